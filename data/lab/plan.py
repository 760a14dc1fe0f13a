"""Which blocks to skip for a budget of compute:  python -m data.lab.plan --budget 40%

Every pattern of at most four spans whose compute is within the budget, and below it by less than a
block's (2,000 of them, drawn at random, if there are more), gets a cheap score, without a training
of its own. One oracle is trained for each block that a span may start with, with a readout for
every state behind it, all of them in one short run; a pattern borrows from them what its spans
need. Then the full model goes on over the cache that they fill, on text and on passages that come
again. The score is the sum of what the path and the continuation lose, nats a token each, and the
share of recall that is lost. The best patterns, and some from the whole range to see what the score
is worth, are trained for a few hundred steps. All of it is done on training text.
"""

import itertools
import math
import random
import shlex
import sys

import torch
from torch import nn

from data.cli import Parser, command, positive, positive_float, progress, show, step_report
from data.corpus import load_tokens, recall_windows, sample_windows, training_windows
from data.measure import flops
from data.optimizers import new_optimizers, update
from data.options import fit_to_model, train_options, write_skip
from data.tables import recall_loss, share_kept
from eval_ppl import losses_after, own_losses
from load_weights import load_gpt2
from oracle import new_path, no_oracle
from train_oracle import initialise, learning_rate, state_loss, train

MAX_SPANS, MOST = 4, 2000            # spans of a pattern, patterns that are scored
SCORE, JUDGE = 32, 96               # windows to score on, to judge the trained on
COLUMNS = [("skip", "skip", "{}"), ("compute", "path", "{:.1%}"), ("prefill", "prefill", "{:.1%}"),
           ("cheap", "cheap score", "{:.3f}"), ("rank", "rank", "{}"),
           ("trained", "trained", "{:.3f}"),
           ("path_ratio", "path ratio", "{:.3f}"), ("ratio", "continuation", "{:.3f}"),
           ("kept", "recall kept", "{:.1%}")]


def train_starts(gpt2, ids, settings):
    """1-D ids -> an oracle for each block i: of a span from there to the last block, trained on the
    full model's states."""
    n_layer, B, T, steps = gpt2.config.n_layer, *(
        settings[name] for name in ("batch_size", "context", "steps"))
    paths = [new_path(gpt2, {**settings, "skip": f"{i}-{n_layer - 1}"}) for i in range(n_layer)]
    for path in paths:
        initialise(path, sample_windows(ids, 32, T, 0, -1))
    oracles = nn.ModuleList(path.oracles[0] for path in paths)
    optimizers, report = new_optimizers(oracles), step_report(0, steps, B * T)
    for step in range(steps):
        with torch.no_grad():
            true = gpt2.states(training_windows(ids, B, T, 0, step), n_layer)
        # the logarithm: far states are predicted worse, and would have the features to themselves
        loss = sum(state_loss(state, true[j + 1]).log() for i, oracle in enumerate(oracles)
                   for j, state in enumerate(oracle.states(true[i]), start=i))
        loss.backward()
        update(optimizers, learning_rate(settings["lr"], step, steps))
        report(step + 1, loss)
    return oracles


def borrow(path, starts):
    """The path, its oracles with the tensors of those that were trained for their starts."""
    for span, oracle in zip(path.spans, path.oracles, strict=True):
        # not strict: there are readouts for states behind the span, too
        oracle.load_state_dict(starts[span.start].state_dict(), strict=False)
    return path


def patterns(n_layer):
    """All lists of one to MAX_SPANS ranges of blocks with a block between them."""
    for n in range(1, MAX_SPANS + 1):
        for edges in itertools.combinations(range(n_layer + 1), 2 * n):
            yield [range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


class Judge:
    """What a path and its prefill lose, on windows of text and of passages that come again."""

    def __init__(self, gpt2, text, passages, prompt):
        self.gpt2, self.text, self.passages, self.prompt = gpt2, text, passages, prompt
        full = no_oracle(gpt2, [])
        self.full = self.losses(full)
        last = losses_after(gpt2, passages, prompt, {"no": lambda ids: gpt2.prefill(ids[:, -1:])})
        self.nothing = recall_loss(last["no"])

    def losses(self, path):
        """Nats a token: of the path on text, of the full model behind a prompt that the path read,
        on text and on a passage of the prompt."""
        text, passage = (losses_after(self.gpt2, batches, self.prompt, {"it": path.prefill})["it"]
                         for batches in (self.text, self.passages))
        own = own_losses(path, self.text, 1).mean().item()
        return own, text.mean().item(), recall_loss(passage)

    def __call__(self, path):
        """-> score, perplexity ratio of the path, of the continuation, share of recall kept (None,
        and no part of the score, where the model does not copy)."""
        own, text, passage = self.losses(path)
        own, text = own - self.full[0], text - self.full[1]
        kept = share_kept(passage, self.full[2], self.nothing)
        lost = 0 if kept is None else 1 - kept
        return own + text + lost, math.exp(own), math.exp(text), kept


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
    ids = load_tokens(args.text, tokenizer, T)[0]       # the held-out text is for what is chosen
    scored, judged = sample_windows(ids, SCORE, T, 0, -2), sample_windows(ids, JUDGE, T, 0, -3)
    passages = torch.cat(recall_windows(ids, T))
    full, x = no_oracle(gpt2, []), gpt2.embed(ids[None, :T])
    whole = flops(full.hidden, ids[None, :T])
    # the operations of blocks and oracles add up, so one of each is counted
    a_block = flops(lambda x: gpt2.run(x, 0, 1), x) / whole
    an_oracle = flops(new_path(gpt2, {**settings, "skip": "1-1"}).oracles[0], x) / whole
    candidates = []
    for spans in patterns(gpt2.config.n_layer):
        run = gpt2.config.n_layer - sum(map(len, spans))
        compute = run * a_block + len(spans) * an_oracle
        if args.budget - a_block < compute <= args.budget:
            candidates.append({"spans": spans, "skip": write_skip(spans), "compute": compute})
    print(f"{len(candidates)} patterns of at most {MAX_SPANS} spans fit", flush=True)
    if not candidates:
        raise ValueError(f"no pattern has a compute just below --budget {args.budget:.1%}: a block "
                         f"takes {a_block:.1%}, an oracle {an_oracle:.1%}")
    if len(candidates) > MOST:
        print(f"{MOST} of them, drawn at random, are scored")
        candidates = random.Random(0).sample(candidates, MOST)
    torch.manual_seed(0)
    starts = train_starts(gpt2, ids, settings)
    judge = Judge(gpt2, scored.split(8), passages[:SCORE].split(8), T * 3 // 4)
    for row, _ in zip(candidates, progress([scored] * len(candidates), "scoring"), strict=True):
        path = borrow(new_path(gpt2, {**settings, "skip": row["skip"]}), starts)
        row["cheap"] = judge(path)[0]
    candidates.sort(key=lambda row: row["cheap"])
    for rank, row in enumerate(candidates):
        row["rank"] = rank + 1
    # half of those that are trained are the best, the others lie evenly between them and the worst
    best, n = (args.train + 1) // 2, len(candidates)
    places = {*range(best), *(best + (n - 1 - best) * (k + 1) // (args.train - best)
                              for k in range(args.train - best))}
    chosen = [candidates[place] for place in sorted(places) if place < n]
    passages = passages[SCORE:][:JUDGE].split(8)
    judge = Judge(gpt2, judged.split(8), passages, T * 3 // 4)
    for row in chosen:
        print(f"\n--skip {row['skip']}", flush=True)
        torch.manual_seed(0)
        path = new_path(gpt2, {**settings, "skip": row["skip"]})
        initialise(path, sample_windows(ids, 32, T, 0, -1))
        if not train(path, ids, {**settings}, new_optimizers(path.oracles), save=lambda: None):
            sys.exit(130)
        row["prefill"] = flops(path.prefill, ids[None, :T]) / flops(gpt2.prefill, ids[None, :T])
        row["trained"], row["path_ratio"], row["ratio"], row["kept"] = judge(path)
    print()
    show(chosen, COLUMNS)
    if len(chosen) > 2:
        correlation = rank_correlation(*([row[k] for row in chosen] for k in ("cheap", "trained")))
        print(f"rank correlation of the cheap score with the trained: {correlation:.2f}")
    winner = min(chosen, key=lambda row: row["trained"])
    print(shlex.join(["python", "train_oracle.py", "--model", args.model, "--text", args.text,
                      "--skip", winner["skip"], "--dim", str(dim)]))


if __name__ == "__main__":
    command(main)
