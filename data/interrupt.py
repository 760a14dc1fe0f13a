"""Ctrl-C, and SIGTERM, with which job schedulers end a run: one line and status 130, at any moment.

A command imports this before what takes its time, so this file imports very little.
"""

import os
import signal
import sys
from contextlib import contextmanager, suppress
from multiprocessing import current_process, parent_process
from pathlib import Path
from threading import Thread

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_at_once(*_):
    """Where nothing is to be cleaned up: before main and after it, and in a worker process."""
    if current_process().name == "MainProcess":         # one line is enough
        with suppress(OSError):
            os.write(2, b"interrupted\n")
    os._exit(130)


def end_cleanly(*_):
    """While main runs: an exception, so that every `finally` has its turn."""
    raise KeyboardInterrupt


def install():
    for number in SIGNALS:
        signal.signal(number, end_at_once)


def worker():
    """For the processes of a pool, which else wait for ever when what started them is killed."""
    install()
    Thread(target=lambda: (parent_process().join(), os._exit(130)), daemon=True).start()


@contextmanager
def handled_by(handler):
    before = [signal.signal(number, handler) for number in SIGNALS]
    try:
        yield
    finally:
        for number, its in zip(SIGNALS, before, strict=True):
            signal.signal(number, its)


@contextmanager
def interruptible():
    """Yields a list, empty until a signal comes, for a loop that looks at it between steps."""
    came = []
    with handled_by(lambda *_: came.append(True)):
        yield came


# imported by one of our commands, not by a test, as a library or where somebody types
ROOT = Path(__file__).resolve().parent.parent
program = getattr(sys.modules["__main__"], "__file__", None)
if program and Path(program).resolve().parent in (ROOT, ROOT / "data" / "lab"):
    install()
