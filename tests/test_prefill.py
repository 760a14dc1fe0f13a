"""PathOracle.prefill: the KV cache that a path leaves, and what the full model makes of it."""

import pytest
import torch
from tiny import CONFIG, Exact, mixed_logits, random_ids, randomize, tiny_gpt2
from torch.testing import assert_close

from data.greedy import decode
from oracle import KINDS, Nothing, PathOracle, default_replay, new_path, parse_skip

CLOSE = dict(atol=1e-4, rtol=1e-4)
SKIPS = ["2-4", "3-3", "1-2,4-4", "0-5"]
PROMPT, LENGTH = 14, 24
PIECES = [[10], [1] * 10, [3, 1, 6]]


@pytest.fixture
def gpt2():
    return tiny_gpt2()


@pytest.fixture
def ids():
    return random_ids(2, LENGTH)


def exact_path(gpt2, skip="2-4"):
    spans = parse_skip(skip, 6)
    return PathOracle(gpt2, spans, [Exact(gpt2, span) for span in spans])


def random_path(gpt2, kind="transformer", skip="2-4", shared=False):
    path = new_path(gpt2, {"skip": skip, "oracle": kind, "dim": 16, "blocks": 2, "heads": 2, "shared": shared})
    randomize(path.oracles)
    return path.requires_grad_(False)


def prefilled_logits(path, ids, prompt, pieces, replay=0):
    """The logits of ids from the prompt's last token on; behind the prompt, the full model goes on in pieces."""
    logits, cache = path.prefill(ids[:, :prompt], replay)
    pieces = ids[:, prompt:].split(pieces, dim=1)
    return torch.cat([logits[:, None], *(path.gpt2(piece, cache) for piece in pieces)], dim=1)


# ---- against the full model ----

@pytest.mark.parametrize("replay", [0, 1, 5])
@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("skip", SKIPS)
def test_exact_states_lead_to_the_full_models_logits(gpt2, ids, skip, pieces, replay):
    logits = prefilled_logits(exact_path(gpt2, skip), ids, PROMPT, pieces, replay)
    assert_close(logits, gpt2(ids)[:, PROMPT - 1:], **CLOSE)


@pytest.mark.parametrize("replay", [PROMPT, PROMPT + 1, 1000])
def test_replay_of_the_whole_prompt_is_a_full_prefill(gpt2, ids, replay):
    path = random_path(gpt2)
    logits, cache = path.prefill(ids[:, :PROMPT], replay)
    full = gpt2.new_cache()
    assert_close(logits, gpt2(ids[:, :PROMPT], full)[:, -1], **CLOSE)
    for layer, other in zip(cache, full, strict=True):
        assert_close((layer.k, layer.v), (other.k, other.v), **CLOSE)


@pytest.mark.parametrize("prompt, replay", [(1, 8), (48, 8), (49, 16), (192, 32), (256, 48), (1024, 176)])
def test_a_sixth_of_the_prompt_in_multiples_of_8(prompt, replay):
    assert default_replay(prompt) == replay


def test_a_prompt_is_replayed_so_by_default(gpt2, ids):
    path = random_path(gpt2)
    assert torch.equal(path.prefill(ids)[0], path.prefill(ids, 8)[0])
    assert not torch.equal(path.prefill(ids)[0], path.prefill(ids, 9)[0])


# ---- against the same thing without a cache, for oracles that err ----

@pytest.mark.parametrize("replay", [0, 1, 5, PROMPT - 1])
@pytest.mark.parametrize("skip, shared", [("2-4", False), ("1-2,4-4", False), ("1-2,4-4", True), ("0-5", False)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_full_model_goes_on_from_predicted_states(gpt2, ids, kind, skip, shared, replay):
    path = random_path(gpt2, kind, skip, shared)
    logits = prefilled_logits(path, ids, PROMPT, [3, 1, 6], replay)
    assert_close(logits, mixed_logits(path, ids, PROMPT - replay)[:, PROMPT - 1:], atol=1e-3, rtol=1e-3)
    assert not torch.allclose(logits, gpt2(ids)[:, PROMPT - 1:], atol=0.1)


def test_without_replay_the_first_logits_are_the_paths(gpt2, ids):
    path = random_path(gpt2, skip="1-2,4-4")
    assert_close(path.prefill(ids, 0)[0], path(ids)[:, -1], **CLOSE)


@pytest.mark.parametrize("replay", [0, 1, 2])
def test_prompt_of_one_token(gpt2, ids, replay):
    assert_close(prefilled_logits(exact_path(gpt2), ids, 1, [1] * 23, replay), gpt2(ids), **CLOSE)
    path = random_path(gpt2)
    expected = gpt2(ids) if replay else mixed_logits(path, ids, 1)
    assert_close(prefilled_logits(path, ids, 1, [23], replay), expected, **CLOSE)


def test_prompts_of_a_batch_do_not_see_each_other(gpt2, ids):
    path = random_path(gpt2)
    both = prefilled_logits(path, ids, PROMPT, [10], replay=4)
    for row, alone in zip(both, ids):
        assert_close(row[None], prefilled_logits(path, alone[None], PROMPT, [10], replay=4), **CLOSE)


# ---- the cache ----

@pytest.mark.parametrize("replay", [0, 5, 1000])
@pytest.mark.parametrize("kind", [*KINDS, "nothing"])
def test_every_block_has_keys_and_values_of_every_token(gpt2, ids, kind, replay):
    spans = parse_skip("1-2,4-4", 6)
    path = PathOracle(gpt2, spans, [Nothing(), Nothing()]) if kind == "nothing" else random_path(gpt2, kind, "1-2,4-4")
    logits, cache = path.prefill(ids[:, :PROMPT], replay)
    assert logits.shape == (2, CONFIG.vocab_size) and len(cache) == 6
    for layer in cache:
        assert len(layer) == PROMPT
        assert layer.k.shape == layer.v.shape == (2, 4, PROMPT, 6)
    gpt2(ids[:, PROMPT:PROMPT + 3], cache)
    assert [len(layer) for layer in cache] == [PROMPT + 3] * 6


def test_cache_is_exact_up_to_the_input_of_the_first_skipped_block(gpt2, ids):
    full, (_, cache) = gpt2.new_cache(), random_path(gpt2, skip="2-4").prefill(ids, 0)
    gpt2(ids, full)
    for layer, other in zip(cache[:3], full):
        assert_close((layer.k, layer.v), (other.k, other.v), **CLOSE)
    for layer, other in zip(cache[3:], full[3:]):
        assert not torch.allclose(layer.k, other.k, atol=0.1)


@pytest.mark.parametrize("replay", [0, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_prompt_token_changes_no_earlier_keys_and_values(gpt2, ids, kind, replay):
    path, prompt = random_path(gpt2, kind, "1-2,4-4"), ids[:, :PROMPT]
    _, before = path.prefill(prompt, replay)
    for t in range(PROMPT):
        changed = prompt.clone()
        changed[:, t] = (prompt[:, t] + 1) % CONFIG.vocab_size
        _, after = path.prefill(changed, replay)
        for a, b in zip(before, after, strict=True):
            assert_close((a.k[:, :, :t], a.v[:, :, :t]), (b.k[:, :, :t], b.v[:, :, :t]), atol=1e-5, rtol=0)
            assert not torch.allclose(a.k[:, :, t], b.k[:, :, t], atol=1e-3)


def test_a_cached_call_leaves_no_trace_in_the_model(gpt2, ids):
    path = random_path(gpt2)
    before, path_before = gpt2(ids), path(ids)
    prefilled_logits(path, random_ids(2, LENGTH, seed=1), PROMPT, [10])
    assert torch.equal(gpt2(ids), before)
    assert torch.equal(path(ids), path_before)
    assert_close(path.prefill(ids, 0)[0], path_before[:, -1], **CLOSE)


# ---- the ends of the context ----

@pytest.mark.parametrize("replay", [0, 5, 1000])
def test_a_prompt_may_fill_the_context_but_nothing_fits_behind_it(gpt2, replay):
    path, ids = random_path(gpt2), random_ids(1, CONFIG.n_positions)
    logits, cache = path.prefill(ids, replay)
    assert logits.isfinite().all()
    with pytest.raises(ValueError, match="33 tokens.* 32"):
        gpt2(ids[:, :1], cache)
    with pytest.raises(ValueError, match="33 tokens.* 32"):
        path.prefill(random_ids(1, 33), replay)


@pytest.mark.parametrize("replay", [0, 5])
def test_an_empty_prompt_is_refused(gpt2, replay):
    with pytest.raises(ValueError):
        random_path(gpt2).prefill(random_ids(1, 0), replay)


def test_a_replay_below_0_is_refused(gpt2, ids):
    with pytest.raises(ValueError, match="replayed"):
        random_path(gpt2).prefill(ids, -1)


# ---- greedy decoding ----

def greedy(logits_of, ids, n):
    """By recomputation: (1, T) ids -> the n ids that follow."""
    for _ in range(n):
        ids = torch.cat([ids, logits_of(ids)[:, -1:].argmax(dim=-1)], dim=1)
    return ids[0, -n:].tolist()


@pytest.mark.parametrize("prompt", [1, 6, 20])
def test_greedy_decoding_over_the_cache_equals_recomputation(gpt2, prompt):
    ids, n = random_ids(1, prompt), CONFIG.n_positions - prompt        # to the last token that the context allows
    gpt2.wpe.weight.mul_(10)                                           # so that it does not repeat one token for ever
    expected = greedy(gpt2, ids, n)
    assert len(set(expected)) >= 5
    assert decode(gpt2, *exact_path(gpt2).prefill(ids, 0), n) == expected
    assert decode(gpt2, *random_path(gpt2).prefill(ids, replay=prompt), n) == expected
    path = random_path(gpt2)
    assert decode(gpt2, *path.prefill(ids, 0), n) == greedy(lambda ids: mixed_logits(path, ids, prompt), ids, n)
