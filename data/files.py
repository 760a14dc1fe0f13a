"""Files of our own: written whole or not at all, tensors only, and never over what is read."""

import os
import secrets
import stat
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors.torch import save

try:
    import fcntl
except ImportError:             # Windows: runs do not notice one another there
    fcntl = None

ROOT = Path(__file__).parent.parent
OF_A_MODEL = ("*.json", "*.txt", "*model*.safetensors")     # what is read of its directory
locks = []                                                  # (open file, its path)


def stream(path):
    """What to open if `path` is a pipe, a device or our own output, and no file; else None."""
    for number in (1, 2):       # /dev/stdout, also where that is a file or a socket
        try:
            if os.path.samestat(os.stat(path), os.fstat(number)):
                return number
        except OSError:
            pass                # there is no such file, or the output is closed
    return path if os.path.exists(path) and not os.path.isfile(path) else None


def behind_links(path):
    return Path(os.path.realpath(path) if os.path.islink(path) else path)


@contextmanager
def part_of(path):
    """The name of a new, empty file beside `path`; gone at the end, unless it was renamed."""
    part = Path(f"{path}.{secrets.token_hex(4)}.part")
    try:
        part.open("xb").close()
        yield part
    finally:
        part.unlink(missing_ok=True)


def replace_file(path, content):
    """Writes bytes whole or not at all: what stood at `path` stays until the new file is complete.

    A link stays a link, a file keeps its owner and permissions, a pipe or a device is written to.
    """
    target, output = behind_links(path), stream(path)
    try:
        if output is not None:
            print(end="", flush=True)           # what was printed before comes before
            with open(output, "wb", closefd=output is path) as file:
                file.write(content)
            return
        with part_of(target) as part:
            with suppress(FileNotFoundError):
                old, new = target.stat(), part.stat()
                try:
                    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                        os.chown(part, old.st_uid, old.st_gid)
                    os.chmod(part, stat.S_IMODE(old.st_mode))
                except PermissionError:         # somebody else's: it can only be written in place
                    part = target
            part.write_bytes(content)
            os.replace(part, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None     # the name as given


def save_tensors(path, tensors, metadata):
    """A safetensors file with {string: string} metadata."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    replace_file(path, save(tensors, metadata))


def check_output(path, option, reads=()):
    """For the start of a command: ValueError where `path` cannot be written, or is read, too.

    `reads` are the files and the models' directories that the command reads.
    """
    if os.path.isdir(path):
        raise ValueError(f"{option} {path} is a directory: give the name of a file")
    for place in (where for read in reads for where in (Path(read), ROOT / read)):
        files = [file for kind in OF_A_MODEL for file in place.glob(kind)]
        for file in files if place.is_dir() else [place]:
            if os.path.exists(path) and file.exists() and file.samefile(path):
                raise ValueError(f"{option} {path} is {file}, which is read: give another name")
    try:
        if stream(path) is None:
            if os.path.exists(path) and not os.access(path, os.W_OK):
                raise PermissionError(0, "it is write-protected")
            target = behind_links(path)
            if target.is_symlink():
                raise OSError(0, "it is a link to itself")
            with part_of(target) as part:
                part.write_bytes(b"?")
        elif Path(path).is_char_device():       # not a pipe: its reader would take this for all
            with open(path, "wb", buffering=0) as file:
                file.write(b"")                 # a full device refuses even this
        elif Path(path).is_block_device():
            raise PermissionError(0, "it is a disk")
    except FileNotFoundError:
        directory = behind_links(path).parent
        raise ValueError(f"{option} {path}: there is no directory {directory}") from None
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from None


def claim(out):
    """The name under which a run keeps what is to become `out`, for this process alone.

    It is beside the file that `out` leads to, for a pipe or device in the working directory. The
    lock is the system's, which ends with the process; ValueError where another process has it.
    """
    name = behind_links(out) if stream(out) is None else Path(out).name
    unfinished, lock = Path(f"{name}.unfinished"), Path(f"{name}.lock")
    while fcntl:
        file = lock.open("ab")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(f"another run is at work on {out}: give another name") from None
        except OSError:
            pass                # a file system without locks
        if lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno())):
            locks.append((file, lock))
            break
        file.close()            # the run that had it has just removed it
    return unfinished


def release():
    """Gives back what was claimed."""
    while locks:
        file, lock = locks.pop()
        lock.unlink(missing_ok=True)
        file.close()
