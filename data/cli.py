"""What the commands share: errors in one line, progress, tables."""

import argparse
import ctypes
import sys
import time
from contextlib import suppress

import torch

from data.files import release
from data.interrupt import end_cleanly, handled_by


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message} (see --help)")


def positive(text):
    """For argparse: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seed(text):
    """For argparse: a seed, which random generators hold in 32 bits."""
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 4294967295")
    return int(text)


def non_negative(text):
    """For argparse: a number of at least 0."""
    try:
        if 0 <= float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")


def positive_float(text):
    """For argparse: a number above 0."""
    if non_negative(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return float(text)


def device(text):
    """For argparse: a device that PyTorch can compute on here."""
    try:
        torch.zeros(1, device=text).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {reason}") from None
    return text


def keep_memory():
    """Has glibc keep the memory that a step frees, for the next one needs it again.

    Left to itself it returns large blocks to the system and gets them back a page at a time, which
    can take a tenth of a training step.
    """
    mallopt = sys.platform == "linux" and getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        trim_threshold, mmap_threshold = -1, -3                 # their numbers in malloc.h
        # in bytes: what is asked for, or the most that older versions accept
        if mallopt(mmap_threshold, 1 << 30) or mallopt(mmap_threshold, 32 << 20):
            mallopt(trim_threshold, 1 << 30)


def command(main):
    """Runs main. Trouble with what the user gave is one line on stderr and status 2, Ctrl-C 130."""
    keep_memory()
    for output in (sys.stdout, sys.stderr):
        if output:                      # what a terminal's encoding cannot say is shown escaped
            output.reconfigure(errors="backslashreplace")
    try:
        with handled_by(end_cleanly):
            try:
                main()
            finally:
                release()
                print(end="", flush=True)
        return
    except BrokenPipeError:             # who reads our output has seen enough, as `| head` has
        message, status = "", 141
    except KeyboardInterrupt:
        message, status = "interrupted\n", 130
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        message, status = " ".join(str(error).split()), 2
        if isinstance(error, (RuntimeError, MemoryError)):
            if isinstance(error, RuntimeError) and "memory" not in message:
                raise
            message = "there is not enough memory: take a smaller --batch-size or --context"
        message = f"error: {message}\n"
    for output, text in ((sys.stderr, message), (sys.stdout, "")):
        try:
            print(text, end="", file=output, flush=True)
        except OSError:                 # it is gone or full: Python must not try again at its end
            with suppress(OSError):
                output.close()
    sys.exit(status)


def progress(batches, doing="evaluating"):
    """Yields the batches, and every five seconds says on stderr how far it is."""
    start = shown = time.time()
    done = 0
    for n, batch in enumerate(batches):
        if time.time() - shown > 5:
            shown, seconds = time.time(), time.time() - start
            print(f"  {doing}: {n}/{len(batches)} batches, {done / seconds:,.0f} tokens/s, "
                  f"{seconds / n * (len(batches) - n):.0f} s left", file=sys.stderr, flush=True)
        yield batch
        done += batch.numel()


def step_report(first, steps, tokens):
    """-> report(done, loss), which says every five seconds how far a training is."""
    start = shown = time.time()

    def report(done, loss):
        nonlocal shown
        if time.time() - shown > 5 or done in (first + 1, steps):
            shown = time.time()
            rate = (done - first) / (shown - start)
            print(f"step {done}/{steps}  loss {loss:.4f}  {rate * tokens:,.0f} tokens/s  "
                  f"{(steps - done) / rate:.0f} s left", flush=True)
    return report


def show(rows, columns):
    """Prints rows as a table; a column is (key, heading, format)."""
    cells = [[heading for _, heading, _ in columns]]
    cells += [["" if row.get(key) is None else form.format(row[key]) for key, _, form in columns]
              for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        numbers = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *numbers]).rstrip())
    print(flush=True)
