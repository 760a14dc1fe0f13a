"""What a path saves: floating-point operations as counted, milliseconds as measured.  python -m data.cost  prints both.

Weights are random, for speed does not depend on them: the shape of the embedded model at its context of 256 tokens, and
GPT-2 Small's at 1,024 (training: 256); blocks 2 to 9 of 12 skipped. Everything in one table was measured in one interleaved run.
"""

import argparse
import math
import os
import statistics
import time

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from data.cli import Parser, command, positive


def flops(function, *args):
    """Floating-point operations of the matrix products and attentions in function(*args), counted as they run."""
    # the counter hands over the shapes of the tensors
    def attention(q, k, v, *args, out_shape=None, **kwargs):
        return sdpa_flop_count(q, k, v)

    def attention_backward(grad, q, k, v, *args, out_shape=None, **kwargs):
        return sdpa_backward_flop_count(grad, q, k, v)

    def product(y, a, b, **kwargs):
        return 2 * math.prod(a) * b[2]
    # what the counter does not know
    unknown = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention, torch.ops.aten.baddbmm_: product,
               torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=unknown) as counter:
        function(*args)
    return counter.get_total_flops()


@torch.no_grad()
def milliseconds(functions, ids, runs=15):
    """Median time of each function(ids) -> list. Runs are interleaved, so that a slow moment of the machine hits all; each
    is timed behind an untimed run of the same function, so that none finds the processor's caches full of another's data."""
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    times = [[] for _ in functions]
    for _ in range(runs):
        for function, its in zip(functions, times):
            function(ids)
            wait()
            start = time.perf_counter()
            function(ids)
            wait()
            its.append(1000 * (time.perf_counter() - start))
    return [statistics.median(its) for its in times]


def main():
    from model import (  # here, for eval_ppl.py imports this file, and train_oracle.py that
        GPT2,
        GPT2Config,
    )
    from oracle import default_replay, new_path
    from train_oracle import DEFAULTS, KL_EVERY, default_dim, new_optimizers, train_step

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=15, help="interleaved runs behind each median, a third, but "
                        "at least 5, in training (%(default)s)")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads on {os.cpu_count()} cores\n")

    for name, config in (("embedded model", GPT2Config(4096, 256, 192, 12, 6)), ("GPT-2 Small", GPT2Config())):
        torch.manual_seed(0)
        gpt2 = GPT2(config).requires_grad_(False)
        T = config.n_positions
        path = new_path(gpt2, {**DEFAULTS, "dim": default_dim(config.n_embd, DEFAULTS["heads"])})
        ids = torch.randint(config.vocab_size, (1, T))
        ways = {"full prefill": lambda ids: path.prefill(ids, replay=T),
                "path": lambda ids: gpt2.unembed(path.hidden(ids)[:, -1]),
                f"oracle prefill, replay {default_replay(T)}": path.prefill,
                "oracle prefill, no replay": lambda ids: path.prefill(ids, 0)}
        times = milliseconds(ways.values(), ids, args.runs)
        operations = [flops(way, ids) for way in ways.values()]
        print(f"time to first token, {name}'s shape, prompt of {T}\n"
              f"{'':28}{'GFLOP':>8}{'allowed':>9}{'ms':>9}{'speed-up':>10}{'reached':>9}")
        for way, operation, ms in zip(ways, operations, times):
            allowed, speedup = operations[0] / operation, times[0] / ms
            print(f"{way:28}{operation / 1e9:8.2f}{allowed:8.2f}x{ms:9.1f}{speedup:9.2f}x{speedup / allowed:9.0%}")
        print()

        # training: a step against what it needs of the frozen model, a forward pass over the same batch
        batch = torch.randint(config.vocab_size, (DEFAULTS["batch_size"], 256))
        optimizers = new_optimizers(path.oracles)

        @torch.enable_grad()
        def step(ids, kl_weight):
            train_step(path, ids, DEFAULTS["cos_weight"], kl_weight, optimizers)

        def forward(ids):
            return gpt2.run(gpt2.embed(ids), 0, path.spans[-1].stop)
        ways = {"blocks 0 to 9 of GPT-2 forward, alone": forward,
                "a training step": lambda ids: step(ids, 0),
                "all of GPT-2 forward, alone (every fourth logit)":
                    lambda ids: gpt2.unembed(gpt2.run(forward(ids), path.spans[-1].stop, config.n_layer)[:, ::KL_EVERY]),
                "a training step with the KL term": lambda ids: step(ids, DEFAULTS["kl_weight"])}
        times = milliseconds(ways.values(), batch, max(5, args.runs // 3))
        operations = [flops(way, batch) for way in ways.values()]
        print(f"training, {name}'s shape, batch of {batch.shape[0]} x {batch.shape[1]}\n"
              f"{'':50}{'GFLOP':>8}{'allowed':>9}{'tokens/s':>10}{'speed':>8}{'reached':>9}")
        for n, (way, operation, ms) in enumerate(zip(ways, operations, times)):
            allowed, speed = operations[n // 2 * 2] / operation, times[n // 2 * 2] / ms         # against the forward pass alone
            rate = 1000 * batch.numel() / ms
            print(f"{way:50}{operation / 1e9:8.2f}{allowed:9.0%}{rate:10,.0f}{speed:8.0%}{speed / allowed:9.0%}")
        print(flush=True)


if __name__ == "__main__":
    command(main)
