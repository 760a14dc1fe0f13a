"""data/published_recipe.py and data/frontier.py: they run to their end, and compare what they say they compare."""

import json
import re
import sys

import pytest
import torch
from test_commands import place  # noqa: F401
from tiny import CONFIG

from data import frontier, published_recipe


@pytest.mark.parametrize("causal", [False, True])
def test_the_published_oracle_sees_the_future_unless_told_otherwise(causal):
    torch.manual_seed(0)
    oracle, x = published_recipe.PublishedOracle(24, 8, causal), torch.randn(1, 6, 24)
    changed = x.clone()
    changed[:, 5] += 1
    assert torch.allclose(oracle(x)[:, :5], oracle(changed)[:, :5], atol=1e-6) == causal
    assert not torch.allclose(oracle(x)[:, 5], oracle(changed)[:, 5])


def test_the_published_recipe_prints_held_out_figures(place, monkeypatch, capsys):      # noqa: F811
    monkeypatch.setattr(published_recipe, "TOKENS", 16)
    monkeypatch.setattr(published_recipe, "SAMPLES", 6)
    monkeypatch.setattr(sys, "argv", ["published_recipe", "--model", str(place / "model"), "--skip", "2-3", "--dim", "8",
                                      "--text", str(place / "text.txt"), "--causal"])
    published_recipe.main()
    out = capsys.readouterr().out
    assert "epoch 5/5" in out
    for context in (16, CONFIG.n_positions):
        original, path, ratio = re.search(rf"windows of {context}: .*PPL ([\d.]+), path ([\d.]+), ratio ([\d.]+)", out).groups()
        assert float(path) / float(original) == pytest.approx(float(ratio), abs=0.01)


def test_the_frontier_trains_what_is_missing_and_measures_each_oracle(place, monkeypatch, tmp_path, capfd):    # noqa: F811
    flags = f"--text {place / 'text.txt'} --dim 8 --steps 2 --batch-size 2"
    monkeypatch.setattr(frontier, "LADDER", {"transformer": f"--skip 2-3 {flags}"})
    monkeypatch.setattr(frontier, "SIZES", {})
    monkeypatch.setattr(frontier, "SKIPS", {"skip 1-2,4-4": f"--skip 1-2,4-4 {flags}"})
    monkeypatch.setattr(frontier, "CONTEXTS", (32, 16))
    monkeypatch.setattr(frontier, "draw", lambda rows, file: None)
    monkeypatch.setattr(sys, "argv", ["frontier", "--model", str(place / "model"), "--out", str(tmp_path)])
    frontier.main()
    out = capfd.readouterr().out
    rows = json.loads((tmp_path / "frontier.json").read_text())
    # what each training run printed at its end: the ratio with nothing in the skipped blocks' place, and the oracle's
    printed = [float(ratio) for ratio in re.findall(r"^(?:skip|\S+\.safetensors) .*%\s+[\d.]+\s+([\d.]+)", out, flags=re.M)]
    assert printed == pytest.approx([row[key] for row in rows for key in ("nothing_32", "ratio_32")], abs=0.001)
    assert [row["skip"] for row in rows] == ["2-3", "1-2,4-4"] and 0.5 < rows[1]["compute"] < rows[0]["compute"] < 1
    assert rows[0]["ratio_32"] != rows[0]["ratio_16"]
    frontier.main()                                             # now everything is there
    assert "train_oracle.py" not in capfd.readouterr().out


def test_the_picture_is_drawn_the_same_twice(tmp_path):
    pytest.importorskip("matplotlib")
    names = [*frontier.SIZES, *frontier.SKIPS]
    rows = [{"name": name, "compute": 0.3 + 0.01 * i, "ratio_256": 1 + 0.1 * i} for i, name in enumerate(names)]
    frontier.draw(rows, tmp_path / "a.svg")
    frontier.draw(rows, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
