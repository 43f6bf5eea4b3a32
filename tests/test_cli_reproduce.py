"""`kinfolk reproduce` from the command line."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conftest import Command
from kinfolk.progress import Reporter
from tiny_study import cells, write_files


@pytest.fixture(autouse=True)
def _files() -> None:
    write_files()


def test_the_command_shows_progress_the_table_and_the_files(command: Command) -> None:
    ended = command(
        "reproduce", "mine.toml", "--rows", "Gossip, Oracle", "--columns", "two", "--seeds", "1", "--device", "cpu"
    )
    assert (ended.code, len(cells())) == (0, 2)
    assert "1/2 Gossip, two, seed 0: round 2/2" in ended.err
    assert (
        "2/2 Oracle, two, seed 0: 2 rounds on cpu, runs/reproduce/cells/digits-8x10-rotation-oracle-2rounds"
        in ended.err
    )
    assert "Gossip, in a nutshell" in ended.out
    assert "two: published" in ended.out
    assert ended.out.endswith("written: runs/reproduce/mine.md\nwritten: runs/reproduce/mine.csv\n")


def test_list_shows_what_is_done_and_runs_nothing(command: Command) -> None:
    assert "10 cells, 8 runs (equal cells share one), 0 finished" in command("reproduce", "mine.toml", "--list").out
    assert not Path("runs").exists()
    command("reproduce", "mine.toml", "--rows", "Oracle", "--seeds", "1")
    shown = command("reproduce", "mine.toml", "--list").out
    assert re.search(r"^Oracle, two, seed 0 +finished +runs/reproduce/cells/digits-", shown, re.MULTILINE)
    assert re.search(r"^Oracle, two, seed 1 +missing ", shown, re.MULTILINE)
    assert "8 runs (equal cells share one), 1 finished" in shown


def test_list_shows_the_rows_and_columns_asked_for_and_refuses_others(command: Command) -> None:
    listed = command("reproduce", "mine.toml", "--rows", "Gossip, Oracle", "--columns", "two", "--list", "--json").json
    assert [(cell["row"], cell["column"], cell["seed"]) for cell in listed["cells"]] == [
        ("Gossip", "two", 0), ("Gossip", "two", 1), ("Oracle", "two", 0), ("Oracle", "two", 1)
    ]  # fmt: skip
    assert "0 cells, 0 runs" in command("reproduce", "mine.toml", "--rows=Oracle", "--columns=four", "--list").out
    for word, message in (
        ("--rows", "no row 'Typo' in this study: known: Alone, Gossip, Oracle"),
        ("--columns", "no column 'Typo' in this study: known: four, two"),
    ):
        ended = command("reproduce", "mine.toml", word, "Typo", "--list")
        assert (ended.code, ended.out, ended.message) == (2, "", message)


@pytest.mark.parametrize("words", [[], ["--no-run"]])
def test_a_folder_that_cannot_be_made_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def refused(self: Path, *args: Any, **options: Any) -> None:
        raise PermissionError(13, os.strerror(13), str(self))

    for out, why in (
        ("tiny.toml", "tiny.toml is a file; choose another --out"),
        ("tiny.toml/below", "tiny.toml/below cannot be made: Not a directory"),
    ):
        assert command("reproduce", "mine.toml", *words, "--out", out).err == f"kinfolk: {why}\n"
    monkeypatch.setattr(Path, "mkdir", refused)
    ended = command("reproduce", "mine.toml", *words, "--out", "locked")
    assert (ended.code, ended.err) == (2, "kinfolk: locked cannot be made: Permission denied\n")


def test_packs_on_the_command_line(command: Command) -> None:
    words = ["--rows", "Oracle", "--seeds", "1", "--device", "cpu", "--out", "there", "--pack", "cells.zip"]
    assert command("reproduce", "mine.toml", *words).out.endswith("packed: cells.zip, 1 run\n")
    ended = command("reproduce", "mine.toml", "--cells", "cells.zip", "--cells", "there", "--no-run")
    assert (ended.code, ended.err, len(cells())) == (0, "", 1)
    for folder in ("there", "runs/reproduce"):
        assert "- command: `kinfolk reproduce mine.toml`" in Path(folder, "mine.md").read_text(encoding="utf-8")
    ended = command("reproduce", "mine.toml", "--list", "--cells", "cells.zip")
    assert (ended.code, ended.out) == (2, "")
    assert "leave out --cells and --pack" in ended.err


def test_ctrl_c_says_how_to_go_on(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as keyboard:
        keyboard.setattr(Reporter, "round", lambda self, t, row: os.kill(os.getpid(), signal.SIGINT))
        ended = command("reproduce", "mine.toml", "--rows", "Oracle")
    assert ended.code == 130
    again = "kinfolk reproduce mine.toml --rows Oracle"
    assert ended.err.splitlines()[-1] == f"kinfolk: stopped after round 1; go on with: {again}"
    assert command(*again.split()[1:]).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "panm/table2"],
            "panm/table2 is a study of many runs, not one experiment: kinfolk reproduce panm/table2",
        ),
        (["run", "mine.toml"], "mine.toml is a study of many runs, not one experiment: kinfolk reproduce mine.toml"),
        (["reproduce", "panm/tabel2"], "no file and no shipped study 'panm/tabel2': did you mean 'panm/table2'?"),
        (["reproduce", "digits"], "digits is one experiment, not a study: kinfolk run digits"),
        (["reproduce", "mine.toml", "--rows", "Gosip"], "no row 'Gosip' in this study: did you mean 'Gossip'?"),
    ],
)
def test_a_mistake_is_one_line(command: Command, words: list[str], message: str) -> None:
    ended = command(*words)
    assert (ended.code, ended.out, ended.err) == (2, "", f"kinfolk: {message}\n")


def test_kinfolk_list_shows_experiments_and_studies_apart(command: Command) -> None:
    experiments, studies = command("list").out.splitlines()[-2:]
    assert experiments.startswith("shipped experiments: afind/cifar10, ")
    assert "table2" not in experiments
    assert studies.startswith("studies, for `kinfolk reproduce`: ")
    assert "panm/table2" in studies
    assert "panm/cifar10" not in studies


def test_a_small_study_goes_through_to_its_picture(command: Command) -> None:
    words = ["run.rounds=2", "method.discover_rounds=1", "data.clients=8", "data.train=10", "training.epochs=1"]
    overrides = [*words[:1], *words[2:]]
    ended = command("reproduce", "panm/small/figure7", *overrides)
    assert (ended.code, ended.err.splitlines()[-1].split()[0]) == (0, "6/6")
    (path,) = Path("runs/reproduce/panm/small").glob("figure7-*.png")
    with Image.open(path) as picture:
        assert picture.format == "PNG"
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert f"]({path.name})" in text
    assert "neighbor precision, %" in text
