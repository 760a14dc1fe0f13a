"""A tiny GPT-2 with random weights, the same as a model directory, a tiny text, and what prefilling must lead to."""

import json
import random
from dataclasses import asdict

import torch
from safetensors.torch import save_file
from torch import nn

from model import GPT2, GPT2Config

PRINTS = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = PRINTS + [b for b in range(256) if b not in PRINTS]             # GPT-2's order: token i is the byte BYTES[i]
CHARACTERS = [chr(b) for b in PRINTS] + [chr(256 + n) for n in range(256 - len(PRINTS))]     # and is spelled so
MERGES = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("a", "n")]       # U+0120 spells the space
CONFIG = GPT2Config(vocab_size=256 + len(MERGES) + 1, n_positions=32, n_embd=24, n_layer=6, n_head=4)
EOT_ID = CONFIG.vocab_size - 1


def tiny_gpt2(seed=0):
    """Every parameter random, biases and layer norms included."""
    gpt2, generator = GPT2(CONFIG).requires_grad_(False), torch.Generator().manual_seed(seed)
    for name, p in gpt2.named_parameters():
        p.normal_(0, 0.3, generator=generator)
        if ".ln_" in name and name.endswith("weight"):
            p += 1
    return gpt2


def random_ids(batch, length, seed=0):
    return torch.randint(CONFIG.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def randomize(module, seed=0, std=0.3):
    """Random weights for oracles, which start as no change at all."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, std, generator=generator)


class Exact(nn.Module):
    """The oracle that runs the skipped blocks: its features are all their states, side by side."""

    def __init__(self, gpt2, span):
        super().__init__()
        self.gpt2, self.span = gpt2, span

    def trunk(self, x):
        states = []
        for i in self.span:
            states.append(x := self.gpt2.blocks[i](x))
        return torch.cat(states, dim=-1)

    def states(self, x, features, start, stop=None):
        return torch.stack(features.chunk(len(self.span), dim=-1))[start:stop]

    def forward(self, x):
        return self.states(x, self.trunk(x), -1)[0]


def mixed_logits(path, ids, jumped, seen=True):
    """What a prefill of which `jumped` tokens went through the path must lead to, computed without a cache.

    All of ids (B, T) goes through all blocks, but behind each skipped one the first tokens' states are the oracle's.
    seen=False hides those tokens from the others in the skipped blocks.
    """
    x = path.gpt2.embed(ids)
    for i, block in enumerate(path.gpt2.blocks):
        for span, oracle in zip(path.spans, path.oracles):
            if i == span.start:
                states = list(oracle.states(x[:, :jumped], oracle.trunk(x[:, :jumped]), -len(span)))
        if any(i in span for span in path.spans):
            x = torch.cat([states.pop(0), block(x)[:, jumped:] if seen else block(x[:, jumped:])], dim=1)
        else:
            x = block(x)
    return path.gpt2.unembed(x)


def write_checkpoint(directory, seed=0):
    """tiny_gpt2(seed) and its tokenizer as the four files of a model directory; gives the directory."""
    directory.mkdir(parents=True)
    tensors = {name.replace("blocks.", "h."): (p.t() if ".c_" in name and p.ndim == 2 else p).contiguous()
               for name, p in tiny_gpt2(seed).named_parameters()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2", **asdict(CONFIG)}))
    tokens = [*CHARACTERS, *map("".join, MERGES), "<|endoftext|>"]
    (directory / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}), encoding="utf-8")
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, MERGES), ""]), encoding="utf-8")
    return directory


def tiny_text(words=500, seed=0):
    """Some 2,500 characters, so some 250 held-out ones."""
    choose = random.Random(seed)
    return " ".join(choose.choices(["the", "than", "an", "cat", "sat", "on", "mat,", "naïve", "theory.\n"], k=words))
