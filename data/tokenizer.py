"""GPT-2's tokenizer, as a tiktoken.Encoding, from the files that come with a checkpoint."""

from pathlib import Path

import numpy as np
import tiktoken

from data.hub import FILES, read_json

EOT = "<|endoftext|>"
# GPT-2 cuts text into words before it merges bytes (encoder.py of the published GPT-2 code)
SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def byte_characters():
    """{character: byte}, as the files spell bytes.

    A byte that prints stands for itself, the n-th of the others is chr(256 + n).
    """
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in prints]
    return {**{chr(b): b for b in prints}, **{chr(256 + n): b for n, b in enumerate(others)}}


def load_tokenizer(directory):
    """GPT-2's byte-level BPE (Radford et al. 2019, section 2.2) as a tiktoken.Encoding.

    tiktoken merges the pair that makes the token of the lowest id, which is GPT-2's rule only
    where ids are in the order of the merges; other vocabularies are refused. The files are not
    read by tiktoken.load: it caches them by their path.
    """
    directory = Path(directory)
    settings = directory / "tokenizer_config.json"
    if settings.exists() and read_json(settings).get("add_prefix_space"):
        raise ValueError(f"{settings}: add_prefix_space = True is not supported")
    path = merges_path = directory / "tokenizer.json"
    if path.exists():
        vocab, merges, added = read_one_file(path)
    else:
        path, merges_path = directory / "vocab.json", directory / "merges.txt"
        vocab, merges, added = read_two_files(path, merges_path)
    every = vocab | added
    ids = every.values()
    # an id without a token would be one that the model can answer with and nobody can read
    if not all(type(i) is int for i in ids) or sorted(ids) != list(range(len(ids))) \
            or any(vocab.get(token, i) != i for token, i in added.items()):
        raise ValueError(f"{path} is damaged (its {len(ids)} ids are not the numbers from 0 to "
                         f"{len(ids) - 1}, each once): fetch it again")

    byte_of = byte_characters()
    tokens = [*byte_of, *(pair.replace(" ", "") for pair in merges)]
    ids = [vocab.get(token) for token in tokens]
    if None in ids or EOT not in every or not set("".join(tokens)) <= byte_of.keys():
        lacking = EOT if EOT not in every else "a byte, or what a merge makes"
        raise ValueError(f"{path} lacks {lacking}: its vocabulary and the merges of "
                         f"{merges_path.name} do not belong together, or are damaged")
    if ids[256:] != sorted(set(ids[256:])) or max(ids[:256]) > min(ids[256:], default=1 << 31):
        raise ValueError(f"{path}: ids are not in the order of {merges_path.name}, as GPT-2's are; "
                         "such a tokenizer is not supported")
    rank = dict(zip(tokens, ids, strict=True))
    special = {token: i for token, i in every.items() if token not in rank}
    for token in special.keys() - added.keys():     # would one more merge make it?
        if token != EOT and not every[token] > every[EOT] > max(ids) \
                and any(token[:cut] in rank and token[cut:] in rank
                        for cut in range(1, len(token))):
            raise ValueError(f"{merges_path} lacks the merge that makes {token!r} of {path}: it is "
                             "truncated, fetch it again")
    check_merges(merges_path, merges, rank, ids[256:])
    # Latin-1 writes the characters 0 to 255 as the bytes 0 to 255
    spell = {ord(character): byte for character, byte in byte_of.items()}
    ranks = {token.translate(spell).encode("latin-1"): i for token, i in rank.items()}
    return tiktoken.Encoding(name=str(path), pat_str=SPLIT, mergeable_ranks=ranks,
                             special_tokens=special)


def check_merges(path, merges, rank, ids):
    """Refuses merges of which GPT-2's BPE, which merges listed pairs, does not make each token.

    tiktoken merges any two neighbours whose bytes are a token's. That is the same where the merge
    (a, b) is all that can end in the token ab, that is: where the bytes of ab, merged in the order
    of the list, come to be a and b. They do unless another merge takes the end of a and the start
    of b first. So undo the merges inside a and b, the latest first, and look at the two parts that
    meet in the middle: do they make a token before the merge that was just undone?
    """
    n = 1 + max(rank.values())
    ids = np.array(ids, dtype=np.int64)
    halves = " ".join(merges).split(" ") if merges else []
    a, b = np.array([rank.get(half, n) for half in halves], dtype=np.int64).reshape(-1, 2).T
    bad = (a >= ids) | (b >= ids)               # a part that is made later, or never
    left, right = np.full((2, n + 1), -1)       # of each id the pair that makes it, -1 for bytes
    left[ids], right[ids] = a, b
    order = np.argsort(a * n + b)
    pairs, made = (a * n + b)[order], ids[order]
    at = np.flatnonzero(~bad)                   # the merges still looked at, all in one go
    a, b = a[at], b[at]
    while len(at):
        on = left[np.maximum(a, b)] >= 0
        at, a, b = at[on], a[on], b[on]
        undo_a = a > b                          # of equal merges, the left one comes first
        before = np.where(undo_a, a, b + 1)     # what is made earlier gets ahead of it
        a, b = np.where(undo_a, right[a], a), np.where(undo_a, b, left[b])
        found = np.minimum(np.searchsorted(pairs, a * n + b), len(pairs) - 1)
        bad[at] |= (pairs[found] == a * n + b) & (made[found] < before)
    if bad.any():
        raise ValueError(f"{path}: {merges[bad.argmax()]} is not the order in which tiktoken "
                         "merges; such a tokenizer is not supported")


def read_two_files(path, merges_path):
    """(vocabulary, merges as "a b", added tokens) of vocab.json, merges.txt, added_tokens.json."""
    vocab, added_path = read_json(path), path.with_name("added_tokens.json")
    if not merges_path.exists():
        raise ValueError(f"{merges_path} is missing: a model is a directory with "
                         f"{', '.join(FILES)}")
    try:
        lines = merges_path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{merges_path} is damaged ({error}): fetch it again") from None
    merges = [line.rstrip() for line in lines if line and not line.startswith("#version")]
    if not all(pair.count(" ") == 1 for pair in merges):
        raise ValueError(f"{merges_path} is damaged (a line is no pair): fetch it again")
    return vocab, merges, read_json(added_path) if added_path.exists() else {}


def read_one_file(path):
    """The same of tokenizer.json; refuses what GPT-2's tokenizer does not do, by its name.

    The other things that the file may say change no id (its truncation and padding are those of
    the last call before it was saved).
    """
    file = read_json(path)
    for part, name, allowed in (("model", "type", (None, "BPE")),
                                ("model", "dropout", (None, 0)),
                                ("model", "continuing_subword_prefix", (None, "")),
                                ("model", "end_of_word_suffix", (None, "")),
                                ("normalizer", "type", (None,)),
                                ("pre_tokenizer", "type", ("ByteLevel",)),
                                ("pre_tokenizer", "add_prefix_space", (False,)),
                                ("pre_tokenizer", "use_regex", (None, True)),
                                ("post_processor", "type",
                                 (None, "ByteLevel", "TemplateProcessing")),
                                ("post_processor", "special_tokens", (None, {})),
                                ("decoder", "type", (None, "ByteLevel"))):
        section = file.get(part) or {}
        value = section.get(name) if isinstance(section, dict) else section
        if value not in allowed:
            raise ValueError(f"{path}: {part}.{name} = {value!r} is not what GPT-2's tokenizer "
                             "does; not supported")
    try:
        vocab, merges = file["model"]["vocab"], file["model"]["merges"]
        merges = [m if isinstance(m, str) else " ".join(m) for m in merges]
        added = {token["content"]: token["id"] for token in file.get("added_tokens") or []}
        if not isinstance(vocab, dict) or not all(isinstance(token, str) for token in added) \
                or not all(pair.count(" ") == 1 for pair in merges):
            raise ValueError("no vocabulary, or a token is no text, or a merge no pair")
        return vocab, merges, added
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): fetch it again") from None
