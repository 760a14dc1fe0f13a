"""Two simpler oracles than oracle.py's, which look at each token alone, in the same tables:

    python -m data.lab.ladder linear        one least-squares matrix for each state, in closed form
    python -m data.lab.ladder mlp           a hidden layer, trained as train_oracle.py trains

Nothing is written: they are there to be compared with.
"""

import argparse
import sys

import torch
from torch import nn

from data.cli import Parser, command, positive, positive_float, progress, seed, show
from data.corpus import load_tokens, sample_windows, training_windows
from data.optimizers import new_optimizers
from data.options import fit_to_model, parse_skip, train_options
from data.tables import PATH_COLUMNS, PROMPT_COLUMNS
from eval_ppl import path_rows, prompt_rows
from load_weights import load_gpt2
from oracle import Oracle, PathOracle, Readout
from train_oracle import initialise, train


class TokenOracle(Oracle):
    """Predicts each state from that token's state alone: through a hidden layer of width dim, or,
    with dim None, from the state as it is."""

    def __init__(self, n_embd, n_states, dim=None):
        nn.Module.__init__(self)
        self.hidden = nn.Identity() if dim is None else nn.Sequential(
            nn.LayerNorm(n_embd, elementwise_affine=False), nn.Linear(n_embd, dim), nn.GELU())
        self.readouts = nn.ModuleList(Readout(n_embd, dim or n_embd) for _ in range(n_states))

    def features(self, x):
        """x (B, T, C) -> (B, T, F)"""
        return self.hidden(x)


def token_path(gpt2, skip, dim=None):
    """An untrained PathOracle of TokenOracles."""
    spans = parse_skip(skip, gpt2.config.n_layer)
    return PathOracle(gpt2, spans, [TokenOracle(gpt2.config.n_embd, len(s), dim) for s in spans])


@torch.no_grad()
def fit_linear(path, batches):
    """Least squares in closed form: each readout gets the matrix and bias of the smallest relative
    error over the batches (B, T) at all positions but 0, where pos0 is what is lacking on average.

    One span after the other, since what enters a span depends on the oracles before it.
    """
    gpt2 = path.gpt2
    for n, (span, oracle) in enumerate(zip(path.spans, path.oracles, strict=True)):
        xx = xy = x_0 = change_0 = 0    # normal equations (S, C+1, C+1), (S, C+1, C); position 0
        for ids in progress(batches, "solving"):
            true = torch.stack(gpt2.states(ids, span.stop)[span.start + 1:])        # (S, B, T, C)
            x, start = gpt2.embed(ids), 0
            for before, its in zip(path.spans[:n], path.oracles[:n], strict=True):
                x, start = its(gpt2.run(x, start, before.start)), before.stop
            x = gpt2.run(x, start, span.start)                                      # (B, T, C)
            change = true - x
            x1 = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)[:, 1:].flatten(0, 1)
            weighted = (x1 / true[:, :, 1:].flatten(1, 2).square().sum(-1, keepdim=True)).mT
            xx = xx + (weighted @ x1).double()
            xy = xy + (weighted @ change[:, :, 1:].flatten(1, 2)).double()
            x_0, change_0 = x_0 + x[:, 0].sum(0), change_0 + change[:, :, 0].sum(1)
        windows = sum(map(len, batches))
        solution = torch.linalg.lstsq(xx, xy).solution.float()
        for readout, its, first in zip(oracle.readouts, solution, change_0 / windows, strict=True):
            readout.up.weight.copy_(its[:-1].t())
            readout.up.bias.copy_(its[-1])
            readout.pos0.copy_(first - readout.up(x_0 / windows))


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, settings = parser.add_argument, vars(train_options("").parse_args([]))
    add("kind", choices=("linear", "mlp"), help="which of the two")
    add("--skip", help="blocks to skip (%(default)s)")
    add("--model", help="as in train_oracle.py (%(default)s)")
    add("--text", help="as in train_oracle.py (%(default)s)")
    add("--dim", type=positive, help="width of the hidden layer of mlp (%(default)s)")
    add("--steps", type=positive, help="batches read (%(default)s)")
    add("--batch-size", type=positive, help="windows in a batch (%(default)s)")
    add("--context", type=positive, help="tokens in a window (the model's, at most 256)")
    add("--lr", type=positive_float, help="peak learning rate of mlp (%(default)s)")
    add("--seed", type=seed, help="of weights and windows (%(default)s)")
    parser.set_defaults(**{**settings, "dim": 236})
    settings = {**vars(parser.parse_args()), "heads": 1, "step": 0}

    kind, steps, B, seed_ = (settings[name] for name in ("kind", "steps", "batch_size", "seed"))
    gpt2, tokenizer = load_gpt2(settings["model"])
    fit_to_model(settings, gpt2.config)
    context = settings["context"]
    ids, heldout = load_tokens(settings["text"], tokenizer, context)
    torch.manual_seed(seed_)
    path = token_path(gpt2, settings["skip"], settings["dim"] if kind == "mlp" else None)
    if kind == "linear":
        fit_linear(path, [training_windows(ids, B, context, seed_, step) for step in range(steps)])
    else:
        initialise(path, sample_windows(ids, max(1, 8192 // context), context, seed_, step=-1))
        if not train(path, ids, settings, new_optimizers(path.oracles), save=lambda: None):
            sys.exit(130)
    show(path_rows({kind: path}, heldout, context), PATH_COLUMNS)
    show(prompt_rows(path, heldout, context), PROMPT_COLUMNS)


if __name__ == "__main__":
    command(main)
