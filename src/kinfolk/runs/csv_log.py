"""A table in a run folder that grows by rows, each of a round, and can be brought back to a round."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kinfolk.errors import UserError
from kinfolk.runs.files import append, truncate_line, write_atomically
from kinfolk.runs.tables import from_csv, to_csv


class CsvLog(ABC):
    """Appends rows. They are on the disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def sound(self, row: dict[str, Any]) -> bool:
        """Whether a row that was read may be one of this table's."""

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows with a `round`, and with the same columns as all before."""
        if not rows:
            return
        header, _, lines = to_csv(rows).partition("\n")
        new = not self.path.exists() or self.path.stat().st_size == 0
        append(self.path, (f"{header}\n{lines}" if new else lines).encode(), sync=True)

    def truncate(self, round: int) -> None:
        """Forget every round after `round`: a resumed run will add them again."""
        rows = self.rows()
        kept = [row for row in rows if row["round"] <= round]
        if len(kept) < len(rows):
            write_atomically(self.path, to_csv(kept).encode())

    def repair(self) -> None:
        """Remove half a line that a killed process left."""
        truncate_line(self.path)

    def rows(self) -> list[dict[str, Any]]:
        """What is in the file; a last line that was never completed is left out."""
        if not self.path.exists():
            return []
        whole, _, _ = self.path.read_bytes().rpartition(b"\n")
        rows = from_csv(whole.decode(errors="replace"))
        for number, row in enumerate(rows, start=2):
            if not self.sound(row):
                raise UserError(f"{self.path} is damaged in line {number}")
        return rows
