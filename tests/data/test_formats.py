"""Readers: what they return, and that nothing malformed gets through."""

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from raw_files import CODES, cifar_records, idx_bytes, write_cifar10, write_mnist, write_mosaics

from kinfolk.data import formats
from kinfolk.data.formats import Dataset, Samples
from kinfolk.errors import UserError

RNG = np.random.default_rng(0)


def refusal(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------------------------------------------- IDX


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(sorted(CODES)),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    zipped=st.booleans(),
)
def test_every_idx_type_and_shape_comes_back_as_it_was(tmp_path_factory, dtype, shape, zipped):
    array = RNG.integers(-100, 100, shape).astype(dtype)
    path = tmp_path_factory.mktemp("idx") / "file"
    path.write_bytes(gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array))
    read = formats.read_idx(path)
    assert read.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda data: b"", "starts with nothing"),
        (lambda data: b"\x01" + data[1:], "01 00 08 03"),
        (lambda data: b"\0\0\x0a" + data[3:], "not an IDX file"),
        (lambda data: data[:9], "ends after 9 of 16 bytes"),
        (lambda data: data[:-1], "= 24 bytes of data, found only 23"),
        (lambda data: data + b"x", "= 24 bytes of data, found more"),
        (lambda data: data[:4] + b"\xff" * 12 + data[16:], "more than"),
    ],
)
def test_a_malformed_idx_file_is_refused_with_its_name_and_numbers(tmp_path, zipped, change, words):
    data = change(idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4)))
    path = tmp_path / "broken-idx3"
    path.write_bytes(gzip.compress(data) if zipped else data)
    message = refusal(formats.read_idx, path)
    assert words in message
    assert str(path) in message


def test_a_cut_gzip_file_and_a_missing_file_are_refused(tmp_path):
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(idx_bytes(RNG.integers(0, 255, 1000).astype(np.uint8)))[:-200])
    assert str(cut) in refusal(formats.read_idx, cut)
    assert "cannot be read" in refusal(formats.read_idx, tmp_path / "nothing")


def test_mnist_images_get_a_channel_and_labels_stay_bytes(tmp_path):
    write_mnist(tmp_path)
    arrays = formats.read_mnist(tmp_path)
    assert arrays["train_x"].shape == (20, 1, 28, 28)
    assert arrays["test_x"].shape == (10, 1, 28, 28)
    assert arrays["test_y"].tolist() == list(range(10))
    assert {str(array.dtype) for array in arrays.values()} == {"uint8"}


def test_mnist_with_labels_for_images_or_of_another_length_is_refused(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(9, np.uint8)))
    assert "10 test images but 9 labels" in refusal(formats.read_mnist, tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros(10, np.uint8)))
    assert "holds [10] uint8, expected 3 dimensions" in refusal(formats.read_mnist, tmp_path)


def test_a_qmnist_writer_is_column_two_and_its_class_column_zero(tmp_path):
    table = RNG.integers(0, 10, (6, 8)).astype(np.int32)
    table[:, 2] += 2000
    path = tmp_path / "labels"
    path.write_bytes(idx_bytes(table))
    classes, writers = formats.read_qmnist_labels(path)
    assert classes.dtype == np.uint8
    assert writers.dtype == np.int64
    assert classes.tolist() == table[:, 0].tolist()
    assert writers.tolist() == table[:, 2].tolist()


def test_qmnist_labels_of_the_short_form_or_out_of_range_are_refused(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(idx_bytes(np.zeros(6, np.uint8)))
    assert "expected QMNIST's [N, 8] int32" in refusal(formats.read_qmnist_labels, path)
    path.write_bytes(idx_bytes(np.full((6, 8), 256, np.int32)))  # would become 0 in a byte
    assert "labels run from 256 to 256" in refusal(formats.read_qmnist_labels, path)


# ---------------------------------------------------------------------------------------------------- CIFAR


def test_cifar10_batches_are_joined_in_order_with_planes_as_channels(tmp_path):
    images = write_cifar10(tmp_path)
    arrays = formats.read_cifar10(tmp_path)
    np.testing.assert_array_equal(arrays["train_x"], images)
    assert arrays["train_y"].tolist() == [1, 5, 2, 6, 3, 7, 4, 8, 5, 9]
    assert arrays["test_y"].tolist() == [0, 1, 9]


def test_cifar10_mosaics_decode_to_the_arrays_of_the_binary_version(tmp_path):
    write_cifar10(tmp_path)
    arrays = formats.read_cifar10(tmp_path)
    write_mosaics(tmp_path, arrays)
    again = formats.read_cifar10_mosaics(tmp_path)
    assert again.keys() == arrays.keys()
    for key in arrays:
        assert again[key].dtype == np.uint8
        np.testing.assert_array_equal(again[key], arrays[key])


def test_cifar100_gives_fine_labels_unless_coarse_ones_are_asked_for(tmp_path):
    for name in ("train.bin", "test.bin"):
        (tmp_path / name).write_bytes(cifar_records(2, [[3, 77], [19, 99]], seed=0)[1])
    assert formats.read_cifar100(tmp_path)["train_y"].tolist() == [77, 99]
    assert formats.read_cifar100(tmp_path, coarse=True)["test_y"].tolist() == [3, 19]


def test_a_cifar_file_with_a_broken_record_or_a_wrong_label_is_refused(tmp_path):
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    message = refusal(formats.read_cifar10, tmp_path)
    assert f"{path}: 6145 bytes is not a whole number of 3073-byte records" in message
    path.write_bytes(b"\x0a" + data[1:])
    assert "labels run from 1 to 10, expected 0 to 9" in refusal(formats.read_cifar10, tmp_path)
    path.write_bytes(b"")
    assert "0 bytes" in refusal(formats.read_cifar10, tmp_path)
    path.unlink()
    assert f"{path}: cannot be read" in refusal(formats.read_cifar10, tmp_path)


@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar-10-batches-py", "data_batch_1"])
def test_the_pickled_version_of_cifar_is_refused_and_the_binary_one_named(tmp_path, name):
    formats.refuse_pickled_cifar(tmp_path, "cifar-10")  # nothing there, nothing to refuse
    (tmp_path / name).write_bytes(b"\x80\x04")
    message = refusal(formats.refuse_pickled_cifar, tmp_path, "cifar-10")
    assert name in message
    assert "cifar-10-binary.tar.gz" in message


def test_malformed_mosaics_are_refused(tmp_path):
    write_cifar10(tmp_path)
    arrays = formats.read_cifar10(tmp_path)
    write_mosaics(tmp_path, arrays)
    labels = tmp_path / "test_lables.json"
    for text, words in (
        ("[1, 2]", "2 labels for 3 images"),
        ("[1, 2, 10]", "labels run from 1 to 10"),
        ("[1, 2, 300]", "labels run from 1 to 300"),
        ("[1, 2, 3.5]", "list of whole numbers"),
        ('{"a": 1}', "list of whole numbers"),
        ("[1, 2", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ):
        labels.write_text(text)
        message = refusal(formats.read_cifar10_mosaics, tmp_path)
        assert words in message
        assert str(labels) in message
    Image.fromarray(np.zeros((3, 1000, 3), np.uint8)).save(tmp_path / "test_batch.png")
    assert "1000 pixels wide, expected 1024" in refusal(formats.read_cifar10_mosaics, tmp_path)
    (tmp_path / "test_batch.png").write_bytes((tmp_path / "data_batch_1.png").read_bytes()[:300])
    assert "not a picture" in refusal(formats.read_cifar10_mosaics, tmp_path)


# ---------------------------------------------------------------------------------------------------- samples


def test_samples_must_agree_in_length_and_type():
    x, y = np.zeros((3, 2), np.float32), np.zeros(3, np.int64)
    assert len(Samples(x, y, y)) == 3
    assert "3 x but 2 y" in refusal(Samples, x, y[:2])
    assert "3 x but 2 user" in refusal(Samples, x, y, y[:2])
    assert "not float64" in refusal(Samples, x.astype(np.float64), y)
    assert "[3] int32" in refusal(Samples, x, y.astype(np.int32))
    assert "[3, 1] int64" in refusal(Samples, x, y[:, None])


def test_a_dataset_has_one_sample_shape_and_labels_within_its_classes():
    def samples(shape, label):
        return Samples(np.zeros((2, *shape), np.uint8), np.full(2, label, np.int64))

    good = Dataset("toy", samples((1, 4, 4), 0), samples((1, 4, 4), 1), classes=2)
    assert good.shape == (1, 4, 4)
    assert "[1, 4, 4], test samples [16]" in refusal(Dataset, "toy", good.train, samples((16,), 1), 2)
    assert "toy test: labels run from 2 to 2" in refusal(Dataset, "toy", good.train, samples((1, 4, 4), 2), 2)
    assert "labels run from -1" in refusal(Dataset, "toy", samples((1, 4, 4), -1), good.test, 2)
