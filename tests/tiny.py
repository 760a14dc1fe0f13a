"""A tiny GPT-2 with random weights, the same as a model directory, paths on it and their NumPy
reference, a tiny text."""

import json
import random
from dataclasses import asdict

import numpy as np
import torch
from numpy_gpt2 import arrays, numpy_logits
from safetensors.torch import save_file
from torch import nn

from data.options import parse_skip
from model import GPT2, GPT2Config
from oracle import PathOracle, new_path

PRINTS = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = PRINTS + [b for b in range(256) if b not in PRINTS]     # GPT-2's order: token i is BYTES[i]
CHARACTERS = [chr(b) for b in PRINTS] + [chr(256 + n) for n in range(256 - len(PRINTS))]
MERGES = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("a", "n")]       # U+0120 spells the space
CONFIG = GPT2Config(vocab_size=256 + len(MERGES) + 1, n_positions=32, n_embd=24, n_layer=6,
                    n_head=4)
EOT_ID = CONFIG.vocab_size - 1
SETTINGS = {"model": "tiny", "text": "docs", "skip": "2-4", "dim": 16, "blocks": 2, "heads": 2,
            "shared": False, "context": 16, "step": 0, "steps": 1}


def tiny_gpt2(seed=0):
    """Every parameter random, biases and layer norms included."""
    gpt2, generator = GPT2(CONFIG).requires_grad_(False), torch.Generator().manual_seed(seed)
    for name, p in gpt2.named_parameters():
        p.normal_(0, 0.3, generator=generator)
        if ".ln_" in name and name.endswith("weight"):
            p += 1
    return gpt2


def random_ids(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (batch, length), generator=generator)


def changed(ids, t):
    """ids (B, T) with other tokens at position t."""
    ids = ids.clone()
    ids[:, t] = (ids[:, t] + 1) % CONFIG.vocab_size
    return ids


def randomize(module, seed=0, std=0.3):
    """Random weights, and deviations, for oracles, which start as no change at all."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in (*module.parameters(), *module.buffers()):
            p.normal_(0, std, generator=generator)


def random_path(gpt2, skip="2-4", **settings):
    path = new_path(gpt2, {**SETTINGS, "skip": skip, **settings})
    randomize(path.oracles)
    return path.requires_grad_(False)


class Exact(nn.Module):
    """The oracle that runs the skipped blocks: its features are all their states, side by side."""

    def __init__(self, gpt2, span):
        super().__init__()
        self.gpt2, self.span = gpt2, span
        self.readouts = [lambda x, features, j=j: features.chunk(len(span), dim=-1)[j]
                         for j in range(len(span))]

    def features(self, x):
        states = [x]
        for i in self.span:
            states.append(self.gpt2.blocks[i](states[-1]))
        return torch.cat(states[1:], dim=-1)

    def states(self, x):
        return [*self.features(x).chunk(len(self.span), dim=-1)]

    def forward(self, x):
        return self.states(x)[-1]


def exact_path(gpt2, skip="2-4"):
    spans = parse_skip(skip, CONFIG.n_layer)
    return PathOracle(gpt2, spans, [Exact(gpt2, span) for span in spans])


def reference(path, ids, jumped=None, seen=True):
    """Logits (B, T, V) in NumPy: of the path, or, where only the first `jumped` tokens go through
    it, of the full model behind them."""
    oracles = [(span, arrays(oracle),
                oracle.blocks[0].attn.n_head if getattr(oracle, "blocks", ()) else 1)
               for span, oracle in zip(path.spans, path.oracles, strict=True)]
    w, jumped = arrays(path.gpt2), ids.shape[1] if jumped is None else jumped
    return torch.tensor(np.stack([numpy_logits(w, row, CONFIG.n_head, CONFIG.layer_norm_epsilon,
                                               oracles, jumped, seen) for row in ids.tolist()]))


def write_checkpoint(directory, seed=0):
    """tiny_gpt2(seed) and its tokenizer as the four files of a model directory; gives that."""
    directory.mkdir(parents=True)
    tensors = {name.replace("blocks.", "h."):
               (p.t() if ".c_" in name and p.ndim == 2 else p).contiguous()
               for name, p in tiny_gpt2(seed).named_parameters()}
    save_file(tensors, directory / "model.safetensors")
    config = json.dumps({"model_type": "gpt2", **asdict(CONFIG)})
    (directory / "config.json").write_text(config)
    tokens = [*CHARACTERS, *map("".join, MERGES), "<|endoftext|>"]
    vocab = json.dumps({token: i for i, token in enumerate(tokens)})
    (directory / "vocab.json").write_text(vocab, encoding="utf-8")
    merges = "\n".join(["#version: 0.2", *map(" ".join, MERGES), ""])
    (directory / "merges.txt").write_text(merges, encoding="utf-8")
    return directory


def tiny_text(words=500, seed=0):
    """Some 2,500 characters, so some 250 held-out ones."""
    vocabulary = ["the", "than", "an", "cat", "sat", "on", "mat,", "naïve", "theory.\n"]
    return " ".join(random.Random(seed).choices(vocabulary, k=words))
