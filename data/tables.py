"""The two tables, from what was measured."""

COST = ("compute", "compute", "{:.1%}"), ("ppl", "PPL", "{:.2f}"), ("ratio", "ratio", "{:.3f}")
TIME = ("prefill_ms", "prefill ms", "{:.1f}"), ("speedup", "speed-up", "{:.2f}x")
PATH_COLUMNS = (("path", "path", "{}"), ("blocks_run", "blocks", "{}"), *COST,
                ("cosine", "cosine", "{:.4f}"), ("mse", "MSE", "{:.4g}"), *TIME)
PROMPT_COLUMNS = (("path", "prompt read by", "{}"), *COST, ("first_16_ratio", "first 16", "{:.3f}"),
                  ("recall", "recall", "{:.2f}"), ("kept", "kept", "{:.1%}"), *TIME)


def path_table(figures, cost, blocks):
    """figures, cost and blocks by name -> rows; the full model is the first."""
    full = figures["full model"]["ppl"]
    return [{"path": name, "blocks_run": blocks[name], **its, "ratio": its["ppl"] / full,
             **cost[name]} for name, its in figures.items()]


def prompt_table(text, passage, cost):
    """Losses {row: (windows, tokens)} of what follows a prompt in nats a token, on text and on a
    passage that stood in the prompt, and the cost of each row -> rows, the best first.

    recall is the loss on the passage but for its first sixth; kept the share of what the full model
    gains there from the prompt, None where that is less than half of its loss without.
    """
    recall = {name: its[:, its.shape[1] // 6:].mean().item() for name, its in passage.items()}
    gain = recall["no prompt"] - recall["full model"]
    rows = []
    for name, its in text.items():
        ppl, early = (part.mean().exp().item() for part in (its, its[:, :16]))
        full, full_early = (part.mean().exp().item()
                            for part in (text["full model"], text["full model"][:, :16]))
        kept = recall["no prompt"] - recall[name]
        rows.append({"path": name, "ppl": ppl, "ratio": ppl / full,
                     "first_16_ppl": early, "first_16_ratio": early / full_early,
                     "recall": recall[name],
                     "kept": kept / gain if gain > recall["no prompt"] / 2 else None, **cost[name]})
    return sorted(rows, key=lambda row: row["ppl"])
