"""data/lab/pretrain.py: a run that was cut ends with the same model, and the files it writes are that model."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny import CONFIG, random_ids, write_checkpoint

from data.lab import pretrain
from load_weights import load_gpt2


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(name, steps) trains a tiny model in tmp_path/name on random tokens."""
    monkeypatch.setattr(pretrain, "CONFIG", CONFIG)
    monkeypatch.setattr(pretrain, "SAVE_EVERY", 2)
    monkeypatch.setattr(pretrain, "load_tokens", lambda *args: (random_ids(1, 2000)[0], random_ids(1, 300, seed=1)[0]))

    def run(name, steps=6):
        if not (tmp_path / name).exists():
            write_checkpoint(tmp_path / name)               # for its tokenizer
            (tmp_path / name / "model.safetensors").unlink()
        monkeypatch.setattr(sys, "argv", ["pretrain", "--out", str(tmp_path / name), "--steps", str(steps), "--batch-size", "2"])
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
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_checkpoint_of_another_run_is_refused(run, tmp_path):
    run("model", steps=4)
    with pytest.raises(ValueError, match="another --out"):
        run("model", steps=8)


def test_it_writes_a_model_that_loads(run, tmp_path):
    tensors = run("model", steps=1)
    assert all(t.dtype == torch.float16 for t in tensors.values())
    assert tensors["h.0.mlp.c_fc.weight"].shape == (24, 96)             # (in, out)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["eos_token_id"] == CONFIG.vocab_size - 1 and config["model_type"] == "gpt2"
    gpt2, tokenizer = load_gpt2(tmp_path / "model")
    assert torch.equal(gpt2.blocks[0].mlp.c_fc.weight, tensors["h.0.mlp.c_fc.weight"].float().t())
    assert gpt2.config == CONFIG and tokenizer.eot_token == CONFIG.vocab_size - 1


def test_the_learning_rate_warms_up_and_cools_down_to_zero():
    rates = [pretrain.learning_rate(step, 1000) for step in range(1001)]
    assert rates[0] == 0.01 and rates[99] == 1 == rates[300] and rates[650] == pytest.approx(0.5) and rates[1000] == 0
