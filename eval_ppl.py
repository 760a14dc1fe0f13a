import torch
from torch.nn import functional as F


def windows(ids, context, batch_size=8):
    """Cuts 1-D ids into non-overlapping windows: batches (batch_size, context), the last window as long as it comes."""
    whole = len(ids) // context * context
    batches = list(ids[:whole].view(-1, context).split(batch_size))
    return batches + [ids[None, whole:]] if len(ids) - whole > 1 else batches


@torch.no_grad()
def mean_loss(model, ids, context):
    """Mean loss (nats a token) of model(ids) -> logits over non-overlapping windows of 1-D ids; its exp is the perplexity.

    Each token is predicted from those before it in its window; the first of a window is not scored.
    """
    total = count = 0
    for window in windows(ids, context):
        logits, targets = model(window)[:, :-1], window[:, 1:]
        total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += targets.numel()
    return total / count
