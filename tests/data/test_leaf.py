"""LEAF's FEMNIST and CelebA on tiny files in their form."""

import numpy as np
import pytest
from PIL import Image
from raw_files import shade, write_celeba, write_femnist, write_leaf

from kinfolk.data.leaf import CELEBA_TRAITS, read_celeba, read_femnist
from kinfolk.errors import UserError


def refusal(call, folder) -> str:
    with pytest.raises(UserError) as caught:
        call(folder)
    return str(caught.value)


def test_femnist_gives_bytes_with_white_at_255_and_one_number_per_writer(tmp_path):
    write_femnist(tmp_path)
    arrays = read_femnist(tmp_path)
    assert arrays["train_x"].shape == (3, 1, 28, 28)
    assert arrays["train_x"].dtype == np.uint8
    assert arrays["train_x"][:, 0, 0, 0].tolist() == [255, 0, 128]
    assert arrays["train_y"].tolist() == [61, 0, 5]
    assert arrays["train_user"].tolist() == [1, 0, 0]  # w1, w2 in order of name
    assert arrays["test_user"].tolist() == [1, 0]
    assert arrays["test_x"].max() == 3


@pytest.mark.parametrize(
    "users, words",
    [
        ({"a": ([shade(0.5)[:-1]], [1])}, "user 'a': x is [1, 783], expected [N, 784]"),
        ({"a": ([shade(1.5)], [1])}, "pixels run from 1.5 to 1.5, expected 0 to 1"),
        ({"a": ([shade(float("nan"))], [1])}, "expected 0 to 1"),
        ({"a": ([shade(0.5)], [62])}, "has the label 62, expected 0 to 61"),
        ({"a": ([shade(0.5)], [256])}, "has the label 256"),
        ({"a": ([shade(0.5)], ["x"])}, "has the label 'x'"),
        ({"a": ([shade(0.5), shade(0.5)], [1])}, "user 'a' has 2 x and 1 y, num_samples says 1"),
        ({"a": ([["x"] * 784], [1])}, "user 'a'"),
    ],
)
def test_femnist_files_with_wrong_contents_are_refused(tmp_path, users, words):
    write_femnist(tmp_path)
    write_leaf(tmp_path / "train" / "bad.json", users)
    assert words in refusal(read_femnist, tmp_path)


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "not JSON"),
        ("[]", "expected an object with 'users'"),
        ('{"users": [], "num_samples": []}', "there is no 'user_data'"),
        ('{"users": ["a"], "num_samples": [], "user_data": {}}', "1 users but 0 entries"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {}}', "user 'a' is in 'users' but not in 'user_data'"),
        (
            '{"users": [], "num_samples": [], "user_data": {"a": {"x": [], "y": []}, "b": {}}}',
            "user 'a' is in 'user_data' but not in 'users' (2 such users)",
        ),
        (
            '{"users": ["a", "a"], "num_samples": [0, 0], "user_data": {"a": {"x": [], "y": []}}}',
            "user 'a' is named twice",
        ),
        ('{"users": ["a"], "num_samples": [0], "user_data": {"a": {"x": [], "y": []}}}', "user 'a' has no samples"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [1]}}}', "user 'a': there is no 'y'"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": [1]}}', "user 'a': there is no 'x'"),
        (
            '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": "1", "y": [1]}}}',
            "user 'a': 'x' is not a list",
        ),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {}, "b": {}, "a": {}}}', "'a' is there twice"),
        ('{"users": 3, "num_samples": [1], "user_data": {}}', "bad.json"),
        ('{"users": [["a"]], "num_samples": [1], "user_data": {}}', "bad.json"),
    ],
)
def test_files_that_are_not_leaf_files_are_refused_by_name(tmp_path, text, words):
    write_femnist(tmp_path)
    bad = tmp_path / "train" / "bad.json"
    bad.write_text(text)
    message = refusal(read_femnist, tmp_path)
    assert words in message
    assert str(bad) in message


@pytest.mark.parametrize(("part", "other"), [("train", "test"), ("test", "train")])
def test_where_users_have_samples_in_both_parts_a_lost_half_is_refused(tmp_path, part, other):
    write_femnist(tmp_path)
    lone = {"w0": ([shade(0.5)], [1]), "w3": ([shade(0.5)], [1])}
    write_leaf(tmp_path / part / "all_data_2.json", lone)
    message = refusal(read_femnist, tmp_path)
    assert f"{tmp_path / part / 'all_data_2.json'}: user 'w0' is not in {other} (2 such users)" in message
    assert f"a file is missing in {other}" in message
    assert "\n" not in message


def test_parts_that_have_no_user_in_common_are_a_split_by_user(tmp_path):
    write_leaf(tmp_path / "train" / "a.json", {"w2": ([shade(0.0)] * 2, [1, 2]), "w0": ([shade(0.0)], [3])})
    write_leaf(tmp_path / "test" / "a.json", {"w1": ([shade(0.0)], [4])})
    arrays = read_femnist(tmp_path)
    assert arrays["train_user"].tolist() == [2, 2, 0]
    assert arrays["test_user"].tolist() == [1]


def test_a_part_in_which_nobody_is_is_refused(tmp_path):
    write_femnist(tmp_path)
    for file in (tmp_path / "test").iterdir():
        write_leaf(file, {})
    message = refusal(read_femnist, tmp_path)
    assert (
        f"{tmp_path / 'test' / 'all_data_0.json'}: there are no users in it, nor in any other file of test" == message
    )


def test_a_file_without_users_beside_others_is_read(tmp_path):
    write_femnist(tmp_path)
    write_leaf(tmp_path / "test" / "empty.json", {})
    assert read_femnist(tmp_path)["test_user"].tolist() == [1, 0]


def test_celebas_lost_halves_are_refused_though_the_user_has_too_few_pictures(tmp_path):
    write_celeba(tmp_path, {"9": 5, "7": 6})
    write_leaf(tmp_path / "train" / "more.json", {"10": (["9-0.png"], [1])})
    assert "user '10' is not in test (1 such users)" in refusal(read_celeba, tmp_path)


def test_a_user_in_two_files_of_one_part_is_refused(tmp_path):
    write_femnist(tmp_path)
    write_leaf(tmp_path / "train" / "more.json", {"w1": ([shade(0.0)], [1])})
    assert "user 'w1' is already in another file of train" in refusal(read_femnist, tmp_path)


def test_a_part_without_files_is_refused(tmp_path):
    write_leaf(tmp_path / "train" / "a.json", {"a": ([shade(0.5)], [1])})
    assert f"{tmp_path / 'test'}: there are no LEAF files" in refusal(read_femnist, tmp_path)


def test_celeba_pictures_are_resized_and_users_with_few_of_them_dropped(tmp_path):
    write_celeba(tmp_path, {"9": 5, "10": 4, "7": 6})
    arrays = read_celeba(tmp_path)
    assert arrays["train_x"].shape == (4 + 5, 3, 84, 84)
    assert arrays["train_x"].dtype == np.uint8
    assert arrays["train_user"].tolist() == [1] * 4 + [0] * 5  # "7" sorts before "9"; "10" has only four
    assert arrays["test_user"].tolist() == [1, 0]
    assert arrays["train_y"].tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert arrays["train_x"][:4, 0, 50, 50].tolist() == [0, 10, 20, 30]  # red grows with the image's number
    assert (arrays["train_x"][:, 2] == 255).all()  # blue


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname", "", 7])
def test_celeba_never_leaves_its_image_folder(tmp_path, name):
    write_celeba(tmp_path, {"a": 5})
    Image.new("RGB", (9, 9)).save(tmp_path / "raw" / "secret.png")
    write_leaf(tmp_path / "train" / "all.json", {"a": ([name], [1])})
    assert "expected the name of an image file" in refusal(read_celeba, tmp_path)


def test_celebas_traits_become_domains_where_they_are_known(tmp_path):
    write_celeba(tmp_path, {"a": 5})
    assert "train_domain" not in read_celeba(tmp_path)
    names = ["5_o_Clock_Shadow", *CELEBA_TRAITS[::-1]]
    faces = {"a-0.png": "-1 1 -1 -1 -1 -1", "a-1.png": "1 -1 -1 -1 -1 1", "a-2.png": "1 1 1 1 1 1"}
    faces |= {"a-3.png": "1 -1 -1 -1 -1 -1", "a-4.png": "-1 -1 -1 1 -1 -1"}
    lines = ["5", " ".join(names), *(f"{name}   {values}" for name, values in faces.items())]
    (tmp_path / "raw" / "list_attr_celeba.txt").write_text("\n".join(lines))
    arrays = read_celeba(tmp_path)
    assert arrays["train_domain"].tolist() == [0b00001, 0b10000, 0b11111, 0]
    assert arrays["test_domain"].tolist() == [0b00100]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "not CelebA's list of attributes, or cut off"),
        (["5", "Smiling", "a-0.png 1"], "not CelebA's list of attributes, or cut off"),
        (["1", " ".join(CELEBA_TRAITS), "a-0.png 1 1 1"], "not CelebA's list of attributes, or cut off"),
        (["1", " ".join(CELEBA_TRAITS), "a-0.png 1 1 1 1 1"], "there is no a-1.png (3 such)"),
    ],
)
def test_a_list_of_traits_that_is_not_whole_is_refused(tmp_path, lines, words):
    write_celeba(tmp_path, {"a": 5})
    (tmp_path / "raw" / "list_attr_celeba.txt").write_text("\n".join(lines))
    assert words in refusal(read_celeba, tmp_path)


def test_celeba_without_its_images_says_what_is_missing(tmp_path):
    write_celeba(tmp_path, {"a": 5})
    lost = tmp_path / "raw" / "img_align_celeba" / "a-2.png"
    lost.unlink()
    assert str(lost) in refusal(read_celeba, tmp_path)
    (tmp_path / "raw").rename(tmp_path / "elsewhere")
    assert "there is no raw/img_align_celeba folder" in refusal(read_celeba, tmp_path)
