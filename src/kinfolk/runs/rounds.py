"""What a method notes in every round, evaluated or not: `rounds.csv`, one row per round."""

from pathlib import Path
from typing import Any

from kinfolk.runs.csv_log import CsvLog

FILE = "rounds.csv"


class RoundLog(CsvLog):
    """Rows of numbers, each with its `round`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE)

    def sound(self, row: dict[str, Any]) -> bool:
        numbers = [value for name, value in row.items() if name != "round"]
        return type(row.get("round")) is int and all(each is None or type(each) in (int, float) for each in numbers)


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """A row for every round so far, an undefined number as None; [] if the method notes nothing."""
    return RoundLog(folder).rows()
