"""Checkpoints: the tensors and facts of a round, in folders that verify themselves.

A generation `round-00000010/` holds `tensors.safetensors` and `manifest.json`. It is built under a temporary
name and renamed when every byte is on the disk, so a name `round-…` means a complete save; sums then notice
what a disk or a copy damaged later. Two are kept: if the newest does not verify, the other is taken.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
from torch import Tensor

from kinfolk.errors import UserError
from kinfolk.runs.files import (
    explained,
    remove,
    sweep,
    sync_folder,
    temporary_for,
    write_synced,
)

FORMAT = "kinfolk checkpoint"
VERSION = 1
TENSORS = "tensors.safetensors"
MANIFEST = "manifest.json"
_BLOCK = 1 << 22  # bytes; hashed and written while still in the processor's cache
_GENERATION = re.compile(r"round-(\d{8,})(?:-(\d+))?")
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    round: int
    tensors: dict[str, Tensor]  # on the CPU, each with its own memory
    facts: dict[str, Any]
    notices: list[str] = field(default_factory=list)  # what had to be skipped, for the user to read


class _DamagedError(Exception):
    """Why one generation cannot be used."""


def save(folder: Path, round: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Save a round under `folder` (RUN/checkpoint) and return its generation.

    `facts` is JSON: keys come back as strings, tuples as lists. Tensors may be on any device and share
    memory; each is stored in full. After an error of the disk the earlier generations are as they were.
    """
    if round < 0:
        raise ValueError(f"round {round} is negative")
    # What is compared on loading is what JSON makes of the facts, not what Python had.
    plain: dict[str, Any] = json.loads(json.dumps(dict(facts)))
    earlier = _generations(folder)
    saved = earlier[-1][0] if earlier else None
    attempts = [attempt for other, attempt, _ in earlier if other == round]
    # A folder cannot be replaced atomically, so a round that is saved again gets a new name.
    name = f"round-{round:08d}" + (f"-{max(attempts) + 1}" if attempts else "")
    target = folder / name
    with explained(lambda error: write_error(folder.parent, target, error, saved)):
        _commit(target, round, tensors, plain)
    _prune(folder, round, target)
    return target


def _commit(target: Path, round: int, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
    folder = target.parent
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
    temporary = temporary_for(target)
    try:
        temporary.mkdir()
        stored = _write_tensors(temporary / TENSORS, tensors)
        manifest = {"format": FORMAT, "version": VERSION, "round": round, "facts": facts, "tensors": stored}
        write_synced(temporary / MANIFEST, _render(manifest))
        sync_folder(temporary)
        os.rename(temporary, target)
    except BaseException:
        remove(temporary)
        raise
    sync_folder(folder)


def _prune(folder: Path, round: int, target: Path) -> None:
    """Keep `target` and the newest generation before it.

    Later rounds go as well: who saves round 10 after round 20 has gone back, because 20 was damaged.
    """
    earlier = [path for other, _, path in _generations(folder) if other < round]
    keep = {target, *earlier[-1:]}
    for _, _, path in _generations(folder):
        if path not in keep:
            gone = temporary_for(path)  # renamed first: a half removed generation must not look like one
            with contextlib.suppress(OSError):  # the save itself is safe; the next one tries again
                os.rename(path, gone)
                remove(gone)
    sweep(folder)


def load(folder: Path, expect: Mapping[str, Any] | None = None) -> Checkpoint:
    """The newest generation under `folder` that verifies; `expect` names facts that it must agree with."""
    generations = _generations(folder)
    if not generations:
        raise UserError(f"{folder} holds no checkpoint: the run stopped before its first one, start it again")
    notices: list[str] = []
    for round, _, path in reversed(generations):
        try:
            manifest = _read_manifest(path, round)
            _check_origin(path, manifest["facts"], expect or {})
            tensors = _read_tensors(path / TENSORS, manifest["tensors"])
        except _DamagedError as damage:
            notices.append(f"checkpoint of round {round} skipped: {damage}")
            continue
        return Checkpoint(round, tensors, manifest["facts"], notices)
    raise UserError("no checkpoint can be used: " + "; ".join(notices))


def rounds(folder: Path) -> list[int]:
    """The rounds saved under `folder`, oldest first, without verifying them."""
    return sorted({round for round, _, _ in _generations(folder)})


def write_error(run: Path, path: Path, error: OSError, saved: int | None) -> UserError:
    """What to tell the user when `path` of a run cannot be written; `saved` is the last round that is."""
    full = error.errno == errno.ENOSPC
    what = "disk is full" if full else (error.strerror or str(error)).lower()
    remedy = "free space" if full else "put that right"
    if saved is None:
        state, step = "no round is saved yet", "start the run again"
    else:
        state, step = f"the run is safe up to round {saved}", f"`kinfolk resume {run}`"
    return UserError(f"{what} while writing {path}; {state}; {remedy} and {step}")


def _generations(folder: Path) -> list[tuple[int, int, Path]]:
    """(round, attempt, path) of everything that was saved, oldest first."""
    if not folder.is_dir():
        return []
    matches = [(_GENERATION.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), int(match[2] or 1), path) for match, path in matches if match)


def _render(manifest: dict[str, Any]) -> bytes:
    """The manifest as bytes that depend on its content alone, with the sum of the rest as its last entry."""
    # NaN and infinities are written as Python does: facts have to come back exactly.
    checksum = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "checksum": checksum}, indent=1).encode() + b"\n"


def _read_manifest(generation: Path, round: int) -> dict[str, Any]:
    path = generation / MANIFEST
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise _DamagedError(f"{path} is damaged: not JSON, or cut off") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _DamagedError(f"{path} is not a kinfolk checkpoint")
    found = manifest.pop("checksum", None)
    if text != _render(manifest):
        raise _DamagedError(f"{path} is damaged: its content does not agree with its sum {found}")
    if manifest["version"] > VERSION:
        # Nothing is damaged: to go back to an older round without asking would throw work away.
        raise UserError(
            f"{path} was written by a newer kinfolk: format version {manifest['version']}, "
            f"this one reads up to {VERSION}; upgrade kinfolk"
        )
    if manifest["round"] != round:
        raise _DamagedError(f"{path} is of round {manifest['round']}: the folder was renamed")
    return manifest


def _check_origin(generation: Path, facts: dict[str, Any], expect: Mapping[str, Any]) -> None:
    for key, expected in json.loads(json.dumps(dict(expect))).items():
        if key not in facts or facts[key] != expected:
            found = repr(facts[key]) if key in facts else "not recorded"
            raise UserError(
                f"checkpoint belongs to another run: {key} is {found} in {generation}, expected {expected!r}"
            )


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file and return its size and sum.

    Written here and not by the library (which reads it): one tensor at a time leaves the device, the sum is
    taken in the same pass, and an error keeps its errno.
    """
    # The widest elements first: every tensor of the file is then aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES or name == "__metadata__":
            raise TypeError(f"tensor '{name}' of type {tensor.dtype} cannot be saved")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()

    def write(file: BinaryIO) -> None:
        for block in _blocks(len(text).to_bytes(8, "little") + text, names, tensors):
            digest.update(block)
            file.write(block)

    write_synced(path, write)
    return {"file": TENSORS, "bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}


def _blocks(head: bytes, names: list[str], tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        if tensor.numel():
            # Not reshape(-1): with a single element torch may keep a stride that `view` then refuses.
            flat = tensor.as_strided((tensor.numel(),), (1,))
            data = flat.view(torch.uint8).numpy().data
            for start in range(0, len(data), _BLOCK):
                yield data[start : start + _BLOCK]


def _read_tensors(path: Path, stored: dict[str, Any]) -> dict[str, Tensor]:
    try:
        size = path.stat().st_size
        if size != stored["bytes"]:
            how = "truncated" if size < stored["bytes"] else "too long"
            raise _DamagedError(f"{path} is {how}: {size} bytes, expected {stored['bytes']}")
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != stored["sha256"]:
            raise _DamagedError(f"{path} is damaged: SHA-256 is {found}, expected {stored['sha256']}")
        with safetensors.safe_open(path, framework="pt") as reader:
            # Copied: a tensor that is a view of the file would be read again later, and unverified.
            return {name: reader.get_tensor(name).clone() for name in reader.keys()}  # noqa: SIM118
    except OSError as error:
        raise _unreadable(path, error) from error
    except safetensors.SafetensorError as error:
        raise _DamagedError(f"{path} is not a kinfolk checkpoint: {error}") from error


def _unreadable(path: Path, error: OSError) -> _DamagedError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return _DamagedError(f"{path} is missing")
    return _DamagedError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}")
