"""Decoded arrays on disk: one folder per set with plain .npy files and a manifest that is written last.

A folder without a manifest holds nothing as far as this module is concerned, so a writer that dies half-way
leaves no set that looks whole.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from kinfolk.data.formats import Array, Arrays
from kinfolk.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1


def data_root(root: Path | None = None) -> Path:
    """`root` if given, else $KINFOLK_DATA, else kinfolk/data in the user's cache folder."""
    if root is not None:
        return root
    if chosen := os.environ.get("KINFOLK_DATA"):
        return Path(chosen).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # unset, or to be ignored according to the XDG specification
        cache = Path.home() / ".cache"
    return cache / "kinfolk" / "data"


def digest(array: Array) -> str:
    """SHA-256 of the array's bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def save(folder: Path, arrays: Arrays, sums: dict[str, str], source: str) -> None:
    """Write `arrays` with their checksums, each file at once or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    described = {}
    for name, array in arrays.items():
        write(folder / f"{name}.npy", partial(_save_array, array))
        described[name] = {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": sums[name]}
    manifest = {"format": FORMAT, "source": source, "arrays": described}
    text = json.dumps(manifest, indent=2) + "\n"
    write(folder / MANIFEST, lambda file: file.write(text.encode()))


def _save_array(array: Array, file: IO[bytes]) -> None:
    np.save(file, array, allow_pickle=False)


def load(folder: Path) -> Arrays | None:
    """The arrays of `folder`, or None when there is no manifest.

    They are mapped copy-on-write: nothing is read before it is used, and nothing the caller writes reaches
    the disk. Shapes and dtypes are compared with the manifest; checksums were compared on writing.
    """
    described = manifest(folder)
    if described is None:
        return None
    arrays: Arrays = {}
    for name, about in described["arrays"].items():
        path = folder / f"{name}.npy"
        try:
            array = np.load(path, mmap_mode="c", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: damaged ({error}); run 'kinfolk data get {folder.name}' again") from error
        if list(array.shape) != about["shape"] or str(array.dtype) != about["dtype"]:
            raise UserError(
                f"{path}: holds {list(array.shape)} {array.dtype}, the manifest says {about['shape']} "
                f"{about['dtype']}; run 'kinfolk data get {folder.name}' again"
            )
        arrays[name] = np.asarray(array)  # a plain array over the mapped file
    return arrays


def manifest(folder: Path) -> dict[str, Any] | None:
    """What was noted when the arrays were written, or None when the folder holds none."""
    path = folder / MANIFEST
    try:
        noted = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    try:
        if noted["format"] != FORMAT:
            raise UserError(f"{path}: written in format {noted['format']}, this version reads {FORMAT}")
        for about in noted["arrays"].values():
            list(about["shape"]), str(about["dtype"]), str(about["sha256"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged; run 'kinfolk data get {folder.name}' again") from error
    return dict(noted)


def write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file at once or not at all: `fill` writes to a temporary one that then takes its place."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a shared data folder is read by others
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process, waiting for another that has it.

    The lock is on the folder itself and goes with the process, so nothing is left to clean up. Where there is
    no flock (Windows) it does nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
