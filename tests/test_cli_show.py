"""`kinfolk show --png`, and what is said of folders and pictures that cannot be."""

from __future__ import annotations

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
