"""The files of a model: find("gpt2") -> a directory that holds them, fetched if need be.

A model is a directory as Hugging Face lays it out: config.json; vocab.json and merges.txt, or
tokenizer.json; model.safetensors, or the shards that model.safetensors.index.json lists.
"""

import http.client
import json
import os
import re
import urllib.request
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

REPOSITORIES = {name: f"openai-community/{name}"
                for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
REPOSITORIES["distilgpt2"] = "distilbert/distilgpt2"
FILES = ("config.json", "vocab.json", "merges.txt", "model.safetensors")
# what torch.compile, DataParallel and training frameworks put before the names of all tensors
WRAPPERS = ("_orig_mod.", "module.", "model.")


def find(model):
    """The directory of a model: itself, a Hugging Face cache that has it whole, or our own cache.

    A name is one of REPOSITORIES or owner/name; what our own cache lacks is downloaded.
    """
    here = Path(model), Path(__file__).parent.parent / model    # data/mini is found from anywhere
    for directory in here:
        if directory.is_dir():
            return directory
    # a slip in the path of a directory, such as data/mni, is no name to ask the hub for
    owned = re.fullmatch(r"[a-zA-Z0-9][\w.-]*/\w[\w.-]*", model, re.ASCII)
    if model not in REPOSITORIES and (not owned or any(path.parent.is_dir() for path in here)):
        raise ValueError(f"no such model: {model} (give a directory, owner/name of a repository, "
                         f"or one of: {', '.join(REPOSITORIES)})")
    repository = REPOSITORIES.get(model, model)
    home_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = Path(os.environ.get("HF_HUB_CACHE")
               or Path(os.environ.get("HF_HOME") or home_cache / "huggingface") / "hub")
    # older caches know gpt2 without its organisation
    caches = [hub / f"models--{name.replace('/', '--')}" for name in (repository, model)]
    for cache in sorted(caches, key=lambda cache: not (cache / "refs" / "main").exists()):
        for snapshot in snapshots(cache):
            if is_whole(snapshot):
                return snapshot
    directory = home_cache / "pathoracle" / model
    if not is_whole(directory):
        endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        fetch(f"{endpoint}/{repository}/resolve/main", directory, model in REPOSITORIES)
    return directory


def snapshots(cache):
    """The snapshot that refs/main names; where nothing was fetched by that name, newest first."""
    main = cache / "refs" / "main"
    if main.exists():
        return [cache / "snapshots" / main.read_text().strip()]
    return sorted(cache.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)


def is_whole(directory):
    def has(*names):
        return all((directory / name).exists() for name in names)

    return (has("config.json") and (has("tokenizer.json") or has("vocab.json", "merges.txt"))
            and all(path.exists() for path in weight_files(directory)))


def weight_files(directory):
    """model.safetensors, or the shards that model.safetensors.index.json lists."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map \
            or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} is damaged (no weight_map of file names): fetch it again")
    return [directory / name for name in sorted(set(weight_map.values()))]


def fetch(address, directory, published):
    """Downloads the files of a model that directory lacks."""
    directory.mkdir(parents=True, exist_ok=True)

    def get(*names):
        for name in names:
            if not (directory / name).exists():
                download(f"{address}/{name}", directory / name)

    def get_either(names, others):
        try:
            get(*names)
        except OSError as error:
            if getattr(error.__cause__, "code", None) != 404:
                raise
            try:
                get(*others)
            except OSError:
                raise error from None           # neither is there: name what was asked for first

    get("config.json")
    # a fine-tune may have added tokens, which only tokenizer.json is sure to hold
    two_files, one_file = ("vocab.json", "merges.txt"), ("tokenizer.json",)
    get_either(*((two_files, one_file) if published else (one_file, two_files)))
    get_either(["model.safetensors"], ["model.safetensors.index.json"])
    get(*(path.name for path in weight_files(directory)))


def download(url, path, sha256=None):
    """Fetches url to path with a progress bar.

    path appears only once it has the size (and sum) that it must have.
    """
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as reply:
            size = int(reply.headers["Content-Length"] or -1)
        print(f"downloading {url}")
        torch.hub.download_url_to_file(url, str(part), hash_prefix=sha256)
        if size < 0 and not sha256:
            raise ValueError("the server does not say how long the file is")
        if size >= 0 and part.stat().st_size != size:   # to torch.hub, a cut connection is the end
            raise ValueError(f"{part.stat().st_size} bytes came instead of {size}")
        os.replace(part, path)
    except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
        raise OSError(f"could not download {url}: {error}; try again, or put the file at {path} "
                      "yourself") from error
    finally:
        part.unlink(missing_ok=True)


def read_json(path):
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: a model is a directory with {', '.join(FILES)}"
                         ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged (no JSON object): fetch it again")
    return value


def read_config(directory, defaults):
    """{size: value} for the sizes in defaults; refuses what model.py does not compute."""
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
    for name, default in defaults.items():
        value = sizes[name] = config.get(name, config.get(alias.get(name), default))
        kind = (float, int) if name == "layer_norm_epsilon" else int
        if (not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < 1 << 31) \
                and not (name == "n_inner" and value is None):
            raise ValueError(f"{path}: {name} = {value!r} is not a positive number")
    if sizes["n_embd"] % sizes["n_head"]:
        raise ValueError(f"{path}: n_embd = {sizes['n_embd']} is not divisible by n_head = "
                         f"{sizes['n_head']}")
    return sizes


def read_tensors(path):
    """{name: tensor} of a safetensors file, memory-mapped: read from the disk only when used."""
    if not Path(path).is_file():
        pickled = Path(path).with_name("pytorch_model.bin").exists()
        raise ValueError(f"{path} is {'a directory' if Path(path).is_dir() else 'missing'}"
                         + pickled * ": pytorch_model.bin is a pickle and is not read; convert it "
                         "to safetensors")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({error}): fetch it again") from None


def read_metadata(path):
    """The string metadata of a safetensors file that read_tensors has read."""
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def read_model(directory):
    """{name in GPT-2's published file: float32 tensor} of the directory's safetensors files.

    Refused: another type of number, an output matrix of its own, names that are there twice.
    """
    files = weight_files(Path(directory))
    found = plain_names([(path, *item) for path in files for item in read_tensors(path).items()])
    for name, tensor in found.items():
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{files[0]}: {name} is stored as {tensor.dtype}; only float16, "
                             "bfloat16, float32 and float64 are read")
        found[name] = tensor.float()
    head = found.pop("lm_head.weight", None)        # tied to wte: a file may hold either, or both
    if head is not None and not torch.equal(head, found.setdefault("wte.weight", head)):
        raise ValueError(f"{files[0]}: lm_head.weight differs from wte.weight (an untied head is "
                         "not supported) or is not finite")
    return found


def plain_names(tensors):
    """{name in GPT-2's published file: tensor} of [(path, name, tensor)], without causal masks."""
    names = [name for _, name, _ in tensors]
    while wrapper := next((w for w in WRAPPERS if any(name.startswith(w) for name in names)), None):
        bare = [name for name in names if not name.startswith(wrapper)]
        if bare:
            raise ValueError(f"{tensors[0][0]}: some names begin with {wrapper!r}, {bare[0]} does "
                             "not: these are not the tensors of one model")
        names = [name.removeprefix(wrapper) for name in names]
    found = {}
    for name, (path, _, tensor) in zip(names, tensors, strict=True):
        name = name.removeprefix("transformer.")
        if name in found:
            raise ValueError(f"{path} holds {name} a second time, with and without a prefix or in "
                             "two shards")
        if not name.endswith((".attn.bias", ".attn.masked_bias")):      # masks that old files hold
            found[name] = tensor
    return found


def refuse_not_finite(gpt2, directory):
    """Has the first forward pass refuse weights that are not finite, by their name.

    That pass reads them all anyway; to read them here as well would double the time to load.
    """
    unchecked = dict(gpt2.named_parameters())

    def check(*_):
        for name, p in unchecked.items():       # a sum is one fast pass, but can overflow
            if not p.sum().isfinite() and not p.isfinite().all():
                name = name.replace("blocks.", "h.", 1)
                raise ValueError(f"{directory}: {name} is not finite; take another file")
        unchecked.clear()

    gpt2.wte.register_forward_pre_hook(check)
