"""An oracle's file: safetensors, with the settings that it was trained with as JSON metadata."""

import json

from data.files import save_tensors
from data.hub import read_metadata, read_tensors

FORMAT = 2          # another for files that this code would read wrongly


def save_oracle(file, tensors, settings):
    """Writes {name: tensor} and {name: value} whole or not at all."""
    save_tensors(file, tensors, {"pathoracle": json.dumps({**settings, "format": FORMAT})})


def read_oracle(file):
    """Settings and tensors of an oracle file; ValueError where it is missing or none of ours."""
    tensors, metadata = read_tensors(file), read_metadata(file)
    try:
        settings = json.loads(metadata["pathoracle"])
        if settings["format"] != FORMAT:
            raise ValueError
        return settings, tensors
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file} is no oracle of this version: train one with train_oracle.py"
                         ) from None
