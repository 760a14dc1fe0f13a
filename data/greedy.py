"""Text that goes on with a prompt: eval_ppl.py --prompt."""


def show_texts(outs, prompt, tokenizer):
    """outs: {name: ids (1, n)}, the full model's first. Perplexity does not show loops; this does.
    """
    full = next(iter(outs.values()))
    for name, out in outs.items():
        equal = (out == full).float().mean()
        grams = [tuple(gram) for gram in out[0].unfold(0, min(4, out.shape[1]), 1).tolist()]
        repeated = 1 - len(set(grams)) / len(grams)
        print(f"[{name}: {equal:.0%} as the full model, {repeated:.0%} of the 4-grams repeated]\n"
              f"{prompt}{tokenizer.decode(out[0].tolist())}\n", flush=True)
