"""oracle.py and the losses of train_oracle.py: the path against explicit passes, the fits against closed forms."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CONFIG, Exact, random_ids, randomize, tiny_gpt2
from torch import nn
from torch.testing import assert_close

from oracle import (KINDS, Nothing, Oracle, PathOracle, load_path, new_path, parse_skip, read_settings, save_path,
                    true_states)
from train_oracle import default_dim, fit_linear, initialise, path_loss, set_first, state_loss

CLOSE = dict(atol=1e-4, rtol=1e-4)
SKIPS = ["2-4", "3-3", "1-2,4-4", "0-5"]
SETTINGS = {"model": "tiny", "skip": "2-4", "oracle": "transformer", "dim": 16, "blocks": 2, "heads": 2, "shared": False,
            "cos_weight": 0.5, "kl_weight": 0.0, "text": "docs", "context": 16, "step": 0, "steps": 1}


@pytest.fixture
def gpt2():
    return tiny_gpt2()


# ---- skip patterns ----

@pytest.mark.parametrize("pattern, spans", [("2-9", [range(2, 10)]), ("0-11", [range(12)]), ("5-5", [range(5, 6)]),
                                            ("2-4,6-8", [range(2, 5), range(6, 9)]),
                                            (" 0-0 , 2-2", [range(1), range(2, 3)]),
                                            ("0-1,3-4,6-10", [range(2), range(3, 5), range(6, 11)])])
def test_good_skip_patterns(pattern, spans):
    assert parse_skip(pattern, 12) == spans


@pytest.mark.parametrize("pattern, hint", [
    ("9-2", "2-9"), ("2-12", "0 to 11"), ("2-4,6-12", "0 to 11"), ("2-5,4-8", "between"), ("2-4,5-8", "between"),
    ("6-8,2-4", "ascend"),
    *((pattern, "2-4,6-8") for pattern in ("a-b", "", "2", "2-", "-1-3", "2-4,", "2-4;6-8", "1.5-3"))])
def test_bad_skip_patterns_say_what_is_wrong(pattern, hint):
    with pytest.raises(ValueError) as error:
        parse_skip(pattern, 12)
    message = str(error.value)
    assert repr(pattern) in message and hint in message and "\n" not in message


# ---- the path ----

@pytest.mark.parametrize("skip", SKIPS)
def test_exact_oracles_make_the_path_the_full_model(gpt2, skip):
    spans, ids = parse_skip(skip, 6), random_ids(2, 20)
    path = PathOracle(gpt2, spans, [Exact(gpt2, span) for span in spans])
    assert_close(path(ids), gpt2(ids), **CLOSE)
    assert not torch.allclose(path(ids), PathOracle(gpt2, spans, [Nothing() for _ in spans])(ids), atol=0.1)


@pytest.mark.parametrize("skip, left", [("2-4", [0, 1, 5]), ("3-3", [0, 1, 2, 4, 5]), ("1-2,4-4", [0, 3, 5]),
                                        ("0-5", [])])
def test_nothing_in_their_place_leaves_the_other_blocks(gpt2, skip, left):
    spans, ids = parse_skip(skip, 6), random_ids(2, 20)
    x = gpt2.wte.weight[ids] + gpt2.wpe.weight[:20]
    for i in left:
        x = gpt2.blocks[i](x)
    assert_close(PathOracle(gpt2, spans, [Nothing() for _ in spans])(ids), gpt2.unembed(x), **CLOSE)


def test_true_states_are_those_between_the_blocks(gpt2):
    ids = random_ids(2, 20)
    x, states = gpt2.embed(ids), true_states(gpt2, ids, 4)
    assert len(states) == 5
    for i, state in enumerate(states):
        assert_close(state, x, **CLOSE)
        x = gpt2.blocks[i](x)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_token_changes_no_earlier_logits(gpt2, kind, skip, shared):
    path, ids = new_path(gpt2, {**SETTINGS, "skip": skip, "oracle": kind, "shared": shared}), random_ids(2, 12)
    randomize(path.oracles)
    with torch.no_grad():
        before = path(ids)
        for t in range(12):
            changed = ids.clone()
            changed[:, t] = (ids[:, t] + 1) % CONFIG.vocab_size
            after = path(changed)
            assert_close(after[:, :t], before[:, :t], atol=1e-5, rtol=0)
            assert ((after - before)[:, t].abs().amax(dim=-1) > 1e-3).all()


# ---- the oracles ----

@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_oracle_predicts_no_change(kind):
    x, oracle = torch.randn(2, 7, 24), Oracle(kind, 24, 3, 16, 2, 2)
    assert torch.equal(oracle(x), x)
    assert all(torch.equal(state, x) for state in oracle.states(x, oracle.trunk(x), -3))


@pytest.mark.parametrize("kind", KINDS)
def test_each_state_has_weights_of_its_own_and_the_last_is_forward(kind):
    x, oracle = torch.randn(2, 7, 24), Oracle(kind, 24, 3, 16, 2, 2)
    randomize(oracle)
    states = oracle.states(x, oracle.trunk(x), -3)
    assert [state.shape for state in states] == [x.shape] * 3
    assert_close(states[-1], oracle(x))
    assert all(not torch.allclose(a, b, atol=0.1) for a, b in ((states[0], states[1]), (states[1], states[2])))
    assert_close(oracle.states(x, oracle.trunk(x), -2)[-1], oracle(x))            # where a shared oracle stands for a shorter span
    assert len(oracle.states(x, oracle.trunk(x), -2)) == 2 and len(oracle.states(x, oracle.trunk(x), -1)) == 1


def test_a_linear_oracle_is_linear_and_adds_a_constant_at_position_0():
    oracle, (x, y) = Oracle("linear", 24, 1, 16, 2, 2), torch.randn(2, 3, 7, 24)
    randomize(oracle)
    with torch.no_grad():
        assert_close(oracle(0.3 * x + 0.7 * y), 0.3 * oracle(x) + 0.7 * oracle(y), **CLOSE)
        difference = oracle(x) - oracle(x.roll(1, dims=1)).roll(-1, dims=1)     # of a token and the same one place on
    assert_close(difference[:, 1:6], torch.zeros(3, 5, 24), **CLOSE)
    assert_close(difference[:, 0], difference[:1, 0].expand(3, 24), **CLOSE)
    assert difference[0, 0].norm() > 0.5


@pytest.mark.parametrize("n_embd, heads, dim", [(192, 2, 84), (768, 2, 336), (192, 5, 80), (192, 8, 80), (4, 8, 8)])
def test_the_default_width_is_7_sixteenths_in_whole_heads(n_embd, heads, dim):
    assert default_dim(n_embd, heads) == dim


def test_parameters_are_counted_once(gpt2):
    settings = {**SETTINGS, "skip": "1-2,4-5"}
    own, shared = (new_path(gpt2, {**settings, "shared": shared}) for shared in (False, True))
    assert sum(own.n_parameters()) == sum(p.numel() for p in own.oracles.parameters())
    assert own.n_parameters() == tuple(2 * n for n in shared.n_parameters())
    assert new_path(gpt2, {**SETTINGS, "skip": "3-3"}).n_parameters()[1] == 0      # no input lies within the span


# ---- files ----

@pytest.fixture
def saved(gpt2, tmp_path):
    path = new_path(gpt2, SETTINGS)
    randomize(path.oracles)
    save_path(tmp_path / "oracle.safetensors", path, SETTINGS)
    return tmp_path / "oracle.safetensors"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_path_computes_the_same(gpt2, tmp_path, kind, shared):
    settings, file = {**SETTINGS, "oracle": kind, "skip": "1-2,4-4", "shared": shared}, tmp_path / "file"
    path = new_path(gpt2, settings)
    randomize(path.oracles)
    save_path(file, path, settings)
    ids, loaded = random_ids(2, 20), load_path(file, tiny_gpt2())
    assert torch.equal(loaded(ids), path(ids))
    assert settings.items() <= read_settings(file).items()
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("change", ["seed", "one weight"])
def test_another_model_is_refused(saved, change):
    other = tiny_gpt2(seed=1 if change == "seed" else 0)
    other.blocks[3].mlp.c_fc.bias[0] += 0.5
    with pytest.raises(ValueError, match="another model"):
        load_path(saved, other)


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.001])
def test_a_truncated_file_is_refused(saved, gpt2, keep):
    content = saved.read_bytes()
    saved.write_bytes(content[:int(len(content) * keep)])
    with pytest.raises(ValueError, match="truncated"):
        load_path(saved, gpt2)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"pathoracle": "{"}, {"pathoracle": "{}"}, {"pathoracle": "[]"}])
def test_a_file_that_is_no_oracle_is_refused(saved, gpt2, metadata):
    save_file({"x": torch.zeros(1)}, saved, metadata)
    for read in (read_settings, lambda file: load_path(file, gpt2)):
        with pytest.raises(ValueError, match="no oracle"):
            read(saved)


def test_an_oracle_that_lacks_a_tensor_is_refused(saved, gpt2):
    tensors = load_file(saved)
    metadata = {"pathoracle": json.dumps(read_settings(saved))}
    up = tensors.pop("0.up")
    for damaged in ({**tensors, "0.up": up[:1]}, tensors):
        save_file(damaged, saved, metadata)
        with pytest.raises(ValueError, match="0.up"):
            load_path(saved, gpt2)


# ---- losses ----

def test_state_loss_is_the_relative_error_and_the_cosine_of_each_token():
    true, predicted = (torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    true[:, 0] *= 1000                                          # must not outweigh the others
    losses = []
    for t, p in zip(true.flatten(0, 1).double().numpy(), predicted.flatten(0, 1).double().numpy()):
        cosine = t @ p / np.sqrt(t @ t * (p @ p))
        losses.append((p - t) @ (p - t) / (t @ t) + 0.7 * (1 - cosine))
    assert_close(state_loss(predicted, true, 0.7).item(), np.mean(losses), **CLOSE)


def test_path_loss_of_exact_oracles_is_zero_and_kl_counts_for_others(gpt2):
    spans, ids = parse_skip("1-2,4-4", 6), random_ids(2, 20)
    exact = PathOracle(gpt2, spans, [Exact(gpt2, span) for span in spans])
    nothing = PathOracle(gpt2, spans, [Nothing() for _ in spans])
    assert abs(path_loss(exact, ids, 0.5, 1.0).item()) < 1e-5
    with_kl, without = (path_loss(nothing, ids, 0.5, weight).item() for weight in (2.0, 0.0))
    p, q = (logits[:, ::4].double().log_softmax(dim=-1) for logits in (gpt2(ids), nothing(ids)))    # every fourth token
    assert_close((with_kl - without) / 2, (p.exp() * (p - q)).sum(dim=-1).mean().item(), **CLOSE)


def test_path_loss_of_the_states_behind_the_spans_and_of_those_for_the_cache(gpt2):
    spans, ids = parse_skip("1-3,5-5", 6), random_ids(2, 20)
    path = PathOracle(gpt2, spans, [Nothing() for _ in spans])
    true = [state.double().numpy() for state in true_states(gpt2, ids, 6)]

    def errors(predicted, t):                                   # (B, T, C) -> relative squared error of each token
        return ((predicted - t) ** 2).sum(axis=-1) / (t * t).sum(axis=-1)

    x = true[1]
    between = np.mean([errors(x, t)[:, ::8].mean() for t in true[2:4]])     # every eighth token
    behind = gpt2.blocks[4](torch.from_numpy(x).float()).double().numpy()   # what enters the second span is the path's
    expected = errors(x, true[4]).mean() + between + errors(behind, true[6]).mean()
    assert_close(path_loss(path, ids, 0, 0).item(), expected, **CLOSE)


# ---- the linear oracle ----

@pytest.mark.parametrize("skip", ["2-4", "1-2,4-4"])
def test_fit_linear_is_weighted_least_squares(gpt2, skip):
    path = new_path(gpt2, {**SETTINGS, "oracle": "linear", "skip": skip})
    batches = [random_ids(8, 20, seed) for seed in range(3)]
    fit_linear(path, lambda step: batches[step], 3)
    ids = torch.cat(batches)
    x = gpt2.run(gpt2.embed(ids), 0, path.spans[0].start)       # as the path sees it: predicted behind the first span
    for span, oracle, until in zip(path.spans, path.oracles, [*(span.start for span in path.spans[1:]), 6]):
        true = gpt2.embed(ids)
        for i in range(span.stop):
            true = gpt2.blocks[i](true)
            if i in span:
                j = i - span.start
                rows, targets = (a[:, 1:].flatten(0, 1).double().numpy() for a in (x, true))
                weight = 1 / np.linalg.norm(targets, axis=1, keepdims=True)
                a = np.hstack([rows, np.ones_like(weight)])
                solution = np.linalg.lstsq(a * weight, (targets - rows) * weight, rcond=None)[0]
                ones = np.ones((*x.shape[:2], 1))
                wanted = x.double().numpy() + np.concatenate([x.double().numpy(), ones], axis=2) @ solution
                wanted[:, 0] += (true[:8, 0].double().numpy() - wanted[:8, 0]).mean(axis=0)     # over the first batch
                with torch.no_grad():
                    predicted = oracle.states(x, oracle.trunk(x), -len(span))[j].double()
                assert_close(predicted, torch.tensor(wanted), atol=5e-3, rtol=1e-3)
        with torch.no_grad():
            x = gpt2.run(oracle(x), span.stop, until)


def test_fit_linear_recovers_blocks_that_are_linear(gpt2):
    """Blocks 2 and 3 add a constant. Block 1 adds a matrix product, for gelu(u) - gelu(-u) = u, and the layer norm
    before it does nothing: the embeddings have mean 0 and variance 1."""
    for block in gpt2.blocks[:4]:
        block.attn.c_proj.weight.zero_()
        block.mlp.c_proj.weight.zero_()
    gpt2.blocks[0].attn.c_proj.bias.zero_()
    gpt2.blocks[0].mlp.c_proj.bias.zero_()
    gpt2.wpe.weight.zero_()
    gpt2.wte.weight.copy_(nn.functional.layer_norm(gpt2.wte.weight, (24,)))
    block, u, v = gpt2.blocks[1], torch.randn(48, 24), torch.randn(24, 48) / 20
    block.attn.c_proj.bias.zero_()
    block.mlp.c_fc.weight.copy_(torch.cat([u, -u]))
    block.mlp.c_fc.bias.zero_()
    block.mlp.c_proj.weight.copy_(torch.cat([v, -v], dim=1))

    path = new_path(gpt2, {**SETTINGS, "oracle": "linear", "skip": "1-3"})
    fit_linear(path, lambda step: random_ids(8, 20, seed=step), 4)
    ids = random_ids(4, 30, seed=100)
    x = gpt2.embed(ids)
    with torch.no_grad():
        for predicted, true in zip(path.oracles[0].states(x, x, -3), true_states(gpt2, ids, 4)[2:]):
            assert_close(predicted, true, atol=1e-2, rtol=1e-2)
        assert_close(path(ids), gpt2(ids), atol=1e-2, rtol=1e-2)
    assert (true_states(gpt2, ids, 2)[2] - gpt2.embed(ids)).norm(dim=-1).min() > 1      # it was not trivial


# ---- the massive activation ----

def massive_gpt2(norm):
    """A GPT-2 whose block 2 writes a state of about this norm at position 0, by a neuron that only its wpe excites."""
    gpt2 = tiny_gpt2()
    gpt2.wte.weight[:, 0] = gpt2.wpe.weight[:, 0] = 0           # up to block 2, coordinate 0 is wpe's alone
    gpt2.wpe.weight[0, 0] = 40
    for block in gpt2.blocks[:2]:
        for layer in (block.attn.c_proj, block.mlp.c_proj):
            layer.weight[0] = layer.bias[0] = 0
    block = gpt2.blocks[2]
    block.attn.c_proj.weight[0] = block.attn.c_proj.bias[0] = 0
    block.ln_2.weight[0], block.ln_2.bias[0] = 1, 0
    block.mlp.c_fc.weight[0], block.mlp.c_fc.bias[0] = 0, -10
    block.mlp.c_fc.weight[0, 0] = 4         # coordinate 0 is normalised to 3.9 at position 0, and to about 0 elsewhere
    direction = torch.randn(24, generator=torch.Generator().manual_seed(0))
    block.mlp.c_proj.weight[:, 0] = direction / direction.norm() * norm / (4 * 3.9 - 10)
    return gpt2


def relative_errors(gpt2, first, steps=250):
    """Trains an oracle -> mean relative error of what it predicts on fresh ids: at position 0, at the others."""
    torch.manual_seed(0)
    path = new_path(gpt2, SETTINGS)
    if first:
        set_first(path, 0, random_ids(8, 20))
    optimizer = torch.optim.AdamW(path.oracles.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (steps - step) / steps
        path_loss(path, random_ids(8, 20, seed=step), SETTINGS["cos_weight"], SETTINGS["kl_weight"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    ids = random_ids(16, 20, seed=steps)
    states = true_states(gpt2, ids, 5)
    with torch.no_grad():
        error = (path.oracles[0](states[2]) - states[5]).norm(dim=-1) / states[5].norm(dim=-1)
    return error[:, 0].mean().item(), error[:, 1:].mean().item()


def test_a_massive_activation_at_position_0_does_not_disturb_the_others():
    norms = true_states(massive_gpt2(3000), random_ids(8, 20), 3)[3].norm(dim=-1)
    assert (2500 < norms[:, 0]).all() and (norms[:, 0] < 3500).all() and (norms[:, 1:] < 100).all()
    _, usual = relative_errors(massive_gpt2(0), first=True)
    assert usual < 0.3                                          # it did learn: the input itself has an error of 0.65
    first, others = relative_errors(massive_gpt2(3000), first=True)
    assert first < 0.03 and others < 1.2 * usual
    # the loss alone, before anything is known of position 0; a plain squared error is 3 times the usual one here
    _, others = relative_errors(massive_gpt2(3000), first=False)
    assert others < 1.2 * usual


def test_initialise_starts_each_head_at_the_mean_change(gpt2):
    ids = random_ids(8, 20)
    path = new_path(gpt2, {**SETTINGS, "skip": "1-1,3-4", "shared": True})
    initialise(path, 1, ids)                                    # the longer of the spans: both heads
    oracle = path.oracles[1]
    assert (oracle.unit != 1).all() and (oracle.bias != 0).any(dim=1).all() and (oracle.first != 0).any(dim=1).all()
