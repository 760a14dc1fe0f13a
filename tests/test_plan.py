"""data/lab/plan.py: it scores what it says it scores, and ranks by it."""

import argparse
import math
import re
import sys

import numpy as np
import pytest
import torch
from numpy_gpt2 import numpy_losses
from tiny import CONFIG, random_ids, tiny_gpt2, tiny_text, write_checkpoint
from torch.testing import assert_close

from data.lab import plan
from data.options import parse_skip, train_options, write_skip
from oracle import new_path, no_oracle


def test_patterns_are_all_there_are():
    assert {write_skip(spans) for spans in plan.patterns(4)} == {
        "0-0", "1-1", "2-2", "3-3", "0-1", "1-2", "2-3", "0-2", "1-3", "0-3",
        "0-0,2-2", "0-0,3-3", "1-1,3-3", "0-0,2-3", "0-1,3-3"}
    assert max(map(len, plan.patterns(12))) == plan.MAX_SPANS
    assert sum(1 for _ in plan.patterns(18)) == sum(math.comb(19, 2 * n) for n in (1, 2, 3, 4))
    for spans in plan.patterns(6):
        assert parse_skip(write_skip(spans), 6) == spans


SETTINGS = {**vars(train_options("").parse_args(["--skip", "0-0"])), "step": 0, "steps": 60,
            "dim": 8, "blocks": 1, "heads": 2, "context": 32, "batch_size": 4}


def test_one_oracle_for_each_start_learns_all_states_behind_it():
    gpt2, text = tiny_gpt2(), random_ids(1, 4000)[0] % 8
    torch.manual_seed(0)
    starts = plan.train_starts(gpt2, text, SETTINGS)
    ids = random_ids(16, 32, seed=1) % 8
    true = gpt2.states(ids, CONFIG.n_layer)
    assert [len(oracle.readouts) for oracle in starts] == [6, 5, 4, 3, 2, 1]
    for i, oracle in enumerate(starts):
        states = oracle.states(true[i])
        for j, (state, readout) in enumerate(zip(states, oracle.readouts, strict=True), start=i):
            error = (state - true[j + 1]).square().mean()
            constant = true[i] + readout.std * readout.up.bias      # knows the mean change alone
            assert error < 0.8 * (constant - true[j + 1])[:, 1:].square().mean(), (i, j)


def test_a_pattern_borrows_the_first_readouts():
    gpt2, x = tiny_gpt2(), torch.randn(2, 9, 24)
    starts = [new_path(gpt2, {**SETTINGS, "skip": f"{i}-5"}).oracles[0] for i in range(6)]
    for oracle in starts:
        for readout in oracle.readouts:
            torch.nn.init.normal_(readout.up.weight)
            torch.nn.init.normal_(readout.pos0)
            readout.std.uniform_(0.5, 2)
    path = plan.borrow(new_path(gpt2, {**SETTINGS, "skip": "1-2,4-4"}), starts)
    for oracle, start, n in zip(path.oracles, (1, 4), (2, 1), strict=True):
        expected = starts[start].states(x)[:n]
        assert_close(oracle.states(x), expected)
        assert not torch.equal(expected[0], starts[start - 1].states(x)[0])


def test_the_score_is_the_sum_of_what_is_lost():
    gpt2, full = tiny_gpt2(), no_oracle(tiny_gpt2(), [])
    text, passage = random_ids(4, 32), random_ids(4, 30, seed=1)
    judge = plan.Judge(gpt2, [text], [passage], 24)
    score, *others, kept = judge(full)
    assert (score, *others) == pytest.approx((0, 1, 1), abs=1e-5)
    assert kept is None                                 # a random model does not copy
    own = [numpy_losses(logits[:-1], ids[1:]) for logits, ids in zip(gpt2(text), text, strict=True)]
    losses = [numpy_losses(logits[23:-1], ids[24:])
              for ids, logits in zip(passage, gpt2(passage), strict=True)]
    its, again = np.mean(own), np.mean(np.array(losses)[:, 1:])     # but for the first of six
    late = np.mean([row[23:] for row in own])
    judge.full, judge.nothing = (3.0, 1.0, again - 1), again + 9
    score, *ratios, kept = judge(full)
    assert score == pytest.approx(its - 3 + late - 1 + 1 / 10, rel=1e-4)
    assert (*ratios, kept) == pytest.approx((np.exp(its - 3), np.exp(late - 1), 0.9), rel=1e-4)


@pytest.mark.parametrize("a, b, rho", [([1, 2, 3], [10, 20, 90], 1), ([1, 2, 3], [3, 2, 1], -1),
                                       ([1, 2, 3, 4], [2, 1, 4, 3], 0.6)])
def test_rank_correlation(a, b, rho):
    assert plan.rank_correlation(a, b) == pytest.approx(rho)


@pytest.mark.parametrize("text, share", [("40%", 0.4), ("40", 0.4), ("37.5%", 0.375)])
def test_a_budget_is_a_share(text, share):
    assert plan.percent(text) == pytest.approx(share)
    with pytest.raises(argparse.ArgumentTypeError):
        plan.percent("half")


@pytest.mark.parametrize("train, trained", [(3, 3), (20, 15)])      # of 15 patterns that fit
def test_it_proposes_what_it_trained_best(tmp_path, monkeypatch, capfd, train, trained):
    write_checkpoint(tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny_text() * 3, encoding="utf-8")
    for name in ("SCORE", "JUDGE"):
        monkeypatch.setattr(plan, name, 64)
    monkeypatch.setattr(sys, "argv", ["plan", "--model", str(tmp_path / "model"), "--text",
                                      str(tmp_path / "text.txt"), "--budget", "80%",
                                      "--train", str(train), "--steps", "2"])
    plan.main()
    out = capfd.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.match(r"\d[-,\d]* +\d", line)]
    assert len(rows) == len({row[0] for row in rows}) == trained and "rank correlation" in out
    best = min(rows, key=lambda row: float(row[5]))
    assert f"--text {tmp_path / 'text.txt'} --skip {best[0]} --dim 8" in out.splitlines()[-1]
    assert all(float(row[1].rstrip("%")) <= 80 for row in rows)


def test_a_run_that_is_stopped_ends_all(tmp_path, monkeypatch, capfd):
    write_checkpoint(tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny_text() * 3, encoding="utf-8")
    for name in ("SCORE", "JUDGE"):
        monkeypatch.setattr(plan, name, 64)
    monkeypatch.setattr(plan, "train", lambda *_, **__: False)      # as after Ctrl-C
    monkeypatch.setattr(sys, "argv", ["plan", "--model", str(tmp_path / "model"), "--text",
                                      str(tmp_path / "text.txt"), "--budget", "80%",
                                      "--steps", "2"])
    with pytest.raises(SystemExit) as ended:
        plan.main()
    assert ended.value.code == 130
    assert "python train_oracle.py" not in capfd.readouterr().out


def test_a_budget_that_nothing_fits_is_one_line(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny_text() * 3, encoding="utf-8")
    monkeypatch.setattr(plan, "train_starts", None)      # said before the long work
    monkeypatch.setattr(sys, "argv", ["plan", "--model", str(tmp_path / "model"), "--text",
                                      str(tmp_path / "text.txt"), "--budget", "1%"])
    with pytest.raises(ValueError, match="no pattern has a compute just below --budget 1.0%"):
        plan.main()
