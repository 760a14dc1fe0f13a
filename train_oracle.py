"""Trains an oracle to stand in for the blocks of GPT-2 that are to be skipped:  python train_oracle.py --skip 2-9

GPT-2 is frozen. Each batch of random windows of text runs through it, which gives the hidden states that the oracle must
predict; nothing is stored but the oracle. The run ends with the held-out figures that eval_ppl.py gives too.
"""

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from data.cli import PATH_COLUMNS, Parser, command, device, non_negative, positive, positive_float, progress, seed, show
from data.corpus import load_tokens, sample_windows
from data.files import optimizer_tensors, restore_optimizers
from eval_ppl import path_rows
from load_weights import load_gpt2, read_tensors
from oracle import KINDS, load_path, new_path, read_settings, save_path, true_states

WARM_UP = 50                # steps
SAVE_EVERY = 30             # seconds
KV_WEIGHT = 1.0             # of the states that serve the KV cache alone
KV_EVERY = 8                # those are compared at every eighth position alone, which is much cheaper
KL_EVERY = 4                # and the next-token distributions at every fourth
KL_FROM = 0.7               # share of the steps before the KL term joins: first the states, then what they are for
DEFAULTS = {"skip": "2-9", "model": "data/mini", "text": "docs", "oracle": "transformer", "dim": None, "blocks": 1, "heads": 4,
            "shared": False, "cos_weight": 0.5, "kl_weight": 0.6, "steps": 1500, "batch_size": 4, "context": None,
            "lr": 2e-2, "seed": 0, "step": 0}


def default_dim(n_embd, heads):
    """Width of an oracle: with one block, a transformer has then 2.5% of the parameters of the 8 blocks that it replaces."""
    return max(1, n_embd * 7 // 16 // heads) * heads


def walk(path, ids, stop):
    """ids (B, T) -> true hidden states of GPT-2 up to block `stop`, trace of the path (PathOracle.jump), its state there.

    The early blocks run once for both. Behind its first span the path sees the states that it makes, not the true ones.
    """
    with torch.no_grad():
        true = true_states(path.gpt2, ids, stop)
    trace = []
    x = path.jump(true[path.spans[0].start], trace=trace, stop=stop)
    return true, trace, x


def state_loss(predicted, true, cos_weight):
    """(..., T, C) twice -> squared error + cos_weight * (1 - cosine) of each token, averaged.

    The squared error is relative to the square of the token's true state: in OpenAI's GPT-2 that of position 0 is tens of
    times the others (Oracle has more on it), and would dominate a plain mean.
    """
    error = ((predicted - true).square().sum(dim=-1) / true.square().sum(dim=-1)).mean()
    if cos_weight:
        error = error + cos_weight * (1 - F.cosine_similarity(predicted, true, dim=-1).mean())
    return error


def path_loss(path, ids, cos_weight, kl_weight):
    """The loss of a path's oracles on ids (B, T): of the states behind each span, of those that the KV cache needs, and
    kl_weight * KL(GPT-2's next-token distribution, the path's), through the frozen late blocks (Hinton et al. 2015)."""
    gpt2 = path.gpt2
    true, trace, x = walk(path, ids, gpt2.config.n_layer if kl_weight else path.spans[-1].stop)
    loss = 0
    for span, oracle, (x_in, features, y) in zip(path.spans, path.oracles, trace):
        loss = loss + state_loss(y, true[span.stop], cos_weight)
        if len(span) > 1:
            between = torch.stack([t[:, ::KV_EVERY] for t in true[span.start + 1:span.stop]])
            states = oracle.states(x_in[:, ::KV_EVERY], features[:, ::KV_EVERY], -len(span), -1)
            loss = loss + KV_WEIGHT * state_loss(states, between, 0)
    if kl_weight:
        with torch.no_grad():
            teacher = gpt2.unembed(true[-1][:, ::KL_EVERY]).log_softmax(dim=-1)
        student = gpt2.unembed(x[:, ::KL_EVERY]).log_softmax(dim=-1)
        kl = F.kl_div(student, teacher, log_target=True, reduction="sum") / student[..., 0].numel()
        loss = loss + kl_weight * kl
    return loss


@torch.no_grad()
def set_first(path, n, ids):
    """Sets `first` of oracle n, what it adds at position 0, to the mean of what it lacks there on ids (B, T)."""
    true, trace, _ = walk(path, ids, path.spans[-1].stop)
    span, oracle, (x, features, _) = path.spans[n], path.oracles[n], trace[n]
    for first, state, t in zip(oracle.first[-len(span):], oracle.states(x, features, -len(span)), true[span.start + 1:]):
        first += (t - state)[:, 0].mean(dim=0)


@torch.no_grad()
def initialise(path, n, ids):
    """Where training of oracle n begins: at the mean change of each dimension on ids (B, T), in units of its deviation."""
    true, trace, _ = walk(path, ids, path.spans[-1].stop)
    span, oracle = path.spans[n], path.oracles[n]
    for unit, bias, t in zip(oracle.unit[-len(span):], oracle.bias[-len(span):], true[span.start + 1:]):
        change = (t - trace[n][0])[:, 1:].flatten(0, 1)
        unit.copy_(change.std(dim=0).clamp_min(1e-6))
        bias.copy_(change.mean(dim=0) / unit)
    set_first(path, n, ids)


@torch.no_grad()
def fit_linear(path, batch, steps):
    """Least squares in closed form: each head gets the matrix and bias of the smallest relative error over `steps` batches.

    One span after the other, since what enters a span depends on the oracles before it. Position 0 is set_first's.
    """
    for n, (span, oracle) in enumerate(zip(path.spans, path.oracles)):
        xx, xy = 0, 0                               # normal equations of all heads: (S, C+1, C+1), (S, C+1, C)
        for ids in progress([batch(step) for step in range(steps)], "solving"):
            true, trace, _ = walk(path, ids, path.spans[-1].stop)
            x = trace[n][0][:, 1:].flatten(0, 1)                                        # (N, C)
            x1 = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
            targets = torch.stack(true[span.start + 1:span.stop + 1])[:, :, 1:].flatten(1, 2)     # (S, N, C)
            weighted = (x1 / targets.square().sum(dim=-1, keepdim=True)).mT
            xx, xy = xx + (weighted @ x1).double(), xy + (weighted @ (targets - x)).double()
        solution = torch.linalg.lstsq(xx, xy).solution.float()
        oracle.up.copy_(solution[:, :-1])
        oracle.bias.copy_(solution[:, -1])
        set_first(path, n, batch(0))


def new_optimizers(oracles):
    """Muon for the matrices of the trunks (Jordan et al. 2024), scaled so that the learning rate of AdamW serves both."""
    matrices = [p for name, p in oracles.named_parameters() if "trunk" in name and p.ndim == 2]
    others = [p for p in oracles.parameters() if not any(p is q for q in matrices)]
    optimizers = [torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, weight_decay=0.0, ns_steps=3, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def train_step(path, ids, cos_weight, kl_weight, optimizers):
    """One step on ids (B, T) -> its loss; ValueError where that is not finite."""
    loss = path_loss(path, ids, cos_weight, kl_weight)
    if not loss.isfinite():
        raise ValueError(f"the loss became {loss.item()}: --resume with a smaller --lr, or delete what is saved and train anew")
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train(path, batch, settings, optimizers, save):
    """Gradient steps settings["step"] to ["steps"]; saves now and then, and when it is interrupted. True if complete."""
    interrupted = []
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))       # looked at between steps, never within one
    first, steps, tokens = settings["step"], settings["steps"], settings["batch_size"] * settings["context"]
    began = shown = saved = time.time()
    for step in range(first, steps):
        share = min(1, (step + 1) / WARM_UP, (steps - step) / steps)        # warm-up, then linearly to zero
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = settings["lr"] * share
        kl_weight = settings["kl_weight"] if step >= KL_FROM * steps else 0
        loss = train_step(path, batch(step), settings["cos_weight"], kl_weight, optimizers)
        settings["step"], now = step + 1, time.time()
        if now - shown > 5 or step in (first, steps - 1):
            shown, rate = now, (step + 1 - first) / (now - began)
            print(f"step {step + 1}/{steps}  loss {loss:.4f}  {rate * tokens:,.0f} tokens/s  "
                  f"{(steps - step - 1) / rate:.0f} s left", flush=True)
        if interrupted or now - saved > SAVE_EVERY:
            saved = now
            save()
        if interrupted:
            break
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return settings["step"] == steps


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    argument_default=argparse.SUPPRESS)
    parser.add_argument("--skip", help="blocks to skip, counted from 0, both ends included: 2-9, or 2-4,6-8 (default: 2-9)")
    parser.add_argument("--model", help="a directory in Hugging Face's GPT-2 layout, or gpt2, gpt2-medium, gpt2-large, "
                        "gpt2-xl, distilgpt2 (default: data/mini, which ships with the project)")
    parser.add_argument("--text", help="docs (of the installed Python, NumPy and PyTorch), wikitext-2, or a text file "
                        "(default: docs)")
    parser.add_argument("--oracle", choices=KINDS, help="kind of oracle; linear is solved, not trained: of the options on "
                        "sizes and losses it uses none (default: transformer)")
    parser.add_argument("--dim", type=positive, help="width of the oracle (default: 7/16 of the model's, in whole --heads)")
    parser.add_argument("--blocks", type=positive, help=f"blocks of a transformer oracle (default: {DEFAULTS['blocks']})")
    parser.add_argument("--heads", type=positive, help=f"attention heads of each of those blocks (default: {DEFAULTS['heads']})")
    parser.add_argument("--shared", action="store_true", help="one oracle for all spans instead of one for each")
    parser.add_argument("--cos-weight", type=non_negative, help="weight of 1 - cosine in the loss (default: 0.5)")
    parser.add_argument("--kl-weight", type=non_negative, help="weight of the KL divergence from GPT-2's own next-token "
                        f"distribution, in the last {1 - KL_FROM:.0%}% of the steps (default: {DEFAULTS['kl_weight']})")
    parser.add_argument("--steps", type=positive, help=f"optimizer steps; for linear, batches it is solved over (default: "
                        f"{DEFAULTS['steps']})")
    parser.add_argument("--batch-size", type=positive, help=f"windows in a step (default: {DEFAULTS['batch_size']})")
    parser.add_argument("--context", type=positive, help="tokens in a window (default: the model's, at most 256)")
    parser.add_argument("--lr", type=positive_float, help=f"peak learning rate (default: {DEFAULTS['lr']})")
    parser.add_argument("--seed", type=seed, help="of weights and batches (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("oracle.safetensors"), help="the file written (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with the unfinished run beside --out, or with --out; its "
                        "settings hold but for --steps, --lr, --model and --device; with more --steps a finished run goes on at "
                        "the learning rates of the longer run, its optimizers new")
    parser.add_argument("--device", type=device, default="cpu", help="where to compute, such as cuda (default: %(default)s)")
    given = vars(parser.parse_args())
    out, where, resume = given.pop("out"), given.pop("device"), given.pop("resume", False)

    if out.is_dir():
        raise ValueError(f"--out {out} is a directory: give the name of a file")
    unfinished = Path(f"{out}.unfinished")              # saved here until it is complete; what is there as --out stays so long
    old = unfinished if unfinished.exists() else out
    if unfinished.exists() and not resume:
        raise ValueError(f"{unfinished} holds a run that was cut: go on with --resume, or delete it")
    before = read_settings(old) if resume else {}
    settings = {**DEFAULTS, **before, **given}
    for name in before:
        if settings[name] != before[name] and name not in ("steps", "lr", "model"):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"--resume goes on with {option} {before[name]}: leave {option} out, or train anew")
    if settings["oracle"] == "linear" and settings["shared"]:
        raise ValueError("--shared needs an oracle that is trained: a linear one is solved for each span by itself")

    gpt2, tokenizer = load_gpt2(settings["model"], where)
    settings["context"] = settings["context"] or min(gpt2.config.n_positions, 256)
    settings["dim"] = settings["dim"] or default_dim(gpt2.config.n_embd, settings["heads"])
    if settings["context"] > gpt2.config.n_positions or settings["context"] < 8:
        raise ValueError(f"--context takes 8 to {gpt2.config.n_positions} for this model")
    torch.manual_seed(settings["seed"])
    path = load_path(old, gpt2) if resume else new_path(gpt2, settings).to(where)
    if settings["step"] >= settings["steps"]:
        raise ValueError(f"{old} has all its {settings['step']} steps; give more --steps to go on")
    training_ids, heldout_ids = (ids.to(where) for ids in load_tokens(settings["text"], tokenizer, settings["context"]))

    def batch(step):
        return sample_windows(training_ids, settings["batch_size"], settings["context"], settings["seed"], step)

    replaced = sum(p.numel() for span in path.spans for i in span for p in gpt2.blocks[i].parameters())
    predicting, caching = path.n_parameters()
    print(f"{settings['model']}: blocks {settings['skip']} replaced by {predicting:,} oracle parameters "
          f"({predicting / replaced:.1%} of theirs), and {caching:,} for the KV cache", flush=True)
    optimizers = new_optimizers(path.oracles)

    def save():
        save_path(unfinished, path, settings, optimizer_tensors(path.oracles, optimizers))

    if resume:
        restore_optimizers(path.oracles, optimizers, read_tensors(old))
    save()                                      # better now than in minutes, should there be no permission or no space
    if settings["oracle"] == "linear":
        fit_linear(path, batch, settings["steps"])
        settings["step"] = settings["steps"]
    else:
        # a shared oracle has a head for each block of the longest span
        spans = [max(range(len(path.spans)), key=lambda n: len(path.spans[n]))] if settings["shared"] else range(len(path.spans))
        windows = max(1, 8192 // settings["context"])
        for n in spans if settings["step"] == 0 else ():
            initialise(path, n, sample_windows(training_ids, windows, settings["context"], settings["seed"], -1))
        if not train(path, batch, settings, optimizers, save):
            print(f"stopped after step {settings['step']}, saved in {unfinished}; "
                  f"go on with: python train_oracle.py --resume --out {shlex.quote(str(out))}")
            sys.exit(130)
    save_path(out, path, settings)
    unfinished.unlink(missing_ok=True)
    print(f"saved in {out}; held out, {len(heldout_ids):,} tokens of {settings['text']}:\n", flush=True)
    show(path_rows(gpt2, [(out.name, path)], heldout_ids, settings["context"]), PATH_COLUMNS)


if __name__ == "__main__":
    command(main)
