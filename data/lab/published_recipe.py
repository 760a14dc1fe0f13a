"""The recipe that was published before ours, on our models and held-out text:

    python -m data.lab.published_recipe

5,000 samples of 64 tokens, 5 epochs, batches of 2, AdamW at 1e-3 with a cosine over the epochs,
MSE + 0.5 * (1 - cosine), an encoder of 2 layers that sees the whole window, future tokens included,
and predicts the state from scratch.

What the description leaves open and is assumed here: layers with LayerNorm first, GELU, an MLP of
twice the width (which gives the published parameter count), 4 heads, no dropout, no position
embedding, PyTorch's initialisation. --causal adds the mask that is missing there; without it the
"perplexity" printed is not that of a language model.
"""

import argparse
import math
import time

import torch
from torch import nn
from torch.nn import functional as F

from data.cli import Parser, command, positive, seed
from data.corpus import load_tokens, sample_windows
from data.options import parse_skip
from eval_ppl import evaluate
from load_weights import load_gpt2
from oracle import PathOracle, no_oracle

SAMPLES, TOKENS, EPOCHS, BATCH, LR, COS_WEIGHT = 5000, 64, 5, 2, 1e-3, 0.5


class PublishedOracle(nn.Module):
    """Predicts the state behind a span and none between: it serves the path, but no prefill."""

    def __init__(self, n_embd, dim, causal):
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, nhead=4, dim_feedforward=2 * dim, dropout=0.0,
                                           activation="gelu", batch_first=True, norm_first=True)
        self.down, self.up = nn.Linear(n_embd, dim), nn.Linear(dim, n_embd)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.causal = causal

    def forward(self, x):
        """x (B, T, C) -> (B, T, C)"""
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.up(self.encoder(self.down(x), mask=mask, is_causal=self.causal))


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="data/mini", help="as in train_oracle.py (%(default)s)")
    add("--skip", default="2-9", help="one span of blocks (%(default)s)")
    add("--text", default="docs", help="as in train_oracle.py (%(default)s)")
    add("--dim", type=positive, default=64, help="256 for GPT-2 Small (%(default)s)")
    add("--causal", action="store_true", help="mask future tokens")
    add("--seed", type=seed, default=0, help="of weights and samples (%(default)s)")
    args = parser.parse_args()

    gpt2, tokenizer = load_gpt2(args.model)
    training_ids, heldout_ids = load_tokens(args.text, tokenizer, TOKENS)
    span, *more = parse_skip(args.skip, gpt2.config.n_layer)
    if more:
        raise ValueError(f"--skip {args.skip}: the published recipe skips one span")
    if args.dim % 4:
        raise ValueError(f"--dim {args.dim} is not divisible by the recipe's 4 attention heads: "
                         "take a multiple")
    torch.manual_seed(args.seed)
    oracle = PublishedOracle(gpt2.config.n_embd, args.dim, args.causal)
    samples = sample_windows(training_ids, SAMPLES, TOKENS, args.seed, step=0)
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=LR)
    start = time.time()
    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = LR * (1 + math.cos(math.pi * epoch / EPOCHS)) / 2
        total = 0.0
        for batch in samples[torch.randperm(SAMPLES)].split(BATCH):
            with torch.no_grad():
                true = gpt2.states(batch, span.stop)
            predicted = oracle(true[span.start])
            cosine = F.cosine_similarity(predicted, true[span.stop], dim=-1).mean()
            loss = F.mse_loss(predicted, true[span.stop]) + COS_WEIGHT * (1 - cosine)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        print(f"epoch {epoch + 1}/{EPOCHS}  loss {total / SAMPLES:.4f}  "
              f"{time.time() - start:.0f} s", flush=True)

    paths = {"full model": no_oracle(gpt2, []), "path": PathOracle(gpt2, [span], [oracle])}
    for context in (TOKENS, min(256, gpt2.config.n_positions)):
        full, path = evaluate(paths, heldout_ids, context).values()
        print(f"windows of {context}: full model PPL {full['ppl']:.2f}, path {path['ppl']:.2f}, "
              f"ratio {path['ppl'] / full['ppl']:.3f}, cosine {path['cosine']:.4f}")


if __name__ == "__main__":
    command(main)
