"""oracle.py and the losses of train_oracle.py against NumPy and explicit passes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy_gpt2 import arrays, log_softmax, oracle_states
from safetensors.torch import load_file, save_file
from tiny import (
    CONFIG,
    SETTINGS,
    changed,
    exact_path,
    random_ids,
    random_path,
    randomize,
    reference,
    tiny_gpt2,
)
from torch.testing import assert_close

from data.checkpoint import FORMAT
from data.optimizers import new_optimizers
from data.options import fit_to_model, parse_skip, write_skip
from oracle import Oracle, Readout, load_path, new_path, no_oracle, read_oracle, save_path
from train_oracle import initialise, path_loss, state_loss

CLOSE = dict(atol=1e-4, rtol=1e-4)
SKIPS = ["2-4", "3-3", "1-2,4-5", "0-5"]


@pytest.fixture
def gpt2():
    return tiny_gpt2()


@pytest.fixture
def attentive(gpt2):
    """One whose answers depend on its cache."""
    for block in gpt2.blocks:
        block.attn.c_proj.weight.mul_(6)
    return gpt2


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_oracle(n_states=3, blocks=2):
    oracle = Oracle(24, n_states, 16, blocks, 2).requires_grad_(False)
    randomize(oracle)
    return oracle


# ---- skip patterns ----

@pytest.mark.parametrize("pattern, spans", [
    ("2-9", [range(2, 10)]), ("0-11", [range(12)]), ("5-5", [range(5, 6)]),
    ("2-4,6-8", [range(2, 5), range(6, 9)]), (" 0-0 , 2-2", [range(1), range(2, 3)]),
    ("0-1,3-4,6-10", [range(2), range(3, 5), range(6, 11)])])
def test_good_skip_patterns(pattern, spans):
    assert parse_skip(pattern, 12) == spans
    assert write_skip(spans) == pattern.replace(" ", "")


@pytest.mark.parametrize("pattern, hint", [
    ("9-2", "2-9"), ("2-12", "0 to 11"), ("2-4,6-12", "0 to 11"), ("2-5,4-8", "between"),
    ("2-4,5-8", "between"), ("6-8,2-4", "ascend"),
    *((pattern, "1-3,5-7") for pattern in ("a-b", "", "2", "2-", "-1-3", "2-4,", "2-4;6-8",
                                           "1.5-3"))])
def test_bad_skip_patterns_say_what_is_wrong(pattern, hint):
    with pytest.raises(ValueError) as error:
        parse_skip(pattern, 12)
    message = str(error.value)
    assert repr(pattern) in message and hint in message and "\n" not in message


# ---- the path ----

@pytest.mark.parametrize("skip", SKIPS)
def test_exact_oracles_make_the_path_the_full_model(gpt2, skip):
    ids = random_ids(2, 20)
    path = exact_path(gpt2, skip)
    assert_close(path(ids), gpt2(ids), **CLOSE)
    assert not torch.allclose(path(ids), no_oracle(gpt2, path.spans)(ids), atol=0.1)


@pytest.mark.parametrize("skip, shared", [*((skip, False) for skip in SKIPS), ("1-2,4-5", True)])
def test_the_path_equals_the_numpy_reference(gpt2, skip, shared):
    path, ids = random_path(gpt2, skip, shared=shared), random_ids(2, 20)
    assert_close(path(ids).double(), reference(path, ids), atol=1e-3, rtol=1e-3)
    assert_close(gpt2.unembed(path.hidden(ids)), path(ids))


@pytest.mark.parametrize("skip, left", [("2-4", [0, 1, 5]), ("3-3", [0, 1, 2, 4, 5]),
                                        ("1-2,4-5", [0, 3]), ("0-5", []), (None, range(6))])
def test_no_oracle_leaves_the_other_blocks(gpt2, skip, left):
    path, ids = no_oracle(gpt2, parse_skip(skip, 6) if skip else []), random_ids(2, 20)
    x = gpt2.wte.weight[ids] + gpt2.wpe.weight[:20]
    for i in left:
        x = gpt2.blocks[i](x)
    assert_close(path(ids), gpt2.unembed(x), **CLOSE)


@pytest.mark.parametrize("skip, shared", [*((skip, False) for skip in SKIPS), ("1-2,4-5", True)])
def test_a_changed_token_changes_no_earlier_logits(gpt2, skip, shared):
    path, ids = random_path(gpt2, skip, shared=shared), random_ids(2, 12)
    before = path(ids)
    for t in range(12):
        after = path(changed(ids, t))
        assert_close(after[:, :t], before[:, :t], atol=1e-5, rtol=0)
        assert ((after - before)[:, t].abs().amax(dim=-1) > 1e-3).all()


def test_shared_spans_have_one_oracle_and_one_length(gpt2):
    own, shared = (new_path(gpt2, {**SETTINGS, "skip": "1-2,4-5", "shared": shared})
                   for shared in (False, True))
    assert shared.oracles[0] is shared.oracles[1] and own.oracles[0] is not own.oracles[1]
    assert [len(oracle.readouts) for oracle in own.oracles] == [2, 2]
    fit_to_model({**SETTINGS, "skip": "1-2,4-5", "shared": True}, CONFIG)
    with pytest.raises(ValueError, match="one length"):
        fit_to_model({**SETTINGS, "skip": "1-2,4-4", "shared": True}, CONFIG)


# ---- the oracle ----

@pytest.mark.parametrize("blocks", [0, 2])
def test_an_untrained_oracle_predicts_no_change(blocks):
    x, oracle = random(2, 7, 24), Oracle(24, 3, 16, blocks, 2)
    assert torch.equal(oracle(x), x)
    assert len(oracle.states(x)) == 3 and all(torch.equal(y, x) for y in oracle.states(x))


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 7])
def test_the_states_equal_the_numpy_reference_and_the_last_is_forwards(blocks, length):
    x, oracle = random(2, length, 24), random_oracle(blocks=blocks)
    states = oracle.states(x)
    for row in range(2):
        wanted = oracle_states(arrays(oracle), x[row].double().numpy(), 2)
        assert_close([y[row].double() for y in states], [*map(torch.tensor, wanted)], **CLOSE)
    assert_close(oracle(x), states[-1])


def test_a_readout_is_its_formula():
    x, features, readout = random(1, 5, 24), random(1, 5, 16, seed=1), Readout(24, 16)
    randomize(readout)
    w = {name: t.detach().double().numpy() for name, t in readout.state_dict().items()}
    assert w.keys() == {"scale", "up.weight", "up.bias", "std", "pos0"}
    wanted = x[0].numpy() * w["scale"] + (features[0].numpy() @ w["up.weight"].T + w["up.bias"]) \
        * w["std"] + np.outer([1, 0, 0, 0, 0], w["pos0"])
    assert_close(readout(x, features)[0].detach().double(), torch.tensor(wanted), **CLOSE)
    assert "std" not in dict(readout.named_parameters())


def test_each_token_sees_itself_and_the_one_before_even_without_blocks():
    oracle, x = random_oracle(blocks=0), random(2, 7, 24)
    before = oracle.features(x)
    for t in range(7):
        other = x.clone()
        other[:, t] = random(2, 24, seed=1)
        moved = (oracle.features(other) - before).abs().amax(dim=-1) > 1e-3     # (B, T)
        assert moved.nonzero().tolist() == [[b, s] for b in (0, 1) for s in (t, t + 1) if s < 7]


def test_position_0_sees_zeros_before_it():
    oracle, x = random_oracle(blocks=0), random(2, 7, 24)
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    itself = normed @ oracle.down.weight[:, :24].T + oracle.down.bias
    assert_close(oracle.features(x)[:, 0], oracle.ln(itself)[:, 0], **CLOSE)
    assert not torch.allclose(oracle.features(x)[:, 1:], oracle.ln(itself)[:, 1:], atol=0.1)


# ---- files ----

@pytest.fixture
def saved(gpt2, tmp_path):
    save_path(tmp_path / "oracle.safetensors", random_path(gpt2), SETTINGS, {})
    return tmp_path / "oracle.safetensors"


@pytest.mark.parametrize("skip, shared", [("1-2,4-4", False), ("1-2,4-5", True)])
def test_a_saved_path_computes_the_same(gpt2, tmp_path, skip, shared):
    settings, file = {**SETTINGS, "skip": skip, "shared": shared}, tmp_path / "file"
    path, ids = random_path(gpt2, **settings), random_ids(2, 20)
    save_path(file, path, settings, {"optimizer.x": torch.ones(2)})
    loaded = load_path(file, tiny_gpt2())
    assert torch.equal(loaded(ids), path(ids))
    assert not any(p.requires_grad for p in loaded.parameters())
    found, tensors = read_oracle(file)
    assert settings.items() <= found.items() and found["format"] == FORMAT == 2
    assert tensors["optimizer.x"].tolist() == [1, 1]
    assert ("1.down.weight" in tensors) == (not shared)
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("change", ["seed", "one weight", "all but one row", "config"])
def test_another_model_is_refused(saved, change):
    other = tiny_gpt2(seed=1 if change == "seed" else 0)
    if change == "config":
        other.config = replace(CONFIG, layer_norm_epsilon=1e-6)
    elif change != "seed":
        other.blocks[3].mlp.c_fc.bias[slice(1) if change == "one weight" else slice(1, None)] += 0.5
    with pytest.raises(ValueError, match="another model"):
        load_path(saved, other)


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.001])
def test_a_truncated_file_is_refused(saved, gpt2, keep):
    content = saved.read_bytes()
    saved.write_bytes(content[:int(len(content) * keep)])
    with pytest.raises(ValueError, match="truncated"):
        load_path(saved, gpt2)


@pytest.mark.parametrize("metadata", [
    None, {"format": "pt"}, *({"pathoracle": text} for text in
                              ("{", "{}", "[]", '{"fingerprint": ""}', '{"format": 1}', "2"))])
def test_a_file_that_is_no_oracle_of_this_version_is_refused(saved, gpt2, metadata):
    save_file({"x": torch.zeros(1)}, saved, metadata)
    for read in (read_oracle, lambda file: load_path(file, gpt2)):
        with pytest.raises(ValueError, match="no oracle of this version") as error:
            read(saved)
        assert str(saved) in str(error.value) and "\n" not in str(error.value)


def test_an_oracle_that_lacks_a_tensor_is_refused(saved, gpt2):
    settings, tensors = read_oracle(saved)
    up = tensors.pop("0.readouts.0.up.weight")
    for damaged in ({**tensors, "0.readouts.0.up.weight": up[:1]}, tensors):
        save_file(damaged, saved, {"pathoracle": json.dumps(settings)})
        with pytest.raises(ValueError, match="is damaged"):
            load_path(saved, gpt2)
    assert "0.readouts.0.up.bias" in load_file(saved)


# ---- losses ----

def errors(predicted, true):
    """(B, T, C) twice -> squared error relative to the true state's square, (B, T)"""
    return ((predicted - true) ** 2).sum(axis=-1) / (true ** 2).sum(axis=-1)


def test_state_loss_is_the_relative_error_of_each_token():
    true, predicted = (random(2, 5, 24, seed=n) for n in (0, 1))
    true[:, 0] *= 1000                                          # must not outweigh the others
    expected = errors(predicted.double().numpy(), true.double().numpy()).mean()
    assert_close(state_loss(predicted, true).item(), expected, **CLOSE)


def test_the_loss_of_exact_oracles_is_zero(gpt2):
    for weight in (0, 1):
        loss = path_loss(exact_path(gpt2, "1-2,4-4"), random_ids(2, 20), 0.5, weight, weight)
        assert abs(loss.item()) < 1e-5


def test_the_loss_of_the_states(gpt2):
    """Each counts as much, those between the skipped blocks as those behind the spans."""
    path, ids = new_path(gpt2, {**SETTINGS, "skip": "1-3,5-5"}), random_ids(2, 20)
    true = [state.double().numpy() for state in gpt2.states(ids, 6)]
    x = true[1]                                                 # what an untrained oracle predicts
    between = sum(errors(x, t).mean() for t in true[2:4])
    behind = gpt2.blocks[4](torch.from_numpy(x).float()).double().numpy()   # the path's own
    squares = errors(x, true[4]).mean() + between + errors(behind, true[6]).mean()
    assert_close(path_loss(path, ids, 0, 0, 0).item(), squares, **CLOSE)
    cosines = [(a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
               for a, b in ((x, true[4]), (behind, true[6]))]
    expected = squares + 0.7 * sum(1 - cosine.mean() for cosine in cosines)
    assert_close(path_loss(path, ids, 0.7, 0, 0).item(), expected, **CLOSE)


def kl(path, ids, jumped, at):
    """KL(full model, what the first `jumped` tokens of the path lead to) at a slice, in NumPy."""
    total = []
    for p, q in zip(reference(path, ids, 0), reference(path, ids, jumped), strict=True):
        p, q = (log_softmax(logits.numpy()[at]) for logits in (p, q))
        total.append((np.exp(p) * (p - q)).sum(axis=1))
    return np.mean(total)


@pytest.mark.parametrize("skip, shared", [("2-4", False), ("1-2,4-5", True), ("0-3", False)])
def test_the_terms_of_the_next_token_distributions(attentive, skip, shared):
    path, ids = random_path(attentive, skip, shared=shared), random_ids(2, 20)
    path_kl, cache_kl = slice(None, None, 4), slice(15, None)
    states, of_path = (path_loss(path, ids, 0.5, weight, 0).item() for weight in (0, 2))
    assert_close((of_path - states) / 2, kl(path, ids, None, path_kl), rtol=1e-3, atol=1e-4)
    # with the cache, only the first three quarters of the tokens jump
    states, of_path = (path_loss(path, ids[:, :15], 0.5, weight, 0).item() for weight in (0, 2))
    of_cache, both = (path_loss(path, ids, 0.5, weight, 3).item() for weight in (0, 2))
    assert_close((of_cache - states) / 3, kl(path, ids, 15, cache_kl), rtol=1e-3, atol=1e-4)
    assert_close(both - of_cache, of_path - states, rtol=1e-3, atol=1e-4)
    assert kl(path, ids, 15, cache_kl) > 0.05                   # it is not trivial


@pytest.mark.parametrize("name", ["readouts.0.up.bias", "readouts.1.scale", "readouts.2.pos0",
                                  "down.bias"])
def test_the_gradient_through_the_cache_reaches_the_states_between(attentive, name):
    path, ids = random_path(attentive), random_ids(2, 20)
    p = dict(path.oracles[0].named_parameters())[name].requires_grad_()

    def gradient(cache_weight):
        return torch.autograd.grad(path_loss(path, ids, 0.5, 0, cache_weight), p)[0]

    slope, step = gradient(2) - gradient(1), 1e-3
    with torch.no_grad():
        for i in (0, 7):
            ends = []
            for sign in (1, -1):
                p[i] += sign * step
                ends.append(kl(path, ids, 15, slice(15, None)))
                p[i] -= sign * step
            assert_close(slope[i].item(), (ends[0] - ends[1]) / (2 * step), rtol=2e-2, atol=1e-5)
    assert slope.abs().max() > 1e-4


# ---- before the first step ----

@pytest.mark.parametrize("skip", ["2-4", "1-2,4-5"])
def test_initialise_starts_each_readout_at_the_mean_change(gpt2, skip):
    path, ids = new_path(gpt2, {**SETTINGS, "skip": skip}).requires_grad_(False), random_ids(8, 20)
    initialise(path, ids)
    true, start = [s.double().numpy() for s in gpt2.states(ids, 6)], 0
    x = gpt2.embed(ids)
    for span, oracle in zip(path.spans, path.oracles, strict=True):
        x = gpt2.run(x, start, span.start)
        for i, y, readout in zip(span, oracle.states(x), oracle.readouts, strict=True):
            y, change = y.double().numpy(), true[i + 1] - x.double().numpy()
            # the mean prediction is right at position 0, and over all others
            for there in (slice(0, 1), slice(1, None)):
                means = [state[:, there].mean(axis=(0, 1)) for state in (y, true[i + 1])]
                np.testing.assert_allclose(*means, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(readout.std.numpy(), change[:, 1:].reshape(-1, 24).std(
                axis=0, ddof=1), rtol=1e-3)
            assert not readout.up.weight.any() and (readout.scale == 1).all()
        x, start = oracle(x), span.stop


def test_initialise_starts_a_shared_oracle_as_the_first_span_needs_it(gpt2):
    ids, shared, own = random_ids(8, 20), *(
        new_path(gpt2, {**SETTINGS, "skip": "1-2,4-5", "shared": shared}) for shared in (1, 0))
    initialise(shared, ids)
    initialise(own, ids)
    for readout, other in zip(shared.oracles[1].readouts, own.oracles[0].readouts, strict=True):
        assert_close(readout.up.bias, other.up.bias)
        assert_close(readout.pos0, other.pos0)


def test_each_parameter_has_one_optimizer_and_muon_has_the_matrices_of_the_features(gpt2):
    path = new_path(gpt2, {**SETTINGS, "blocks": 1})
    names = {p: name for name, p in path.oracles.named_parameters()}
    adam, muon = ([names[p] for p in optimizer.param_groups[0]["params"]]
                  for optimizer in new_optimizers(path.oracles))
    assert sorted(adam + muon) == sorted(names.values())
    assert muon == ["0.down.weight", *(f"0.blocks.0.{name}.weight" for name in (
        "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))]


# ---- the massive activation ----

def massive_gpt2(norm):
    """A GPT-2 whose block 2 writes a state of about this norm at position 0, by a neuron that only
    its wpe excites."""
    gpt2 = tiny_gpt2()
    gpt2.wte.weight[:, 0] = gpt2.wpe.weight[:, 0] = 0   # up to block 2, coordinate 0 is wpe's alone
    gpt2.wpe.weight[0, 0] = 40
    for block in gpt2.blocks[:2]:
        for layer in (block.attn.c_proj, block.mlp.c_proj):
            layer.weight[0] = layer.bias[0] = 0
    block = gpt2.blocks[2]
    block.attn.c_proj.weight[0] = block.attn.c_proj.bias[0] = 0
    block.ln_2.weight[0], block.ln_2.bias[0] = 1, 0
    block.mlp.c_fc.weight[0], block.mlp.c_fc.bias[0] = 0, -10
    block.mlp.c_fc.weight[0, 0] = 4     # coordinate 0 is 3.9 at position 0, and about 0 elsewhere
    direction = random(24)
    block.mlp.c_proj.weight[:, 0] = direction / direction.norm() * norm / (4 * 3.9 - 10)
    return gpt2


def relative_errors(gpt2, steps=150):
    """Trains an oracle -> mean relative error on fresh ids, at position 0 and at the others."""
    torch.manual_seed(0)
    path = new_path(gpt2, SETTINGS)
    initialise(path, random_ids(8, 20))
    optimizer = torch.optim.AdamW(path.oracles.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (steps - step) / steps
        path_loss(path, random_ids(8, 20, seed=step), 0.5, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = gpt2.states(random_ids(16, 20, seed=steps), 5)
    with torch.no_grad():
        error = (path.oracles[0](states[2]) - states[5]).norm(dim=-1) / states[5].norm(dim=-1)
    return error[:, 0].mean().item(), error[:, 1:].mean().item()


def test_a_massive_activation_at_position_0_does_not_disturb_the_others():
    norms = massive_gpt2(3000).states(random_ids(8, 20), 3)[3].norm(dim=-1)
    assert ((norms[:, 0] - 3000).abs() < 500).all() and (norms[:, 1:] < 100).all()
    _, usual = relative_errors(massive_gpt2(0))
    assert usual < 0.35                     # it did learn: the input itself has an error of 0.65
    first, others = relative_errors(massive_gpt2(3000))
    assert first < 0.03 and others < 1.2 * usual


