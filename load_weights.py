"""GPT-2 from safetensors, without transformers:  model, tokenizer = load_gpt2("data/mini")

Whatever cannot be loaded exactly is refused: every function here raises ValueError or OSError with
one line that says what is wrong and what to do.
"""

import hashlib
from dataclasses import fields, replace

import torch

from data.hub import find, read_config, read_model, refuse_not_finite
from data.tokenizer import load_tokenizer
from model import GPT2, GPT2Config


def load_gpt2(model, device="cpu"):
    """(GPT2, tiktoken.Encoding) of a directory in Hugging Face's layout, or a name (data/hub.py).

    The weights are frozen and float32. On the CPU a float32 file is used through its memory map.

    A vocabulary that is padded (to a multiple of 64, say) is cut to the tokenizer's: no answer may
    be one of the other rows of wte. transformers keeps them, in the softmax too.
    """
    directory = find(str(model))
    config = load_config(directory)
    tokenizer, gpt2 = load_tokenizer(directory), load_weights(directory, config)
    n = tokenizer.n_vocab
    if n > config.vocab_size:
        raise ValueError(f"{directory}: the tokenizer has ids up to {n - 1}, vocab_size in config."
                         f"json is {config.vocab_size}: the files belong to different models")
    if n < config.vocab_size:
        gpt2.config = replace(config, vocab_size=n)
        gpt2.wte = torch.nn.Embedding.from_pretrained(gpt2.wte.weight[:n])
    refuse_not_finite(gpt2, directory)
    return gpt2.to(device), tokenizer


def load_config(directory):
    """GPT2Config of config.json; refuses by its name a setting that model.py does not implement."""
    return GPT2Config(**read_config(directory, {f.name: f.default for f in fields(GPT2Config)}))


def load_weights(directory, config):
    """GPT2 with the weights of the directory's safetensors files, which must fit the config."""
    found, asks = read_model(directory), f"config.json (n_layer = {config.n_layer})"
    with torch.device("meta"):                  # shapes only: nothing is initialised in vain
        gpt2 = GPT2(config)
    state = {}
    for name, expected in gpt2.state_dict().items():
        key = name.replace("blocks.", "h.", 1)
        tensor = found.pop(key, None)
        if tensor is None:
            raise ValueError(f"{directory}: the weights lack {key}, which {asks} asks for")
        if ".c_" in name and tensor.ndim == 2:
            tensor = tensor.t()         # GPT-2 stores (in, out), a "Conv1D"; a view, no copy
        if tensor.shape != expected.shape:
            raise ValueError(f"{directory}: {key} has the shape {tuple(tensor.shape)} as the model "
                             f"uses it, config.json asks for {tuple(expected.shape)}")
        state[name] = tensor
    if found:
        raise ValueError(f"{directory}: {asks} does not know {len(found)} tensors of the weights, "
                         f"such as {min(found)}")
    gpt2.load_state_dict(state, assign=True)
    return gpt2.requires_grad_(False)


def fingerprint(gpt2):
    """16 hexadecimal digits to tell a GPT-2: a hash of its config and some rows of all tensors."""
    digest = hashlib.sha256(repr(gpt2.config).encode())
    for p in gpt2.parameters():
        digest.update(p[::max(1, len(p) // 16)].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
