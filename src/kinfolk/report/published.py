"""What was published beside what came out: one Markdown table per quantity, and the same as rows for CSV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NOTHING = "–"
FLAG = "(!)"
SIDE_BY_SIDE = 3  # columns of a study in one table, where each takes three


@dataclass(frozen=True)
class Entry:
    """One row in one column of a study: what was published, and what every finished seed gave."""

    measure: str
    row: str
    column: str
    ours: tuple[float, ...]  # one per finished seed
    published: float | None = None
    published_std: float | None = None
    printed: str = ""  # the published value as the paper has it
    digits: int = 2  # shown after the point

    @property
    def mean(self) -> float | None:
        return float(np.mean(self.ours)) if self.ours else None

    @property
    def std(self) -> float | None:
        """Over seeds, with n - 1."""
        return float(np.std(self.ours, ddof=1)) if len(self.ours) > 1 else None

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.published is None else self.mean - self.published

    @property
    def pooled(self) -> float | None:
        """Root of the mean of both variances; with one seed of ours the published deviation alone."""
        if self.published_std is None or self.std is None:
            return self.published_std
        return math.sqrt((self.published_std**2 + self.std**2) / 2)

    @property
    def flagged(self) -> bool:
        """More than three pooled standard deviations apart (by more than rounding, where both are zero)."""
        if self.difference is None or self.pooled is None:
            return False
        return abs(self.difference) > 3 * self.pooled + 1e-9


def csv_rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """One row per entry, numbers as they are."""
    return [
        {
            "measure": entry.measure,
            "row": entry.row,
            "column": entry.column,
            "published": entry.published,
            "published_std": entry.published_std,
            "ours": entry.mean,
            "ours_std": entry.std,
            "seeds": len(entry.ours),
            "difference": entry.difference,
            "pooled_std": entry.pooled if entry.difference is not None else None,
            "flagged": entry.flagged if entry.difference is not None and entry.pooled is not None else None,
        }
        for entry in entries
    ]


def table(entries: Sequence[Entry]) -> str:
    """Markdown, a line per row: published, ours and the difference of each column side by side.

    A column of which nothing was published has ours alone. Where there are too many to read in one line, the table goes
    on in another one below.
    """
    columns = list(dict.fromkeys(entry.column for entry in entries))
    compared = {entry.column for entry in entries if entry.published is not None}
    size = SIDE_BY_SIDE if compared else len(columns)
    groups = [columns[i : i + size] for i in range(0, len(columns), size)]
    return "\n\n".join(_table(entries, group, compared) for group in groups)


def _table(entries: Sequence[Entry], columns: Sequence[str], compared: set[str]) -> str:
    found = {(entry.row, entry.column): entry for entry in entries}
    heading = ["method"]
    for name in columns:
        heading += [f"{name}: published", "ours", "difference"] if name in compared else [name]
    lines = [heading]
    for row in dict.fromkeys(entry.row for entry in entries):
        line = [row]
        for name in columns:
            entry = found.get((row, name))
            cells = ["", "", ""] if entry is None else [entry.printed or NOTHING, _ours(entry), _difference(entry)]
            line += cells if name in compared else cells[1:2]
        lines.append(line)
    return markdown(lines)


def _difference(entry: Entry) -> str:
    if entry.difference is None:
        return NOTHING
    return f"{entry.difference:+.{entry.digits}f}" + (f" {FLAG}" if entry.flagged else "")


def _ours(entry: Entry) -> str:
    """mean ± standard deviation (number of seeds)."""
    if entry.mean is None:
        return NOTHING
    spread = "" if entry.std is None else f"±{entry.std:.{entry.digits}f}"
    return f"{entry.mean:.{entry.digits}f}{spread} ({len(entry.ours)})"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose source is aligned too: the first line is the heading, numbers stand right."""
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    widths = [max(3, *(len(line[i]) for line in escaped)) for i in range(len(escaped[0]))]

    def text(line: Sequence[str]) -> str:
        first, *rest = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([text(escaped[0]), rule, *(text(line) for line in escaped[1:])])
