"""Files of our own: written whole or not at all, tensors only."""

import os
from pathlib import Path

from safetensors.torch import save


def replace_file(path, content):
    """Writes bytes whole or not at all: what stood at `path` stays there until the new file is complete."""
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def save_tensors(path, tensors, metadata):
    """A safetensors file with {string: string} metadata."""
    replace_file(path, save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, metadata))


def optimizer_tensors(module, optimizers):
    """The optimizers' state as named tensors, so that it can stand in a safetensors file: nothing is ever pickled."""
    return {f"optimizer.{key}.{name}": value for name, p in module.named_parameters()
            for optimizer in optimizers for key, value in optimizer.state.get(p, {}).items()}


def restore_optimizers(module, optimizers, tensors):
    """The reverse of optimizer_tensors."""
    for name, p in module.named_parameters():
        for optimizer in optimizers:
            if any(p is q for group in optimizer.param_groups for q in group["params"]):
                optimizer.state[p] = {full.split(".")[1]: tensor.to(p.device, copy=True) for full, tensor in tensors.items()
                                      if full.startswith("optimizer.") and full.split(".", 2)[2] == name}
