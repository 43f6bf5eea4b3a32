"""LEAF's files from end to end: written tiny, read, handed out by user, trained on, tested on people never seen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Command
from kinfolk import UserError, load_federation
from kinfolk.config import read
from kinfolk.data import catalog
from kinfolk.data.tiny_leaf import write_tiny
from kinfolk.exporting import read_model
from kinfolk.runs.folder import RunFolder

SMALL = {
    "femnist": ["data.validation_clients=1", "model.hidden=16"],
    "celeba": ["training.batch_size=10"],
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with tiny sets of six users each, as a user has it who was told of $KINFOLK_DATA."""
    folder = tmp_path / "leaf"
    write_tiny(folder, users=6)
    monkeypatch.setenv("KINFOLK_DATA", str(folder))
    return folder


def first(root: Path, name: str, part: str = "train") -> Path:
    return sorted((root / name / part).glob("*.json"))[0]


def changed(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def everything(root: Path) -> dict[str, str]:
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# -- what is written ---------------------------------------------------------------------------------------------


def test_the_tiny_sets_have_the_form_of_the_real_ones(root: Path) -> None:
    for name, shape in (("femnist", (1, 28, 28)), ("celeba", (3, 84, 84))):
        data = catalog.load(name)
        assert data.shape == shape
        users = [np.unique(part.user).tolist() for part in (data.train, data.test)]
        assert users == [list(range(6))] * 2
        assert len(data.test.y) < len(data.train.y) / 4
    femnist = catalog.load("femnist")
    assert np.bincount(femnist.train.user).tolist() == [18] * 6
    corners = femnist.train.x[:, 0, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert np.mean(corners == 255) > 0.9  # white paper
    assert len(np.unique(femnist.train.y)) > 5
    faces = catalog.load("celeba").train
    assert faces.domain is not None
    assert 5 < len(np.unique(faces.domain)) <= 32
    assert set(faces.y.tolist()) == {0, 1}
    assert np.abs(faces.x[faces.y == 1].mean(0) - faces.x[faces.y == 0].mean(0)).max() > 30  # the mouth


def test_two_folders_are_the_same_and_nothing_is_written_over(root: Path, tmp_path: Path, command: Command) -> None:
    assert command("data", "leaf", "--tiny", str(tmp_path / "again"), "--users", "6").code == 0
    assert everything(tmp_path / "again") == everything(root)
    before = everything(root)
    assert "exists already" in command("data", "leaf", "--tiny", str(root)).message
    assert everything(root) == before
    file = tmp_path / "file"
    file.write_text("mine")
    assert "cannot be written" in command("data", "leaf", "--tiny", str(file / "deeper")).message
    with pytest.raises(UserError, match="at least 2"):
        write_tiny(tmp_path / "one", users=1)


# -- the whole path ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_from_files_to_people_never_seen(name: str, root: Path, command: Command) -> None:
    sizes = ["data.clients=3", "data.new_clients=2", "method.participation=0.6", "run.rounds=1"]
    ended = command("run", f"fedcg/{name}", *sizes, *SMALL[name], "--out", "run", "--json")
    assert ended.code == 0, ended.err
    assert 0 <= ended.json["new_accuracy"] <= 1
    rows = RunFolder.open(Path("run")).new_clients()
    assert [row["role"] for row in rows][:2] == ["new"] * 2
    counts = np.bincount(np.concatenate([part.user for part in (catalog.load(name).train, catalog.load(name).test)]))
    assert all(row["samples"] in counts for row in rows)  # all of theirs, and nobody else's
    assert command("export", "run", "--to", "model.safetensors").code == 0
    assert read_model("model.safetensors").domains == 4


def test_parts_divided_by_user_are_read_and_trained_on(root: Path, command: Command) -> None:
    for number, file in enumerate(sorted((root / "femnist").glob("*/*.json"))):
        keep = [f"f{user:04d}_{user:02d}" for user in ([4], [5], [0, 1], [2, 3])[number]]

        def only(document: dict[str, Any], keep: list[str] = keep) -> None:
            spare = next(iter(document["user_data"].values()))
            document["user_data"] = {name: document["user_data"].get(name, spare) for name in keep}
            document["users"] = keep
            document["num_samples"] = [len(own["y"]) for own in document["user_data"].values()]

        changed(file, only)
    data = catalog.load("femnist")
    assert np.unique(data.train.user).tolist() == [0, 1, 2, 3]
    assert np.unique(data.test.user).tolist() == [4, 5]
    sizes = ["data.clients=3", "data.new_clients=2", "method.participation=0.6", "run.rounds=1"]
    ended = command("run", "fedcg/femnist", *sizes, *SMALL["femnist"], "--out", "run", "--json")
    assert ended.code == 0, ended.err


def test_faces_know_their_traits_wherever_they_are_held(root: Path) -> None:
    data = load_federation(read("fedcg/celeba", ["data.clients=3", "data.new_clients=2"]))
    assert 5 < data.domains <= 32
    assert data.clusters is None
    turned = load_federation(read("fedcg/celeba", ["data.clients=3", "data.new_clients=2", "data.rotate=samples"]))
    assert turned.domains == 4  # angles count for more


# -- files that are not as they should be ------------------------------------------------------------------------


def cut(root: Path) -> None:
    file = first(root, "femnist")
    file.write_bytes(file.read_bytes()[:-40])


def unnamed(root: Path) -> None:
    changed(first(root, "femnist"), lambda document: (document["users"].pop(), document["num_samples"].pop()))


def unknown(root: Path) -> None:
    def add(document: dict[str, Any]) -> None:
        document["users"].append("stranger")
        document["num_samples"].append(3)

    changed(first(root, "femnist", "test"), add)


def empty(root: Path) -> None:
    def empty_one(document: dict[str, Any]) -> None:
        document["user_data"]["f0001_01"] = {"x": [], "y": []}
        document["num_samples"][1] = 0

    changed(first(root, "femnist"), empty_one)


def nothing(root: Path) -> None:
    for file in (root / "femnist" / "train").glob("*.json"):
        file.unlink()


def no_folder(root: Path) -> None:
    (root / "femnist" / "test").rename(root / "test")


def one_file(root: Path) -> None:
    first(root, "femnist").unlink()


def miscounted(root: Path) -> None:
    changed(first(root, "femnist"), lambda document: document["num_samples"].__setitem__(2, 99))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (one_file, "user 'f0000_00' is not in train (3 such users), though others are in both parts"),
        (miscounted, "user 'f0002_02' has 18 x and 18 y, num_samples says 99"),
        (cut, "not JSON, or cut off"),
        (unnamed, "is in 'user_data' but not in 'users' (1 such users)"),
        (unknown, "user 'stranger' is in 'users' but not in 'user_data'"),
        (empty, "user 'f0001_01' has no samples"),
        (nothing, "there are no LEAF files"),
        (no_folder, "the train and test folders of JSON files"),
    ],
)
def test_files_that_are_wrong_are_told_in_a_line_and_stay(
    harm: Callable[[Path], None], words: str, root: Path, command: Command
) -> None:
    harm(root)
    before = everything(root)
    for words_of_command in (("data", "get", "femnist"), ("run", "fedcg/femnist", "--out", "run")):
        ended = command(*words_of_command)
        assert ended.code == 2
        assert words in ended.message
        assert str(root / "femnist") in ended.message
    assert everything(root) == before
    assert not Path("run").exists()


def test_a_set_that_was_read_before_is_not_lost_when_its_files_are_harmed(root: Path) -> None:
    right = catalog.load("femnist").train.y.tolist()
    cut(root)
    assert catalog.load("femnist").train.y.tolist() == right


def test_more_people_than_there_are_is_one_line(root: Path, command: Command) -> None:
    ended = command("run", "fedcg/celeba", "--out", "run")
    assert ended.code == 2
    assert "6 of 6 users have at least split.min_samples = 2 samples" in ended.message
    lost = next((root / "celeba" / "raw" / "img_align_celeba").iterdir())
    for name in ("manifest.json", "train_x.npy"):
        (root / "celeba" / name).unlink(missing_ok=True)
    lost.unlink()
    assert str(lost) in command("data", "get", "celeba").message
