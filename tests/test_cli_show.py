"""`kinfolk show --png`, and what is said of folders and pictures that cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from matplotlib.figure import Figure
from PIL import Image

from conftest import Command, tiny_experiment


@pytest.fixture
def here(command: Command) -> Path:
    """The folder of a finished run."""
    text = tomli_w.dumps(
        tiny_experiment(data={"clients": 4, "train": 10, "test": 10}, run={"rounds": 2, "evaluate_every": 1})
    )
    Path("tiny.toml").write_text(text, encoding="utf-8")
    assert command("run", "tiny.toml", "--out", "here").code == 0
    return Path("here")


# -- folders that were damaged ---------------------------------------------------------------------------------


CONFIGS = {
    "rounds that are a text": ("rounds = 2", 'rounds = "x"', "'run.rounds' = 'x' is not a number"),
    "no name": ('name = "tiny"', "", "it lacks name, method.name or run.seed"),
    "no seed": ("seed = 0", "", "it lacks name, method.name or run.seed"),
    "no section run": ("[run]", "[other]", "it lacks name, method.name or run.seed"),
}


@pytest.mark.parametrize(("old", "new", "why"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_config_that_lacks_something_is_one_line(command: Command, here: Path, old: str, new: str, why: str) -> None:
    text = (here / "config.toml").read_text(encoding="utf-8")
    assert old in text
    (here / "config.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    ended = command("show", "here")
    assert (ended.code, ended.err) == (2, f"kinfolk: here/config.toml is damaged: {why}\n")


@pytest.mark.parametrize("words", [["show", "here"], ["show", "here", "--json"], ["resume", "here", "--rounds", "3"]])
def test_a_line_of_metrics_without_its_accuracy_is_one_line(command: Command, here: Path, words: list[str]) -> None:
    rows = [json.loads(line) for line in (here / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    del rows[1]["accuracy"]
    (here / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    ended = command(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.message == "here/metrics.jsonl is damaged in line 2: it has no 'accuracy'"


def test_a_run_without_metrics_and_without_rounds_left_says_what_can_be_done(command: Command, here: Path) -> None:
    (here / "metrics.jsonl").unlink()
    (here / "summary.json").unlink()
    ended = command("resume", "here")
    assert ended.code == 2
    assert ended.message == (
        "metrics.jsonl is gone and no round is left to evaluate: add some with `kinfolk resume RUN --rounds N`"
    )
    assert command("resume", "here", "--rounds", "3", "--json").json["round"] == 3


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl"])
def test_a_file_of_a_run_that_may_not_be_read_is_one_line(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = Path.open

    def refused(self: Path, *args: Any, **options: Any) -> Any:
        if self == here / name:
            raise PermissionError(13, os.strerror(13), str(self))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", refused)
    ended = command("show", "here")
    assert (ended.code, ended.err) == (2, f"kinfolk: here/{name}: Permission denied\n")


def test_a_graph_that_is_gone_is_told_of_when_the_run_goes_on(command: Command, here: Path) -> None:
    told = "here has no graph.npz: who mixed with whom up to round 2 is lost"
    assert told not in command("resume", "here", "--rounds", "3").err
    (here / "graph.npz").unlink()
    assert told.replace("round 2", "round 3") in command("resume", "here", "--rounds", "4").err


# -- pictures ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["x.png", "x.txt", "x"])
def test_a_picture_is_told_of_and_stands_under_the_name_asked_for(command: Command, name: str) -> None:
    ended = command("show", "here", "--png", name)
    assert ended.code == 0
    assert "tiny, random, seed 0 (finished)" in ended.out
    assert ended.out.splitlines()[-1] == f"picture: {name}"
    with Image.open(name) as picture:
        assert picture.format == "PNG"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("name", "why"), [("no/where.png", "No such file or directory"), ("folder", "Is a directory")])
def test_a_picture_that_cannot_be_written_is_one_line_below_the_table(command: Command, name: str, why: str) -> None:
    Path("folder").mkdir()
    ended = command("show", "here", "--png", name)
    assert ended.code == 2
    assert "tiny, random, seed 0 (finished)" in ended.out
    assert ended.err == f"kinfolk: {name} cannot be written: {why}\n"
    assert not list(Path("folder").iterdir())
    assert not Path("folder.png").exists()


@pytest.mark.usefixtures("here")
def test_a_picture_in_a_folder_that_may_not_be_written_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def savefig(self: Figure, path: Path, **options: Any) -> None:
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Figure, "savefig", savefig)
    assert command("show", "here", "--png", "x.png").err == "kinfolk: x.png cannot be written: Permission denied\n"


@pytest.mark.usefixtures("here")
def test_json_is_alone_on_standard_output_beside_a_picture_too(command: Command) -> None:
    assert command("show", "here", "--png", "x.png", "--json").json["status"] == "finished"
    assert Path("x.png").is_file()


@pytest.mark.parametrize(
    ("typed", "where"),
    [
        (["show", "here", "--png"], "kinfolk show --help"),
        (["data", "split", "digits", "--png"], "kinfolk data split --help"),
        (["--nonsense"], "kinfolk --help"),
    ],
)
def test_an_option_without_its_value_names_the_help_of_its_command(
    command: Command, typed: list[str], where: str
) -> None:
    ended = command(*typed)
    assert ended.code == 2
    assert ended.message.endswith(f"; see `{where}`")
