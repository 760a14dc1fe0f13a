"""GPT-2 from safetensors, without transformers:  model, tokenizer = load_gpt2("data/mini")

Whatever cannot be loaded exactly is refused: every function here raises ValueError or OSError with
one line that says what is wrong and what to do.
"""

import hashlib
from dataclasses import fields, replace
from pathlib import Path

import torch

from data.hub import find, plain_names, read_json, read_tensors, weight_files
from data.hub import read_metadata as read_metadata
from data.tokenizer import load_tokenizer
from model import GPT2, GPT2Config


def load_gpt2(model, device="cpu"):
    """(GPT2, tiktoken.Encoding) of a directory in Hugging Face's layout, or a name (data/hub.py).

    The weights are frozen and float32. On the CPU a float32 file is used through its memory map.

    A vocabulary that is padded (to a multiple of 64, say) is cut to the tokenizer's: the other rows
    of wte are no tokens, so no answer may be one of them. transformers keeps them, in the softmax
    too: its perplexity is then that of a model that could say them, higher by a hair.
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
    return gpt2.to(device), tokenizer


def load_config(directory):
    """GPT2Config of config.json; refuses by its name a setting that model.py does not implement."""
    path = Path(directory) / "config.json"
    config = read_json(path)
    # the settings that change the computation, and the values with which model.py computes the same
    for name, *allowed in (("model_type", "gpt2"), ("scale_attn_weights", True),
                           ("activation_function", "gelu_new", "gelu_pytorch_tanh"),
                           ("scale_attn_by_inverse_layer_idx", False), ("pruned_heads", {}),
                           ("add_cross_attention", False), ("tie_word_embeddings", True),
                           ("quantization_config", None)):
        if config.get(name) is not None and config[name] not in allowed:
            raise ValueError(f"{path}: {name} = {config[name]!r} is not supported, only "
                             f"{allowed[0]!r}")
    # the other names under which transformers reads these sizes
    alias = {"n_embd": "hidden_size", "n_positions": "max_position_embeddings",
             "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    sizes = {}
    for field in fields(GPT2Config):
        name = field.name
        value = sizes[name] = config.get(name, config.get(alias.get(name), field.default))
        kind = (float, int) if name == "layer_norm_epsilon" else int
        if (not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < 1 << 31) \
                and not (name == "n_inner" and value is None):
            raise ValueError(f"{path}: {name} = {value!r} is not a positive number")
    if sizes["n_embd"] % sizes["n_head"]:
        raise ValueError(f"{path}: n_embd = {sizes['n_embd']} is not divisible by n_head = "
                         f"{sizes['n_head']}")
    return GPT2Config(**sizes)


def load_weights(directory, config):
    """GPT2 with the weights of the directory's safetensors files."""
    files = weight_files(Path(directory))
    found = plain_names([(path, *item) for path in files for item in read_tensors(path).items()])
    file, asks = files[0], f"config.json (n_layer = {config.n_layer})"
    head = found.pop("lm_head.weight", None)        # tied to wte: a file may hold either, or both
    if head is not None:
        found.setdefault("wte.weight", head)
    with torch.device("meta"):                  # shapes only: nothing is initialised in vain
        gpt2 = GPT2(config)
    state = {}
    for name, expected in gpt2.state_dict().items():
        key = name.replace("blocks.", "h.", 1)
        tensor = found.pop(key, None)
        if tensor is None:
            raise ValueError(f"{file} lacks {key}, which {asks} asks for")
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{file}: {key} is stored as {tensor.dtype}; only float16, bfloat16, "
                             "float32 and float64 are read")
        if ".c_" in name and tensor.ndim == 2:
            tensor = tensor.t()         # GPT-2 stores (in, out), a "Conv1D"; a view, no copy
        if tensor.shape != expected.shape:
            raise ValueError(f"{file}: {key} has the shape {tuple(tensor.shape)} as the model uses "
                             f"it, config.json asks for {tuple(expected.shape)}")
        state[name] = tensor.float()
        # the sum is one fast pass, and finite but for an overflow, where each number is looked at
        if not state[name].sum().isfinite() and not state[name].isfinite().all():
            raise ValueError(f"{file}: {key} holds numbers that are not finite: take another file")
    if found:
        raise ValueError(f"{file} holds {len(found)} tensors that {asks} does not know, such as "
                         f"{min(found)}")
    if head is not None and not torch.equal(head.float(), state["wte.weight"]):
        raise ValueError(f"{file}: lm_head.weight differs from wte.weight; an untied head is not "
                         "supported")
    gpt2.load_state_dict(state, assign=True)
    return gpt2.requires_grad_(False)


def fingerprint(gpt2):
    """16 hexadecimal digits that tell a GPT-2 from another: a hash of its config and of some rows
    of every tensor."""
    digest = hashlib.sha256(repr(gpt2.config).encode())
    for p in gpt2.parameters():
        digest.update(p[::max(1, len(p) // 16)].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
