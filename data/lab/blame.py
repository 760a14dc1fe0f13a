"""Which block's cache loses what of a prompt:  python -m data.lab.blame [ORACLE ...]

The second table of eval_ppl.py, where the true keys and values of one block (and of each span, and
of the late blocks) stand in the cache that an oracle prefill left: what a row gains on "oracle
prefill" is what the errors in that block cost, for it reads the others as they are.
"""

import argparse
from pathlib import Path

import torch

from data.checkpoint import read_oracle
from data.cli import Parser, command, positive, show
from data.corpus import load_tokens, recall_windows
from data.options import SHIPPED, write_skip
from data.tables import prompt_table
from eval_ppl import losses_after
from load_weights import load_gpt2
from oracle import load_path

COLUMNS = (("path", "true keys and values", "{}"), ("ratio", "ratio", "{:.3f}"),
           ("first_16_ratio", "first 16", "{:.3f}"), ("kept", "kept", "{:.1%}"))


def read_with_truth(path, blocks):
    """ids (B, T) -> logits of the last position (B, V), KV cache: as path.prefill, but for the keys
    and values of some blocks, which are the full model's."""
    def read(ids):
        cache, true = path.prefill(ids)[1], path.gpt2.prefill(ids)[1]
        cache = [true[i] if i in blocks else layer for i, layer in enumerate(cache)]
        for layer in cache:                         # the last token is read again, over these
            layer.k, layer.v = layer.k[:, :, :-1], layer.v[:, :, :-1]
        return path.gpt2(ids[:, -1:], cache)[:, -1], cache
    return read


def blame_rows(path, text, passages, prompt):
    """Batches of windows (B, T) -> rows: the oracle prefill, then with each block's truth."""
    gpt2, n_layer = path.gpt2, path.gpt2.config.n_layer
    first, last = path.spans[0].start, path.spans[-1].stop
    parts = {f"block {i}": [i] for i in range(first + 1, n_layer)}  # what enters `first` is true
    parts |= {f"blocks {write_skip([span])}": span for span in path.spans if len(span) > 1}
    if last < n_layer - 1:
        parts[f"blocks {last}-{n_layer - 1}"] = range(last, n_layer)
    reads = {"full model": gpt2.prefill, "no prompt": lambda ids: gpt2.prefill(ids[:, -1:]),
             "none (oracle prefill)": path.prefill,
             **{name: read_with_truth(path, blocks) for name, blocks in parts.items()}}
    losses = (losses_after(gpt2, batches, prompt, reads) for batches in (text, passages))
    rows = {row["path"]: row for row in prompt_table(*losses, {name: {} for name in reads})}
    return [rows[name] for name in list(reads)[2:]]


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracles", nargs="*", metavar="ORACLE", type=Path,
                        default=[SHIPPED / "oracle.safetensors"],
                        help="files of train_oracle.py (default: the one in data/mini)")
    parser.add_argument("--windows", type=positive, default=96,
                        help="of text, and of passages that come again, at most (%(default)s)")
    args = parser.parse_args()

    for file in args.oracles:
        settings = read_oracle(file)[0]
        context = settings["context"]
        gpt2, tokenizer = load_gpt2(settings["model"])
        ids = load_tokens(settings["text"], tokenizer, context)[1]
        passages = torch.cat(recall_windows(ids, context))[:args.windows].split(8)
        text = ids[:min(args.windows, len(ids) // context) * context].view(-1, context).split(8)
        print(f"{file}: {context * 3 // 4} tokens of prompt, {args.windows} windows at most\n")
        show(blame_rows(load_path(file, gpt2), text, passages, context * 3 // 4), COLUMNS)


if __name__ == "__main__":
    command(main)
