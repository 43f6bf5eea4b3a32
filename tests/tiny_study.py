"""A study of eight clients and two rounds, for the tests of `kinfolk reproduce` and of packs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import tomli_w

from conftest import tiny_experiment
from kinfolk.experiment import Observer

STUDY: dict[str, Any] = {
    "study": "Gossip, in a nutshell",
    "experiment": "tiny.toml",
    "seeds": 2,
    "columns": {"two": ["data.split.clusters=2"], "four": ["data.split.clusters=4"]},
    "rows": {
        "Alone": ["method.name=local", "data.split.clusters=2"],
        "Gossip": ["method.name=random"],
        "Oracle": {"set": ["method.name=oracle"], "columns": ["two"]},
    },
    "published": {"accuracy": {"Gossip": ["99.9±0.1", "98.0"], "Alone": ["40.0±100.0", ""]}},
    "unstated": ["the weather: fine"],
    "notes": ["Only a test."],
}


class Ran(Observer):
    """Notes the cells that are really run."""

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.started_at: list[int] = []
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def cell(self, number: int, of: int, name: str) -> None:
        self.cells.append(f"{number}/{of} {name}")

    def started(self, config: Any, folder: Path, first: int, device: str) -> None:
        self.started_at.append(first)


def write_files() -> None:
    """A study and the experiment it starts from, in this folder."""
    small = tiny_experiment(
        data={"clients": 8, "train": 10, "test": 10}, run={"rounds": 2, "evaluate_every": 1, "checkpoint_every": 1}
    )
    Path("tiny.toml").write_text(tomli_w.dumps(small), encoding="utf-8")
    write_study()


def write_study(**changes: Any) -> None:
    Path("mine.toml").write_text(tomli_w.dumps({**STUDY, **changes}), encoding="utf-8")


def results() -> list[dict[str, str]]:
    with open("runs/reproduce/mine.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def one(row: str, column: str) -> dict[str, str]:
    return next(line for line in results() if (line["row"], line["column"]) == (row, column))


def cells() -> list[str]:
    return sorted(path.name for path in Path("runs/reproduce/cells").iterdir())
