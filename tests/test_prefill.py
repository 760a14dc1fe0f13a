"""PathOracle.prefill: the KV cache that a path leaves, and what the full model makes of it."""

import pytest
import torch
from tiny import CONFIG, changed, exact_path, random_ids, random_path, reference, tiny_gpt2
from torch.testing import assert_close

from data.greedy import decode
from data.options import parse_skip
from oracle import no_oracle

CLOSE = dict(atol=1e-4, rtol=1e-4)
ROUGH = dict(atol=1e-3, rtol=1e-3)
SKIPS = ["2-4", "3-3", "1-2,4-5", "0-5"]
PATHS = [*((skip, False) for skip in SKIPS), ("1-2,4-5", True)]
PROMPT, LENGTH = 14, 24


@pytest.fixture
def gpt2():
    return tiny_gpt2()


@pytest.fixture
def ids():
    return random_ids(2, LENGTH)


def prefilled_logits(path, ids, prompt, pieces):
    """The logits of ids from the prompt's last token on, where the full model goes on in pieces."""
    logits, cache = path.prefill(ids[:, :prompt])
    pieces = ids[:, prompt:].split(pieces, dim=1)
    return torch.cat([logits[:, None], *(path.gpt2(piece, cache) for piece in pieces)], dim=1)


# ---- against the full model ----

@pytest.mark.parametrize("pieces", [[10], [1] * 10, [3, 1, 6]])
@pytest.mark.parametrize("skip", [None, *SKIPS])
def test_exact_states_lead_to_the_full_models_logits(gpt2, ids, skip, pieces):
    path = exact_path(gpt2, skip) if skip else no_oracle(gpt2, [])
    logits = prefilled_logits(path, ids, PROMPT, pieces)
    assert_close(logits, gpt2(ids)[:, PROMPT - 1:], **CLOSE)


@pytest.mark.parametrize("skip", [None, *SKIPS])
def test_without_a_jump_or_error_the_cache_is_the_full_models(gpt2, ids, skip):
    full, path = gpt2.new_cache(), exact_path(gpt2, skip) if skip else no_oracle(gpt2, [])
    gpt2(ids, full)
    for layer, other in zip(path.prefill(ids)[1], full, strict=True):
        assert_close((layer.k, layer.v), (other.k, other.v), **CLOSE)


def test_there_is_no_replay(gpt2, ids):
    with pytest.raises(TypeError, match="replay"):
        random_path(gpt2).prefill(ids, replay=8)


# ---- against the NumPy reference, for oracles that err ----

@pytest.mark.parametrize("prompt, pieces", [(PROMPT, [3, 1, 6]), (2, [22])])
@pytest.mark.parametrize("skip, shared", PATHS)
def test_the_full_model_goes_on_from_predicted_states(gpt2, ids, skip, shared, prompt, pieces):
    path = random_path(gpt2, skip, shared=shared)
    logits = prefilled_logits(path, ids, prompt, pieces)
    assert_close(logits.double(), reference(path, ids, prompt - 1)[:, prompt - 1:], **ROUGH)
    assert not torch.allclose(logits, gpt2(ids)[:, prompt - 1:], atol=0.1)


@pytest.mark.parametrize("skip", SKIPS)
def test_the_full_model_goes_on_where_nothing_was_predicted(gpt2, ids, skip):
    path = no_oracle(gpt2, parse_skip(skip, 6))
    logits = prefilled_logits(path, ids, PROMPT, [10])
    assert_close(logits.double(), reference(path, ids, PROMPT - 1)[:, PROMPT - 1:], **ROUGH)


@pytest.mark.parametrize("skip, shared", PATHS)
def test_the_full_model_may_go_on_from_any_token(gpt2, ids, skip, shared):
    path = random_path(gpt2, skip, shared=shared)
    for read in (2, 8, PROMPT):
        logits = gpt2(ids[:, read:], path.prefill(ids[:, :read])[1])
        assert_close(logits.double(), reference(path, ids, read - 1)[:, read:], **ROUGH)


@pytest.mark.parametrize("skip", SKIPS)
def test_a_prompt_of_one_token_is_the_full_models(gpt2, ids, skip):
    logits, cache = random_path(gpt2, skip).prefill(ids[:, :1])
    assert_close(logits, gpt2(ids[:, :1])[:, -1], **CLOSE)
    assert [len(layer) for layer in cache] == [1] * 6


def test_prompts_of_a_batch_do_not_see_each_other(gpt2, ids):
    path = random_path(gpt2)
    both = prefilled_logits(path, ids, PROMPT, [10])
    for row, alone in zip(both, ids, strict=True):
        assert_close(row[None], prefilled_logits(path, alone[None], PROMPT, [10]), **CLOSE)


# ---- the cache ----

@pytest.mark.parametrize("skip, shared", PATHS)
def test_the_skipped_blocks_are_filled_with_their_predicted_inputs(gpt2, ids, skip, shared):
    path = random_path(gpt2, skip, shared=shared)
    cache = path.prefill(ids[:, :PROMPT + 1])[1]
    assert len(cache) == 6
    x, inputs = gpt2.embed(ids[:, :PROMPT]), {}
    for i, block in enumerate(gpt2.blocks):
        inputs.setdefault(i, x)
        for span, oracle in zip(path.spans, path.oracles, strict=True):
            if i == span.start:
                inputs |= {i + 1 + j: state for j, state in enumerate(oracle.states(x))}
        x = inputs[i + 1] if i + 1 in inputs else block(inputs[i])
    for i, (block, layer) in enumerate(zip(gpt2.blocks, cache, strict=True)):
        _, *kv = block.attn.c_attn(block.ln_1(inputs[i])).split(24, dim=-1)
        for wanted, found in zip(kv, (layer.k, layer.v), strict=True):
            wanted = wanted.view(2, PROMPT, 4, 6).transpose(1, 2)
            assert_close(found[:, :, :PROMPT], wanted, **CLOSE)
    gpt2(ids[:, PROMPT + 1:PROMPT + 3], cache)
    assert [len(layer) for layer in cache] == [PROMPT + 3] * 6


def test_the_cache_is_exact_up_to_the_input_of_the_first_skipped_block(gpt2, ids):
    full, cache = gpt2.new_cache(), random_path(gpt2, "2-4").prefill(ids)[1]
    gpt2(ids, full)
    for i, (layer, other) in enumerate(zip(cache, full, strict=True)):
        assert torch.allclose(layer.k, other.k, atol=1e-4 if i < 3 else 0.1) == (i < 3)


@pytest.mark.parametrize("skip, shared", PATHS)
def test_a_changed_prompt_token_changes_no_earlier_keys_and_values(gpt2, ids, skip, shared):
    path, prompt = random_path(gpt2, skip, shared=shared), ids[:, :PROMPT]
    before = path.prefill(prompt)[1]
    for t in range(PROMPT):
        after = path.prefill(changed(prompt, t))[1]
        for a, b in zip(before, after, strict=True):
            assert_close((a.k[:, :, :t], a.v[:, :, :t]), (b.k[:, :, :t], b.v[:, :, :t]),
                         atol=1e-5, rtol=0)
            assert not torch.allclose(a.k[:, :, t], b.k[:, :, t], atol=1e-3)


def test_a_cached_call_leaves_no_trace_in_the_model(gpt2, ids):
    path = random_path(gpt2)
    before, path_before, prefill_before = gpt2(ids), path(ids), path.prefill(ids)[0]
    prefilled_logits(path, random_ids(2, LENGTH, seed=1), PROMPT, [10])
    assert torch.equal(gpt2(ids), before) and torch.equal(path(ids), path_before)
    assert torch.equal(path.prefill(ids)[0], prefill_before)


# ---- the ends of the context ----

def test_a_prompt_may_fill_the_context_but_nothing_fits_behind_it(gpt2):
    path, ids = random_path(gpt2), random_ids(1, CONFIG.n_positions)
    logits, cache = path.prefill(ids)
    assert logits.isfinite().all()
    for read in (lambda: gpt2(ids[:, :1], cache), lambda: path.prefill(random_ids(1, 33))):
        with pytest.raises(ValueError, match="33 tokens.* 32"):
            read()


def test_an_empty_prompt_is_refused(gpt2):
    with pytest.raises(ValueError, match="empty"):
        random_path(gpt2).prefill(random_ids(1, 0))


# ---- greedy decoding ----

def greedy(logits_of, ids, n):
    """By recomputation: (1, T) ids -> the n ids that follow."""
    for _ in range(n):
        ids = torch.cat([ids, logits_of(ids)[:, -1:].argmax(dim=-1)], dim=1)
    return ids[:, -n:]


@pytest.mark.parametrize("prompt", [1, 6, 20])
def test_greedy_decoding_over_the_cache_equals_recomputation(gpt2, prompt):
    ids, n = random_ids(1, prompt), CONFIG.n_positions - prompt     # as far as the context goes
    gpt2.wpe.weight.mul_(10)                    # so that it does not repeat one token for ever
    expected = greedy(gpt2, ids, n)
    assert len(set(expected[0].tolist())) >= 5
    assert torch.equal(decode(gpt2, *exact_path(gpt2).prefill(ids), n), expected)
    assert torch.equal(decode(gpt2, *no_oracle(gpt2, []).prefill(ids), n), expected)
    path = random_path(gpt2)
    assert torch.equal(decode(gpt2, *path.prefill(ids), n),
                       greedy(lambda ids: reference(path, ids, prompt - 1), ids, n))
