"""The method: run GPT-2's early blocks, let an oracle predict what the skipped blocks would have made, resume behind them.

    embeddings -> early blocks -> oracle -> late blocks -> logits

`PathOracle.forward` is that diagram. `PathOracle.prefill` reads a prompt this way and leaves a KV cache for *all* blocks,
with which the unmodified GPT-2 goes on. Sizes in comments as in model.py; S = len(span), the number of skipped blocks.
"""

import json
import re

import torch
from torch import nn

from data.files import save_tensors
from load_weights import fingerprint, read_metadata, read_tensors
from model import Block

KINDS = ("transformer", "mlp", "linear")


def parse_skip(pattern, n_layer):
    """"2-9" -> [range(2, 10)], "2-4,6-8" -> [range(2, 5), range(6, 9)]: blocks are counted from 0, both ends included.

    Raises ValueError for anything but ascending spans of the model's blocks with a block between them.
    """
    spans, last = [], -2
    for part in pattern.split(","):
        match = re.fullmatch(r"\s*(\d+)-(\d+)\s*", part)
        if not match:
            raise ValueError(f"skip pattern {pattern!r}: write spans of blocks as in 2-9 or 2-4,6-8")
        start, end = int(match[1]), int(match[2])
        if start > end:
            raise ValueError(f"skip pattern {pattern!r}: {start}-{end} runs backwards, write {end}-{start}")
        if end >= n_layer:
            raise ValueError(f"skip pattern {pattern!r}: the model's blocks are 0 to {n_layer - 1}")
        if start <= last + 1:
            raise ValueError(f"skip pattern {pattern!r}: spans ascend and leave at least one block between them")
        spans.append(range(start, end + 1))
        last = end
    return spans


class Oracle(nn.Module):
    """Predicts, from the input x of a span of skipped blocks, the S hidden states, one behind each block.

    A trunk (causal, shared by all predictions) turns x (B, T, C) into features (B, T, F), and a head for each state scales
    x and adds what the blocks would have added:  x * scale + (features @ up + bias) * unit.  So an untrained oracle predicts no
    change. `unit` is fixed before training: the size of the change in each dimension, so that one learning rate fits all.
    The last state is the span's output, where the late blocks resume. The others, the inputs of the skipped blocks after
    the first, serve the KV cache alone. `first` is added at position 0, whose state in OpenAI's GPT-2 is a huge constant
    that the later tokens use as a place to attend to (Sun et al. 2024, "Massive Activations in Large Language Models").
    """

    def __init__(self, kind, n_embd, n_states, dim, blocks, n_head):
        super().__init__()
        if kind == "transformer":
            if dim % n_head:
                raise ValueError(f"oracle dim {dim} is not divisible by its {n_head} attention heads: take a multiple")
            self.trunk = nn.Sequential(nn.LayerNorm(n_embd, elementwise_affine=False), nn.Linear(n_embd, dim),
                                       *(Block(dim, n_head, 2 * dim) for _ in range(blocks)), nn.LayerNorm(dim))
        elif kind == "mlp":
            self.trunk = nn.Sequential(nn.LayerNorm(n_embd, elementwise_affine=False), nn.Linear(n_embd, dim), nn.GELU())
        else:
            self.trunk, dim = nn.Identity(), n_embd
        self.scale = nn.Parameter(torch.ones(n_states, n_embd))
        self.up = nn.Parameter(torch.zeros(n_states, dim, n_embd))
        self.bias = nn.Parameter(torch.zeros(n_states, n_embd))
        self.unit = nn.Parameter(torch.ones(n_states, n_embd), requires_grad=False)
        self.first = nn.Parameter(torch.zeros(n_states, n_embd))

    def states(self, x, features, start, stop=None):
        """x (B, T, C) from a text's first token on, features = trunk(x) -> the states of heads [start:stop], (N, B, T, C).

        Heads are counted from the end: -1 predicts what leaves a span, -n what leaves the first block of a span of n.
        """
        B, T, _ = x.shape
        parts = self.scale, self.up, self.bias, self.unit, self.first
        scale, up, bias, unit, first = (p[start:stop, None] for p in parts)
        # the formula above for all heads at once, and in place, since the states are many
        y = torch.addcmul(bias * unit, scale, x.flatten(0, 1))                              # (N, B*T, C)
        y.baddbmm_(features.flatten(0, 1).expand(len(y), -1, -1), up[:, 0] * unit)
        y.index_add_(1, torch.arange(0, B * T, T, device=x.device), first.expand(-1, B, -1))
        return y.unflatten(1, (B, T))

    def forward(self, x):
        """x (B, T, C) -> the state behind the span, (B, T, C)."""
        return self.states(x, self.trunk(x), -1)[0]


class Nothing(nn.Module):
    """The oracle to beat: what goes into the span comes out of it."""
    trunk = nn.Identity()

    def forward(self, x):
        return x

    def states(self, x, features, start, stop=None):
        return x.expand((stop or 0) - start, *x.shape)


class PathOracle(nn.Module):
    """A GPT-2 whose skipped blocks are replaced by oracles, one for each span. Called like GPT2: ids -> logits."""

    def __init__(self, gpt2, spans, oracles):
        super().__init__()
        self.gpt2, self.spans, self.oracles = gpt2, spans, nn.ModuleList(oracles)

    def n_parameters(self):
        """How many parameters predict what the late blocks resume from, and how many more serve the KV cache alone."""
        caching = sum(p[:-1].numel() for o in set(self.oracles) for p in (o.scale, o.up, o.bias, o.unit, o.first))
        return sum(p.numel() for p in self.oracles.parameters()) - caching, caching

    def forward(self, ids):
        """ids (B, T) -> logits (B, T, vocab_size)"""
        return self.gpt2.unembed(self.hidden(ids))

    def hidden(self, ids, cache=None, replay=0, stop=None):
        """ids (B, T) -> the state before block `stop` (None: after the last), (B, T, C)."""
        x = self.gpt2.embed(ids)                                    # embeddings
        x = self.gpt2.run(x, 0, self.spans[0].start, cache)         # early blocks
        return self.jump(x, cache, replay, stop=stop)               # oracle, late blocks; further spans likewise

    def jump(self, x, cache=None, replay=0, trace=None, stop=None):
        """The state before the first skipped block -> the state before block `stop` (None: after the last), (B, T, C).

        With a cache, the skipped blocks are given keys and values of their *predicted* inputs, the others their own; and
        the last `replay` tokens go through the skipped blocks after all, over the predicted cache of those before them.
        With a list as trace, (input of the span, features, predicted output) is appended to it for each span.
        """
        resume_until = [span.start for span in self.spans[1:]] + [self.gpt2.config.n_layer if stop is None else stop]
        for span, oracle, until in zip(self.spans, self.oracles, resume_until):
            if cache is not None:
                y = self.predict_and_fill(x, span, oracle, cache, replay)
            elif trace is not None:
                features = oracle.trunk(x)
                y = oracle.states(x, features, -1)[0]
                trace.append((x, features, y))
            else:
                y = oracle(x)                                       # predict
            x = self.gpt2.run(y, span.stop, until, cache)           # resume
        return x

    def predict_and_fill(self, x, span, oracle, cache, replay):
        """The state behind the span, (B, T, C), from its input; leaves keys and values in the span's blocks."""
        if replay >= x.shape[1]:
            return self.gpt2.run(x, span.start, span.stop, cache)
        jumped = x.shape[1] - replay
        x, replayed = x[:, :jumped], x[:, jumped:]
        states = [x, *oracle.states(x, oracle.trunk(x), -len(span))]     # the first is what enters the span
        for i, state in zip(span, states):
            if replay:
                replayed = self.gpt2.blocks[i](torch.cat([state, replayed], dim=1), cache[i], last=replay)
            else:
                self.gpt2.blocks[i].fill(state, cache[i])
        return torch.cat([states[-1], replayed], dim=1)

    @torch.no_grad()
    def prefill(self, ids, replay=None):
        """Reads a prompt ids (B, T) -> logits of its last position (B, vocab_size), KV cache of all blocks.

        The last `replay` tokens (None: default_replay) go through the skipped blocks themselves. Decoding goes on with
        gpt2(next_ids, cache). Raises ValueError for a prompt that is empty or beyond the context, and a replay below 0.
        """
        replay = default_replay(ids.shape[1]) if replay is None else replay
        if not ids.numel() or replay < 0:
            raise ValueError("a prompt has at least one token, and no fewer than 0 are replayed")
        cache, last = self.gpt2.new_cache(), self.gpt2.config.n_layer - 1
        if last in self.spans[-1]:
            return self.gpt2.unembed(self.hidden(ids, cache, replay)[:, -1]), cache
        return self.gpt2.last_logits(self.hidden(ids, cache, replay, stop=last), cache), cache


def default_replay(n_prompt):
    """A sixth of the tokens of a prompt, rounded up to a multiple of 8: of up to 8 tokens, all."""
    return -(-n_prompt // 48) * 8


def plain_skip(gpt2, spans):
    """The path with nothing in place of the skipped blocks."""
    return PathOracle(gpt2, spans, [Nothing() for _ in spans])


def true_states(gpt2, ids, stop):
    """What the oracles have to predict: the hidden states before block 0, before block 1, ... before block `stop`."""
    states = [gpt2.embed(ids)]
    for i in range(stop):
        states.append(gpt2.run(states[-1], i, i + 1))
    return states


def new_path(gpt2, settings):
    """PathOracle with untrained oracles of settings["skip"], ["oracle"], ["dim"], ["blocks"], ["heads"] and ["shared"]."""
    spans = parse_skip(settings["skip"], gpt2.config.n_layer)
    sizes = settings["dim"], settings["blocks"], settings["heads"]
    lengths = [max(map(len, spans))] if settings["shared"] else map(len, spans)
    oracles = [Oracle(settings["oracle"], gpt2.config.n_embd, length, *sizes) for length in lengths]
    return PathOracle(gpt2, spans, oracles * len(spans) if settings["shared"] else oracles)


def save_path(file, path, settings, further_tensors={}):
    """One safetensors file: the oracles' weights, and in its metadata all that is needed to use them."""
    tensors = dict(path.oracles.named_parameters())             # lists a shared oracle once
    settings = {**settings, "fingerprint": fingerprint(path.gpt2)}
    save_tensors(file, {**tensors, **further_tensors}, {"pathoracle": json.dumps(settings)})


def read_settings(file):
    """The settings that an oracle was trained with; raises ValueError where the file is none of ours."""
    read_tensors(file)                                          # for what it says of a missing or damaged file
    try:
        settings = json.loads(read_metadata(file)["pathoracle"])
        for name in ("skip", "oracle", "dim", "blocks", "heads", "shared", "model", "text", "context", "step", "steps",
                     "fingerprint"):
            settings[name]
        return settings
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file} is a safetensors file but no oracle of this version: train one with train_oracle.py") from None


def load_path(file, gpt2):
    """PathOracle of an oracle file on the GPT-2 that it was trained on; raises ValueError on any other."""
    settings, tensors = read_settings(file), read_tensors(file)
    if settings["fingerprint"] != fingerprint(gpt2):
        raise ValueError(f"{file} was trained on another model ({settings['model']}): give that --model, or train an oracle "
                         "for this one")
    path = new_path(gpt2, settings)
    with torch.no_grad():
        for name, p in path.oracles.named_parameters():
            if name not in tensors or tensors[name].shape != p.shape:
                raise ValueError(f"{file} is damaged: its tensor {name} is missing or of another shape; train it again")
            p.copy_(tensors[name])
    return path.to(gpt2.wte.weight.device)
