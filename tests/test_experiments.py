"""data/lab/: each experiment runs to its end, and compares what it says it compares."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import CONFIG, random_ids, tiny_gpt2, tiny_text, write_checkpoint

from data.corpus import load_tokens
from data.lab import cost, frontier, ladder, published_recipe
from data.measure import flops
from eval_ppl import evaluate, prompt_rows
from load_weights import load_gpt2
from oracle import load_path, new_path, no_oracle
from train_oracle import path_loss

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the tiny model and a text."""
    place = tmp_path_factory.mktemp("place")
    write_checkpoint(place / "model")
    (place / "text.txt").write_text(tiny_text(), encoding="utf-8")
    return place


@pytest.fixture
def run(place, monkeypatch, capfd):
    """run(module, *arguments) -> what it prints."""
    def run(module, *args):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
        module.main()
        return capfd.readouterr().out
    return run


@pytest.mark.parametrize("name", ["cost", "frontier", "ladder", "pretrain", "published_recipe"])
def test_each_is_a_command(name):
    out = subprocess.run([sys.executable, "-m", f"data.lab.{name}", "--help"], cwd=ROOT, text=True,
                         capture_output=True, env={**os.environ, "COLUMNS": "100"}, timeout=300)
    assert out.returncode == 0 and f"python -m data.lab.{name}" in out.stdout, out.stderr


# published_recipe

@pytest.mark.parametrize("causal", [False, True])
def test_the_published_oracle_sees_the_future_unless_told_otherwise(causal):
    torch.manual_seed(0)
    oracle, x = published_recipe.PublishedOracle(24, 8, causal), torch.randn(1, 6, 24)
    changed = x.clone()
    changed[:, 5] += 1
    assert torch.allclose(oracle(x)[:, :5], oracle(changed)[:, :5], atol=1e-6) == causal
    assert not torch.allclose(oracle(x)[:, 5], oracle(changed)[:, 5])


def test_the_published_recipe_prints_held_out_figures(place, run, monkeypatch):
    monkeypatch.setattr(published_recipe, "TOKENS", 16)
    monkeypatch.setattr(published_recipe, "SAMPLES", 6)
    out = run(published_recipe, "--model", place / "model", "--skip", "2-3", "--dim", 8,
              "--text", place / "text.txt", "--causal")
    gpt2, tokenizer = load_gpt2(place / "model")
    heldout = load_tokens(str(place / "text.txt"), tokenizer, 16)[1]
    assert "epoch 5/5" in out
    for context in (16, CONFIG.n_positions):
        found = re.search(rf"windows of {context}: .*PPL ([\d.]+), path ([\d.]+), ratio ([\d.]+)",
                          out)
        full, path, ratio = map(float, found.groups())
        true = evaluate({"full model": no_oracle(gpt2, [])}, heldout, context)["full model"]["ppl"]
        assert full == pytest.approx(true, abs=0.01)
        assert path / full == pytest.approx(ratio, abs=0.01) and ratio != 1


# ladder

def test_least_squares_finds_a_linear_truth():
    """With the matrices that attention and MLP end in at zero, each block adds a constant."""
    gpt2 = tiny_gpt2()
    for block in gpt2.blocks:
        block.attn.c_proj.weight.zero_()
        block.mlp.c_proj.weight.zero_()
    path = ladder.token_path(gpt2, "1-2,4-4")
    ladder.fit_linear(path, [random_ids(4, 16, seed) for seed in range(4)])
    ids = random_ids(2, 16, seed=9)
    true = gpt2.states(ids, 5)
    assert not torch.allclose(true[1], true[3], atol=0.1)
    for span, oracle in zip(path.spans, path.oracles, strict=True):
        for i, state in zip(span, oracle.states(true[span.start]), strict=True):
            torch.testing.assert_close(state, true[i + 1], rtol=0, atol=1e-3)


def relative_error(path, ids):
    """Of the state behind the first span, position 0 left out."""
    span = path.spans[0]
    states = path.gpt2.states(ids, span.stop)
    x, true = path.oracles[0](states[span.start])[:, 1:], states[span.stop][:, 1:]
    return ((x - true).square().sum(-1) / true.square().sum(-1)).mean()


def test_least_squares_is_a_minimum_of_the_relative_error():
    path, ids = ladder.token_path(tiny_gpt2(), "1-2"), random_ids(8, 32)
    ladder.fit_linear(path, ids.split(2))
    readout, true = path.oracles[0].readouts[-1], path.gpt2.states(ids, 3)
    least = relative_error(path, ids)
    assert least < relative_error(no_oracle(path.gpt2, path.spans), ids)
    relative_error(path, ids).backward()
    assert readout.up.weight.grad.abs().max() < 1e-3 * readout.up.weight.abs().max()
    assert readout.up.bias.grad.abs().max() < 1e-3
    # and at position 0 nothing is lacking on average
    lacking = (true[3] - path.oracles[0](true[1]))[:, 0].mean(0)
    torch.testing.assert_close(lacking, torch.zeros(24), rtol=0, atol=1e-3)


def test_a_later_span_is_fitted_to_what_the_path_makes():
    """Its gradient vanishes behind the first span's oracle, not behind the true state."""
    path, ids = ladder.token_path(tiny_gpt2(), "1-2,4-4"), random_ids(8, 32)
    ladder.fit_linear(path, ids.split(2))
    with torch.no_grad():
        true, readout = path.gpt2.states(ids, 5), path.oracles[1].readouts[0]
        walked = path.gpt2.run(path.oracles[0](true[1]), 3, 4)
    sizes = []
    for x in (walked, true[4]):
        readout.zero_grad()
        error = (path.oracles[1](x) - true[5])[:, 1:].square().sum(-1)
        (error / true[5][:, 1:].square().sum(-1)).mean().backward()
        sizes.append(readout.up.weight.grad.norm())
    assert sizes[0] < 0.01 * sizes[1]


def test_a_token_oracle_serves_where_an_oracle_does():
    gpt2, ids = tiny_gpt2(), random_ids(2, 32)
    path = ladder.token_path(gpt2, "1-2,4-4", dim=8)
    for p in path.oracles.parameters():
        torch.nn.init.normal_(p, std=0.3)
    path_loss(path, ids, 0.5, 0.6, 1.0).backward()
    assert all(p.grad is not None and p.grad.any() for p in path.oracles.parameters())
    x = torch.randn(1, 6, 24)
    changed = x.clone()
    changed[:, :5] += 1                         # each token alone: the last does not notice
    assert torch.equal(path.oracles[0](x)[:, 5], path.oracles[0](changed)[:, 5])
    rows = prompt_rows(path, torch.cat([*ids, *random_ids(8, 32, seed=1)]), 32)
    assert {"full model", "oracle prefill", "no oracle"} <= {row["path"] for row in rows}


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_the_ladder_prints_both_tables(place, run, kind):
    out = run(ladder, kind, "--model", place / "model", "--skip", "2-3", "--steps", 8, "--dim", 7,
              "--batch-size", 2, "--text", place / "text.txt")
    assert re.search(rf"^{kind} +4 .*x$", out, flags=re.M)
    assert re.search(r"^oracle prefill .*x$", out, flags=re.M)
    assert ("step 8/8" in out) == (kind == "mlp")


# frontier

def test_the_frontier_trains_what_is_missing_and_measures_each(place, run, monkeypatch, tmp_path):
    flags = f"--text {place / 'text.txt'} --dim 8 --batch-size 2"
    monkeypatch.setattr(frontier, "RUNS", {"2-3": f"--skip 2-3 {flags}",
                                           "1-2,4-4": f"--skip 1-2,4-4 {flags}"})
    monkeypatch.setattr(frontier, "STEPS", 2)
    drawn = []
    monkeypatch.setattr(frontier, "draw", lambda rows, file: drawn.append((rows, file)))
    monkeypatch.setattr(frontier, "load_pyplot", lambda: None)
    args = "--model", place / "model", "--out", tmp_path
    out = run(frontier, *args)
    rows = json.loads((tmp_path / "frontier.json").read_text())
    assert drawn == [(rows, tmp_path / "frontier.svg")]
    assert [row["name"] for row in rows] == ["2-3", "1-2,4-4"]
    assert 0.5 < rows[1]["compute"] < rows[0]["compute"] < 1
    assert all(row["prefill_compute"] > row["compute"] for row in rows)
    gpt2, tokenizer = load_gpt2(place / "model")
    heldout = load_tokens(str(place / "text.txt"), tokenizer, 32)[1]
    heldout = heldout[:len(heldout) // 4]
    for row in rows:
        path = load_path(tmp_path / f"{row['name']}.safetensors", gpt2)
        ratio = evaluate({"": path}, heldout, 32)[""]["ppl"] / evaluate(
            {"": no_oracle(gpt2, [])}, heldout, 32)[""]["ppl"]
        assert row["ratio"] == pytest.approx(ratio) and row["bare_ratio"] != row["ratio"]
        (prefill,) = (its for its in prompt_rows(path, heldout, 32) if
                      its["path"] == "oracle prefill")
        assert row["prefill_ratio"] == pytest.approx(prefill["ratio"])
    assert out.count("train_oracle.py") == 2

    # what is there is neither trained nor measured again; what is gone is both
    monkeypatch.setattr(frontier, "measure", None)
    assert "train_oracle.py" not in run(frontier, *args)
    (tmp_path / "2-3.safetensors").unlink()
    monkeypatch.setattr(frontier, "measure", lambda name, *_: {**rows[0], "ratio": 9.5})
    out = run(frontier, *args)
    assert out.count("python train_oracle.py") == 1 and "9.500" in out


def test_the_frontier_needs_matplotlib_from_the_start(place, run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(frontier, "train", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        run(frontier, "--model", place / "model", "--out", tmp_path)


def test_the_frontier_resumes_a_run_that_was_cut(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(frontier.subprocess, "run", lambda command: seen.append(command) or
                        subprocess.CompletedProcess(command, 130))
    for cut in (False, True):
        if cut:
            (tmp_path / "a.unfinished").touch()
        with pytest.raises(ValueError, match="start again"):
            frontier.train("m", tmp_path / "a", ["--skip", "2-3"])
    assert "--resume" not in seen[0] and seen[0][2:4] == ["--skip", "2-3"]
    assert seen[1][2:] == ["--resume", "--out", str(tmp_path / "a")]


def test_the_picture_names_every_oracle_and_is_drawn_the_same_twice(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"name": name, "compute": 0.3 + 0.05 * i,
             "ratio": 1 + 0.1 * i, "prefill_compute": 0.4 + 0.05 * i, "prefill_ratio": 1 + 0.02 * i,
             "kept": None if i == 3 else 1 - 0.1 * i} for i, name in enumerate(frontier.RUNS)]
    for name in ("a.svg", "b.svg"):
        frontier.draw(rows, tmp_path / name)
    picture = (tmp_path / "a.svg").read_bytes()
    assert picture == (tmp_path / "b.svg").read_bytes()
    counts = {row["name"]: picture.count(f"<!-- {row['name']} -->".encode()) for row in rows}
    assert counts.pop(rows[3]["name"]) == 2 and set(counts.values()) == {3}


# cost

def test_the_formulas_count_what_runs():
    gpt2, ids = tiny_gpt2(), random_ids(1, 32)
    path = new_path(gpt2, {"skip": "1-3", "dim": 8, "blocks": 1, "heads": 2, "shared": False})
    counted = {"full prefill": flops(gpt2.prefill, ids),
               "path": flops(lambda ids: gpt2.unembed(path.hidden(ids)[:, -1]), ids),
               "oracle prefill": flops(path.prefill, ids)}
    assert {way: sum(its) for way, its in cost.count(CONFIG, 32, 3, 8).items()} == counted


def test_the_share_of_attention_is_what_an_attention_adds():
    """Without the attentions' products of pairs of tokens, what is left grows with the prompt."""
    for way, (short, pairs, own) in cost.count(CONFIG, 1 << 10, 3, 8).items():
        _, pairs_4, own_4 = cost.count(CONFIG, 1 << 12, 3, 8)[way]
        assert 15.9 * own <= own_4 <= 16.1 * own and 15.9 < pairs_4 / pairs < 16.1 and short > 0


def test_scaling_prints_all_models_and_prompts(run):
    out = run(cost, "--scaling")
    assert len(re.findall(r"^\S.* (full prefill|path|oracle prefill) ", out, flags=re.M)) == 27
    # 2 tensors of 2 bytes for each of 1,024 tokens, 12 blocks and 768 dimensions
    assert re.search(rf"^GPT-2 Small +1k +full prefill .* {4 * 1024 * 12 * 768 / 1e9:.3f}$", out,
                     flags=re.M)


def test_cost_measures_each_way_and_each_loss(run, monkeypatch):
    monkeypatch.setattr(cost, "SHAPES", {"tiny": CONFIG})
    monkeypatch.setattr(cost, "PATTERNS", ("1-3", "1-2,4-4"))
    out = run(cost, "--runs", 1)
    rows = {line[:25].strip(): line.split() for line in out.splitlines()}
    for skip in cost.PATTERNS:
        # what the clock reached of what the operations allow
        *_, allowed, _, speedup, reached = rows[f"oracle prefill {skip}"]
        assert float(allowed[:-1]) > 1
        assert float(speedup[:-1]) / float(allowed[:-1]) == pytest.approx(
            float(reached[:-1]) / 100, abs=0.02)
    gflop = re.findall(r"^states.*? +([\d.]+) +[\d.]+ +[\d,]+$", out, flags=re.M)
    assert len(gflop) == 3 and [float(n) for n in gflop] == sorted(map(float, gflop))
