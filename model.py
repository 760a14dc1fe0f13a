"""GPT-2 in one file (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3).

The forward pass is three steps, so that a caller can enter and leave the stack at any block:

    x = model.embed(ids)               # ids (B, T) -> hidden state (B, T, C)
    x = model.run(x, start, stop)      # blocks start .. stop-1: (B, T, C) -> (B, T, C)
    logits = model.unembed(x)          # (B, T, C) -> (B, T, vocab_size)

Sizes in comments: B batch, T tokens, C = n_embd, H = n_head, D = C / H, P tokens already in the KV cache.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a GPT-2; the names are those of Hugging Face's config.json, the defaults are GPT-2 Small."""
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
        self.k, self.v = (torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)) if len(self) else (k, v)

    def truncate(self, n):
        """Forgets all but the first n tokens, as a decoder must that had guessed further ones wrongly."""
        if len(self) > n:
            self.k, self.v = self.k[:, :, :n], self.v[:, :, :n]


@lru_cache(maxsize=1)
def causal_mask(Q, K, dtype, device):
    """(Q, K): 0 where one of the last Q of K tokens sees another, else -inf. Every block of a pass asks for the same one.

    (is_causal of PyTorch's attention serves Q = K alone: it aligns the mask to the top left.)
    """
    return torch.full((Q, K), -torch.inf, dtype=dtype, device=device).triu(K - Q + 1)


class Attention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)     # queries, keys and values side by side
        self.c_proj = nn.Linear(n_embd, n_embd)

    def heads(self, x):
        """(B, T, C) -> (B, H, T, D)"""
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def forward(self, x, cache=None, last=None):
        """x (B, T, C) -> (B, N, C) for the last N tokens (None: all T); each sees the cached tokens and the new ones up to
        itself, and all T leave their keys and values in the cache."""
        C = x.shape[-1]
        if last is None:
            q, k, v = (self.heads(part) for part in self.c_attn(x).chunk(3, dim=-1))
        else:
            q = self.heads(F.linear(x[:, -last:], self.c_attn.weight[:C], self.c_attn.bias[:C]))
            k, v = self.keys_values(x)
        if cache is not None:
            cache.append(k, v)
            k, v = cache.k, cache.v
        Q, K = q.shape[2], k.shape[2]
        mask = causal_mask(Q, K, q.dtype, q.device) if 1 < Q < K else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=1 < Q == K)
        return self.c_proj(y.transpose(1, 2).flatten(2))

    def keys_values(self, x):
        """x (B, T, C) -> keys and values, each (B, H, T, D)"""
        C = x.shape[-1]
        return (self.heads(part) for part in F.linear(x, self.c_attn.weight[C:], self.c_attn.bias[C:]).chunk(2, dim=-1))


class MLP(nn.Module):
    def __init__(self, n_embd, n_inner):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, n_inner)
        self.c_proj = nn.Linear(n_inner, n_embd)

    def forward(self, x):
        """x (B, T, C) -> (B, T, C)"""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))    # GPT-2 was trained with the tanh form


class Block(nn.Module):
    """x -> x + attention(ln_1(x)) -> x + mlp(ln_2(x)): the residual stream keeps its shape (B, T, C)."""

    def __init__(self, n_embd, n_head, n_inner=None, eps=1e-5):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd, eps)
        self.attn = Attention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd, eps)
        self.mlp = MLP(n_embd, n_inner or 4 * n_embd)

    def forward(self, x, cache=None, last=None):
        """x (B, T, C) -> (B, N, C) for the last N tokens (None: all T); keys and values of all T go into the cache."""
        y = self.attn(self.ln_1(x), cache, last)
        x = (x if last is None else x[:, -last:]) + y
        return x + self.mlp(self.ln_2(x))

    def fill(self, x, cache):
        """Puts the keys and values of the input x into the cache and computes nothing else: a sixth of the block."""
        cache.append(*self.attn.keys_values(self.ln_1(x)))


class GPT2(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        # uniform, as the Linear layers start: nn.Embedding's own normal_ costs a second of imports on the meta device
        self.wte, self.wpe = (nn.Embedding.from_pretrained(torch.empty(n, c.n_embd).uniform_(-0.1, 0.1), freeze=False)
                              for n in (c.vocab_size, c.n_positions))
        self.blocks = nn.ModuleList(Block(c.n_embd, c.n_head, c.n_inner, c.layer_norm_epsilon) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd, c.layer_norm_epsilon)

    def embed(self, ids, past=0):
        """ids (B, T), the tokens at positions past .. past+T-1 -> hidden state (B, T, C).

        Raises ValueError where the positions run beyond the context of the model.
        """
        end = past + ids.shape[1]
        if end > self.config.n_positions:
            raise ValueError(f"{end} tokens do not fit the model's context of {self.config.n_positions}; shorten the text")
        return self.wte(ids) + self.wpe.weight[past:end]

    def run(self, x, start, stop, cache=None):
        """Hidden state before block `start` -> hidden state before block `stop`, both (B, T, C)."""
        for i in range(start, stop):
            x = self.blocks[i](x, cache[i] if cache else None)
        return x

    def unembed(self, x):
        """x (B, T, C) -> logits (B, T, vocab_size); the output matrix is the token embedding's (tied)."""
        return F.linear(self.ln_f(x), self.wte.weight)

    def last_logits(self, x, cache):
        """State before the last block (B, T, C) -> logits of the last position, (B, vocab_size), which is all that a prefill
        asks of that block besides the keys and values of every token."""
        return self.unembed(self.blocks[-1](x, cache[-1], last=1)[:, -1])

    def new_cache(self):
        """An empty KV cache, one entry for each block; `run` fills it and continues from it."""
        return [LayerCache() for _ in self.blocks]

    def forward(self, ids, cache=None):
        """ids (B, T) -> logits (B, T, vocab_size). With a cache, ids are the tokens that follow those in it."""
        x = self.embed(ids, past=max(map(len, cache)) if cache else 0)     # a skipped block's may be empty
        x = self.run(x, 0, self.config.n_layer, cache)
        return self.unembed(x)
