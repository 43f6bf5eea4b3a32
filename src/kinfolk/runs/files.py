"""Files that are either the old ones or the new ones, whatever happens while they are written."""

import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kinfolk.errors import UserError

LOCK = ".lock"
Content = bytes | Callable[[BinaryIO], object]

# Process ids come back (in a container every run may have the same one): a temporary name has a token too.
_TOKEN = secrets.token_hex(4)
_COUNTER = itertools.count()
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.tmp-(?P<process>\d+)-(?P<token>[0-9a-f]{8})-\d+")


def temporary_for(path: Path) -> Path:
    """A fresh hidden name beside `path`, so on the same file system: a rename from it is atomic."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{_TOKEN}-{next(_COUNTER)}")


def is_temporary(path: Path) -> bool:
    return _TEMPORARY.fullmatch(path.name) is not None


def write_atomically(path: Path, content: Content) -> None:
    """Replace `path` by `content`: bytes, or a function that writes to an open file.

    It is on the disk when this returns. A reader sees the old file or the new one, never a part of it.
    """
    temporary = temporary_for(path)
    try:
        write_synced(temporary, content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def write_synced(path: Path, content: Content) -> None:
    """Write a new file and wait for the disk. Not atomic: for a name that nobody reads yet."""
    with open(path, "xb") as file:
        if callable(content):
            content(file)
        else:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def append_line(path: Path, text: str, *, sync: bool = False) -> None:
    """Append one line; after an error the file ends where it ended before."""
    if "\n" in text:
        raise ValueError("a line cannot hold a line break")
    append(path, text.encode() + b"\n", sync=sync)


def append(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Append whole lines; after an error the file ends where it ended before."""
    is_new = not path.exists()
    with open(path, "ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(content):  # a disk that fills up takes the first part and refuses the rest
                written += file.write(content[written:])
            if sync:
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(start)
            raise
    if sync and is_new:
        sync_folder(path.parent)


def truncate_line(path: Path) -> None:
    """Cut off a last line that has no end: its writer was killed."""
    if path.exists() and not (lines := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, lines.rfind(b"\n") + 1)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has nothing to sync for a folder
            raise
    finally:
        os.close(descriptor)


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove what dead processes left half written in `folder` (only for the file `name`, if given)."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        match = _TEMPORARY.fullmatch(path.name)
        if match and name in (None, match["name"]) and not _is_owned(int(match["process"]), match["token"]):
            remove(path)


def _is_owned(process: int, token: str) -> bool:
    if process == os.getpid():
        return token == _TOKEN
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's process: alive
    return True


def remove(path: Path) -> None:
    """Remove a file or a folder; one that does not go stays for the next sweep."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def lock(folder: Path) -> int:
    """Become the only writer in `folder` until the returned descriptor is closed or the process ends."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 20).decode(errors="replace") or "unknown"
            raise UserError(
                f"{folder} is being written by another process (id {owner}); wait for it or stop it"
            ) from error
        with contextlib.suppress(OSError):  # only for the message above
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader accepts: NaN and infinities become null, array scalars become numbers."""
    return json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy or torch scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def explained(explain: Callable[[OSError], Exception]) -> Iterator[None]:
    """Turn an error of the disk into the one that `explain` makes of it."""
    try:
        yield
    except OSError as error:
        raise explain(error) from error
