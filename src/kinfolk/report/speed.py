"""What `kinfolk bench` found, as a table that fits eighty columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
HEADINGS = (
    "job",
    "clients",
    "precision",
    "plain\nloop s",
    "kinfolk\ns",
    "ratio",
    "% of\nproduct",
    "% of\ncopy",
    "warm-up\ns",
)


def speed_table(rows: Sequence[Row], jobs: Mapping[str, str], title: str) -> Group:
    """One line per job and precision; jobs: what each job's letter stands for."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.title_justify, table.title_style = "left", "bold"
    for number, heading in enumerate(HEADINGS):
        justify = "left" if number in (0, 2) else "right"
        table.add_column(heading, justify=justify, no_wrap=True, vertical="bottom", header_style="bold")  # type: ignore[arg-type]
    for before, row in zip([None, *rows], rows):
        table.add_row(*_cells(row, new=before is None or before["job"] != row["job"]))
    notes = [
        *(f"{name}: {what}" for name, what in jobs.items() if any(row["job"] == name for row in rows)),
        "plain loop: a module and an optimizer per client, one after the other; medians",
        "% of: the FLOP/s of a large matrix product, the bytes/s of a large copy",
        "warm-up: what the first calls cost beyond later ones",
    ]
    if len({row["clients"] for row in rows}) > 1:
        notes.append("fewer clients where it would take long: both sides take as much longer with more")
    wrong = [f"{row['job']} {row['precision']}" for row in rows if not row["agrees"]]
    if wrong:
        notes.append(f"!: the result is not the plain loop's ({', '.join(wrong)})")
    return Group(table, *(Text(note, style="dim") for note in notes))


def _cells(row: Row, new: bool) -> list[str]:
    """new: the first line of its job."""
    return [
        row["job"] if new else "",
        str(row["clients"]) if new else "",
        row["precision"] if row["agrees"] else f"{row['precision']} !",
        figure(row["plain_loop_s"]) if new else "",
        figure(row["kinfolk_s"]),
        f"{figure(row['ratio'])}×",
        figure(100 * row["of_product_peak"]),
        figure(100 * row["of_copy_peak"]),
        figure(row["warm_up_s"]),
    ]


def figure(value: float) -> str:
    """Three digits: 0.00123, 0.0123, 1.23, 123."""
    if value < 0:
        return f"-{figure(-value)}"
    if value == 0 or value >= 100:
        return f"{value:.0f}"
    if value < 0.0001:
        return f"{value:.1e}"
    return f"{float(f'{value:.3g}'):.{2 if value >= 1 else 6}f}".rstrip("0").rstrip(".")
