"""data/cli.py and data/interrupt.py: how a command ends, and what it can show."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data import cli
from data.interrupt import interruptible

ROOT = Path(cli.__file__).parents[1]
HEAD = """
if __name__ in ("__main__", "__mp_main__"):
    import data.interrupt
    data.interrupt.install()
import sys, time
def ready():
    print("ready", flush=True)
"""
MAIN = """
from data.cli import command
from data.files import claim, replace_file
from data.interrupt import interruptible
def main():
{body}
if __name__ == "__main__":
    command(main)
"""
# what a command is doing when the signal comes
MOMENTS = {
    "importing": HEAD + "ready()\ntime.sleep(60)\n",
    "importing torch": HEAD + "ready()\nimport torch\n" + MAIN.format(body="    time.sleep(60)"),
    "working": HEAD + MAIN.format(body="    ready(); time.sleep(60)"),
    "writing": HEAD + MAIN.format(body="""
    import os
    os.replace = lambda *_: (ready(), time.sleep(60))
    claim("out")
    replace_file("out", b"content")"""),
    "waiting for a pipe's reader": HEAD + MAIN.format(body="""
    import os
    os.mkfifo("pipe"); ready(); replace_file("pipe", b"content"); os.unlink("pipe")"""),
    "ending": HEAD + MAIN.format(body="    pass") + "    ready(); time.sleep(60)\n",
    "collecting text": HEAD + MAIN.format(body="""
    from pathlib import Path
    from data import corpus
    for n in range(500):
        Path(f"package/{n}.py").write_text("x = " + "1 + " * 300 + "1")
    ready()
    while True:
        corpus.split_docs({"package": "package"})"""),
}


def start(code, cwd, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    (cwd / "program.py").write_text(code)
    return subprocess.Popen([sys.executable, "program.py"], cwd=cwd, start_new_session=True,
                            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "",
                                 **options.pop("env", {})},
                            text=True, **options)


@pytest.mark.skipif(os.name != "posix", reason="signals to a process group")
@pytest.mark.parametrize("number, whom", [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)],
                         ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_is_one_line_and_status_130(tmp_path, moment, number, whom):
    (tmp_path / "package").mkdir()
    process = start(MOMENTS[moment], tmp_path)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5 if moment in ("importing torch", "collecting text") else 0.05)
    whom(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert {path.name for path in tmp_path.iterdir()} <= {"package", "pipe", "program.py"}


@pytest.mark.parametrize("here", [".", "tests"])
def test_an_interpreter_that_imports_us_keeps_its_own_ctrl_c(here):
    """Where somebody types, or in a notebook, there is no program file."""
    code = ("import sys, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "sys.path.insert(0, sys.argv[1]); import data.interrupt\n"
            "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    out = subprocess.run([sys.executable, "-c", code, str(ROOT)], cwd=ROOT / here, text=True,
                         capture_output=True, timeout=30)
    assert out.stdout == "True\n", out.stderr


@pytest.mark.skipif(os.name != "posix", reason="processes there do not fork")
def test_a_collection_that_was_killed_leaves_no_processes(tmp_path):
    (tmp_path / "package").mkdir()
    process = start(MOMENTS["collecting text"], tmp_path)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.kill()
    process.communicate(timeout=20)             # ends only when no worker has its output open


def test_a_loop_can_look_whether_a_signal_came():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        with interruptible() as interrupted:
            assert not interrupted
            signal.raise_signal(number)
            assert interrupted
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_command_leaves_the_handlers_as_they_were():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    cli.command(lambda: None)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stderr too"])
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(tmp_path, both):
    read, write = os.pipe()
    body = "    print('short')"
    if both:
        body = "    while True: print('x' * 9999, file=sys.stdout); print('y', file=sys.stderr)"
    process = start(HEAD + MAIN.format(body=body), tmp_path, stdout=write,
                    **{"stderr": write} if both else {})
    os.close(read)
    os.close(write)
    err = process.communicate(timeout=30)[1]
    assert (process.returncode, err) == (141, None if both else "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        process = start(HEAD + MAIN.format(body="    print('short')"), tmp_path, stdout=full)
        err = process.communicate(timeout=30)[1]
    assert process.returncode == 2 and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("encoding, shown", [("ascii", r"caf\xe9 \u2192 \ud800"),
                                             ("latin-1", r"café \u2192 \ud800"),
                                             ("cp1252", r"café \u2192 \ud800"),
                                             ("utf-8", r"café → \ud800")])
def test_what_an_encoding_cannot_say_is_shown_escaped(tmp_path, encoding, shown):
    body = r"    print('caf\xe9 \u2192 \ud800'); raise ValueError('caf\xe9 \u2192 \ud800')"
    process = start(HEAD + MAIN.format(body=body), tmp_path, env={"PYTHONIOENCODING": encoding},
                    encoding=encoding)
    assert process.communicate(timeout=30) == (f"{shown}\n", f"error: {shown}\n")
    assert process.returncode == 2


@pytest.mark.parametrize("error, line", [
    (ValueError("two\nlines"), "error: two lines"),
    (FileNotFoundError(2, "no such file", "x"), "error: [Errno 2] no such file: 'x'"),
    (MemoryError(), "error: there is not enough memory"), (KeyboardInterrupt(), "interrupted"),
    (RuntimeError("can't allocate memory"), "error: there is not enough memory")], ids=repr)
def test_trouble_is_one_line(capsys, error, line):
    def main():
        raise error
    with pytest.raises(SystemExit) as end:
        cli.command(main)
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1
    assert end.value.code == (130 if isinstance(error, KeyboardInterrupt) else 2)


def test_a_fault_of_ours_keeps_its_traceback():
    def main():
        raise RuntimeError("sizes do not match")
    with pytest.raises(RuntimeError, match="sizes"):
        cli.command(main)
