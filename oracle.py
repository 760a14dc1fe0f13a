"""The method: run the early blocks, predict what the skipped blocks would have made, resume.

    embeddings -> early blocks -> oracle -> late blocks -> logits

PathOracle.hidden is that line; prefill leaves a KV cache of all blocks, with which the full model
goes on. Sizes in comments as in model.py; a span is a range() of S blocks, F its oracle's width.
"""

import torch
from torch import nn
from torch.nn import functional as F

from data.checkpoint import read_oracle, save_oracle
from data.options import parse_skip
from load_weights import fingerprint
from model import Block


class Readout(nn.Module):
    """Predicts one state from the span's input x:  x * scale + up(features) * std."""

    def __init__(self, n_embd, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n_embd))
        self.up = nn.Linear(dim, n_embd)
        nn.init.zeros_(self.up.weight)          # so an untrained one predicts no change
        nn.init.zeros_(self.up.bias)
        # deviation of the change in each dimension, set once: one learning rate then fits all
        self.register_buffer("std", torch.ones(n_embd))
        # position 0 holds a huge constant that later tokens attend to (Sun et al. 2024)
        self.pos0 = nn.Parameter(torch.zeros(n_embd))

    def forward(self, x, features):
        """x (B, T, C), features (B, T, F), of position 0 and any behind it -> (B, T, C)"""
        y = x * self.scale + self.up(features) * self.std
        y[:, :1] += self.pos0
        return y


class Oracle(nn.Module):
    """Predicts the S states behind the blocks of a span from its input: a small causal Transformer
    makes features of the text, and a readout for each state reads them."""

    def __init__(self, n_embd, n_states, dim, blocks, n_head):
        super().__init__()
        self.norm = nn.LayerNorm(n_embd, elementwise_affine=False)
        self.down = nn.Linear(2 * n_embd, dim)
        self.blocks = nn.ModuleList(Block(dim, n_head, 2 * dim) for _ in range(blocks))
        self.ln = nn.LayerNorm(dim)
        self.readouts = nn.ModuleList(Readout(n_embd, dim) for _ in range(n_states))

    def features(self, x):
        """x (B, T, C) from position 0 on -> (B, T, F)"""
        x = self.norm(x)
        # the skipped blocks look at the token before; given it, the oracle need not attend to it
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]                 # (B, T, C), zeros at position 0
        x = self.down(torch.cat([x, before], dim=-1))           # (B, T, 2C) -> (B, T, F)
        for block in self.blocks:
            x = block(x)
        return self.ln(x)

    def forward(self, x):
        """x (B, T, C) -> the state behind the span, where the late blocks resume, (B, T, C)."""
        return self.readouts[-1](x, self.features(x))

    def states(self, x):
        """x (B, T, C) -> the S states behind the blocks, each (B, T, C); the last is forward's."""
        features = self.features(x)
        return [readout(x, features) for readout in self.readouts]


class NoOracle(nn.Module):
    """What an oracle has to beat: its input comes out of it. A path calls no more than this."""

    def __init__(self, n_states):
        super().__init__()
        self.n_states = n_states

    def forward(self, x):
        return x

    def states(self, x):
        return [x] * self.n_states


class PathOracle(nn.Module):
    """A GPT-2 that jumps over spans of its blocks, one oracle for each."""

    def __init__(self, gpt2, spans, oracles):
        super().__init__()
        self.gpt2, self.spans, self.oracles = gpt2, spans, nn.ModuleList(oracles)

    def forward(self, ids):
        """ids (B, T) -> logits (B, T, vocab_size)"""
        return self.gpt2.unembed(self.hidden(ids))

    def hidden(self, ids):
        """ids (B, T) -> the state behind the last block, (B, T, C)."""
        x, start = self.gpt2.embed(ids), 0
        for span, oracle in zip(self.spans, self.oracles, strict=True):
            x = self.gpt2.run(x, start, span.start)                     # run
            x = oracle(x)                                               # predict
            start = span.stop                                           # skip
        return self.gpt2.run(x, start, self.gpt2.config.n_layer)        # resume

    def prefill(self, ids):
        """A prompt ids (B, T) -> logits of its last position (B, vocab_size), and its KV cache, of
        all blocks: the full model can go on. The last token passes every block, over the cache of
        those before it. ValueError for an empty prompt, or one beyond the model's context."""
        if ids.shape[1] == 0:
            raise ValueError("the prompt is empty: it takes at least one token")
        gpt2, cache = self.gpt2, self.gpt2.new_cache()
        x, start = gpt2.embed(ids), 0
        for span, oracle in zip(self.spans, self.oracles, strict=True):
            x = gpt2.run(x, start, span.start, cache)                   # run
            x, last = x[:, :-1], x[:, -1:]
            states = oracle.states(x)                                   # predict
            for i, entering in zip(span, [x, *states[:-1]], strict=True):
                gpt2.blocks[i].fill(entering, cache[i])                 # skip, but fill
            last = gpt2.run(last, span.start, span.stop, cache)
            x, start = torch.cat([states[-1], last], dim=1), span.stop
        return gpt2.finish(x, start, cache), cache                      # resume


def no_oracle(gpt2, spans):
    """The path with nothing in place of the skipped blocks."""
    return PathOracle(gpt2, spans, [NoOracle(len(span)) for span in spans])


def new_path(gpt2, settings):
    """An untrained PathOracle; of the settings (train_oracle.py's options) it needs skip, dim,
    blocks, heads and shared."""
    spans = parse_skip(settings["skip"], gpt2.config.n_layer)
    sizes = settings["dim"], settings["blocks"], settings["heads"]
    oracles = [Oracle(gpt2.config.n_embd, len(span), *sizes) for span in spans]
    return PathOracle(gpt2, spans, oracles[:1] * len(spans) if settings["shared"] else oracles)


def distinct_oracles(path):
    """The oracles of a path, one that spans share only once."""
    return nn.ModuleList(dict.fromkeys(path.oracles))


def save_path(file, path, settings, more_tensors):
    """One safetensors file: the oracles' tensors, the settings and the model's fingerprint."""
    tensors = {**distinct_oracles(path).state_dict(), **more_tensors}
    save_oracle(file, tensors, {**settings, "fingerprint": fingerprint(path.gpt2)})


def load_path(file, gpt2):
    """PathOracle, frozen, of an oracle file on the GPT-2 that it was trained on; ValueError on any
    other, and where the file is missing, damaged or none of ours."""
    settings, tensors = read_oracle(file)
    if settings["fingerprint"] != fingerprint(gpt2):
        raise ValueError(f"{file} was trained on another model ({settings['model']}): give that "
                         "--model, or train an oracle for this one")
    path = new_path(gpt2, settings)
    tensors = {name: t for name, t in tensors.items() if not name.startswith("optimizer.")}
    try:
        distinct_oracles(path).load_state_dict(tensors)
    except RuntimeError:
        raise ValueError(f"{file} is damaged: it lacks tensors, or they have other shapes; train "
                         "it again") from None
    return path.to(gpt2.wte.weight.device).requires_grad_(False)
