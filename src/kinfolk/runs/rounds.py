"""What a method notes in every round, evaluated or not: `rounds.csv`, one row per round."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kinfolk.errors import UserError
from kinfolk.runs.files import append, truncate_line, write_atomically
from kinfolk.runs.tables import from_csv, to_csv

FILE = "rounds.csv"


class RoundLog:
    """Appends rows. They are on the disk when `add` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of some rounds, each with its `round` and the same columns as all before."""
        if not rows:
            return
        header, _, lines = to_csv(rows).partition("\n")
        new = not self.path.exists() or self.path.stat().st_size == 0
        append(self.path, (f"{header}\n{lines}" if new else lines).encode(), sync=True)

    def truncate(self, round: int) -> None:
        """Forget every round after `round`: a resumed run will add them again."""
        rows = _rows(self.path)
        kept = [row for row in rows if row["round"] <= round]
        if len(kept) < len(rows):
            write_atomically(self.path, to_csv(kept).encode())

    def repair(self) -> None:
        """Remove half a line that a killed process left."""
        truncate_line(self.path)


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """A row for every round so far, an undefined number as None; [] if the method notes nothing."""
    return _rows(folder / FILE)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the file; a last line that was never completed is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    rows = from_csv(whole.decode(errors="replace"))
    for number, row in enumerate(rows, start=2):
        numbers = [value for name, value in row.items() if name != "round"]
        if type(row.get("round")) is not int or not all(
            value is None or type(value) in (int, float) for value in numbers
        ):
            raise UserError(f"{path} is damaged in line {number}")
    return rows
