"""Loads GPT-2 from safetensors, without transformers:  model, tokenizer = load_gpt2("data/mini" or "gpt2" ...)

Whatever cannot be loaded exactly is refused: every function here raises ValueError or OSError with one line that says
what is wrong and what to do.
"""

import hashlib
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from data.hub import find, read_json
from data.tokenizer import load_tokenizer
from model import GPT2, GPT2Config


def load_gpt2(model, device="cpu"):
    """(GPT2, tiktoken.Encoding) of a directory in Hugging Face's GPT-2 layout, or of a name such as gpt2 (data/hub.py).

    The weights are frozen and float32. On the CPU a float32 file is used through its memory map, not copied.
    """
    directory = find(str(model))
    config = load_config(directory)
    gpt2 = load_weights(directory, config).to(device)
    tokenizer = load_tokenizer(directory)
    if tokenizer.max_token_value >= config.vocab_size:
        raise ValueError(f"{directory}: the tokenizer has ids up to {tokenizer.max_token_value}, "
                         f"vocab_size in config.json is {config.vocab_size}: the files belong to different models")
    return gpt2, tokenizer


def load_config(directory):
    """GPT2Config of config.json; refuses a setting that model.py does not implement, by its name."""
    path = Path(directory) / "config.json"
    config = read_json(path)
    # each setting that changes the computation, and the values under which model.py computes the same
    for name, default, allowed in (("model_type", "gpt2", ("gpt2",)),
                                   ("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
                                   ("scale_attn_weights", True, (True,)),
                                   ("scale_attn_by_inverse_layer_idx", False, (False,)),
                                   ("add_cross_attention", False, (False,)),
                                   ("tie_word_embeddings", True, (True,)),
                                   ("pruned_heads", {}, ({},)),
                                   ("quantization_config", None, (None,))):
        value = default if config.get(name) is None else config[name]
        if value not in allowed:
            raise ValueError(f"{path}: {name} = {value!r} is not supported, only {allowed[0]!r}")
    # the other names under which transformers reads these sizes
    alias = {"n_embd": "hidden_size", "n_positions": "max_position_embeddings", "n_layer": "num_hidden_layers",
             "n_head": "num_attention_heads"}
    sizes = {}
    for field in fields(GPT2Config):
        value = config.get(field.name, config.get(alias.get(field.name), field.default))
        if not (field.name == "n_inner" and value is None):
            kind = (float, int) if field.name == "layer_norm_epsilon" else int
            if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < 1 << 31:
                raise ValueError(f"{path}: {field.name} = {value!r} is not a positive number")
        sizes[field.name] = value
    if sizes["n_embd"] % sizes["n_head"]:
        raise ValueError(f"{path}: n_embd = {sizes['n_embd']} is not divisible by n_head = {sizes['n_head']}")
    return GPT2Config(**sizes)


def load_weights(directory, config):
    """GPT2 with the weights of model.safetensors, or of the shards that model.safetensors.index.json lists."""
    index = Path(directory) / "model.safetensors.index.json"
    files = [Path(directory) / "model.safetensors"]
    if not files[0].exists() and index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
            raise ValueError(f"{index} is damaged (no weight_map of file names): fetch it again")
        files = [Path(directory) / name for name in sorted(set(weight_map.values()))]
    found = {}
    for path in files:
        for name, tensor in read_tensors(path).items():
            name = name.removeprefix("transformer.")
            if name in found:
                raise ValueError(f"{path} holds {name} a second time, with and without a prefix or in two shards")
            if not name.endswith((".attn.bias", ".attn.masked_bias")):      # causal masks that old files carry along
                found[name] = tensor
    head = found.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, found.get("wte.weight", head)):
        raise ValueError(f"{files[0]}: lm_head.weight differs from wte.weight; an untied head is not supported")

    with torch.device("meta"):                  # shapes only: nothing is initialised that the file replaces
        gpt2 = GPT2(config)
    state = {}
    for name, expected in gpt2.state_dict().items():
        key = name.replace("blocks.", "h.", 1)
        tensor = found.pop(key, None)
        if tensor is None:
            raise ValueError(f"{files[0]} lacks {key}, which config.json (n_layer = {config.n_layer}) asks for")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{files[0]}: {key} is stored as {tensor.dtype}; only float32, float16 and bfloat16 are read")
        if ".c_" in name and tensor.ndim == 2:
            tensor = tensor.t()                 # GPT-2 stores these as (in, out), a "Conv1D"; a view, no copy
        if tensor.shape != expected.shape:
            raise ValueError(f"{files[0]}: {key} has the shape {tuple(tensor.shape)} as the model uses it, "
                             f"config.json asks for {tuple(expected.shape)}")
        state[name] = tensor.float()
    if found:
        raise ValueError(f"{files[0]} holds {len(found)} tensors that config.json (n_layer = {config.n_layer}) "
                         f"does not know, such as {min(found)}")
    gpt2.load_state_dict(state, assign=True)
    return gpt2.requires_grad_(False)


def read_tensors(path):
    """{name: tensor} of a safetensors file, memory-mapped: read from the disk only when used."""
    if not Path(path).exists():
        pickled = Path(path).with_name("pytorch_model.bin").exists()
        raise ValueError(f"{path} is missing" + (": pytorch_model.bin is a pickle and is not read; convert it to "
                                                 "safetensors" if pickled else ""))
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({error}): fetch it again") from None


def read_metadata(path):
    """The string metadata of a safetensors file that read_tensors has read."""
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def fingerprint(gpt2):
    """16 hexadecimal digits that tell a GPT-2 from another: a hash of its config and of some rows of every tensor."""
    digest = hashlib.sha256(repr(gpt2.config).encode())
    for p in gpt2.parameters():
        digest.update(p[::max(1, len(p) // 16)].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
