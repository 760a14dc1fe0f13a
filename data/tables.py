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


def recall_loss(losses):
    """Nats a token of a passage, (windows, tokens), that stood in the prompt; its first sixth only
    shows that it comes again."""
    return losses[:, losses.shape[1] // 6:].mean().item()


def share_kept(loss, full, nothing):
    """Of what the full model gains on a passage by its prompt, from losses; None where that is less
    than half of its loss without one, for then it does not copy."""
    gain = nothing - full
    return (nothing - loss) / gain if gain > nothing / 2 else None


def prompt_table(text, passage, cost):
    """Losses {row: (windows, tokens)} of what follows a prompt in nats a token, on text and on a
    passage that stood in the prompt, and the cost of each row -> rows, the best first."""
    recall = {name: recall_loss(its) for name, its in passage.items()}
    ppls = {name: [part.mean().exp().item() for part in (its, its[:, :16])]
            for name, its in text.items()}
    rows, (full, full_early) = [], ppls["full model"]
    for name, (ppl, early) in ppls.items():
        kept = share_kept(recall[name], recall["full model"], recall["no prompt"])
        rows.append({"path": name, "ppl": ppl, "ratio": ppl / full,
                     "first_16_ppl": early, "first_16_ratio": early / full_early,
                     "recall": recall[name], "kept": kept, **cost[name]})
    return sorted(rows, key=lambda row: row["ppl"])
