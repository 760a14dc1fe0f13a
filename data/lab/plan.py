"""Which blocks to skip for a budget of compute:  python -m data.lab.plan --budget 40%

Every pattern of spans that fits gets a cheap score, without training: its oracles are solved in
closed form, one linear map from a token's state and that of the token before, for each start of a
span and each state behind it, fitted once and shared by all patterns; then the full model goes on
over the cache that they fill, on text and on passages that come again. The score is the sum of what
the path and the continuation lose, nats a token each, and the share of recall that is lost. The
best patterns, and some from the whole range to see what the score is worth, are trained for a few
hundred steps.
"""

import itertools
import math

import torch
from torch import nn
from torch.nn import functional as F

from data.cli import Parser, command, positive, positive_float, progress, show
from data.corpus import load_tokens, recall_windows, sample_windows, windows
from data.measure import flops
from data.optimizers import new_optimizers
from data.options import fit_to_model, train_options, write_skip
from eval_ppl import token_losses
from load_weights import load_gpt2
from oracle import PathOracle, new_path, no_oracle
from train_oracle import initialise, train

MAX_SPANS = 4
FIT, SCORE, JUDGE = 96, 32, 96      # windows to solve on, to score on, to judge the trained on
COLUMNS = [("skip", "skip", "{}"), ("compute", "path", "{:.1%}"), ("prefill", "prefill", "{:.1%}"),
           ("cheap", "cheap score", "{:.3f}"), ("rank", "rank", "{}"),
           ("trained", "trained", "{:.3f}"),
           ("path_ratio", "path ratio", "{:.3f}"), ("ratio", "continuation", "{:.3f}"),
           ("kept", "recall kept", "{:.1%}")]


class LinearOracle(nn.Module):
    """The S states behind a span from its input, each one linear map of two tokens' states."""

    def __init__(self, solution, n_states):
        super().__init__()
        self.maps, self.pos0 = (part[:n_states] for part in solution)   # (S, 2C+1, C), (S, C)

    def states(self, x):
        states = x + torch.einsum("btf,sfc->sbtc", features(x), self.maps)
        states[:, :, 0] = x[:, 0] + self.pos0[:, None]
        return list(states)

    def forward(self, x):
        return self.states(x)[-1]


def features(x):
    """x (B, T, C) -> (B, T, 2C + 1): the normalised state, that of the token before, and 1."""
    x = F.layer_norm(x, x.shape[-1:])
    return torch.cat([x, F.pad(x, (0, 0, 1, -1)), torch.ones_like(x[..., :1])], dim=-1)


@torch.no_grad()
def solve(gpt2, ids):
    """ids (B, T) -> for each block i that a span may start with, the least-squares maps to the
    changes behind blocks i, i+1, ... (S, 2C+1, C), and the mean changes at position 0, (S, C)."""
    n_layer, C = gpt2.config.n_layer, gpt2.config.n_embd
    xx = [0] * n_layer
    xy, pos0 = [0] * n_layer, [0] * n_layer
    for batch in progress(ids.split(8), "solving"):
        true = gpt2.states(batch, n_layer)
        for i in range(n_layer):
            f = features(true[i])[:, 1:].flatten(0, 1)                  # (N, 2C + 1)
            change = torch.stack(true[i + 1:]) - true[i]                # (S, B, T, C)
            xx[i] = xx[i] + (f.T @ f).double()
            targets = change[:, :, 1:].flatten(1, 2).transpose(0, 1).flatten(1)     # (N, S * C)
            xy[i] = xy[i] + (f.T @ targets).double()
            pos0[i] = pos0[i] + change[:, :, 0].mean(1) * len(batch) / len(ids)
    ridge = 1e-4 * torch.eye(2 * C + 1, dtype=torch.float64)
    maps = [torch.linalg.solve(a + ridge * a.trace() / len(a), b).float()
            for a, b in zip(xx, xy, strict=True)]
    return [(m.unflatten(1, (-1, C)).transpose(0, 1), p) for m, p in zip(maps, pos0, strict=True)]


def patterns(n_layer):
    """All lists of one to MAX_SPANS ranges of blocks with a block between them."""
    for kept in itertools.product((True, False), repeat=n_layer):
        edges = [i for i in range(n_layer + 1)
                 if (i < n_layer and not kept[i]) != (i > 0 and not kept[i - 1])]
        if 0 < len(edges) <= 2 * MAX_SPANS:
            yield [range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@torch.no_grad()
def behind(gpt2, read, text, passages, prompt):
    """Nats a token of the full model behind a prompt: on text, and on passages that come again."""
    means = []
    for batches, skip in ((text, 0), (passages, (passages[0].shape[1] - prompt) // 6)):
        losses = []
        for window in batches:                                          # (B, T)
            last, cache = read(window[:, :prompt])
            logits = torch.cat([last[:, None], gpt2(window[:, prompt:-1], cache)], dim=1)
            losses.append(token_losses(logits, window[:, prompt:])[:, skip:])
        means.append(torch.cat(losses).mean().item())
    return means


@torch.no_grad()
def throughout(path, text):
    """Nats a token of the path on windows of text."""
    return torch.cat([token_losses(path(w)[:, :-1], w[:, 1:]) for w in text]).mean().item()


class Judge:
    """What a path and its prefill lose, on windows of text and of passages that come again."""

    def __init__(self, gpt2, text, passages, prompt):
        full = no_oracle(gpt2, [])
        self.windows, self.path = (text, passages, prompt), throughout(full, text)
        self.full = behind(gpt2, full.prefill, *self.windows)
        self.nothing = behind(gpt2, lambda ids: full.prefill(ids[:, -1:]), *self.windows)

    def __call__(self, path):
        """-> score, perplexity ratio of the path, of the continuation, share of recall kept."""
        own = throughout(path, self.windows[0]) - self.path
        text, passage = behind(path.gpt2, path.prefill, *self.windows)
        text, passage = text - self.full[0], passage - self.full[1]
        lost = passage / (self.nothing[1] - self.full[1])
        return own + text + lost, math.exp(own), math.exp(text), 1 - lost


def percent(text):
    """"40%" or "40" -> 0.4"""
    return positive_float(text.removesuffix("%")) / 100


def rank_correlation(a, b):
    """Spearman's, of two lists of numbers."""
    ranks = torch.tensor([a, b]).argsort(1).argsort(1).double()
    return torch.corrcoef(ranks)[0, 1].item()


def main():
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--budget", type=percent, default=0.4, help="compute of the path (40%%)")
    add("--model", default="data/mini", help="as in train_oracle.py (%(default)s)")
    add("--text", default="docs", help="as in train_oracle.py (%(default)s)")
    add("--train", type=positive, default=8, help="patterns that are trained (%(default)s)")
    add("--steps", type=positive, default=300, help="of each of them (%(default)s)")
    args = parser.parse_args()
    gpt2, tokenizer = load_gpt2(args.model)
    settings = {**vars(train_options("").parse_args(["--skip", "0-0"])), "step": 0}
    heads = settings["heads"]
    # a little narrower than the default: there are several of them
    dim = max(1, gpt2.config.n_embd * 5 // 12 // heads) * heads
    settings |= {"dim": dim, "steps": args.steps}
    fit_to_model(settings, gpt2.config)
    T = settings["context"]
    ids, heldout = load_tokens(args.text, tokenizer, T)
    # the plan is made on training text: the held-out text is for the figures of what is chosen
    fit, scored = (sample_windows(ids, n, T, 0, step) for n, step in ((FIT, -2), (SCORE, -3)))
    full, x = no_oracle(gpt2, []), gpt2.embed(ids[None, :T])
    whole = flops(full.hidden, ids[None, :T])
    # the operations of blocks and oracles add up, so one of each is counted
    a_block = flops(lambda x: gpt2.run(x, 0, 1), x) / whole
    an_oracle = flops(new_path(gpt2, {**settings, "skip": "1-1"}).oracles[0], x) / whole
    candidates, solutions = [], solve(gpt2, fit)
    for spans in patterns(gpt2.config.n_layer):
        run = gpt2.config.n_layer - sum(map(len, spans))
        compute = run * a_block + len(spans) * an_oracle
        if args.budget - a_block < compute <= args.budget:
            candidates.append({"spans": spans, "skip": write_skip(spans), "compute": compute})
    print(f"{len(candidates)} patterns of at most {MAX_SPANS} spans fit", flush=True)
    judge = Judge(gpt2, scored.split(8), recall_windows(ids, T)[:SCORE // 8], T * 3 // 4)
    for row, _ in zip(candidates, progress([scored] * len(candidates), "scoring"), strict=True):
        oracles = [LinearOracle(solutions[span.start], len(span)) for span in row["spans"]]
        row["cheap"] = judge(PathOracle(gpt2, row["spans"], oracles))[0]
    candidates.sort(key=lambda row: row["cheap"])
    for rank, row in enumerate(candidates):
        row["rank"] = rank + 1
    # half of those that are trained are the best, the others lie evenly between them and the worst
    best, n = (args.train + 1) // 2, len(candidates)
    places = [*range(best), *(best + (n - 1 - best) * (k + 1) // (args.train - best)
                              for k in range(args.train - best))]
    chosen = [candidates[place] for place in places if place < n]
    text = [w for w in windows(heldout, T) if w.shape[1] == T][:JUDGE * T // 2048]
    judge = Judge(gpt2, text, recall_windows(heldout, T)[:JUDGE * T // 2048], T * 3 // 4)
    for row in chosen:
        print(f"\n--skip {row['skip']}", flush=True)
        torch.manual_seed(0)
        path = new_path(gpt2, {**settings, "skip": row["skip"]})
        initialise(path, sample_windows(ids, 32, T, 0, -1))
        train(path, ids, {**settings}, new_optimizers(path.oracles), save=lambda: None)
        row["prefill"] = flops(path.prefill, ids[None, :T]) / flops(full.prefill, ids[None, :T])
        row["trained"], row["path_ratio"], row["ratio"], row["kept"] = judge(path)
    print()
    show(chosen, COLUMNS)
    if len(chosen) > 2:
        correlation = rank_correlation(*([row[k] for row in chosen] for k in ("cheap", "trained")))
        print(f"rank correlation of the cheap score with the trained: {correlation:.2f}")
    winner = min(chosen, key=lambda row: row["trained"])
    print(f"python train_oracle.py --model {args.model} --skip {winner['skip']} "
          f"--dim {dim}")


if __name__ == "__main__":
    command(main)
