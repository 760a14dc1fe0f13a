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
          GPT2Config(vocab_size=50, n_positions=16, n_embd=6, n_layer=2, n_head=6),
          GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=3, n_head=4, n_inner=10),
          GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2,
                     layer_norm_epsilon=0.3)]


def build(config):
    """(GPT2, the weights it was given)"""
    c, gpt2 = config, GPT2(config)
    weights = random_weights(c.vocab_size, c.n_positions, c.n_embd, c.n_layer, c.n_inner)
    gpt2.load_state_dict({name.replace("h.", "blocks.", 1):
                          torch.tensor(array.T if ".c_" in name else array)
                          for name, array in weights.items()})
    return gpt2.requires_grad_(False), weights


def random_ids(config, batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


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
        for row, logits in zip(ids.tolist(), gpt2(ids), strict=True):
            wanted = numpy_logits(weights, row, config.n_head, config.layer_norm_epsilon)
            assert_close(logits.double(), torch.tensor(wanted), **CLOSE)


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


@pytest.mark.parametrize("stop", [0, 3, 4])
def test_states_are_those_between_the_blocks(gpt2, ids, stop):
    x, states = gpt2.wte.weight[ids] + gpt2.wpe.weight[:12], gpt2.states(ids, stop)
    assert len(states) == stop + 1
    for block, state in zip((*gpt2.blocks, None), states, strict=False):
        assert_close(state, x, **CLOSE)
        x = block(x) if block else x


# ---- KV cache ----

@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 7], [1, 11], [3] * 4, [4, 1, 6, 1]],
                         ids=str)
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


@pytest.mark.parametrize("empty", [0, 2, 3])
def test_positions_count_on_where_the_cache_of_a_block_is_empty(gpt2, ids, empty):
    cache = gpt2.new_cache()
    gpt2(ids[:, :7], cache)
    cache[empty] = gpt2.new_cache()[0]
    x, seen = gpt2.embed(ids[:, 7:], past=7), gpt2.states(ids, TINY.n_layer)
    for i, block in enumerate(gpt2.blocks):
        before = [] if i == empty else [seen[i][:, :7]]
        x = block(torch.cat([*before, x], dim=1))[:, -5:]
    assert_close(gpt2(ids[:, 7:], cache), gpt2.unembed(x), **CLOSE)


def test_caches_leave_no_trace_in_the_model(gpt2, ids):
    before, cache = gpt2(ids), gpt2.new_cache()
    gpt2(ids[:, :5], cache)
    gpt2(random_ids(TINY, 2, 9, seed=1), gpt2.new_cache())
    assert torch.equal(gpt2(ids), before)
    assert_close(gpt2(ids[:, 5:], cache), before[:, 5:], **CLOSE)   # nor in each other


@pytest.mark.parametrize("past", [0, 4])
def test_fill_caches_what_a_forward_pass_caches(gpt2, past):
    x = torch.randn(2, 9, TINY.n_embd, generator=torch.Generator().manual_seed(0))
    block, (forward, fill) = gpt2.blocks[1], gpt2.new_cache()[:2]
    if past:
        block(x[:, :past], forward)
        block(x[:, :past], fill)
    block(x[:, past:], forward)
    block.fill(x[:, past:], fill)
    assert len(fill) == 9
    assert_close((fill.k, fill.v), (forward.k, forward.v), **CLOSE)
    assert not torch.allclose(fill.k, fill.v)


@pytest.mark.parametrize("length", [1, 2, 12])
def test_prefill_gives_the_last_logits_and_caches_every_token(gpt2, ids, length):
    ids, full = ids[:, :length], gpt2.new_cache()
    logits, cache = gpt2.prefill(ids)
    assert_close(logits, gpt2(ids, full)[:, -1], **CLOSE)
    for layer, other in zip(cache, full, strict=True):
        assert_close((layer.k, layer.v), (other.k, other.v), **CLOSE)


# ---- what a token may see ----

@pytest.mark.parametrize("split", [0, 5])
def test_a_changed_token_changes_no_earlier_logits(gpt2, ids, split):
    def logits(ids):
        cache = gpt2.new_cache()
        pieces = ids[:, :split], ids[:, split:]
        return torch.cat([gpt2(piece, cache) for piece in pieces if piece.numel()], dim=1)

    before = logits(ids)
    for t in range(ids.shape[1]):
        changed = ids.clone()
        changed[:, t] = (ids[:, t] + 1) % TINY.vocab_size
        after = logits(changed)
        assert_close(after[:, :t], before[:, :t], atol=1e-6, rtol=0)
        assert ((after - before)[:, t:].abs().amax(dim=-1) > 1e-3).all()    # all later ones do


def test_rows_of_a_batch_do_not_see_each_other(gpt2, ids):
    assert_close(gpt2(ids[:1]), gpt2(ids)[:1], **CLOSE)


# ---- what does not fit ----

def test_context_counts_the_cached_tokens(gpt2):
    ids, cache = random_ids(TINY, 1, 16), gpt2.new_cache()
    gpt2(ids)
    with pytest.raises(ValueError, match="17 tokens.* 16"):
        gpt2(random_ids(TINY, 1, 17))
    gpt2(ids[:, :10], cache)
    with pytest.raises(ValueError, match="17 tokens.* 16"):
        gpt2(random_ids(TINY, 1, 7), cache)
    assert_close(gpt2(ids[:, 10:], cache), gpt2(ids)[:, 10:], **CLOSE)  # they left nothing behind
    with pytest.raises(ValueError, match="17 tokens.* 16"):
        gpt2(ids[:, :1], cache)
    assert [len(layer) for layer in cache] == [16] * 4


def test_a_cache_refuses_another_batch(gpt2, ids):
    cache = gpt2.new_cache()
    gpt2(ids[:, :4], cache)
    with pytest.raises(RuntimeError, match="size 2 but got size 1"):
        gpt2(ids[:1, 4:5], cache)


def test_a_cache_may_be_filled_while_gradients_are_on(gpt2, ids):
    gpt2.requires_grad_()
    cache = gpt2.new_cache()
    logits = torch.cat([gpt2(ids[:, :4], cache), gpt2(ids[:, 4:], cache)], dim=1)
    assert logits.requires_grad
    assert_close(logits, gpt2(ids), **CLOSE)
