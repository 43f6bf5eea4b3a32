"""Getting tiny sets: sources in order, what they leave behind, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from raw_files import idx_bytes, write_mnist
from tiny_catalog import Fake, change, fail, mnist, put, refusal

from kinfolk.data import catalog
from kinfolk.data.sets import CATALOG
from kinfolk.errors import UserError


def test_files_of_the_wrong_contents_are_refused_with_both_sums_and_left_alone(tmp_path, change):
    folder = put(tmp_path, "mnist", write_mnist)
    found = CATALOG["mnist"].sums["test_y"]
    change("mnist", sums={**CATALOG["mnist"].sums, "test_y": "f" * 64})
    before = sorted(folder.iterdir())
    for call in (catalog.load, catalog.get):
        message = refusal(call, "mnist", tmp_path)
        assert f"test_y of mnist has SHA-256 {found}, expected {'f' * 64}" in message
        assert sorted(folder.iterdir()) == before


def test_sources_are_tried_in_order_until_one_is_right(tmp_path, change, mnist):
    def wrong(into: Path) -> None:
        write_mnist(into)
        (into / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.full(10, 3, np.uint8)))

    sources = (
        Fake("first", fail("no route")),
        Fake("second", wrong, resumes=True),
        Fake("third", write_mnist),
        Fake("fourth", fail("must not be asked")),
    )
    change("mnist", sources=sources)
    seen = []
    folder = catalog.get("mnist", tmp_path, progress=lambda label, done, total: seen.append(label))
    assert seen == ["first", "second", "third"]
    assert json.loads((folder / "manifest.json").read_text())["source"] == "third"
    assert sorted(path.suffix for path in folder.iterdir()) == [".json"] + [".npy"] * 4
    np.testing.assert_array_equal(catalog.load("mnist", tmp_path).train.x, mnist["train_x"])
    seen.clear()
    catalog.get("mnist", tmp_path, progress=lambda label, done, total: seen.append(label))
    assert seen == []


@pytest.mark.parametrize("resumes", [False, True])
def test_when_every_source_fails_one_line_gives_every_reason_and_nothing_is_left(tmp_path, change, resumes):
    right = CATALOG["mnist"].sums["train_x"]
    sources = (
        Fake("first", fail("first: no route"), resumes),
        Fake("second", lambda into: write_mnist(into, train=20), resumes),
        Fake("third", lambda into: (into / "unrelated").write_text("?"), resumes),
    )
    change("mnist", sources=sources, sums={**CATALOG["mnist"].sums, "train_x": "0" * 64})
    message = refusal(catalog.get, "mnist", tmp_path)
    assert "first: no route; second: " in message
    assert "first: first" not in message
    assert f"has SHA-256 {right}, expected {'0' * 64}" in message
    assert "third: brought none of the files of mnist" in message
    assert "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz" in message
    assert str(tmp_path / "mnist") in message
    assert list(tmp_path.iterdir()) == []


def test_an_official_address_out_of_reach_leaves_no_folder(tmp_path, change):
    change("mnist", sources=(Fake("official", fail("no route"), resumes=True),))
    refusal(catalog.get, "mnist", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_broken_transfer_left_stays_for_the_next_time_and_goes_after_success(tmp_path, change):
    def half(into: Path) -> None:
        (into / "train.part").write_bytes(b"half")
        raise UserError("broke off")

    change("mnist", sources=(Fake("official", half, resumes=True),))
    refusal(catalog.get, "mnist", tmp_path)
    assert (tmp_path / "mnist" / "download" / "train.part").read_bytes() == b"half"
    change("mnist", sources=(Fake("official", half, resumes=True), Fake("other", write_mnist)))
    catalog.get("mnist", tmp_path)
    assert not (tmp_path / "mnist" / "download").exists()


def test_a_source_with_too_few_samples_is_refused_with_the_numbers(tmp_path, change):
    change("mnist", sources=(Fake("short", lambda into: write_mnist(into, train=19)),))
    message = refusal(catalog.get, "mnist", tmp_path)
    assert "train_x of mnist is (19, 1, 28, 28), expected (20, 1, 28, 28)" in message
