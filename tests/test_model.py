"""model.py against the NumPy reference, and its parts (split runs, KV cache) against its whole."""

import pytest
import torch
from numpy_gpt2 import numpy_logits, random_weights
from torch.testing import assert_close

from model import GPT2, GPT2Config

CLOSE = dict(atol=1e-4, rtol=1e-4)
TINY = GPT2Config(vocab_size=31, n_positions=16, n_embd=12, n_layer=4, n_head=3)
SHAPES = [TINY,
          GPT2Config(vocab_size=7, n_positions=5, n_embd=8, n_layer=1, n_head=1),
          GPT2Config(vocab_size=50, n_positions=16, n_embd=6, n_layer=2, n_head=6),         # heads of one number
          GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=3, n_head=4, n_inner=10),
          GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, layer_norm_epsilon=0.3)]


def build(config):
    """(GPT2, the weights it was given)"""
    c, gpt2 = config, GPT2(config)
    weights = random_weights(c.vocab_size, c.n_positions, c.n_embd, c.n_layer, c.n_inner)
    gpt2.load_state_dict({name.replace("h.", "blocks.", 1): torch.tensor(array.T if ".c_" in name else array)
                          for name, array in weights.items()})
    return gpt2.requires_grad_(False), weights


def random_ids(config, batch, length, seed=0):
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def gpt2():
    return build(TINY)[0]


@pytest.fixture
def ids():
    return random_ids(TINY, 2, 12)


@pytest.mark.parametrize("config", SHAPES, ids=str)
def test_logits_equal_the_numpy_reference(config):
    gpt2, weights = build(config)
    for length in (1, 2, config.n_positions):
        ids = random_ids(config, 2, length)
        expected = [numpy_logits(weights, row, config.n_head, config.layer_norm_epsilon) for row in ids.tolist()]
        for row, wanted in zip(gpt2(ids), expected, strict=True):
            assert_close(row.double(), torch.tensor(wanted), **CLOSE)


def test_any_split_of_the_blocks_equals_forward(gpt2, ids):
    expected = gpt2(ids)
    for i in range(TINY.n_layer + 1):
        for j in range(i, TINY.n_layer + 1):
            x = gpt2.run(gpt2.embed(ids), 0, i)
            x = gpt2.run(gpt2.run(x, i, j), j, TINY.n_layer)
            assert_close(gpt2.unembed(x), expected)


def test_running_no_block_changes_nothing_and_one_block_does(gpt2, ids):
    x = gpt2.embed(ids)
    assert torch.equal(gpt2.run(x, 2, 2), x)
    assert torch.equal(gpt2.run(x, 2, 3), gpt2.blocks[2](x))
    assert not torch.allclose(gpt2.run(x, 2, 3), x)


# ---- KV cache ----

@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5] + [1] * 7, [5, 7], [1, 11], [3] * 4, [4, 1, 6, 1]], ids=str)
def test_cached_pieces_equal_one_uncached_pass(gpt2, ids, pieces):
    cache = gpt2.new_cache()
    logits = torch.cat([gpt2(piece, cache) for piece in ids.split(pieces, dim=1)], dim=1)
    assert_close(logits, gpt2(ids), **CLOSE)
    assert [len(layer) for layer in cache] == [12] * TINY.n_layer


def test_cache_serves_a_run_that_is_split_between_blocks(gpt2, ids):
    cache, logits = gpt2.new_cache(), []
    for past, piece in ((0, ids[:, :7]), (7, ids[:, 7:9]), (9, ids[:, 9:])):
        x = gpt2.run(gpt2.embed(piece, past), 0, 3, cache)
        logits.append(gpt2.unembed(gpt2.run(x, 3, TINY.n_layer, cache)))
    assert_close(torch.cat(logits, dim=1), gpt2(ids), **CLOSE)


@pytest.mark.parametrize("keep", [0, 1, 5, 8])
def test_truncated_cache_continues_with_other_tokens(gpt2, ids, keep):
    cache, other = gpt2.new_cache(), random_ids(TINY, 2, 4, seed=1)
    gpt2(ids[:, :8], cache)
    for layer in cache:
        layer.truncate(keep)
    assert [len(layer) for layer in cache] == [keep] * TINY.n_layer
    expected = gpt2(torch.cat([ids[:, :keep], other], dim=1))[:, keep:]
    assert_close(gpt2(other, cache), expected, **CLOSE)


def test_truncating_to_more_than_there_is_keeps_all(gpt2, ids):
    cache = gpt2.new_cache()
    cache[0].truncate(3)
    assert len(cache[0]) == 0
    gpt2(ids, cache)
    cache[0].truncate(13)
    assert len(cache[0]) == 12


def test_caches_leave_no_trace_in_the_model(gpt2, ids):
    before = gpt2(ids)
    cache, other = gpt2.new_cache(), gpt2.new_cache()
    gpt2(ids[:, :5], cache)
    gpt2(random_ids(TINY, 2, 9, seed=1), other)
    assert torch.equal(gpt2(ids), before)
    assert_close(gpt2(ids[:, 5:], cache), before[:, 5:], **CLOSE)      # the other cache did not touch this one


@pytest.mark.parametrize("past", [0, 4])
def test_fill_caches_what_a_forward_pass_caches(gpt2, past):
    block, x = gpt2.blocks[1], torch.randn(2, 9, TINY.n_embd, generator=torch.Generator().manual_seed(0))
    forward, fill = gpt2.new_cache()[1], gpt2.new_cache()[1]
    if past:
        block(x[:, :past], forward)
        block(x[:, :past], fill)
    block(x[:, past:], forward)
    block.fill(x[:, past:], fill)
    assert len(fill) == 9
    assert_close((fill.k, fill.v), (forward.k, forward.v), **CLOSE)
    assert not torch.allclose(fill.k, fill.v)


# ---- what a token may see ----

@pytest.mark.parametrize("split", [0, 5])
def test_a_changed_token_changes_no_earlier_logits(gpt2, ids, split):
    def logits(ids):
        cache = gpt2.new_cache()
        return torch.cat([gpt2(piece, cache) for piece in (ids[:, :split], ids[:, split:]) if piece.numel()], dim=1)

    before = logits(ids)
    for t in range(ids.shape[1]):
        changed = ids.clone()
        changed[:, t] = (ids[:, t] + 1) % TINY.vocab_size
        after = logits(changed)
        assert_close(after[:, :t], before[:, :t], atol=1e-6, rtol=0)
        assert ((after - before)[:, t:].abs().amax(dim=-1) > 1e-3).all()       # while it and all later ones do change


def test_rows_of_a_batch_do_not_see_each_other(gpt2, ids):
    assert_close(gpt2(ids[:1]), gpt2(ids)[:1], **CLOSE)


# ---- the end of the context ----

def test_full_context_is_allowed_and_one_token_more_is_refused(gpt2):
    gpt2(random_ids(TINY, 1, 16))
    with pytest.raises(ValueError, match="17 tokens.* 16"):
        gpt2(random_ids(TINY, 1, 17))


def test_context_counts_the_cached_tokens(gpt2):
    ids, cache = random_ids(TINY, 1, 16), gpt2.new_cache()
    gpt2(ids[:, :10], cache)
    with pytest.raises(ValueError, match="17 tokens.* 16"):
        gpt2(random_ids(TINY, 1, 7), cache)
    assert_close(gpt2(ids[:, 10:], cache), gpt2(ids)[:, 10:], **CLOSE)         # the refused tokens left nothing behind
    with pytest.raises(ValueError, match="17 tokens.* 16"):
        gpt2(ids[:, :1], cache)


# ---- what does not fit a cache ----

def test_a_cache_refuses_another_batch_and_more_than_the_context():
    gpt2 = GPT2(GPT2Config(vocab_size=31, n_positions=8, n_embd=12, n_layer=2, n_head=3)).requires_grad_(False)
    ids, cache = torch.randint(31, (2, 8)), gpt2.new_cache()
    gpt2(ids[:, :4], cache)
    with pytest.raises(RuntimeError, match="size 2 but got size 1"):
        gpt2(ids[:1, 4:5], cache)
    gpt2(ids[:, 4:], cache)
    with pytest.raises(ValueError, match="9 tokens.* 8"):
        gpt2(ids[:, :1], cache)
    assert [len(layer) for layer in cache] == [8, 8]


def test_a_cache_may_be_filled_while_gradients_are_on():
    gpt2 = GPT2(GPT2Config(vocab_size=31, n_positions=8, n_embd=12, n_layer=2, n_head=3))
    ids, cache = torch.randint(31, (2, 8)), gpt2.new_cache()
    logits = torch.cat([gpt2(ids[:, :4], cache), gpt2(ids[:, 4:], cache)], dim=1)
    torch.testing.assert_close(logits, gpt2(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("past", [0, 4])
@pytest.mark.parametrize("last", [1, 2, 5])
def test_a_block_asked_for_its_last_tokens_computes_these_alone_and_caches_all(gpt2, past, last):
    block, x = gpt2.blocks[1], torch.randn(2, 9, TINY.n_embd, generator=torch.Generator().manual_seed(0))
    whole, part = gpt2.new_cache()[1], gpt2.new_cache()[1]
    expected = block(x, whole)[:, -last:]
    if past:
        block(x[:, :past], part)
    assert_close(block(x[:, past:], part, last=last), expected, **CLOSE)
    assert_close((part.k, part.v), (whole.k, whole.v), **CLOSE)
    assert_close(block(x, last=last), expected, **CLOSE)            # without a cache too
