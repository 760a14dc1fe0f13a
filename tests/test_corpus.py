"""data/corpus.py: what is training text and what is held out, and how it becomes tokens."""

import hashlib
import http.server
import io
import json
import os
import random
import shutil
import string
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from tiny import BYTES, EOT_ID, write_checkpoint

from data import corpus
from data.corpus import load_text, load_tokens, sample_windows, split_docs, training_windows
from load_weights import load_gpt2


def made_up(n_words, seed):
    """A text of n words of seven letters each, that hardly occur anywhere else."""
    choose = random.Random(seed)
    return " ".join("".join(choose.choices(string.ascii_lowercase, k=7)) for _ in range(n_words))


# ---- a text file ----

def test_the_last_tenth_of_a_file_is_held_out(tmp_path):
    whole = "\n" + made_up(500, 0) + "ä\r\n"
    (tmp_path / "file").write_bytes(whole.encode())
    [train], [heldout] = load_text(tmp_path / "file")
    assert (train + heldout).replace("\r\n", "\n") == whole.replace("\r\n", "\n")
    assert len(heldout) == pytest.approx(len(whole) / 10, abs=1)


@pytest.mark.parametrize("content, complaint", [(b"", "empty"), (b" \n\t ", "empty"),
                                                (b"caf\xe9 " * 99, "not UTF-8")])
def test_files_without_text_are_refused(tmp_path, content, complaint):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        load_text(tmp_path / "file")


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="directory"):
        load_text(tmp_path)
    with pytest.raises(ValueError, match="no such text"):
        load_text(tmp_path / "nowhere")
    if os.name == "posix":
        os.mkfifo(tmp_path / "pipe")
        for place in (tmp_path / "pipe", "/dev/zero"):          # neither is waited for nor read on
            with pytest.raises(ValueError, match="pipe or a device"):
                load_text(place)


# ---- documentation strings ----

def split(root, files):
    """split_docs of a package of these files, {name: content}"""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            content = content.encode("utf-8", "surrogatepass")
        (root / name).write_bytes(content)
    return split_docs({"package": root})


def literal(text):
    return f"x = {text!r}\n"


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """(names of training files, of held-out ones): found by trying, since a hash decides."""
    files = {f"{n % 7}/{n}.py": literal(made_up(30, n)) for n in range(300)}
    train, heldout = split(tmp_path_factory.mktemp("package"), files)
    # each is on one side
    assert sorted(train + heldout) == sorted(made_up(30, n) for n in range(300))
    return [[name for name, content in files.items() if content[5:-2] in side]
            for side in (train, heldout)]


def test_about_one_file_in_twenty_is_held_out(names):
    assert len(names[0]) + len(names[1]) == 300
    assert 5 <= len(names[1]) <= 30


def test_files_go_whole_to_one_side(names, tmp_path):
    both = names[0][:9], names[1][:3]
    files = {name: f"def f():\n    {made_up(30, name)!r}\n"
                   f"    class C:\n        {made_up(30, name + '2')!r}\n"
                   f"x = [{{'a': ({made_up(30, name + '3')!r}, 1)}}]\n" for name in sum(both, [])}
    for side, its in zip(split(tmp_path, files), both, strict=True):
        assert sorted(side) == sorted(made_up(30, name + n) for name in its for n in ("", "2", "3"))


def test_the_split_is_the_same_each_time_and_everywhere(names, tmp_path):
    files = {name: literal(made_up(30, name)) for name in names[0][:20] + names[1][:4]}
    first = split(tmp_path / "here", files)
    assert first[0] and first[1]
    assert split_docs({"package": tmp_path / "here"}) == first
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert split_docs({"package": tmp_path / "there"}) == first


def test_heldout_documents_that_training_text_gives_away_are_dropped(names, tmp_path):
    documents = [made_up(47, f"heldout {n}") for n in range(5)]         # of 40 runs of 8 words
    words = [document.split() for document in documents]
    train = [
        " ".join(words[1][:15]),                                # 8 of the runs, a fifth: kept
        "a\n    " + "\n    ".join(words[2][-16:]) + " b",       # 9, whatever their layout: dropped
        " ".join(" ".join(words[3][n:n + 8]) + f" {n}" for n in range(9)),      # 9, apart: dropped
        " ".join(" ".join(words[4][n:n + 7]) + f" {n}" for n in range(41))]     # 7 words each: kept
    files = {name: literal(text + "\n" + made_up(40, name))
             for name, text in zip(names[0][:4], train, strict=True)}
    files |= {name: literal(text) for name, text in zip(names[1][:5], documents, strict=True)}
    assert sorted(split(tmp_path, files)[1]) == sorted([*documents[:2], documents[4]])


def test_a_heldout_string_without_words_is_dropped(names, tmp_path):
    # what has more than one space in 25 stays
    heldout = [made_up(40, "a"), ("x" * 22 + " ") * 9, ("y" * 26 + " ") * 9, "\uffff" * 4000]
    files = {name: literal(text) for name, text in zip(names[1][:4], heldout, strict=True)}
    files[names[0][0]] = literal("\ufffe" * 4000)               # the training side keeps its own
    train, rest = split(tmp_path, files)
    assert sorted(rest) == sorted(heldout[:2]) and train == ["\ufffe" * 4000]


def test_the_training_side_holds_nothing_that_is_held_out(names, tmp_path):
    both = made_up(40, "both")
    files = {name: literal(made_up(40, name)) + literal(both)
             for name in names[0][:5] + names[1][:5]}
    train, heldout = split(tmp_path, files)
    assert both in train and both not in heldout
    assert len(heldout) == 5 and not set(train) & set(heldout)


@pytest.mark.parametrize("side", [0, 1])
def test_duplicates_come_once(names, tmp_path, side):
    text = made_up(40, "twice")
    files = {name: literal(text) + f"def f():\n    {text!r}\n" for name in names[side][:3]}
    assert split(tmp_path, files)[side] == [text]


def test_short_literals_are_left_out(names, tmp_path):
    short, long = "s" * 199, "l" * 200
    assert split(tmp_path, {names[0][0]: literal(short) + literal(long)})[0] == [long]


def test_broken_files_are_skipped(names, tmp_path):
    text = literal(made_up(40, 0))
    broken = [text + "def f(:\n", text.encode() + b"\0", b"y = '\xff'\n" + text.encode(),
              "# coding: no-such\n" + text, text + "(" * 100_000]
    files = dict(zip(names[0][:6], [*broken, text], strict=True))
    files |= {"readme.txt": literal(made_up(40, 1)),
              "site-packages/other.py": literal(made_up(40, 2))}
    (tmp_path / "directory.py").mkdir(parents=True)
    assert split(tmp_path, files) == ([made_up(40, 0)], [])


def test_half_a_surrogate_is_no_text(names, tmp_path):
    train, _ = split(tmp_path, {names[0][0]: "x = '" + "a" * 150 + "\\ud800" + "b" * 150 + "'\n"})
    assert train == ["a" * 150 + "b" * 150]


@pytest.mark.parametrize("switch", [["-OO"], ["-W", "error"], ["-X", "dev"]], ids=" ".join)
def test_the_interpreters_switches_do_not_change_the_text(names, tmp_path, switch):
    files = {name: f"def f():\n    {made_up(30, name)!r}\n    assert '\\d', {made_up(30, 1)!r}\n"
             for name in names[0][:3]}
    here = split(tmp_path / "package", files)
    code = ("import json; from pathlib import Path; from data import corpus\n"
            "if __name__ == '__main__':\n"
            "    print(json.dumps(corpus.split_docs({'package': Path('package')})))")
    (tmp_path / "program.py").write_text(code)
    there = subprocess.run([sys.executable, *switch, "program.py"], cwd=tmp_path, text=True,
                           env={**os.environ, "PYTHONPATH": str(Path(corpus.__file__).parents[1])},
                           stdout=subprocess.PIPE, timeout=60)
    assert len(here[0]) == 4 and json.loads(there.stdout) == list(here)


def test_the_order_of_the_text_does_not_depend_on_the_file_system(names, tmp_path, monkeypatch):
    files = {name: literal(made_up(40, name)) for name in names[0][:20]}
    here, rglob = split(tmp_path, files), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda path, glob: reversed([*rglob(path, glob)]))
    assert split_docs({"package": tmp_path}) == here


# ---- where the text is kept ----

@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Stands for split_docs, and counts how often it is called; both caches are empty."""
    def split_docs(packages):
        split_docs.calls += 1
        return ["a document"], ["another"]

    split_docs.calls = 0
    monkeypatch.setattr(corpus, "split_docs", split_docs)
    monkeypatch.setattr(corpus, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return split_docs


def assert_docs_are_right():
    assert [*map(list, corpus.load_docs())] == [["a document"], ["another"]]


@pytest.mark.parametrize("content", [
    b"", b'[["a document"], ["anot', b'[["x"]]', b'[["x"], []]', b'[["x"], [1]]',
    b'{"a": 1, "b": 2}', b"7", b"[" * 100_000, b"\xff", b'["x", "y"]'],
    ids=lambda content: repr(content[:20]))
def test_a_damaged_or_foreign_file_of_the_text_is_made_anew(kept, content):
    assert_docs_are_right()
    [file] = corpus.CACHE.iterdir()
    whole = file.read_bytes()
    file.write_bytes(content)
    for _ in range(2):
        assert_docs_are_right()
    assert kept.calls == 2 and file.read_bytes() == whole and [*corpus.CACHE.iterdir()] == [file]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_read_only_installation_keeps_the_text_in_the_users_cache(kept, tmp_path, damaged,
                                                                    monkeypatch):
    if damaged:                                         # one there, which cannot be made anew
        assert_docs_are_right()
        [file] = corpus.CACHE.iterdir()
        file.write_bytes(b"damaged")
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != corpus.CACHE and may(path, mode))
    before = kept.calls
    for _ in range(2):
        assert_docs_are_right()
    assert kept.calls == before + 1
    assert len([*(tmp_path / "user" / "pathoracle").iterdir()]) == 1


def test_a_text_that_can_be_kept_nowhere_is_used_all_the_same(kept, tmp_path, monkeypatch, capsys):
    for name in ("cache", "user"):
        (tmp_path / name).write_text("a file where a directory is needed")
    assert_docs_are_right()
    assert "not kept" in capsys.readouterr().out


def test_processes_that_collect_at_the_same_time_end_with_a_whole_file(kept, monkeypatch):
    both = threading.Barrier(2)

    def split_docs(packages):
        both.wait(20)                                   # neither has found a file
        return ["a document"], ["another"]

    monkeypatch.setattr(corpus, "split_docs", split_docs)
    threads = [threading.Thread(target=assert_docs_are_right) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [file] = corpus.CACHE.iterdir()
    assert json.loads(file.read_bytes()) == [["a document"], ["another"]]


# ---- tokens ----

@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_gpt2(write_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))[1]


def test_end_of_text_stands_between_documents(tokenizer, monkeypatch):
    def byte_ids(text):                                         # no pair of these letters is merged
        return [BYTES.index(b) for b in text.encode()]
    monkeypatch.setattr(corpus, "load_text", lambda text: (["xyz", "ü", "xx"], ["zz y", "y"]))
    train, heldout = load_tokens("made up", tokenizer)
    assert train.tolist() == [*byte_ids("xyz"), EOT_ID, *byte_ids("ü"), EOT_ID, *byte_ids("xx")]
    assert heldout.tolist() == [*byte_ids("zz y"), EOT_ID, *byte_ids("y")]
    assert train.dtype == heldout.dtype == torch.int64


def test_end_of_text_in_a_text_is_not_the_token(tokenizer, tmp_path):
    whole = "before<|endoftext|>after " * 20
    (tmp_path / "file").write_text(whole)
    train, heldout = load_tokens(tmp_path / "file", tokenizer)
    assert EOT_ID not in train.tolist() + heldout.tolist()
    assert tokenizer.decode(train.tolist()) + tokenizer.decode(heldout.tolist()) == whole


@pytest.mark.parametrize("letters, context, side", [
    (100, 10, None), (100, 11, "held-out"), (8, 2, "held-out"), (1, 2, "training")])
def test_a_side_shorter_than_a_window_is_refused(tokenizer, tmp_path, letters, context, side):
    (tmp_path / "file").write_text("x" * letters)
    if side is None:
        assert [len(ids) for ids in load_tokens(tmp_path / "file", tokenizer, context)] == [90, 10]
    else:
        with pytest.raises(ValueError, match=f"the {side} side"):
            load_tokens(tmp_path / "file", tokenizer, context)


# ---- batches ----

@pytest.mark.parametrize("draw", [sample_windows, training_windows])
def test_windows_depend_on_seed_and_step_alone(draw):
    ids, threads = torch.arange(1000), torch.get_num_threads()
    first = draw(ids, 4, 40, seed=1, step=2)
    torch.rand(5)
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert torch.equal(draw(ids, 4, 40, seed=1, step=2), first)
    finally:
        torch.set_num_threads(threads)
    for seed, step in ((1, 3), (2, 2), (2, 1)):
        assert not torch.equal(draw(ids, 4, 40, seed, step), first)
    assert torch.equal(ids, torch.arange(1000))                 # what was given is not written to


def test_windows_are_the_same_everywhere():
    def row(first, *again):
        return [*range(first, first + 12 - len(again)), *again]

    where = torch.arange(1000), 3, 12, 7, 11
    assert sample_windows(*where).tolist() == [row(784), row(150), row(875)]
    assert training_windows(*where).tolist() \
        == [row(784, 789, 790), row(150), row(875, 875, 876, 877, 878)]


def test_half_of_the_training_windows_hold_a_passage_twice():
    ids, length, lengths, foreign = torch.arange(100_000), 80, [], 0
    plain = torch.cat([sample_windows(ids, 1, length, seed, 0) for seed in range(400)]).tolist()
    windows = torch.cat([training_windows(ids, 1, length, seed, 0) for seed in range(400)]).tolist()
    for window, text in zip(windows, plain, strict=True):
        repeated = length - len(set(window))
        assert (repeated == 0) == (window == text)
        if repeated:
            lengths.append(repeated)
            places = {token: at for at, token in enumerate(window)}     # where each comes last
            again = [at for at, token in enumerate(window) if places[token] != at]
            first, last = again[0], places[window[again[0]]]
            assert again == list(range(first, first + repeated))        # one passage, whole
            assert window[last:last + repeated] == window[first:first + repeated]
            assert first + repeated <= last                             # that does not overlap
            others = set(range(length)) - {*again, *range(last, last + repeated)}
            assert all(window[at] == text[at] for at in others)
            foreign += window[first] != text[first]
    assert 160 < len(lengths) < 240 and 8 < foreign < 45                # of 200, and of 25
    assert min(lengths) >= 80 // 16 and max(lengths) <= 80 * 2 // 5 and len(set(lengths)) > 20


def test_training_windows_of_eight_tokens():
    for step in range(50):
        windows = training_windows(torch.arange(9), 4, 8, seed=0, step=step)
        assert windows.shape == (4, 8) and windows.min() >= 0 and windows.max() <= 8


def test_windows_are_runs_of_the_text_and_reach_both_its_ends():
    ids, starts = torch.arange(100, 113), set()
    for step in range(50):
        for row in sample_windows(ids, 4, 10, seed=0, step=step).tolist():
            assert row == list(range(row[0], row[0] + 10))
            starts.add(row[0])
    assert starts == {100, 101, 102, 103}


def test_a_text_of_one_window_gives_that_window():
    assert sample_windows(torch.arange(10), 3, 10, seed=0, step=0).tolist() == [list(range(10))] * 3


# ---- wikitext-2 ----

TRAIN = " \n = A title = \n \n It was a training text . \n It went on . \n"
TEST = " \n = Another = \n \n This was held out . \n"


def zipped():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for part, text in (("train", TRAIN), ("valid", "unused"), ("test", TEST)):
            archive.writestr(f"wikitext-2-raw/wiki.{part}.raw", text)
    return content.getvalue()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves server.content, or server.sent bytes of it, and counts in server.gets how often."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.send_header("Content-Length", len(server.content))
            self.end_headers()

        def do_GET(self):
            server.gets += 1
            self.do_HEAD()
            self.wfile.write(server.content[:server.sent])

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.content, server.sent, server.gets = zipped(), None, 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/wikitext.zip"
        monkeypatch.setattr(corpus, "WIKITEXT_URL", url)
        monkeypatch.setattr(corpus, "WIKITEXT_SHA256", hashlib.sha256(server.content).hexdigest())
        monkeypatch.setattr(corpus, "CACHE", tmp_path / "cache")
        yield server
        server.shutdown()


def test_wikitext_is_downloaded_once(server):
    [train], [heldout] = load_text("wikitext-2")
    # lines, with their ends, are joined by blank lines, and lines of a space count as empty
    assert train == "\n\n = A title = \n\n\n\n\n It was a training text . \n\n\n It went on . \n"
    assert heldout == "\n\n = Another = \n\n\n\n\n This was held out . \n"
    assert load_text("wikitext-2") == ([train], [heldout])
    assert server.gets == 1


@pytest.mark.parametrize("trouble", ["another sum", "cut"])
def test_a_bad_download_of_wikitext_leaves_nothing(server, trouble):
    good = server.content
    if trouble == "cut":
        server.sent = len(good) // 2
    else:
        server.content = good[:-1] + b"!"
    with pytest.raises(OSError, match="wikitext.zip"):
        load_text("wikitext-2")
    assert [*corpus.CACHE.iterdir()] == []
    server.content, server.sent = good, None            # and the next attempt is not disturbed
    assert load_text("wikitext-2")[1][0].strip().startswith("= Another =")


@pytest.mark.parametrize("damage", [
    lambda content: content[:len(content) // 2], lambda content: b"no zip", lambda content: b"",
    lambda content: content.replace(b"wiki.test.raw", b"wiki.tost.raw"),
    lambda content: content.replace(b"training text", b"training test")],
    ids=["cut", "no zip", "empty", "lacks a file", "another sum"])
def test_a_damaged_archive_is_to_be_deleted(server, damage):
    load_text("wikitext-2")
    [path] = corpus.CACHE.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="wikitext-2-raw-v1.zip is damaged .*delete it"):
        load_text("wikitext-2")
    path.unlink()
    assert load_text("wikitext-2") and server.gets == 2         # and is then fetched again
