"""Where the files of a model are: find("gpt2") -> a directory that holds them, fetched first if need be."""

import http.client
import json
import os
import urllib.request
from pathlib import Path

import torch

REPOSITORIES = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
REPOSITORIES["distilgpt2"] = "distilbert/distilgpt2"
FILES = ("config.json", "vocab.json", "merges.txt", "model.safetensors")


def find(model):
    """The directory of a model: itself, a Hugging Face cache that has it whole, or our own cache (downloads what lacks)."""
    for directory in (Path(model), Path(__file__).parent.parent / model):       # data/mini is found from anywhere
        if directory.is_dir():
            return directory
    if model not in REPOSITORIES:
        raise ValueError(f"no such model: {model} (give a directory, or one of: {', '.join(REPOSITORIES)})")
    environ, home_cache = os.environ, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = Path(environ.get("HF_HUB_CACHE") or Path(environ.get("HF_HOME") or home_cache / "huggingface") / "hub")
    for repository in (REPOSITORIES[model], model):         # older caches know gpt2 without its organisation
        for snapshot in hub.glob(f"models--{repository.replace('/', '--')}/snapshots/*"):
            if all((snapshot / name).exists() for name in FILES):
                return snapshot
    directory = home_cache / "pathoracle" / model
    directory.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        endpoint = (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        if not (directory / name).exists():
            download(f"{endpoint}/{REPOSITORIES[model]}/resolve/main/{name}", directory / name)
    return directory


def download(url, path, sha256=None):
    """Fetches url to path with a progress bar; path appears only once it has the size (and sum) that it must have."""
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as reply:
            size = int(reply.headers["Content-Length"] or -1)
        print(f"downloading {url}")
        torch.hub.download_url_to_file(url, str(part), hash_prefix=sha256)
        if size < 0 and not sha256:
            raise ValueError("the server does not say how long the file is")
        if size >= 0 and part.stat().st_size != size:       # torch.hub takes a cut connection for the end
            raise ValueError(f"{part.stat().st_size} bytes came instead of {size}")
        os.replace(part, path)
    except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
        raise OSError(f"could not download {url}: {error}; try again, or put the file at {path} yourself") from error
    finally:
        part.unlink(missing_ok=True)


def read_json(path):
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: a model is a directory with {', '.join(FILES)}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged (no JSON object): fetch it again")
    return value
