"""Greedy text behind a prompt: eval_ppl.py --prompt."""

import torch

LENGTH = 48


def decode(gpt2, logits, cache, n):
    """Greedy: logits (B, vocab_size) behind a prompt and its KV cache -> n further ids (B, n)."""
    ids = [logits.argmax(dim=-1, keepdim=True)]                         # (B, 1)
    while len(ids) < n:
        ids.append(gpt2(ids[-1], cache)[:, -1].argmax(dim=-1, keepdim=True))
    return torch.cat(ids, dim=1)


@torch.no_grad()
def show_continuations(gpt2, tokenizer, paths, text):
    """Prints how each path, {name: path}, goes on with a text: perplexity does not show loops."""
    ids = torch.tensor([tokenizer.encode_ordinary(text)], device=gpt2.wte.weight.device).long()
    n = min(LENGTH, gpt2.config.n_positions - ids.shape[1])
    if ids.shape[1] == 0 or n < 1:
        raise ValueError(f"--prompt has {ids.shape[1]} tokens: it takes 1 to "
                         f"{gpt2.config.n_positions - 1} for this model")
    outs = {}
    for name, path in paths.items():
        outs[f"{name}: prefill, then the full model"] = decode(gpt2, *path.prefill(ids), n)
        out = ids
        for _ in range(n):              # without a cache: the path reads all of it for each token
            out = torch.cat([out, path(out)[:, -1:].argmax(dim=-1)], dim=1)
        outs[f"{name}: path throughout"] = out[:, -n:]
    full = next(iter(outs.values()))
    for name, out in outs.items():
        equal = (out == full).float().mean()
        grams = [tuple(gram) for gram in out[0].unfold(0, min(4, n), 1).tolist()]
        repeated = 1 - len(set(grams)) / len(grams)
        print(f"[{name}; {equal:.0%} as the full model, {repeated:.0%} of the 4-grams repeated]\n"
              f"{text}{tokenizer.decode(out[0].tolist())}\n", flush=True)
