"""data/lab/pretrain.py: a cut run ends with the same model, and what it writes is that model."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tiny import CONFIG, random_ids, tiny_gpt2, write_checkpoint
from torch.nn import functional as F

from data.lab import pretrain
from load_weights import load_gpt2

TRAIN, HELDOUT = random_ids(1, 2000)[0], random_ids(1, 300, seed=1)[0]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(name, steps) trains a tiny model in tmp_path/name on random tokens."""
    monkeypatch.setattr(pretrain, "CONFIG", CONFIG)
    monkeypatch.setattr(pretrain, "SAVE_EVERY", 2)
    monkeypatch.setattr(pretrain, "load_tokens", lambda *args: (TRAIN, HELDOUT))

    def run(name, steps=6):
        if not (tmp_path / name).exists():
            write_checkpoint(tmp_path / name)               # for its tokenizer
            (tmp_path / name / "model.safetensors").unlink()
        monkeypatch.setattr(sys, "argv", ["pretrain", "--out", str(tmp_path / name), "--steps",
                                          str(steps), "--batch-size", "2"])
        pretrain.main()
        return load_file(tmp_path / name / "model.safetensors")
    return run


def test_a_cut_run_goes_on_to_the_same_model(run, monkeypatch):
    whole = run("whole")
    sample = pretrain.training_windows

    def cut(*args):
        if args[-1] == 5:
            raise KeyboardInterrupt
        return sample(*args)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "training_windows", cut)
        with pytest.raises(KeyboardInterrupt):
            run("cut")
    resumed = run("cut")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_checkpoint_of_another_run_is_refused(run):
    run("model", steps=4)
    with pytest.raises(ValueError, match="another --out"):
        run("model", steps=8)


def test_it_writes_a_model_that_loads(run, tmp_path, capsys):
    tensors = run("model", steps=1)
    assert all(t.dtype == torch.float16 for t in tensors.values())
    assert tensors["h.0.mlp.c_fc.weight"].shape == (24, 96)             # (in, out)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["eos_token_id"] == CONFIG.vocab_size - 1 and config["model_type"] == "gpt2"
    gpt2, tokenizer = load_gpt2(tmp_path / "model")
    fc = tensors["h.0.mlp.c_fc.weight"]
    assert torch.equal(gpt2.blocks[0].mlp.c_fc.weight, fc.float().t())
    assert gpt2.config == CONFIG and tokenizer.eot_token == CONFIG.vocab_size - 1
    # the figures printed at the end are this model's, but for its rounding to float16
    last = capsys.readouterr().out.splitlines()[-1]
    printed = re.search(r"loss ([\d.]+),.*passage ([\d.]+), again ([\d.]+), random tokens again "
                        r"([\d.]+)", last).groups()
    true = pretrain.heldout_loss(gpt2, HELDOUT), *pretrain.copying(gpt2, HELDOUT)
    assert list(map(float, printed)) == pytest.approx(true, abs=0.01)


def test_the_learning_rate_warms_up_and_cools_down_to_zero():
    rates = [pretrain.learning_rate(step, 1000) for step in range(1001)]
    assert rates[0] == 0.01 and rates[99] == 1 == rates[300] and rates[1000] == 0
    assert rates[650] == pytest.approx(0.5)


def test_copying_scores_the_passage_twice_and_random_tokens_once(monkeypatch):
    """In a window of 32, tokens 8 to 13 come again at 24 to 29."""
    monkeypatch.setattr(pretrain, "CONFIG", CONFIG)
    gpt2, before = tiny_gpt2(), HELDOUT.clone()
    window = HELDOUT[:288].view(9, 32).clone()
    window[:, 24:30] = window[:, 8:14]
    losses = F.cross_entropy(gpt2(window)[:, :-1].mT, window[:, 1:], reduction="none")
    first, again, noise = pretrain.copying(gpt2, HELDOUT)
    assert first == pytest.approx(losses[:, 8:13].mean().item(), rel=1e-4)      # of tokens 9 to 13
    assert again == pytest.approx(losses[:, 24:29].mean().item(), rel=1e-4)     # of tokens 25 to 29
    assert noise != first and torch.equal(HELDOUT, before)


class Copier(torch.nn.Module):
    """Has seen it all: next comes what followed this token and the one before it last time."""

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, CONFIG.vocab_size)
        for row, its in zip(ids.tolist(), logits, strict=True):
            seen = {}
            for i in range(1, len(row)):
                if (row[i - 1], row[i]) in seen:
                    its[i, seen[row[i - 1], row[i]]] = 50
                if i + 1 < len(row):
                    seen[row[i - 1], row[i]] = row[i + 1]
        return logits


def test_copying_tells_a_model_that_copies(monkeypatch):
    monkeypatch.setattr(pretrain, "CONFIG", replace(CONFIG, n_positions=256))
    first, again, noise = pretrain.copying(Copier(), random_ids(1, 1024)[0])
    assert first > 4 and again < 0.01 and noise < 0.5
