"""GPT-2's tokenizer, as a tiktoken.Encoding, from the two files that come with a checkpoint."""

from pathlib import Path

import tiktoken

from data.hub import FILES, read_json

EOT = "<|endoftext|>"
# GPT-2 cuts text into words before it merges bytes (encoder.py of the published GPT-2 code)
SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def byte_characters():
    """{character: byte}: in both files a byte that prints stands for itself, the n-th of the others is chr(256 + n)."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in prints]
    return {**{chr(b): b for b in prints}, **{chr(256 + n): b for n, b in enumerate(others)}}


def load_tokenizer(directory):
    """GPT-2's byte-level BPE (Radford et al. 2019, section 2.2) as a tiktoken.Encoding.

    tiktoken merges the pair that makes the token of the lowest id, which is GPT-2's rule only where ids are in the order
    of the merges; other vocabularies are refused. The files are not read by tiktoken.load: it caches them by their path.
    """
    path, merges_path = Path(directory) / "vocab.json", Path(directory) / "merges.txt"
    vocab = read_json(path)
    if not merges_path.exists():
        raise ValueError(f"{merges_path} is missing: a model is a directory with {', '.join(FILES)}")
    try:
        lines = merges_path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{merges_path} is damaged ({error}): fetch it again") from None
    if not all(type(i) is int and i >= 0 for i in vocab.values()) or len(set(vocab.values())) < len(vocab):
        raise ValueError(f"{path} is damaged (its ids are not distinct whole numbers): fetch it again")
    merges = [line.split() for line in lines if line and not line.startswith("#version")]
    byte_of = byte_characters()
    tokens = [*byte_of, *("".join(pair) for pair in merges)]
    ids = [vocab.get(token) for token in tokens]
    if not set("".join(tokens)) <= set(byte_of) or None in ids or EOT not in vocab or any(len(pair) != 2 for pair in merges):
        lacking = EOT if EOT not in vocab else "a byte or a merge of merges.txt"
        raise ValueError(f"{path} lacks {lacking}: vocab.json and merges.txt do not belong together, or are damaged")
    if ids[256:] != sorted(set(ids[256:])) or max(ids[:256]) > min(ids[256:], default=1 << 31):
        raise ValueError(f"{path}: ids are not in the order of merges.txt, as GPT-2's are; such a tokenizer is not supported")
    known = set(tokens)
    special = {token: i for token, i in vocab.items() if token not in known}
    for token, i in special.items():    # a token that one more merge would make is not a special one, unless it was added
        added = token == EOT or i > vocab[EOT] > max(ids)
        if not added and any(token[:cut] in known and token[cut:] in known for cut in range(1, len(token))):
            raise ValueError(f"{merges_path} lacks the merge that makes {token!r} of {path}: it is truncated, fetch it again")
    rank = dict(zip(tokens, ids))
    for pair in merges:                         # is the merge what merging by rank makes of its token?
        token, parts = "".join(pair), list("".join(pair))
        while len(parts) > 2:
            i = min(range(len(parts) - 1), key=lambda i: rank.get(parts[i] + parts[i + 1], 1 << 31))
            if rank.get(parts[i] + parts[i + 1], 1 << 31) >= rank[token]:
                break
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        if parts != pair:
            raise ValueError(f"{merges_path}: {' '.join(pair)} is not the order in which tiktoken merges; not supported")
    ranks = {bytes(byte_of[c] for c in token): i for token, i in zip(tokens, ids)}
    return tiktoken.Encoding(name=str(path), pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=special)
