"""Tiny sets in place of the real ones, with sources that write files or fail."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from raw_files import write_mnist, write_writers

from kinfolk.data import catalog, formats
from kinfolk.data.sets import CATALOG, read_writers
from kinfolk.errors import UserError

__all__ = ["Fake", "change", "fail", "mnist", "put", "refusal", "state", "sums"]


@dataclass(frozen=True)
class Fake:
    """A source that writes files, or fails."""

    label: str
    write: Callable[[Path], None]
    resumes: bool = False

    def fetch(self, into, progress) -> None:
        if progress:
            progress(self.label, 1, 1)
        self.write(into)


def fail(reason: str) -> Callable[[Path], None]:
    def write(into: Path) -> None:
        raise UserError(reason)

    return write


def sums(arrays: formats.Arrays) -> dict[str, str]:
    return {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in arrays.items()}


@pytest.fixture
def change(monkeypatch):
    """Change fields of an entry of the catalogue for one test."""

    def change(name: str, **fields) -> None:
        monkeypatch.setitem(CATALOG, name, replace(CATALOG[name], **fields))

    return change


@pytest.fixture(autouse=True)
def mnist(tmp_path_factory, change):
    """Tiny MNIST and writers in place of the real ones, with their true checksums and no way out to the network."""
    folder = tmp_path_factory.mktemp("raw")
    write_mnist(folder)
    write_writers(folder)
    images, writers = formats.read_mnist(folder), read_writers(folder)
    change("mnist", train=20, test=10, sums=sums(images), sources=(Fake("nowhere", fail("out of reach")),))
    change("mnist-by-writer", train=20, test=10, sums=sums(writers), sources=(Fake("nowhere", fail("gone")),))
    return images


def refusal(call, *arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def put(root: Path, name: str, write: Callable[[Path], object]) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    write(folder)
    return folder


def state(name: str, root: Path) -> str:
    return next(row.state for row in catalog.describe(root) if row.name == name)
