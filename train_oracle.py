"""Trains an oracle to stand in for blocks of GPT-2 that are to be skipped:  python train_oracle.py

GPT-2 is frozen. Batches of random windows of text run through it, which gives the hidden states
that the oracle must predict; nothing is stored but the oracle. The run ends with held-out figures.
"""

import data.interrupt  # noqa: F401  isort: skip (first, for Ctrl-C while torch loads)
import shlex
import sys
import time

import torch
from torch.nn import functional as F

from data.checkpoint import read_oracle
from data.cli import command, show, step_report
from data.corpus import load_tokens, sample_windows, training_windows
from data.interrupt import interruptible
from data.optimizers import new_optimizers, optimizer_tensors, restore_optimizers, update
from data.options import fit_to_model, train_arguments
from data.tables import PATH_COLUMNS
from eval_ppl import path_rows
from load_weights import load_gpt2
from oracle import distinct_oracles, load_path, new_path, save_path

WARM_UP, SAVE_EVERY = 50, 30        # steps, seconds
KL_EVERY = 4                        # the path's KL: at every n-th position
KL_FROM, CACHE_FROM = 0.7, 0.5      # shares of the steps before that and the KL over the cache join


def state_loss(predicted, true):
    """(B, T, C) twice -> squared error relative to the true state's square, mean over the tokens:
    the state of position 0 may be tens of times the others."""
    return ((predicted - true).square().sum(-1) / true.square().sum(-1)).mean()


def kl_loss(gpt2, x, true):
    """States behind the last block (B, T, C) -> KL(true next-token distribution, that of x)."""
    student = gpt2.unembed(x).log_softmax(-1).flatten(0, 1)             # (B * T, V)
    with torch.no_grad():
        teacher = gpt2.unembed(true).log_softmax(-1).flatten(0, 1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def path_loss(path, ids, cos_weight, kl_weight, cache_weight):
    """ids (B, T) -> how far the path is from the full model: in the states behind skipped blocks,
    and, by their weights, in next-token distributions (Hinton et al. 2015): its own, and the full
    model's, which reads the last quarter over the cache that the path leaves of what is before."""
    gpt2, n_layer, T = path.gpt2, path.gpt2.config.n_layer, ids.shape[1]
    with torch.no_grad():
        true = gpt2.states(ids, n_layer if kl_weight or cache_weight else path.spans[-1].stop)
    jump = T * 3 // 4 if cache_weight else T    # so many tokens jump, the others pass every block
    start, loss = path.spans[0].start, 0
    x = true[start]                             # the early blocks have run already, for all
    for span, oracle in zip(path.spans, path.oracles, strict=True):
        x = gpt2.run(x, start, span.start)      # behind a jump: what the path makes, not the truth
        x, rest, start = x[:, :jump], x[:, jump:], span.stop
        states = oracle.states(x)
        for i, state in zip(span, states, strict=True):
            loss = loss + state_loss(state, true[i + 1][:, :jump])
        cosine = F.cosine_similarity(states[-1], true[start][:, :jump], dim=-1).mean()
        loss = loss + cos_weight * (1 - cosine)
        if cache_weight:
            cache = gpt2.new_cache()
            for i, entering in zip(span, [x, *states[:-1]], strict=True):
                gpt2.blocks[i].fill(entering, cache[i])
            rest = gpt2.run(rest, span.start, start, cache)
        x = torch.cat([states[-1], rest], dim=1)
    if kl_weight or cache_weight:
        x = gpt2.run(x, start, n_layer)
    for weight, part in ((kl_weight, slice(0, jump, KL_EVERY)), (cache_weight, slice(jump, T))):
        if weight:
            loss = loss + weight * kl_loss(gpt2, x[:, part], true[-1][:, part])
    return loss


@torch.no_grad()
def initialise(path, ids):
    """Starts each readout at the mean change over ids (B, T), in units of its deviation, and pos0
    at what is then lacking. One that spans share starts as the first of them needs it."""
    true = path.gpt2.states(ids, path.spans[-1].stop)
    start = path.spans[0].start
    x = true[start]
    for span, oracle in zip(path.spans, distinct_oracles(path), strict=False):
        x = path.gpt2.run(x, start, span.start)
        for i, readout in zip(span, oracle.readouts, strict=True):
            change = true[i + 1] - x                                    # (B, T, C)
            later = change[:, 1:].flatten(0, 1)
            readout.std.copy_(later.std(0).clamp_min(1e-6))
            readout.up.bias.copy_(later.mean(0) / readout.std)
            readout.pos0.copy_(change[:, 0].mean(0) - later.mean(0))
        x, start = oracle(x), span.stop


def learning_rate(peak, step, steps):
    """Of one step of `steps`: a line up to the peak, then one down to zero."""
    return peak * min((step + 1) / WARM_UP, (steps - step) / steps)


def train(path, ids, settings, optimizers, save):
    """Steps settings["step"] to ["steps"] on 1-D ids; saves now and then. True if not stopped."""
    first, steps, B, T, seed = (settings[name] for name in
                                ("step", "steps", "batch_size", "context", "seed"))
    report, saved = step_report(first, steps, B * T), time.time()
    with interruptible() as interrupted:            # looked at between steps
        for step in range(first, steps):
            loss = path_loss(path, training_windows(ids, B, T, seed, step), settings["cos_weight"],
                             settings["kl_weight"] * (step >= KL_FROM * steps),
                             settings["cache_weight"] * (step >= CACHE_FROM * steps))
            if not loss.isfinite():
                raise ValueError(f"the loss became {loss.item()}: --resume with a smaller --lr")
            loss.backward()
            update(optimizers, learning_rate(settings["lr"], step, steps))
            settings["step"] = step + 1
            report(step + 1, loss)
            if interrupted or time.time() - saved > SAVE_EVERY:
                saved = time.time()
                save()
            if interrupted:
                break
    return not interrupted


def main():
    settings, out, device, resume, unfinished, old = train_arguments(__doc__)
    gpt2, tokenizer = load_gpt2(settings["model"], device)
    fit_to_model(settings, gpt2.config)
    context, seed = settings["context"], settings["seed"]
    torch.manual_seed(seed)
    path = load_path(old, gpt2) if resume else new_path(gpt2, settings).to(device)
    path.oracles.requires_grad_()
    ids, heldout = (ids.to(device) for ids in load_tokens(settings["text"], tokenizer, context))
    optimizers = new_optimizers(path.oracles)
    if resume:
        restore_optimizers(path.oracles, optimizers, read_oracle(old)[1])
    else:
        initialise(path, sample_windows(ids, max(1, 8192 // context), context, seed, step=-1))

    def save():
        save_path(unfinished, path, settings, optimizer_tensors(path.oracles, optimizers))

    save()                                          # now, should there be no permission or no space
    n = sum(p.numel() for p in path.oracles.parameters())
    of = sum(p.numel() for span in path.spans for i in span for p in gpt2.blocks[i].parameters())
    print(f"{settings['model']}: an oracle of {n:,} parameters, {n / of:.1%} of those of the "
          f"blocks {settings['skip']} that it replaces", flush=True)
    if not train(path, ids, settings, optimizers, save):
        print(f"stopped after step {settings['step']}, saved in {unfinished}; go on with: "
              f"python train_oracle.py --resume --out {shlex.quote(str(out))}")
        sys.exit(130)
    save_path(out, path, settings, {})
    unfinished.unlink(missing_ok=True)
    print(f"saved in {out}; held out, {len(heldout):,} tokens of {settings['text']}:\n", flush=True)
    show(path_rows({str(out): path}, heldout, context), PATH_COLUMNS)


if __name__ == "__main__":
    command(main)
