"""The measurements of eval_ppl.py and data/cost.py, against explicit loops and closed forms."""

import numpy as np
import pytest
import torch
from data.cost import flops
from tiny import CONFIG, Exact, mixed_logits, random_ids, randomize, tiny_gpt2
from torch import nn
from torch.testing import assert_close

from eval_ppl import continuations, evaluate, path_rows, token_losses, windows
from oracle import Nothing, PathOracle, new_path, parse_skip

CLOSE = dict(atol=1e-5, rtol=1e-4)


@pytest.fixture
def gpt2():
    return tiny_gpt2()


def random_path(gpt2, skip="2-4", kind="transformer"):
    path = new_path(gpt2, {"skip": skip, "oracle": kind, "dim": 16, "blocks": 2, "heads": 2, "shared": False})
    randomize(path.oracles)
    return path.requires_grad_(False)


def numpy_losses(logits, targets):
    """logits (T, V), targets (T,) -> T losses in nats"""
    logits = logits.double().numpy()
    log_sums = np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)) + logits.max(axis=1)
    return [log_sums[t] - logits[t, target] for t, target in enumerate(targets.tolist())]


def numpy_perplexity(model, ids, context):
    """One window after the other; each token but the first of a window is scored."""
    losses = []
    for start in range(0, len(ids), context):
        window = ids[start:start + context]
        if len(window) > 1:
            losses += numpy_losses(model(window[None])[0, :-1], window[1:])
    return np.exp(np.mean(losses))


# ---- windows ----

@pytest.mark.parametrize("n, context", [(40, 10), (45, 10), (42, 10), (49, 10), (9, 10), (10, 10), (5000, 10),
                                        (5003, 1000), (9000, 3000)])
def test_windows_hold_each_token_once_and_in_order(n, context):
    batches = windows(torch.arange(n), context)
    assert torch.cat([batch.flatten() for batch in batches]).tolist() == list(range(n))
    rows = [row for batch in batches for row in batch]
    assert all(len(row) == context for row in rows[:-1])
    assert max(batch.numel() for batch in batches) <= max(2048, context)


def test_a_single_token_at_the_end_has_nothing_to_be_predicted_from():
    assert torch.cat([batch.flatten() for batch in windows(torch.arange(41), 10)]).tolist() == list(range(40))


# ---- perplexity ----

def test_perplexity_of_constant_logits_is_the_vocabulary_size(gpt2):
    gpt2.ln_f.weight.zero_()
    gpt2.ln_f.bias.zero_()
    path = random_path(gpt2)
    for figures in evaluate(gpt2, [path], random_ids(1, 100)[0], 16):
        assert figures["ppl"] == pytest.approx(CONFIG.vocab_size, rel=1e-5)


def test_token_losses_against_numpy():
    logits, targets = torch.randn(3, 7, 50), torch.randint(50, (3, 7))
    expected = [numpy_losses(row, wanted) for row, wanted in zip(logits, targets)]
    assert_close(token_losses(logits, targets).double(), torch.tensor(np.array(expected)), **CLOSE)


@pytest.mark.parametrize("n", [160, 167, 161, 162, 12])     # ragged last windows of 7, 1 and 2 tokens; one short window
def test_perplexity_is_over_tokens_not_over_windows(gpt2, n):
    ids, paths = random_ids(1, n)[0], [random_path(gpt2), random_path(gpt2, "1-2,4-4", "linear")]
    figures = evaluate(gpt2, paths, ids, 16)
    for its, model in zip(figures, [gpt2, *paths], strict=True):
        assert its["ppl"] == pytest.approx(numpy_perplexity(model, ids, 16), rel=1e-4)


def test_cosine_and_mse_are_of_the_states_behind_the_spans(gpt2):
    ids, path = random_ids(1, 39)[0], random_path(gpt2, "1-2,4-4")
    cosines, errors = [], []
    for window in ids.split(16):
        true = x = gpt2.embed(window[None])
        for i in range(6):
            true = gpt2.blocks[i](true)
            if i in (2, 4):
                x = predicted = path.oracles[i // 4](x)
                for t, p in zip(true[0].double().numpy(), predicted[0].double().numpy()):
                    cosines.append(t @ p / np.linalg.norm(t) / np.linalg.norm(p))
                    errors.append(((t - p) ** 2).mean())
            elif i in (0, 3, 5):
                x = gpt2.blocks[i](x)
    figures = evaluate(gpt2, [path], ids, 16)
    assert figures[1]["cosine"] == pytest.approx(np.mean(cosines), abs=1e-4)
    assert figures[1]["mse"] == pytest.approx(np.mean(errors), rel=1e-3)
    assert figures[0]["cosine"] == 1 and figures[0]["mse"] == 0


def test_each_pattern_has_a_row_with_nothing_in_its_place_and_its_name(gpt2):
    paths = [(skip, random_path(gpt2, skip)) for skip in ("2-4", "1-2,4-4", "2-4")]
    rows = path_rows(gpt2, paths, random_ids(1, 70)[0], 16)
    assert [row["path"] for row in rows] == ["original", "skip 2-4", "2-4", "skip 1-2,4-4", "1-2,4-4", "2-4"]


def test_without_any_block_left_there_is_no_prefill_without_their_cache(gpt2):
    ids = random_ids(1, 40)[0]
    assert "no cache in the skipped blocks" not in continuations(random_path(gpt2, "0-5"), ids, 14, 6, 5)
    assert "no cache in the skipped blocks" in continuations(random_path(gpt2, "0-4"), ids, 14, 6, 5)


def test_rows_of_the_first_table(gpt2):
    ids, spans = random_ids(1, 70)[0], parse_skip("1-2,4-4", 6)
    exact = PathOracle(gpt2, spans, [Exact(gpt2, span) for span in spans])
    original, skip, path, other = path_rows(gpt2, [("exact", exact), ("random", random_path(gpt2, "1-2,4-4"))], ids, 16)
    assert [row["path"] for row in (original, path, other)] == ["original", "exact", "random"]
    assert [row["blocks_run"] for row in (original, skip, path, other)] == [6, 3, 3, 3]
    assert original["ratio"] == original["compute"] == original["speedup"] == 1
    assert original["ppl"] == pytest.approx(numpy_perplexity(gpt2, ids, 16), rel=1e-4)
    assert path["ratio"] == pytest.approx(1, abs=1e-4) and path["cosine"] == pytest.approx(1, abs=1e-4)
    assert skip["compute"] == pytest.approx(0.5) and path["compute"] == pytest.approx(1)
    for row in (skip, path, other):
        assert row["ratio"] == pytest.approx(row["ppl"] / original["ppl"])
        assert row["speedup"] == pytest.approx(original["prefill_ms"] / row["prefill_ms"])


# ---- the full model behind a prompt ----

@pytest.mark.parametrize("skip", ["1-2,4-4", "0-3"])
def test_continuations_score_the_same_tokens_for_each_way_to_read_the_prompt(gpt2, skip):
    ids, path, prompt, length, replay = random_ids(1, 90)[0], random_path(gpt2, skip), 14, 6, 5
    losses = continuations(path, ids, prompt, length, replay)
    nothing = PathOracle(gpt2, path.spans, [Nothing() for _ in path.spans])
    window = ids[:80].view(4, 20)                               # the ragged last window has no place here
    alone = window[:, prompt - 1:]                              # the prompt's last token, as if a text began with it
    logits = {"original": gpt2(window),
              "path throughout": path(window),
              "oracle prefill": mixed_logits(path, window, prompt - replay),
              "prefill with nothing": mixed_logits(nothing, window, prompt - replay),
              "oracle prefill, no replay": mixed_logits(path, window, prompt),
              "no cache in the skipped blocks": mixed_logits(path, window, prompt, seen=False),
              "no prompt": gpt2(alone)}
    assert losses.keys() == logits.keys()
    for name, its in logits.items():
        its = its[:, :-1] if name == "no prompt" else its[:, prompt - 1:-1]
        expected = [numpy_losses(row, targets) for row, targets in zip(its, window[:, prompt:])]
        assert_close(losses[name].double(), torch.tensor(np.array(expected)), atol=1e-3, rtol=1e-3)


# ---- operations ----

@pytest.mark.parametrize("T", [1, 7, 32])
def test_flops_of_a_layer_a_block_and_a_path(gpt2, T):
    C, inner, V, x, ids = 24, 96, CONFIG.vocab_size, torch.randn(1, T, 24), random_ids(1, T)
    block = 2 * T * (4 * C * C + 2 * C * inner) + 4 * T * T * C
    assert flops(nn.Linear(24, 10), x) == 2 * T * 24 * 10
    assert flops(gpt2.blocks[0], x) == block
    assert flops(gpt2, ids) == 6 * block + 2 * T * C * V
    path = random_path(gpt2, "1-2,4-4", "linear")
    assert flops(path.hidden, ids) == 3 * block + 2 * (2 * T * C * C)
    filled = 3 * (2 * T * C * 2 * C)                            # keys and values of each skipped block
    last = 2 * (4 * C * C + 2 * C * inner) + 4 * T * C + 2 * (T - 1) * C * 2 * C        # its output for one position alone
    assert flops(lambda ids: path.prefill(ids, 0), ids) == 2 * block + last + 3 * (2 * T * C * C) + filled + 2 * C * V
    assert flops(lambda ids: path.prefill(ids, replay=T), ids) == 5 * block + last + 2 * C * V


def test_flops_of_a_backward_pass(gpt2):
    T, C, inner = 8, 24, 96
    products, attention = 2 * T * (4 * C * C + 2 * C * inner), 2 * T * T * C    # of a block; an attention has two of these

    @torch.enable_grad()
    def forward_and_backward(x):
        gpt2.requires_grad_(False).blocks[0](x.requires_grad_()).sum().backward()
    # frozen weights: one product more for each, for the gradient of its input; five more for an attention
    assert flops(forward_and_backward, torch.randn(1, T, C)) == 2 * products + 7 * attention
