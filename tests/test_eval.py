"""The measurements of eval_ppl.py and data/measure.py, against explicit loops and closed forms."""

import math

import numpy as np
import pytest
import torch
from numpy_gpt2 import numpy_losses
from tiny import CONFIG, exact_path, random_ids, random_path, reference, tiny_gpt2
from torch import nn
from torch.testing import assert_close

from data.corpus import recall_windows, windows
from data.measure import flops
from data.options import parse_skip
from data.tables import prompt_table
from eval_ppl import (
    evaluate,
    losses_after,
    own_losses,
    path_rows,
    prompt_rows,
    readers,
    token_losses,
)
from oracle import no_oracle

CLOSE = dict(atol=1e-5, rtol=1e-4)


@pytest.fixture
def gpt2():
    return tiny_gpt2()


def numpy_perplexity(path, ids, context):
    """One window after the other; each token but the first of a window is scored."""
    losses = []
    for window in ids.split(context):
        if len(window) > 1:
            losses += numpy_losses(reference(path, window[None])[0, :-1], window[1:])
    return np.exp(np.mean(losses))


# ---- windows ----

@pytest.mark.parametrize("n, context", [(40, 10), (45, 10), (42, 10), (9, 10), (10, 10),
                                        (5000, 10), (5003, 1000), (9000, 3000)])
def test_windows_hold_each_token_once_and_in_order(n, context):
    batches = windows(torch.arange(n), context)
    assert torch.cat([batch.flatten() for batch in batches]).tolist() == list(range(n))
    assert all(len(row) == context for row in [row for batch in batches for row in batch][:-1])
    assert max(batch.numel() for batch in batches) <= max(2048, context)


def test_a_single_token_at_the_end_has_nothing_to_be_predicted_from():
    batches = windows(torch.arange(41), 10)
    assert torch.cat([batch.flatten() for batch in batches]).tolist() == list(range(40))


@pytest.mark.parametrize("context, text, start, passage", [(256, 192, 64, 48), (16, 12, 4, 3),
                                                           (8, 6, 2, 2), (33, 24, 8, 6)])
def test_recall_windows_end_with_a_passage_that_stood_in_them(context, text, start, passage):
    batches = recall_windows(torch.arange(1000), context)
    rows = torch.cat(batches)
    assert rows.shape == (192, text + passage) and rows.shape[1] <= context
    assert all(batch.numel() <= 2048 for batch in batches)
    for row in rows.tolist():
        assert row[:text] == list(range(row[0], row[0] + text))         # text as it stands
        assert row[text:] == row[start:start + passage]
    assert len(set(rows[:, 0].tolist())) > 100                          # from all over it
    assert torch.equal(rows, torch.cat(recall_windows(torch.arange(1000), context)))


# ---- perplexity ----

def test_perplexity_of_constant_logits_is_the_vocabulary_size(gpt2):
    gpt2.ln_f.weight.zero_()
    gpt2.ln_f.bias.zero_()
    for path in (no_oracle(gpt2, []), random_path(gpt2)):
        figures = evaluate({"it": path}, random_ids(1, 100)[0], 16)
        assert figures["it"]["ppl"] == pytest.approx(CONFIG.vocab_size, rel=1e-5)


def test_token_losses_against_numpy():
    logits, targets = torch.randn(3, 7, 50), torch.randint(50, (3, 7))
    expected = [numpy_losses(row, wanted) for row, wanted in zip(logits, targets, strict=True)]
    assert_close(token_losses(logits, targets).double(), torch.tensor(np.array(expected)), **CLOSE)


@pytest.mark.parametrize("n", [80, 87, 81, 82, 12])     # ragged last windows of 7, 1 and 2 tokens
def test_perplexity_is_over_tokens_not_over_windows(gpt2, n):
    ids = random_ids(1, n)[0]
    paths = {"full": no_oracle(gpt2, []), "one": random_path(gpt2),
             "shared": random_path(gpt2, "1-2,4-5", shared=True)}
    figures = evaluate(paths, ids, 16)
    assert list(figures) == list(paths)
    for name, path in paths.items():
        assert figures[name]["ppl"] == pytest.approx(numpy_perplexity(path, ids, 16), rel=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_cosine_and_mse_are_of_the_states_behind_the_spans(gpt2, shared):
    ids, path = random_ids(1, 39)[0], random_path(gpt2, "1-2,4-5", shared=shared)
    cosines, errors = [], []
    for window in ids.split(16):
        true = x = gpt2.embed(window[None])
        for i in range(6):
            true = gpt2.blocks[i](true)
            if i in (2, 5):
                x = path.oracles[i // 3](x)
                both = (state[0].double().numpy() for state in (true, x))
                for t, p in zip(*both, strict=True):
                    cosines.append(t @ p / np.linalg.norm(t) / np.linalg.norm(p))
                    errors.append(((t - p) ** 2).mean())
            elif i in (0, 3):
                x = gpt2.blocks[i](x)
    figures = evaluate({"full": no_oracle(gpt2, []), "it": path}, ids, 16)
    assert figures["it"]["cosine"] == pytest.approx(np.mean(cosines), abs=1e-4)
    assert figures["it"]["mse"] == pytest.approx(np.mean(errors), rel=1e-3)
    assert figures["full"]["cosine"] == 1 and figures["full"]["mse"] == 0


def test_rows_of_the_first_table(gpt2):
    ids = random_ids(1, 70)[0]
    paths = {"exact": exact_path(gpt2, "1-2,4-4"), "random": random_path(gpt2, "1-2,4-4"),
             "other": random_path(gpt2)}
    rows = path_rows(paths, ids, 16)
    assert [row["path"] for row in rows] == ["full model", "no oracle, 1-2,4-4", "exact", "random",
                                             "no oracle, 2-4", "other"]
    assert [row["blocks_run"] for row in rows] == [6, 3, 3, 3, 3, 3]
    full, without, exact = rows[:3]
    assert full["ratio"] == full["compute"] == full["speedup"] == 1
    assert full["ppl"] == pytest.approx(numpy_perplexity(no_oracle(gpt2, []), ids, 16), rel=1e-4)
    for key in ("ratio", "cosine", "compute"):
        assert exact[key] == pytest.approx(1, abs=1e-4)
    T, C, V = 16, 24, CONFIG.vocab_size                 # the cost is that of one position's logits
    block, last = 2 * T * 12 * C * C + 4 * T * T * C, 2 * C * V
    assert without["compute"] == pytest.approx((3 * block + last) / (6 * block + last))
    for row in rows[1:]:
        assert row["ratio"] == pytest.approx(row["ppl"] / full["ppl"])
        assert row["speedup"] == pytest.approx(full["prefill_ms"] / row["prefill_ms"])


# ---- the full model behind a prompt ----

@pytest.mark.parametrize("skip", ["1-2,4-4", "0-3"])
def test_losses_after_each_way_to_read_the_prompt(gpt2, skip):
    ids, path, prompt = random_ids(4, 20), random_path(gpt2, skip), 14
    reads = readers(path, ids[:1, :prompt])
    losses = losses_after(gpt2, ids.split(3), prompt, reads)
    losses["path throughout"] = own_losses(path, ids.split(3), prompt)
    full, bare = no_oracle(gpt2, []), no_oracle(gpt2, path.spans)
    last, = (name for name in reads if name.startswith("full model, last"))
    n = int(last.split()[3])
    alone = ids[:, prompt - 1:], ids[:, prompt - n:]    # as if a text began there
    logits = {"full model": reference(full, ids), "path throughout": reference(path, ids),
              "oracle prefill": reference(path, ids, prompt - 1),
              "no oracle": reference(bare, ids, prompt - 1),
              "no cache in the skipped blocks": reference(path, ids, prompt - 1, seen=False),
              "no prompt": reference(full, alone[0]), last: reference(full, alone[1])}
    assert losses.keys() == logits.keys() and 1 < n < prompt
    for name, its in logits.items():
        expected = [numpy_losses(row, targets) for row, targets
                    in zip(its[:, -7:-1], ids[:, prompt:], strict=True)]
        assert_close(losses[name].double(), torch.tensor(np.array(expected)), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("skip, dim", [("1-2,4-4", 16), ("0-5", 16), ("2-4", 4), ("3-3", 128)])
@pytest.mark.parametrize("length", [6, 24])
def test_the_control_reads_as_many_tokens_as_cost_no_more(gpt2, skip, dim, length):
    path, ids = random_path(gpt2, skip, dim=dim), random_ids(1, length)
    name = list(readers(path, ids))[-2]
    n = int(name.removeprefix("full model, last ").removesuffix(" tokens"))
    C, V, budget = 24, CONFIG.vocab_size, flops(path.prefill, ids)

    def full(T):        # all of five blocks, keys and values of the last, its output for one token
        return 5 * (2 * T * 12 * C * C + 4 * T * T * C) + 4 * T * C * C + 2 * 10 * C * C \
            + 4 * T * C + 2 * C * V

    assert n == max(n for n in range(1, length) if full(n) <= budget)


def test_rows_of_the_second_table(gpt2):
    ids, path = random_ids(1, 90)[0], random_path(gpt2, "1-2,4-4")      # the last window is ragged
    rows = {row["path"]: row for row in prompt_rows(path, ids, 16)}
    names = {"full model", "no oracle", "oracle prefill", "no cache in the skipped blocks",
             "no prompt", "path throughout"}
    assert names < rows.keys() and len(rows) == 7
    assert [row["ppl"] for row in rows.values()] == sorted(row["ppl"] for row in rows.values())
    full = rows["full model"]
    assert full["compute"] == full["speedup"] == full["ratio"] == full["first_16_ratio"] == 1
    window, passage = ids[:80].view(5, 16), torch.cat(recall_windows(ids, 16))
    for name, jumped in (("full model", 0), ("oracle prefill", 11)):
        its = reference(path, window, jumped)[:, 11:-1]
        losses = [numpy_losses(*pair) for pair in zip(its, window[:, 12:], strict=True)]
        assert rows[name]["ppl"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-3)
        its = reference(path, passage[:20], jumped)[:, 11:-1]
        losses = [numpy_losses(*pair) for pair in zip(its, passage[:20, 12:], strict=True)]
        batch = losses_after(gpt2, [passage[:20]], 12, {name: readers(path, window[:1, :12])[name]})
        assert_close(batch[name].double(), torch.tensor(np.array(losses)), rtol=1e-3, atol=1e-3)
    assert rows["no prompt"]["compute"] < rows["oracle prefill"]["compute"] < 1
    for row in rows.values():           # a random model does not copy
        assert row["kept"] is None and row["ratio"] == pytest.approx(row["ppl"] / full["ppl"])


@pytest.mark.parametrize("without, full, recalled, kept", [
    (4, 1, 1, 1), (4, 1, 4, 0), (4, 1, 1.75, 0.75), (4, 1, 5.5, -0.5), (4, 1.9, 2, 2 / 2.1),
    (4, 2.1, 3, None), (4, 4, 4, None), (4, 6, 5, None)])
def test_kept_and_recall_of_losses_that_are_known(without, full, recalled, kept):
    """A passage of 12 tokens: its first 2 cannot be known, and say nothing here."""
    losses = {"full model": full, "no prompt": without, "oracle prefill": recalled}
    passage = {name: torch.tensor([[9, 9, loss + 0.9, *[loss] * 8, loss - 0.9]] * 3)
               for name, loss in losses.items()}
    text = {name: torch.cat([torch.full((5, 16), float(loss)), torch.full((5, 16), 3.0)], dim=1)
            for name, loss in losses.items()}
    cost = {name: {"compute": 0.5, "prefill_ms": 1.0, "speedup": 2.0} for name in losses}
    rows = {row["path"]: row for row in prompt_table(text, passage, cost)}
    assert rows.keys() == losses.keys()
    for name, loss in losses.items():
        wanted = {"recall": loss, "ppl": math.exp((loss + 3) / 2), **cost[name],
                  "ratio": math.exp((loss - full) / 2), "first_16_ppl": math.exp(loss),
                  "first_16_ratio": math.exp(loss - full)}
        share, its = rows[name].pop("kept"), {**rows[name], "path": 0}
        assert its == pytest.approx({**wanted, "path": 0}, rel=1e-5)
        assert (share is None) == (kept is None)
        if kept is not None:
            of = {"full model": 1, "no prompt": 0, "oracle prefill": kept}
            assert share == pytest.approx(of[name], abs=1e-5)


# ---- operations ----

@pytest.mark.parametrize("T", [1, 7, 32])
def test_flops_of_a_layer_a_block_and_a_path(gpt2, T):
    C, F, V, x, ids = 24, 16, CONFIG.vocab_size, torch.randn(1, T, 24), random_ids(1, T)
    block = 2 * T * 12 * C * C + 4 * T * T * C
    assert flops(nn.Linear(24, 10), x) == 2 * T * 24 * 10
    assert flops(gpt2.blocks[0], x) == block
    assert flops(gpt2, ids) == 6 * block + 2 * T * C * V
    path = random_path(gpt2, "1-2,4-4", blocks=1)
    features = 2 * T * 2 * C * F + 2 * T * 8 * F * F + 4 * T * T * F
    readout, fill = 2 * T * F * C, 2 * T * C * 2 * C
    assert flops(path.hidden, ids) == 3 * block + 2 * (features + readout)
    one = 2 * 10 * C * C + 4 * T * C                    # an output for one position alone
    assert flops(gpt2.prefill, ids) == 5 * block + fill + one + 2 * C * V
    t = T - 1                                           # tokens that jump
    features = 2 * t * 2 * C * F + 2 * t * 8 * F * F + 4 * t * t * F
    skipped = 2 * t * C * 2 * C + 2 * C * 2 * C + one
    assert flops(path.prefill, ids) == 2 * block + fill + one + 2 * C * V \
        + 2 * features + 3 * (2 * t * F * C + skipped)
    assert flops(no_oracle(gpt2, parse_skip("2-4", 6)).prefill, ids) == \
        2 * block + fill + one + 2 * C * V + 3 * skipped


def test_flops_of_a_backward_pass(gpt2):
    T, C = 8, 24
    products, attention = 2 * T * 12 * C * C, 2 * T * T * C     # an attention has two of these

    @torch.enable_grad()
    def forward_and_backward(x):
        gpt2.blocks[0](x.requires_grad_()).sum().backward()
    # frozen weights: one product more for each, for the gradient of its input; five more for an
    # attention
    assert flops(forward_and_backward, torch.randn(1, T, C)) == 2 * products + 7 * attention
