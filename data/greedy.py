"""What each path makes of a prompt, greedily: eval_ppl.py --prompt."""

import time

import torch

from oracle import plain_skip

DECODE = 48                 # tokens that a prompt is continued for


@torch.no_grad()
def decode(gpt2, logits, cache, n):
    """Greedy: logits (1, V) behind a prompt and its KV cache -> n token ids."""
    ids = []
    for _ in range(n):
        ids.append(logits.argmax(dim=-1))
        if len(ids) < n:
            logits = gpt2(ids[-1][:, None], cache)[:, -1]
    return torch.stack(ids, dim=1)[0].tolist()


@torch.no_grad()
def decode_uncached(model, ids, n):
    """Greedy, for a model without a cache: it reads the whole text again for each token."""
    for _ in range(n):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(dim=-1)], dim=1)
    return ids[0, -n:].tolist()


def show_continuations(gpt2, tokenizer, named_paths, text, replay):
    """Prints what each path makes of a prompt: a PPL ratio hides loops."""
    ids = torch.tensor([tokenizer.encode_ordinary(text)], device=gpt2.wte.weight.device, dtype=torch.long)
    n = min(DECODE, gpt2.config.n_positions - ids.shape[1])
    if ids.shape[1] == 0 or n < 1:
        raise ValueError(f"--prompt has {ids.shape[1]} tokens: it takes 1 to {gpt2.config.n_positions - 1} for this model")
    nothing = plain_skip(gpt2, named_paths[0][1].spans)
    ways = {"original": lambda: decode(gpt2, *named_paths[0][1].prefill(ids, replay=ids.shape[1]), n),
            "skip throughout": lambda: decode_uncached(nothing, ids, n)}
    for name, path in named_paths:
        ways[f"{name} throughout"] = lambda path=path: decode_uncached(path, ids, n)
        ways[f"{name} prefill, then the full model"] = lambda path=path: decode(gpt2, *path.prefill(ids, replay), n)
    reference = None
    for name, way in ways.items():
        start = time.perf_counter()
        out = way()
        rate = n / (time.perf_counter() - start)
        reference = reference or out
        equal = sum(a == b for a, b in zip(out, reference)) / n
        grams = [tuple(out[i:i + 4]) for i in range(n - 3)]
        repeated = 1 - len(set(grams)) / len(grams) if grams else 0
        print(f"[{name}: {rate:.0f} tokens/s, {equal:.0%} as the original, {repeated:.0%} of the 4-grams repeated]")
        print(text + tokenizer.decode(out) + "\n", flush=True)
