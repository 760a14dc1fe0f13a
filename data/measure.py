"""What a function costs: floating-point operations as counted, milliseconds as measured."""

import statistics
import time

import torch
from torch.utils import flop_counter

ATEN = torch.ops.aten


@torch.no_grad()
def flops(function, *args):
    """Floating-point operations of the matrix products and attentions in function(*args).

    They are counted while they run; an attention of Q tokens over K is charged for all Q x K pairs.
    """
    # the attention of the CPU, which the counter does not know; it hands over shapes
    def attention(q, k, v, *args, **kwargs):
        return flop_counter.sdpa_flop_count(q, k, v)

    def attention_backward(grad, q, k, v, *args, **kwargs):
        return flop_counter.sdpa_backward_flop_count(grad, q, k, v)

    unknown = {ATEN._scaled_dot_product_flash_attention_for_cpu: attention,
               ATEN._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward}
    with flop_counter.FlopCounterMode(display=False, custom_mapping=unknown) as counter:
        function(*args)
    return counter.get_total_flops()


@torch.no_grad()
def milliseconds(functions, ids, runs=15):
    """Median time of each function(ids) -> list.

    Runs are interleaved, so that a slow moment of the machine hits all; each is timed behind an
    untimed run of the same function, so that none finds the processor's caches full of another's.
    """
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    times = [[] for _ in functions]
    for _ in range(runs):
        for function, its in zip(functions, times, strict=True):
            function(ids)
            wait()
            start = time.perf_counter()
            function(ids)
            wait()
            its.append(1000 * (time.perf_counter() - start))
    return [statistics.median(its) for its in times]


def costs(ways, ids):
    """{name: function of ids} -> {name: {"compute", "prefill_ms", "speedup"}}, as in the tables.

    compute and speed-up are relative to the first."""
    operations = [flops(way, ids) for way in ways.values()]
    times = milliseconds(ways.values(), ids)
    return {name: {"compute": n / operations[0], "prefill_ms": ms, "speedup": times[0] / ms}
            for name, n, ms in zip(ways, operations, times, strict=True)}
