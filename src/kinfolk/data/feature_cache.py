"""Scattering features of a whole set, computed once and kept as mapped arrays under the data root.

They lie in `features/NAME-scattering-KEY`, where the key stands for everything they depend on: the set's name and its
pixels, J, L, the order, how pixels were scaled, the precision and the version of this code. There is a plain .npy file
for each part, a list of the sums of its pieces, and a manifest that is written last: a folder without one is not
finished, and the next call goes on after the last piece that is whole.

They are kept in half precision unless asked otherwise: that takes half the disk and half the time to read, and rounds
to far less than rounding the pixels to 256 steps did before (docs/data.md has the figures).
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch

from kinfolk.data import store
from kinfolk.data.download import Progress
from kinfolk.data.formats import Array, Dataset, Samples
from kinfolk.data.scattering import ANGLES, SCALES, feature_shape, scattered, standardised
from kinfolk.errors import UserError

VERSION = 1  # of the features: raise it when the same pixels come to give other numbers
FOLDER = "features"
PIECE_BYTES = 16 * 2**20  # written, summed and synced at a time; with another size, older features look damaged
Precision = Literal["float16", "float32"]


@dataclass(frozen=True)
class _Job:
    """The features of one data set: what they are made of, and where they are kept."""

    dataset: Dataset
    scales: int
    angles: int
    precision: Precision
    folder: Path
    key: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int, int]:
        return feature_shape(self.dataset.shape, self.scales, self.angles)

    @property
    def piece(self) -> int:
        """Samples in a piece."""
        return max(1, PIECE_BYTES // (math.prod(self.shape) * np.dtype(self.precision).itemsize))

    def parts(self) -> list[tuple[str, Samples]]:
        return [("train", self.dataset.train), ("test", self.dataset.test)]

    def compute(self, pixels: Array) -> Array:
        """Features [P, 81 C, H/4, W/4] of a piece, in the precision they are kept in."""
        x = torch.from_numpy(np.array(pixels, dtype=np.float32))
        if pixels.dtype == np.uint8:
            x /= 255
        return np.asarray(scattered(standardised(x), self.scales, self.angles).numpy(), dtype=self.precision)


def cached(
    dataset: Dataset,
    scales: int = SCALES,
    angles: int = ANGLES,
    precision: Precision = "float16",
    root: Path | None = None,
    progress: Progress | None = None,
    verify: bool = False,
) -> Dataset:
    """The set with features [N, 81 C, H/4, W/4] in place of pixels, mapped from disk; computed if they are not there.

    `progress` is called with (what, bytes done, bytes in all). `verify` reads every byte of what is there, and computes
    again from the first damaged piece on.
    """
    job = _job(dataset, scales, angles, precision, root)
    try:
        if verify or _manifest(job) is None:
            with store.locked(job.folder):
                if _manifest(job) is None or not _is_whole(job):  # another process may have made them meanwhile
                    (job.folder / store.MANIFEST).unlink(missing_ok=True)
                    _make(job, progress)
    except OSError as error:
        raise UserError(f"{job.folder}: features cannot be kept: {error.strerror or error}") from error
    parts = [Samples(_load(job, part, samples), samples.y, samples.user) for part, samples in job.parts()]
    return replace(dataset, train=parts[0], test=parts[1])


def is_cached(dataset: Dataset, root: Path | None = None) -> bool:
    """Whether `cached` would only have to open files."""
    return _manifest(_job(dataset, SCALES, ANGLES, "float16", root)) is not None


def place(dataset: Dataset, root: Path | None = None) -> Path:
    """The folder of the features that `cached` makes."""
    return _job(dataset, SCALES, ANGLES, "float16", root).folder


def _job(dataset: Dataset, scales: int, angles: int, precision: Precision, root: Path | None) -> _Job:
    if scales < 1 or angles < 1:
        raise UserError(f"scattering needs scales >= 1 and angles >= 1: scales = {scales}, angles = {angles}")
    if precision not in ("float16", "float32"):
        raise UserError(f"features are kept in float16 or float32, not {precision}")
    shape = feature_shape(dataset.shape, scales, angles)
    key = {
        "set": dataset.name,
        "pixels": [store.digest(dataset.train.x), store.digest(dataset.test.x)],
        "scales": scales,
        "angles": angles,
        "order": 2,
        "input": "imagenet" if dataset.shape[0] == 3 else "unit",
        "precision": precision,
        "shape": list(shape),
        "version": VERSION,
    }
    sum_ = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    folder = store.data_root(root) / FOLDER / f"{dataset.name}-scattering-{sum_[:12]}"
    return _Job(dataset, scales, angles, precision, folder, key)


def _manifest(job: _Job) -> dict[str, Any] | None:
    path = job.folder / store.MANIFEST
    try:
        noted = json.loads(path.read_bytes())
        if noted["key"] != job.key:
            raise ValueError("it describes other features")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); delete {job.folder} to compute the features again"
        ) from None
    return dict(noted)


def _load(job: _Job, part: str, samples: Samples) -> Array:
    path = job.folder / f"{part}.npy"
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: damaged ({error}); delete {job.folder} to compute the features again") from error
    expected = (len(samples), *job.shape)
    if array.shape != expected or array.dtype != job.precision:
        raise UserError(
            f"{path}: holds {list(array.shape)} {array.dtype}, not {list(expected)} {job.precision}; "
            f"delete {job.folder} to compute the features again"
        )
    return np.asarray(array)


# ------------------------------------------------------------------------------------ computing in pieces


def _make(job: _Job, progress: Progress | None) -> None:
    """Compute what is missing, then say in the manifest that all is there."""
    for part, samples in job.parts():
        _make_part(job, part, samples, progress)
    text = json.dumps({"key": job.key}, indent=2) + "\n"
    store.write(job.folder / store.MANIFEST, lambda file: file.write(text.encode()))


def _make_part(job: _Job, part: str, samples: Samples, progress: Progress | None) -> None:
    """Write a part's pieces one after another; a sum is noted only after its piece is on the disk."""
    header, pieces = _header(job, samples), _pieces(job, samples)
    row = math.prod(job.shape) * np.dtype(job.precision).itemsize
    path, noted = job.folder / f"{part}.npy", job.folder / f"{part}.sums"
    done = _whole_pieces(job, part, samples)
    sums = _sums(noted)[:done]
    store.write(noted, lambda file: file.writelines(f"{each}\n".encode() for each in sums))
    with path.open("r+b" if done else "wb") as file, noted.open("ab") as journal:
        if not done:
            file.write(header)
        for piece in range(done, pieces):
            rows = slice(piece * job.piece, (piece + 1) * job.piece)
            data = job.compute(samples.x[rows]).tobytes()
            file.seek(len(header) + rows.start * row)
            file.write(data)
            _sync(file)
            journal.write(f"{hashlib.sha256(data).hexdigest()}\n".encode())
            _sync(journal)
            if progress:
                progress(
                    f"features of {job.dataset.name} {part}", min(rows.stop, len(samples)) * row, len(samples) * row
                )
        file.truncate(len(header) + len(samples) * row)


def _is_whole(job: _Job) -> bool:
    return all(_whole_pieces(job, part, samples) == _pieces(job, samples) for part, samples in job.parts())


def _whole_pieces(job: _Job, part: str, samples: Samples) -> int:
    """How many pieces, from the first on, are there with the bytes that were noted."""
    header = _header(job, samples)
    size = job.piece * math.prod(job.shape) * np.dtype(job.precision).itemsize
    try:
        with (job.folder / f"{part}.npy").open("rb") as file:
            if file.read(len(header)) != header:
                return 0
            count = 0
            for expected in _sums(job.folder / f"{part}.sums")[: _pieces(job, samples)]:
                if hashlib.sha256(file.read(size)).hexdigest() != expected:
                    break
                count += 1
            return count
    except FileNotFoundError:
        return 0


def _sums(path: Path) -> list[str]:
    """The whole lines of a list of sums; a line that was cut off is none."""
    if not path.is_file():
        return []
    return path.read_text(encoding="ascii", errors="replace").split("\n")[:-1]


def _pieces(job: _Job, samples: Samples) -> int:
    return math.ceil(len(samples) / job.piece)


def _header(job: _Job, samples: Samples) -> bytes:
    """The first bytes of the .npy file of a part."""
    file = io.BytesIO()
    described = {"descr": np.dtype(job.precision).str, "fortran_order": False, "shape": (len(samples), *job.shape)}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
