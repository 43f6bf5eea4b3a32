"""The table of a comparison in its folder, beside the folders of its runs; it stays good when all that is moved."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kinfolk.errors import UserError
from kinfolk.runs.files import explained, strict_json, write_atomically
from kinfolk.runs.folder import COMPARISON, CONFIG, RunFolder
from kinfolk.runs.tables import to_csv

TABLE = "comparison.csv"


def write(folder: Path, rows: Sequence[Mapping[str, Any]], runs: Mapping[str, Sequence[Path]], rounds: int) -> None:
    """Keep the table. runs: method -> folders of its seeds, which lie in `folder`; rounds: how long they all are."""
    names = {method: [path.name for path in some] for method, some in runs.items()}
    found = {"rounds": rounds, "rows": rows, "runs": names}
    with explained(lambda error: UserError(f"{folder / COMPARISON} cannot be written: {error.strerror}")):
        write_atomically(folder / COMPARISON, (strict_json(found, indent=2) + "\n").encode())
        write_atomically(folder / TABLE, to_csv(rows).encode())


def read(folder: Path) -> dict[str, Any]:
    """The folder, the rows of its table, and method -> its runs as they are found from here."""
    found = _read(folder)
    runs = {name: [str(path) for path in some] for name, some in _runs(folder, found).items()}
    return {"folder": str(folder), "rows": found["rows"], "runs": runs}


def outdated(folder: Path) -> str | None:
    """What has happened to a run since the table was made, if anything has."""
    try:
        return _outdated(folder, _read(folder))
    except UserError as error:  # of one of the runs, or it could not have been read
        return str(error)


def _outdated(folder: Path, found: dict[str, Any]) -> str | None:
    paths = [path for some in _runs(folder, found).values() for path in some]
    if gone := [path for path in paths if not (path / CONFIG).is_file()]:
        return f"{gone[0]}, which this table is made of, is not there"
    states = {path: RunFolder.open(path).status() for path in paths}
    # Earlier versions did not keep how long the runs were; a run only ever becomes longer.
    rounds = found.get("rounds", min((state.rounds for state in states.values()), default=0))
    longer = [(path, state) for path, state in states.items() if state.rounds != rounds or state.state != "finished"]
    if not longer:
        return None
    path, state = longer[0]
    what = f"{state.rounds} rounds long" if state.state == "finished" else str(state)
    return f"{path} is {what} now, this table is of {rounds} rounds: make all its runs as long and compare again"


def _read(folder: Path) -> dict[str, Any]:
    path = folder / COMPARISON
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict) or not {"rows", "runs"} <= found.keys():
        raise UserError(f"{path} is damaged: it has no rows or no runs")
    rows, runs = found["rows"], found["runs"]
    table = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    lists = isinstance(runs, dict) and all(isinstance(some, list) for some in runs.values())
    if not (table and lists and all(isinstance(path, str) for some in runs.values() for path in some)):
        raise UserError(f"{path} is damaged: 'rows' must be a list of objects, 'runs' lists of folders by method")
    return found


def _runs(folder: Path, found: Mapping[str, Any]) -> dict[str, list[Path]]:
    """Earlier versions kept paths from where they were called: a run's own name is what stays."""
    return {name: [folder / Path(path).name for path in some] for name, some in found["runs"].items()}
