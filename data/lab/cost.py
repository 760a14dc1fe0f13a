"""What a path saves: operations as counted, time as measured.

    python -m data.lab.cost                 time to first token, and the speed of training
    python -m data.lab.cost --scaling       operations and KV cache of larger models, longer prompts

Weights are random, for speed does not depend on them: the mini model's shape at its context of 256
tokens, and GPT-2 Small's at 1,024 (training: 256). What stands in one table was measured in one
interleaved run. "allowed" is the speed-up that the operations allow, "reached" the share of it that
the clock shows.
"""

import argparse
import os

import torch

from data.cli import Parser, command, positive, show
from data.measure import flops, milliseconds
from data.optimizers import new_optimizers
from data.options import fit_to_model, train_options
from model import GPT2, GPT2Config
from oracle import new_path
from train_oracle import path_loss

SHAPES = {"mini model": GPT2Config(4096, 256, 192, 12, 6), "GPT-2 Small": GPT2Config()}
PATTERNS = "2-9", "1-3,5-6,8-10"
LOSSES = {"states": (0.5, 0, 0), "states, cache": (0.5, 0, 1), "states, cache, KL": (0.5, 0.6, 1)}
TIME_COLUMNS = (("way", "time to first token", "{}"), ("gflop", "GFLOP", "{:.2f}"),
                ("allowed", "allowed", "{:.2f}x"), ("ms", "ms", "{:.1f}"),
                ("speedup", "speed-up", "{:.2f}x"), ("reached", "reached", "{:.0%}"))
STEP_COLUMNS = (("way", "a training step with", "{}"), ("gflop", "GFLOP", "{:.2f}"),
                ("ms", "ms", "{:.1f}"), ("rate", "tokens/s", "{:,.0f}"))
LARGE = {"GPT-2 Small": GPT2Config(), "GPT-2 XL": GPT2Config(n_embd=1600, n_layer=48, n_head=25),
         "7B": GPT2Config(vocab_size=32000, n_embd=4096, n_layer=32, n_head=32)}
PROMPTS = {"1k": 1 << 10, "8k": 1 << 13, "128k": 1 << 17}
SCALING_COLUMNS = (("model", "model", "{}"), ("prompt", "prompt", "{}"), ("way", "read by", "{}"),
                   ("tflop", "TFLOP", "{:,.2f}"), ("compute", "compute", "{:.1%}"),
                   ("attention", "attention", "{:.1%}"), ("own", "oracle's own", "{:.1%}"),
                   ("kv", "KV GB", "{:.3f}"))


def settings(config, skip):
    """train_oracle.py's for this shape, where nothing but --skip is given."""
    its = {**vars(train_options("").parse_args(["--skip", skip])), "step": 0}
    fit_to_model(its, config)
    return its


def first_token(config, runs):
    """Rows: what reads a prompt as long as the context, until the next token's logits."""
    gpt2 = GPT2(config).requires_grad_(False)
    ways = {"full prefill": gpt2.prefill}
    for skip in PATTERNS:
        path = new_path(gpt2, settings(config, skip))
        ways[f"path {skip}"] = lambda ids, path=path: gpt2.unembed(path.hidden(ids)[:, -1])
        ways[f"oracle prefill {skip}"] = path.prefill
    ids = torch.randint(config.vocab_size, (1, config.n_positions))
    times = milliseconds(ways.values(), ids, runs)
    operations = [flops(way, ids) for way in ways.values()]
    return [{"way": way, "gflop": n / 1e9, "allowed": operations[0] / n, "ms": ms,
             "speedup": times[0] / ms, "reached": times[0] / ms * n / operations[0]}
            for way, n, ms in zip(ways, operations, times, strict=True)]


def training(config, runs):
    """Rows: a step by the terms of its loss, and the full model's forward pass, for comparison."""
    gpt2, its = GPT2(config).requires_grad_(False), settings(config, PATTERNS[0])
    path = new_path(gpt2, its)
    optimizers = new_optimizers(path.oracles)

    @torch.enable_grad()
    def step(ids, weights):
        path_loss(path, ids, *weights).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    ways = {name: lambda ids, w=weights: step(ids, w) for name, weights in LOSSES.items()}
    ways["(the full model's forward pass alone)"] = gpt2
    ids = torch.randint(config.vocab_size, (its["batch_size"], its["context"]))
    times = milliseconds(ways.values(), ids, runs)
    operations = [flops(way, ids) for way in ways.values()]
    return [{"way": way, "gflop": n / 1e9, "ms": ms, "rate": 1000 * ids.numel() / ms}
            for way, n, ms in zip(ways, operations, times, strict=True)]


def count(config, T, skipped, dim):
    """{way: operations in matrix products, in the blocks' attention, in the oracle's} of a prompt
    of T tokens and one span of `skipped` blocks, as data.measure.flops counts them."""
    C, n, n_run = config.n_embd, config.n_layer, config.n_layer - skipped
    inner = config.n_inner or 4 * C
    block, fill = 2 * (4 * C * C + 2 * C * inner), 2 * 2 * C * C                # of one token
    oracle, readout = 2 * (2 * C * dim + 8 * dim * dim), 2 * dim * C
    unembed = 2 * C * config.vocab_size
    one, pairs, own = 4 * T * C, 4 * T * T * C, 4 * T * T * dim                 # attentions
    t = T - 1                                       # tokens that jump in an oracle prefill
    # a prefill's last block: keys and values of all tokens, the rest of the last one alone
    end = T * fill + block - fill + unembed
    return {"full prefill": ((n - 1) * T * block + end, (n - 1) * pairs + one, 0),
            "path": (T * (n_run * block + oracle + readout) + unembed, n_run * pairs, own),
            "oracle prefill": ((n_run - 1) * T * block + t * (oracle + skipped * (readout + fill))
                               + skipped * block + end,
                               (n_run - 1) * pairs + (skipped + 1) * one, 4 * t * t * dim)}


def scaling():
    """Rows: the middle two thirds of the blocks skipped, an oracle of 7/16 of the width.

    An attention is charged for all pairs of tokens; a kernel that leaves out those that the causal
    mask hides does half of that, in the blocks and in the oracle alike. The KV cache is float16's;
    that of the path is what going on through the path would need, of its blocks and its oracle. A
    prefill takes only the last token through the last block, the path takes all; an oracle prefill
    takes the last token through all blocks, as the full model does.
    """
    rows = []
    for model, config in LARGE.items():
        C, L = config.n_embd, config.n_layer
        skipped, dim = round(L * 2 / 3), settings(config, f"1-{L - 2}")["dim"]
        widths = {"full prefill": L * C, "path": (L - skipped) * C + dim, "oracle prefill": L * C}
        for prompt, T in PROMPTS.items():
            counts = count(config, T, skipped, dim)
            for way, its in counts.items():
                rows.append({"model": model, "prompt": prompt, "way": way, "tflop": sum(its) / 1e12,
                             "compute": sum(its) / sum(counts["full prefill"]),
                             "attention": sum(its[1:]) / sum(its), "own": its[2] / sum(its),
                             "kv": 2 * 2 * T * widths[way] / 1e9})
    return rows


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--scaling", action="store_true", help="only counts, of larger models and longer prompts")
    add("--runs", type=positive, default=15, help="interleaved runs behind each median, a third, "
        "but at least 5, in training (%(default)s)")
    args = parser.parse_args()
    if args.scaling:
        return show(scaling(), SCALING_COLUMNS)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores\n")
    torch.manual_seed(0)
    for name, config in SHAPES.items():
        print(f"{name}'s shape, prompt of {config.n_positions} tokens", flush=True)
        show(first_token(config, args.runs), TIME_COLUMNS)
        show(training(config, max(5, args.runs // 3)), STEP_COLUMNS)


if __name__ == "__main__":
    command(main)
