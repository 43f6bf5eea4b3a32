"""Tiny raw files in the form of the real ones."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from kinfolk.data.formats import Arrays

CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, CODES[str(array.dtype)], array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_mnist(folder: Path, train: int = 20, test: int = 10) -> None:
    """Raw files in MNIST's form: train gzipped, test not."""
    rng = np.random.default_rng(1)
    for prefix, count in (("train", train), ("t10k", test)):
        for name, array in (
            ("images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)),
            ("labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8)),
        ):
            data = idx_bytes(array)
            if prefix == "train":
                (folder / f"{prefix}-{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / f"{prefix}-{name}").write_bytes(data)


def cifar_records(count: int, labels: list[list[int]], seed: int) -> tuple[np.ndarray, bytes]:
    """Images [count, 3, 32, 32] and the file that holds them with their `labels` [count, L]."""
    images = np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32)).astype(np.uint8)
    return images, np.hstack([np.array(labels, np.uint8), images.reshape(count, -1)]).tobytes()


def write_cifar10(folder: Path) -> np.ndarray:
    """Five batches of two images and a test batch of three; returns the train images."""
    train = []
    for i in range(1, 6):
        images, data = cifar_records(2, [[i], [i + 4]], seed=i)
        (folder / f"data_batch_{i}.bin").write_bytes(data)
        train.append(images)
    (folder / "test_batch.bin").write_bytes(cifar_records(3, [[0], [1], [9]], seed=9)[1])
    return np.concatenate(train)


def write_mosaics(folder: Path, arrays: Arrays) -> None:
    """The same set in the form of the npm package, for equal batches."""
    batches = dict(zip((f"data_batch_{i}.png" for i in range(1, 6)), np.split(arrays["train_x"], 5)))
    for name, x in {**batches, "test_batch.png": arrays["test_x"]}.items():
        Image.fromarray(x.transpose(0, 2, 3, 1).reshape(len(x), 1024, 3)).save(folder / name)
    for part in ("train", "test"):
        (folder / f"{part}_lables.json").write_text(json.dumps(arrays[f"{part}_y"].tolist()))


def write_leaf(path: Path, users: dict[str, tuple[list, list]]) -> None:
    """One LEAF file: users with their x and y."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(document))


def shade(value: float) -> list[float]:
    return [value] * 784


def write_femnist(folder: Path) -> None:
    write_leaf(folder / "train" / "all_data_0.json", {"w2": ([shade(1.0)], [61])})
    write_leaf(folder / "train" / "all_data_1.json", {"w1": ([shade(0.0), shade(128 / 255)], [0, 5])})
    write_leaf(folder / "test" / "all_data_0.json", {"w2": ([shade(3 / 255)], [7]), "w1": ([shade(0.0)], [3])})


def write_celeba(folder: Path, counts: dict[str, int]) -> None:
    """Image i of a user is a plain 178×218 picture of shade 10·i; the last image is for testing."""
    images = folder / "raw" / "img_align_celeba"
    images.mkdir(parents=True)
    parts: dict[str, dict[str, tuple[list, list]]] = {"train": {}, "test": {}}
    for user, count in counts.items():
        names = [f"{user}-{i}.png" for i in range(count)]
        for i, name in enumerate(names):
            Image.new("RGB", (178, 218), (10 * i, 10 * i, 255)).save(images / name)
        smiles = [1 - i % 2 for i in range(count)]
        parts["train"][user] = (names[:-1], smiles[:-1])
        parts["test"][user] = (names[-1:], smiles[-1:])
    for part, users in parts.items():
        write_leaf(folder / part / "all.json", users)


def write_writers(folder: Path, train: int = 20, test: int = 10) -> None:
    """QMNIST's extended labels for `write_mnist`: the writer of a row is 2000 + row // 4."""
    for part, count in (("train", train), ("test", test)):
        table = np.zeros((count, 8), np.int32)
        table[:, 0] = np.arange(count) % 10
        table[:, 2] = 2000 + np.arange(count) // 4
        data = gzip.compress(idx_bytes(table))
        (folder / f"qmnist-{part}-labels-idx2-int.gz").write_bytes(data)
