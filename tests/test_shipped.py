"""What ships: the embedded model and its oracles."""

import logging

import pytest
import torch

from data.corpus import recall_windows
from data.options import SHIPPED, train_options
from eval_ppl import evaluate, losses_after, readers
from load_weights import load_gpt2
from oracle import load_path, no_oracle, read_oracle

FILES = sorted(SHIPPED.glob("oracle*.safetensors"))


@pytest.fixture(scope="module")
def mini():
    """The embedded model, and text of this machine's Python."""
    gpt2, tokenizer = load_gpt2("data/mini")
    assert (gpt2.config.n_layer, gpt2.config.n_embd, gpt2.config.vocab_size) == (12, 192, 4096)
    assert tokenizer.eot_token == 4095
    text = "\n\n".join(filter(None, [logging.__doc__, *(getattr(logging, name).__doc__
                                                        for name in dir(logging))]))
    return gpt2, torch.tensor(tokenizer.encode_ordinary(text))


def test_there_is_an_oracle_of_the_default_skip():
    assert "2-9" in [read_oracle(file)[0]["skip"] for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_oracle_that_ships_is_between_the_full_model_and_none(mini, file):
    gpt2, ids = mini
    path, (settings, tensors) = load_path(file, gpt2), read_oracle(file)
    assert settings["step"] == settings["steps"] and settings["model"] == "data/mini"
    assert not [name for name in tensors if name.startswith("optimizer.")]
    if file.name == "oracle.safetensors":       # what the command makes, as it stands
        parser = train_options("")
        for name in ("skip", "text", "blocks", "heads", "shared", "steps", "batch_size", "lr",
                     "cos_weight", "kl_weight", "cache_weight", "seed"):
            assert settings[name] == parser.get_default(name), name
    full, none, its = (row["ppl"] for row in evaluate(
        {"full": no_oracle(gpt2, []), "none": no_oracle(gpt2, path.spans), "its": path},
        ids[:4096], 256).values())
    assert full < 60 and full < its < full + (none - full) / 3


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_the_prompt_says_is_kept_where_the_model_copies(mini, file):
    gpt2, ids = mini
    path = load_path(file, gpt2)
    reads = readers(path, ids[None, :192])
    reads = {name: reads[name] for name in ("full model", "oracle prefill", "no prompt")}
    losses = losses_after(gpt2, recall_windows(ids, 256)[:3], 192, reads)
    full, its, none = (losses[name][:, 8:].mean() for name in reads)
    assert none - full > none / 2 and (none - its) / (none - full) > 0.9
