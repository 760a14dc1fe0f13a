"""What each head attends to:  python -m data.lab.heads --model data/mini --skip 2-9

Two scores of every head, the mean of some of its attention weights: previous token, from a token
to the one before it, on held-out text; and prefix matching (Olsson et al. 2022, "In-context
Learning and Induction Heads"), on random tokens that come twice, from a token to the one that
followed it the first time. Heads of the first kind feed those of the second, and both together copy
from a prompt; where they stand in skipped blocks, an oracle has to make up for them.
"""

import argparse
import math
from pathlib import Path

import torch

from data.cli import Parser, command, show
from data.corpus import load_tokens, sample_windows
from data.lab.picture import load_pyplot
from data.options import parse_skip
from load_weights import load_gpt2

SEQUENCES, LENGTH, CONTEXT = 64, 60, 256        # random tokens in a sequence, text in a window


def attention_weights(block, x):
    """x (B, T, C) before a block -> (B, H, T, T): how much each token takes from each."""
    q, k, _ = map(block.attn.heads, block.attn.c_attn(block.ln_1(x)).chunk(3, dim=-1))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])             # (B, H, T, T)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(dim=-1)


@torch.no_grad()
def mean_weights(gpt2, ids, back, first):
    """Mean attention weight from tokens `first`, first + 1, ... of ids (B, T) to those `back`
    before them -> (n_layer, H)."""
    states = gpt2.states(ids, gpt2.config.n_layer - 1)                  # before each block
    return torch.stack([attention_weights(block, x)[:, :, first:].diagonal(first - back, 2, 3)
                        .mean(dim=(0, 2)) for block, x in zip(gpt2.blocks, states, strict=True)])


def repeated(vocab_size, length):
    """Random tokens, then the same again -> ids (SEQUENCES, 2 * length); a token's first occurrence
    is the only one before, for they are distinct."""
    once = torch.ones(SEQUENCES, vocab_size).multinomial(
        length, generator=torch.Generator().manual_seed(0))
    return torch.cat([once, once], dim=1)


def draw(scores, skipped, file):
    """{title: (n_layer, H)} as grids side by side, the skipped blocks framed."""
    plt = load_pyplot()
    figure, axes = plt.subplots(1, len(scores), figsize=(7.5, 4.5), layout="constrained")
    for ax, (title, its) in zip(axes, scores.items(), strict=True):
        n_layer, n_head = its.shape
        image = ax.imshow(its.numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for span in skipped:
            ax.add_patch(plt.Rectangle((-0.5, span.start - 0.5), n_head, len(span), fill=False,
                                       edgecolor="tab:red", linewidth=2, clip_on=False))
        ax.set(title=title, xlabel="head", ylabel="block (framed: skipped)",
               xticks=range(n_head), yticks=range(n_layer))
    figure.colorbar(image, ax=axes, label="mean attention weight")
    figure.savefig(file, format="svg", metadata={"Date": None})


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="data/mini", help="as in train_oracle.py (%(default)s)")
    parser.add_argument("--skip", default="2-9", help="blocks to mark (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also draw the scores, as SVG")
    args = parser.parse_args()

    if args.out:
        load_pyplot()
    gpt2, tokenizer = load_gpt2(args.model)
    config = gpt2.config
    skipped = parse_skip(args.skip, config.n_layer)
    context, length = min(CONTEXT, config.n_positions), min(LENGTH, config.n_positions // 2)
    text = sample_windows(load_tokens("docs", tokenizer, context)[1], SEQUENCES // 2, context, 0, 0)
    random = repeated(config.vocab_size, length)
    scores = {"previous token": mean_weights(gpt2, text, 1, 1),
              "prefix matching": mean_weights(gpt2, random, length - 1, length)}
    columns = [("block", "block", "{}"), *((h, str(h), "{:.2f}") for h in range(config.n_head))]
    for title, its in scores.items():
        print(f"{title}, the heads of {args.model}\n")
        show([{"block": f"{i} skipped" if any(i in span for span in skipped) else i,
               **dict(enumerate(row))} for i, row in enumerate(its.tolist())], columns)
    if args.out:
        draw(scores, skipped, args.out)


if __name__ == "__main__":
    command(main)
