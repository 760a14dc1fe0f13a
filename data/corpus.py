"""Text to train and judge on: load_tokens(text, tokenizer) -> (training ids, held-out ids).

`text` is one of

    docs         the long strings, mostly documentation, of the installed standard library, NumPy
                 and PyTorch (the default): English that is on every machine that can run this,
                 collected here and never stored in the repository
    wikitext-2   the raw WikiText-2 (Merity et al. 2016), downloaded once; the test set is held out
    FILE         any UTF-8 text file; the last 10% are held out
"""

import hashlib
import io
import json
import os
import platform
import sysconfig
import types
import warnings
import zipfile
import zlib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path

import numpy
import torch

from data.files import replace_file
from data.hub import download
from data.interrupt import interruptible, worker

CACHE = Path(__file__).parent / "cache"
MIN_CHARS = 200             # a shorter literal is seldom documentation
RECALL_WINDOWS = 192
RUN = 8                     # held-out and training documents are compared in runs of so many words
WIKITEXT_URL = "https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip"
WIKITEXT_SHA256 = "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"


def load_tokens(text, tokenizer, context=2):
    """(training ids, held-out ids), each a 1-D int64 tensor; end-of-text stands between documents.

    Raises ValueError or OSError, in words, where the text cannot be had, or where a side has less
    than one window of `context` tokens.
    """
    sides = []
    for name, documents in zip(("training", "held-out"), load_text(text), strict=True):
        ids = []
        for document in documents:      # one by one, for Ctrl-C amid tiktoken's threads can block
            ids += [*tokenizer.encode_ordinary(document), tokenizer.eot_token]
        ids = ids[:-1]
        if len(ids) < context:
            raise ValueError(f"the {name} side of {text} has {len(ids)} tokens, less than one "
                             f"window of {context}: give a longer text or a smaller --context")
        sides.append(torch.tensor(ids))
    return tuple(sides)


def load_text(text):
    """(training documents, held-out documents), two lists of strings."""
    if text == "docs":
        return load_docs()
    if text == "wikitext-2":
        return load_wikitext()
    if not os.path.exists(text):
        raise ValueError(f"no such text: {text} (a file, or one of: docs, wikitext-2)")
    if not os.path.isfile(text):        # a pipe gives its text once; a judgement must find it again
        kind = "directory" if os.path.isdir(text) else "pipe or a device"
        raise ValueError(f"{text} is a {kind}: give a text file, or one of: docs, wikitext-2")
    try:
        whole = Path(text).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} is not UTF-8 text (byte {error.start}): convert it, or give "
                         "another file") from None
    if not whole.strip():
        raise ValueError(f"{text} is empty: give a file with text in it")
    cut = len(whole) * 9 // 10
    return [whole[:cut]], [whole[cut:]]


def cached(name, good=os.path.exists):
    """Where a text is kept: data/cache or, where that is read-only, the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    paths = [CACHE / name] + os.path.isabs(home) * [Path(home, "pathoracle", name)]
    for path in paths:
        if good(path):
            return path
    for path in paths:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        if os.access(path.parent, os.W_OK):
            break
    return path


def load_wikitext():
    path = cached("wikitext-2-raw-v1.zip")
    if not path.exists():
        download(WIKITEXT_URL, path, WIKITEXT_SHA256)
    try:
        with zipfile.ZipFile(path) as archive:
            sides = [archive.read(f"wikitext-2-raw/wiki.{part}.raw") for part in ("train", "test")]
        texts = [io.StringIO(side.decode("utf-8")) for side in sides]       # ends lines at \n alone
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, to fetch it again") from None
    # "documents joined by blank lines", as published perplexities have it: 287,644 tokens of
    # GPT-2's in the test set
    return tuple(["\n\n".join(line if line.strip() else "" for line in text)] for text in texts)


def load_docs():
    packages = {"python": sysconfig.get_paths()["stdlib"], "numpy": Path(numpy.__file__).parent,
                "torch": Path(torch.__file__).parent}
    versions = (f"python-{platform.python_version()} numpy-{numpy.__version__} "
                f"torch-{torch.__version__}")
    # 2: held-out strings without words are dropped
    path = cached(f"docs 2 {versions}.json", good=read_docs)
    if sides := read_docs(path):
        return sides
    print(f"collecting the documentation strings of {versions} ...", flush=True)
    sides = split_docs(packages)
    try:
        replace_file(path, json.dumps(sides).encode())
    except OSError as error:
        print(f"they are not kept for the next time: {error}", flush=True)
    return sides


def read_docs(path):
    """What load_docs has written to a file; None where there is no such file, or a damaged one."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        sides = train, heldout = json.loads(path.read_bytes())
        if all(type(side) is list and set(map(type, side)) == {str} for side in (train, heldout)):
            return sides


def split_docs(packages):
    """(training documents, held-out documents) of {name: directory}.

    Whole files go to one side or the other: a document's neighbours share its words, and would
    give it away.
    """
    files, heldout_file = [], []
    for package, root in packages.items():
        # by parts, for on Windows paths are compared without regard to case
        for path in sorted(Path(root).rglob("*.py"), key=lambda path: path.parts):
            name = path.relative_to(root)
            if "site-packages" not in name.parts and "dist-packages" not in name.parts:
                files.append(path)
                digest = hashlib.sha256(f"{package}/{name.as_posix()}".encode()).digest()
                number = digest[0] * 256 + digest[1]
                heldout_file.append(number < 65536 * 5 // 100)      # 5% of the files
    documents = []
    try:
        with interruptible() as interrupted, ProcessPoolExecutor(initializer=worker) as pool:
            for its in pool.map(literals, files, chunksize=16):
                documents.append(its)
                if interrupted:
                    pool.shutdown(cancel_futures=True)
                    break
    except BrokenProcessPool:           # which Ctrl-C brings about, too
        if not interrupted:
            raise OSError("a process that reads files was killed: is memory short?") from None
    if interrupted:
        raise KeyboardInterrupt
    sides = [dict.fromkeys(d for ds, h in zip(documents, heldout_file, strict=True) if h == side
                           for d in ds) for side in (0, 1)]
    # a test's string of one character 4,000 times is no English, and would be 8% of the held-out
    # tokens
    worded = [d for d in sides[1] if sum(map(str.isspace, d)) * 25 > len(d)]
    return list(sides[0]), drop_copies(worded, sides[0])


def literals(path):
    """The string literals of at least MIN_CHARS characters in a Python file, in order."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # optimize=0: under python -OO documentation strings would be stripped
            code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
        return []               # some files of the standard library's tests are broken on purpose
    found = []

    def walk(constant):
        if isinstance(constant, str) and len(constant) >= MIN_CHARS:
            # a lone surrogate is no text
            found.append(constant.encode("utf-8", "ignore").decode("utf-8"))
        elif isinstance(constant, types.CodeType):
            walk(constant.co_consts)
        elif isinstance(constant, tuple):
            for part in constant:
                walk(part)

    walk(code)
    return found


def drop_copies(heldout, train):
    """The held-out documents of which at most a fifth of the 8-word runs are in training ones."""
    def runs(document):
        words = document.split()
        return {" ".join(words[i:i + RUN]) for i in range(max(1, len(words) - RUN + 1))}

    ours = {document: runs(document) for document in heldout}
    all_ours = set().union(*ours.values())
    seen = set()
    for document in train:
        seen |= runs(document) & all_ours
    return [document for document, its in ours.items() if len(its & seen) <= len(its) / 5]


def sample_windows(ids, batch_size, length, seed, step):
    """(batch_size, length) windows of 1-D ids at random places that depend on seed and step alone.

    So a run that was cut goes on with the very batches it would have had.
    """
    return draw_windows(ids, batch_size, length, seed, step)[0]


def draw_windows(ids, batch_size, length, seed, step):
    """What sample_windows gives, and the generator for whatever else is to be drawn."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(ids) - length + 1, (batch_size, 1), generator=generator)
    return ids[starts + torch.arange(length)], generator


def training_windows(ids, batch_size, length, seed, step):
    """(batch_size, length) windows at random places, half of which hold a passage twice.

    A passage is a sixteenth to two fifths of the window, one in eight made of tokens drawn at
    random; other text stands between. All depends on seed and step alone.
    """
    windows, generator = draw_windows(ids, batch_size, length, seed, step)

    def draw(low, high):
        return torch.randint(low, high + 1, (), generator=generator).item()

    for window in windows:
        if draw(0, 1):
            n = draw(length // 16, length * 2 // 5)
            first = draw(0, length - 2 * n)
            again = draw(first + n, length - n)
            if draw(1, 8) == 1:
                window[first:first + n] = ids[torch.randint(len(ids), (n,), generator=generator)]
            window[again:again + n] = window[first:first + n]
    return windows


def windows(ids, context):
    """1-D ids -> windows without overlap: batches (B, context) of about 2,048 tokens, then what
    is left."""
    whole, batch_size = len(ids) // context * context, max(1, 2048 // context)
    batches = list(ids[:whole].view(-1, context).split(batch_size)) if whole else []
    return batches + [ids[None, whole:]] if len(ids) - whole > 1 else batches


def recall_windows(ids, context):
    """Windows of held-out text with a passage of it again, which begins at a quarter of them:
    of 256 tokens, 192 of text, then tokens 64 to 111 again. -> batches (B, T)"""
    start, passage = context // 4, max(2, context * 3 // 16)
    text = sample_windows(ids, RECALL_WINDOWS, context * 3 // 4, seed=0, step=0)
    both = torch.cat([text, text[:, start:start + passage]], dim=1)
    return both.split(max(1, 2048 // context))
