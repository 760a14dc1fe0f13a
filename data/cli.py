"""What the commands share: errors in one line, and progress."""

import argparse
import sys
import time


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message} (see --help)")


def positive(text):
    """For argparse: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def command(main):
    """Runs main; trouble with what the user gave becomes one line on stderr and exit status 2."""
    try:
        main()
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


def progress(batches):
    """Yields the batches, and every five seconds says on stderr how far it is."""
    start = shown = time.time()
    done = 0
    for n, batch in enumerate(batches):
        if time.time() - shown > 5:
            shown, seconds = time.time(), time.time() - start
            print(f"  evaluating: {n}/{len(batches)} batches, {done / seconds:,.0f} tokens/s, "
                  f"{seconds / n * (len(batches) - n):.0f} s left", file=sys.stderr, flush=True)
        yield batch
        done += batch.numel()
