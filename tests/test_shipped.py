"""What ships: the embedded model and its oracle, and the README."""

import logging
from pathlib import Path

import torch

from eval_ppl import SHIPPED, evaluate
from load_weights import load_gpt2
from oracle import load_path, plain_skip, read_settings
from train_oracle import DEFAULTS

ROOT = Path(__file__).parent.parent


def test_the_oracle_that_ships_is_between_the_original_and_nothing():
    gpt2, tokenizer = load_gpt2("data/mini")
    assert (gpt2.config.n_layer, gpt2.config.n_embd, gpt2.config.vocab_size) == (12, 192, 4096)
    assert tokenizer.eot_token == 4095
    path = load_path(SHIPPED, gpt2)
    settings = read_settings(SHIPPED)
    assert all(settings[name] == value for name, value in DEFAULTS.items() if value is not None and name != "step")
    assert settings["step"] == settings["steps"]
    text = "\n\n".join(filter(None, [logging.__doc__, *(getattr(logging, name).__doc__ for name in dir(logging))]))
    ids = torch.tensor(tokenizer.encode_ordinary(text))
    original, skip, oracle = (row["ppl"] for row in evaluate(gpt2, [plain_skip(gpt2, path.spans), path], ids, 256))
    assert original < 60 and original < oracle < skip / 3
    predicting, caching = path.n_parameters()
    replaced = sum(p.numel() for i in path.spans[0] for p in gpt2.blocks[i].parameters())
    assert predicting <= 0.026 * replaced


def test_ci_runs_the_test_command_of_the_readme():
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.endswith("python -m pytest")]
    assert len(commands) == 1 and commands[0] in (ROOT / ".ci" / "run").read_text().splitlines()
