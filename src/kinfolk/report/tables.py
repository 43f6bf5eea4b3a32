"""Tables for people: what a run or a comparison came to, in the terminal. They fit eighty columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]  # heading (two lines at most), text of a row

NOTHING = "–"
ROWS = 20  # of a run's table, evenly spread, before and beside the last one


def comparison_table(rows: Sequence[Row], title: str) -> Group:
    """One line per method, every figure a mean over seeds; below it, what the figures mean."""
    best = max((row["accuracy"] for row in rows if row["accuracy"] is not None), default=None)

    def accuracy(row: Row) -> str:
        text = share(row["accuracy"])
        if row["accuracy_std"] is not None:
            text += f" ± {share(row['accuracy_std'])}"
        return f"[bold]{text}[/bold]" if row["accuracy"] == best else text

    table = _table(
        rows,
        title,
        ("method", lambda row: escape(row["method"])),
        ("accuracy\n%", accuracy),
        ("worst\n10 %", lambda row: share(row["worst10"])),
        ("helped\n%", lambda row: share(row["helped"])),
        ("hurt\n%", lambda row: share(row["hurt"])),
        ("precision\n%", lambda row: share(row["neighbor_precision"])),
        ("recall\n%", lambda row: share(row["neighbor_recall"])),
        ("models\nreceived", lambda row: f"{row['models_received']:,.0f}"),
        ("epsilon", _epsilon),
        ("seconds", lambda row: f"{row['seconds']:.1f}"),
    )
    notes = ["accuracy: each client's own model on its own test set, after the last round"]
    if any(row["helped"] is not None for row in rows):
        notes.append("helped, hurt: clients better, worse than alone by more than one standard error")
    if any(row["neighbor_precision"] is not None for row in rows):
        notes.append("precision, recall: of the neighbors, against the true clusters")
    if any(row.get("epsilon") is not None for row in rows):
        notes.append("epsilon: accounted, largest of any client; simulated, not private")
    return Group(table, *(Text(note, style="dim") for note in notes))


def run_table(metrics: Sequence[Row], title: str) -> Table:
    """The evaluations of a run, about twenty of them evenly spread."""
    stride = max(1, -(-len(metrics) // ROWS))
    shown = [row for i, row in enumerate(metrics) if i % stride == 0 or i == len(metrics) - 1]
    return _table(
        shown,
        title,
        ("round", lambda row: f"{row['round']}"),
        ("accuracy\n%", lambda row: share(row["accuracy"])),
        ("common\ntest %", lambda row: share(row.get("global_accuracy"))),
        ("new\nclients %", lambda row: share(row.get("new_accuracy"))),
        ("proxy\n%", lambda row: share(row.get("proxy_accuracy"))),
        ("before\nmixing", lambda row: share(row["before_mixing"])),
        ("worst\n10 %", lambda row: share(row["worst10"])),
        ("precision\n%", lambda row: share(row.get("neighbor_precision"))),
        ("recall\n%", lambda row: share(row.get("neighbor_recall"))),
        ("models\nreceived", lambda row: f"{row['models_received']:,}"),
        ("MB", lambda row: f"{row['bytes_received'] / 1e6:,.1f}"),
        ("epsilon", _epsilon),
        ("seconds", lambda row: f"{row['seconds']:.1f}"),
    )


def _epsilon(row: Row) -> str:
    """What a private method has spent, accounted."""
    value = row.get("epsilon")
    return NOTHING if value is None else f"{value:.3g}"


def share(value: float | None) -> str:
    """A share as a number of percent."""
    return NOTHING if value is None or value != value else f"{100 * value:.1f}"


def _table(rows: Sequence[Row], title: str, *columns: Column) -> Table:
    """A column for every figure that some row has: those of true clusters are left out where there are none."""
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.title_justify, table.title_style = "left", "bold"
    cells = [(heading, [text(row) for row in rows]) for heading, text in columns]
    kept = [(heading, texts) for heading, texts in cells if not texts or set(texts) != {NOTHING}]
    for number, (heading, _) in enumerate(kept):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True, vertical="bottom")
        table.columns[number].header_style = "bold"
    for texts in zip(*(texts for _, texts in kept)):
        table.add_row(*texts)
    return table
