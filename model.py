"""GPT-2 in one file (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

The forward pass is three steps, so that a caller can enter and leave the stack at any block:

    x = gpt2.embed(ids)               # ids (B, T) -> hidden state (B, T, C)
    x = gpt2.run(x, start, stop)      # blocks start .. stop-1: (B, T, C) -> (B, T, C)
    logits = gpt2.unembed(x)          # (B, T, C) -> (B, T, vocab_size)

Sizes in comments: B batch, T tokens, C = n_embd, H = n_head, D = C / H, P tokens in the KV cache.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a GPT-2, named as in Hugging Face's config.json; the defaults: GPT-2 Small."""
    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None          # width of the MLP; None means 4 * n_embd
    layer_norm_epsilon: float = 1e-5


class LayerCache:
    """Keys and values of one block for the tokens it has seen, each (B, H, P, D)."""
    k = v = None

    def __len__(self):
        return 0 if self.k is None else self.k.shape[2]

    def append(self, k, v):
        """Puts k, v (B, H, T, D) behind what is there."""
        if self.k is not None:
            k, v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        self.k, self.v = k, v


class Attention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)     # queries, keys and values side by side
        self.c_proj = nn.Linear(n_embd, n_embd)

    def heads(self, x):
        """(B, T, C) -> (B, H, T, D)"""
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def forward(self, x, cache=None):
        """x (B, T, C) -> (B, T, C); a token sees those in the cache and the new ones up to it."""
        q, k, v = (self.heads(part) for part in self.c_attn(x).chunk(3, dim=-1))
        if cache is not None:
            cache.append(k, v)
            k, v = cache.k, cache.v
        new, total = q.shape[2], k.shape[2]     # T, P + T
        mask = None
        if 1 < new < total:  # is_causal aligns its mask to the top left, so it serves P = 0 alone
            mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=1 < new == total)
        return self.c_proj(y.transpose(1, 2).flatten(2))        # (B, H, T, D) -> (B, T, C)

    def keys_values(self, x):
        """x (B, T, C) -> keys and values, each (B, H, T, D)"""
        C = x.shape[-1]
        kv = F.linear(x, self.c_attn.weight[C:], self.c_attn.bias[C:])      # (B, T, 2C)
        return [self.heads(part) for part in kv.chunk(2, dim=-1)]


class MLP(nn.Module):
    def __init__(self, n_embd, n_inner):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, n_inner)
        self.c_proj = nn.Linear(n_inner, n_embd)

    def forward(self, x):
        """x (B, T, C) -> (B, T, C)"""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))    # the GELU of GPT-2


class Block(nn.Module):
    """Adds attention(ln_1(x)), then mlp(ln_2(x)), to the residual stream x (B, T, C)."""

    def __init__(self, n_embd, n_head, n_inner=None, eps=1e-5):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd, eps)
        self.attn = Attention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd, eps)
        self.mlp = MLP(n_embd, n_inner or 4 * n_embd)

    def forward(self, x, cache=None):
        """x (B, T, C) -> (B, T, C); with a cache, x are the tokens behind those in it."""
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))

    def fill(self, x, cache):
        """Leaves keys and values of x (B, T, C) in the cache: a sixth of the matrix products."""
        cache.append(*self.attn.keys_values(self.ln_1(x)))


class GPT2(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        # uniform: nn.Embedding's own normal_ costs a second of imports on the meta device
        self.wte, self.wpe = (
            nn.Embedding.from_pretrained(torch.empty(n, c.n_embd).uniform_(-0.1, 0.1), freeze=False)
            for n in (c.vocab_size, c.n_positions))
        self.blocks = nn.ModuleList(
            Block(c.n_embd, c.n_head, c.n_inner, c.layer_norm_epsilon) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd, c.layer_norm_epsilon)

    def embed(self, ids, past=0):
        """ids (B, T), the tokens at positions past .. past+T-1 -> hidden state (B, T, C).

        Raises ValueError where the positions run beyond the context of the model.
        """
        end = past + ids.shape[1]
        if end > self.config.n_positions:
            raise ValueError(f"{end} tokens do not fit the model's context of "
                             f"{self.config.n_positions}; shorten the text")
        return self.wte(ids) + self.wpe.weight[past:end]

    def run(self, x, start, stop, cache=None):
        """Hidden state before block `start` -> hidden state before block `stop`, (B, T, C)."""
        for i in range(start, stop):
            x = self.blocks[i](x, cache[i] if cache else None)
        return x

    def unembed(self, x):
        """x (B, T, C) -> logits (B, T, vocab_size); the output matrix is the token embedding's."""
        return F.linear(self.ln_f(x), self.wte.weight)

    def forward(self, ids, cache=None):
        """ids (B, T) -> logits (B, T, vocab_size); with a cache, ids follow the tokens in it."""
        x = self.embed(ids, past=max(map(len, cache)) if cache else 0)  # one may be empty
        return self.unembed(self.run(x, 0, self.config.n_layer, cache))

    def states(self, ids, stop):
        """ids (B, T) -> the hidden states before block 0, 1, ... `stop`, each (B, T, C)."""
        states = [self.embed(ids)]
        for i in range(stop):
            states.append(self.run(states[-1], i, i + 1))
        return states

    def new_cache(self):
        """An empty KV cache, one entry for each block; `run` looks at it and adds to it."""
        return [LayerCache() for _ in self.blocks]

    def prefill(self, ids):
        """A prompt ids (B, T) -> logits of its last position (B, vocab_size), and its KV cache."""
        cache = self.new_cache()
        return self.finish(self.embed(ids), 0, cache), cache

    def finish(self, x, start, cache):
        """Runs a prompt x (B, T, C) from block `start` on -> logits of its last position. The next
        token needs no other: in the last block the others only leave keys and values."""
        last = self.config.n_layer - 1
        x = self.run(x, start, last, cache)
        if start <= last:                               # else a jump has reached the end
            self.blocks[last].fill(x[:, :-1], cache[last])
            x = self.run(x[:, -1:], last, last + 1, cache)
        return self.unembed(x[:, -1])
