"""data/files.py: what is written, what it never destroys, and what is refused before any work."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data import files
from data.files import check_output, claim, release, replace_file, save_tensors

ROOT = Path(files.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
posix = pytest.mark.skipif(os.name != "posix", reason="there are no such files")


def python(code, *args, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], text=True, timeout=60,
                          env=ENVIRONMENT, **options)


def everything(directory):
    return sorted(path.name for path in directory.rglob("*"))


# ---- writing ----

@posix
def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("far/file")
    (tmp_path / "to a link").symlink_to("link")
    (tmp_path / "to a new file").symlink_to("far/new")
    for name, file in (("link", "file"), ("to a link", "file"), ("to a new file", "new")):
        check_output(tmp_path / name, "--out")
        replace_file(tmp_path / name, name.encode())
        assert (tmp_path / "far" / file).read_bytes() == name.encode()
        assert (tmp_path / name).is_symlink()
    save_tensors(tmp_path / "link", {"a": torch.ones(2)}, {})
    assert load_file(tmp_path / "far" / "file")["a"].tolist() == [1, 1]
    assert everything(tmp_path) == ["far", "file", "link", "new", "to a link", "to a new file"]


@posix
def test_permissions_and_owner_stay_and_a_new_file_follows_the_umask(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"old")
    old.chmod(0o604)
    if os.geteuid() == 0:
        os.chown(old, 1234, 1235)
    before, umask = old.stat(), os.umask(0o027)
    try:
        replace_file(old, b"1")
        replace_file(new, b"2")
    finally:
        os.umask(umask)
    after = old.stat()
    assert [(s.st_mode, s.st_uid, s.st_gid) for s in (before, after)] \
        == [(before.st_mode, before.st_uid, before.st_gid)] * 2
    assert after.st_ino != before.st_ino                # replaced, not written over
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives away")
def test_a_file_whose_owner_cannot_be_kept_otherwise_is_written_in_place(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"old and longer")
    os.chown(file, 1234, 1235)
    before = file.stat()

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    replace_file(file, b"new")
    after = file.stat()
    assert (after.st_uid, after.st_ino, file.read_bytes()) == (1234, before.st_ino, b"new")
    assert everything(tmp_path) == ["file"]


@posix
def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    writer = threading.Thread(target=lambda: replace_file(pipe, b"content" * 99999), daemon=True)
    reader.start()
    check_output(pipe, "--out")                         # must not look like the end to the reader
    writer.start()
    reader.join(20)
    assert got == [b"content" * 99999] and pipe.is_fifo() and everything(tmp_path) == ["pipe"]


@posix
def test_devices_are_written_to():
    before = os.stat("/dev/null")
    check_output("/dev/null", "--out")
    replace_file("/dev/null", b"gone")
    assert os.stat("/dev/null").st_ino == before.st_ino and Path("/dev/null").is_char_device()
    with pytest.raises(ValueError, match="--out /dev/full cannot be written: No space"):
        check_output("/dev/full", "--out")
    with pytest.raises(OSError, match="No space.*'/dev/full'"):
        replace_file("/dev/full", b"x")


OWN_OUTPUT = """
import sys
from data.files import check_output, replace_file
print("before")
check_output(sys.argv[1], "--json")
replace_file(sys.argv[1], b"content\\n")
print("after")
"""


@posix
@pytest.mark.parametrize("where", ["pipe", "file", "file by name"])
def test_our_own_output_is_gone_on_with(tmp_path, where):
    name = tmp_path / "log" if where == "file by name" else "/dev/stdout"
    if where == "pipe":
        assert python(OWN_OUTPUT, name).stdout == "before\ncontent\nafter\n"
    else:
        with open(tmp_path / "log", "w") as log:
            python(OWN_OUTPUT, name, stdout=log)
        assert (tmp_path / "log").read_text() == "before\ncontent\nafter\n"
        assert everything(tmp_path) == ["log"]


@pytest.mark.parametrize("trouble", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, trouble):
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def fail(*_):
        raise trouble

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(trouble)) as caught:
        replace_file(file, b"new")
    assert file.read_bytes() == b"old" and everything(tmp_path) == ["file"]
    if isinstance(trouble, OSError):                    # the name is the one that the user gave
        assert str(caught.value) == f"[Errno 28] No space left on device: '{file}'"


# ---- what is refused before any work ----

@pytest.fixture
def model(tmp_path):
    """A model's directory, and, beside it, an oracle, a text, and links to them."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "merges.txt", "model.safetensors", "notes", "oracle.safetensors"):
        (directory / name).write_text(name)
    for name in ("oracle", "text"):
        (tmp_path / name).write_text(name)
    os.link(tmp_path / "text", tmp_path / "hard")
    if os.name == "posix":
        (tmp_path / "soft").symlink_to("model/config.json")
        (tmp_path / "loop").symlink_to("loop")
    return directory


@pytest.mark.parametrize("path, complaint", [
    (".", "directory"), ("model", "directory"), ("nowhere/file", "no directory .*nowhere"),
    ("text/file", "cannot be written"), ("n" * 250, "cannot be written"),
    ("oracle", "is read"), ("./model/../oracle", "is read"), ("text", "is read"),
    ("hard", "is read"), ("model/config.json", "is read"), ("model/merges.txt", "is read"),
    ("model/model.safetensors", "is read"),
    pytest.param("soft", "is read", marks=posix), pytest.param("loop", "link", marks=posix),
    ("model/oracle.safetensors", None), ("model/notes", None), ("model/figures.json", None),
    ("new", None)])
def test_outputs_are_looked_at_before_any_work(tmp_path, model, monkeypatch, path, complaint):
    monkeypatch.chdir(tmp_path)
    before = everything(tmp_path)
    reads = (Path("oracle"), str(model), "text", "docs")
    if complaint is None:
        check_output(Path(path), "--json", reads)
    else:
        with pytest.raises(ValueError, match=complaint) as error:
            check_output(Path(path), "--json", reads)
        assert str(error.value).startswith(f"--json {Path(path)}") and "\n" not in str(error.value)
    assert everything(tmp_path) == before


def test_a_model_named_from_the_projects_root_is_found_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is read"):
        check_output(ROOT / "data" / "mini" / "config.json", "--out", ["data/mini"])


def test_a_protected_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(0o444)
    if os.access(tmp_path / "file", os.W_OK):           # root may write it all the same
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="write-protected"):
        check_output(tmp_path / "file", "--out")
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="a directory in which nobody writes")
def test_a_directory_that_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match="--out /sys/kernel/x cannot be written: Perm"):
        check_output("/sys/kernel/x", "--out")


# ---- two runs with one --out ----

CLAIM = """
import sys, time
from data.files import claim, release
for name in sys.argv[2:]:
    try:
        print(claim(name), flush=True)
    except ValueError as error:
        print(error)
time.sleep(float(sys.argv[1]))
release()
"""


@pytest.mark.skipif(files.fcntl is None, reason="no locks")
def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
    out, link, other = (tmp_path / name for name in ("out", "link", "other"))
    link.symlink_to("out")
    first = subprocess.Popen([sys.executable, "-c", CLAIM, "60", out], stdout=subprocess.PIPE,
                             env=ENVIRONMENT, text=True)
    assert first.stdout.readline() == f"{out}.unfinished\n"
    second = python(CLAIM, 0, out, link, other).stdout.splitlines()
    for name, line in zip((out, link), second[:2], strict=True):        # two names of one file
        assert line == f"another run is at work on {name}: give another name"
    assert second[2:] == [f"{other}.unfinished"]
    assert everything(tmp_path) == ["link", "out.lock"]                 # nothing was taken from it
    first.kill()
    first.communicate()
    assert python(CLAIM, 0, link).stdout == f"{out}.unfinished\n"       # the lock ended with it
    assert everything(tmp_path) == ["link"]


@posix
def test_what_is_to_become_a_device_is_kept_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert claim("/dev/null") == Path("null.unfinished")
    release()
    assert everything(tmp_path) == []


def test_without_locks_a_run_goes_on(tmp_path, monkeypatch):
    if files.fcntl:
        def refuse(*_):
            raise OSError(37, "No locks available")
        monkeypatch.setattr(files.fcntl, "lockf", refuse)
        assert claim(tmp_path / "out") == tmp_path / "out.unfinished"
        release()
    monkeypatch.setattr(files, "fcntl", None)
    assert claim(tmp_path / "out") == tmp_path / "out.unfinished"
    assert everything(tmp_path) == []
