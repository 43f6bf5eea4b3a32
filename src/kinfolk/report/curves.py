"""Accuracy over rounds, one line per method, from the folders of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kinfolk.errors import UserError
from kinfolk.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours without the yellow, which is too pale for a line: told apart by everybody.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")  # the next one for every round of the colours
HEIGHT, ROOM = 4.2, 18  # inches, and names at the right that they have room for


class End(NamedTuple):
    """The right end of a line, where its name stands."""

    value: float
    label: str
    colour: str
    style: Any


def curves_picture(runs: Mapping[str, Sequence[Path]], path: Path, title: str) -> None:
    """Write a PNG of accuracy over rounds. runs: label -> folders of its seeds (a band shows their range)."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'kinfolk[plot]'") from None
    height = HEIGHT * max(1.0, len(runs) / ROOM)
    figure = Figure(figsize=(7.2, height), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    ends: list[End] = []
    for number, (label, folders) in enumerate(runs.items()):
        histories = [RunFolder.open(folder).evaluations() for folder in folders]
        length = min(len(history) for history in histories)
        if not length:
            continue
        rounds = [row["round"] for row in histories[0][:length]]
        values = np.array(
            [[np.nan if row["accuracy"] is None else 100 * row["accuracy"] for row in h[:length]] for h in histories]
        )
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
        marker = "o" if length == 1 else None  # there is no line through one point
        axes.plot(rounds, values.mean(axis=0), color=colour, linestyle=style, linewidth=2, marker=marker)
        if len(histories) > 1:
            axes.fill_between(rounds, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        ends.append(End(float(values.mean(axis=0)[-1]), label, colour, style))
    if not ends:
        raise UserError(f"no picture in {path}: nothing has been evaluated yet")
    _label_ends(axes, ends, gap=HEIGHT / height / 22)
    axes.set_title(title, loc="left", fontsize=11, weight="bold")
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.set_ylabel("accuracy of the clients' own models, %")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


def _label_ends(axes: Axes, ends: Sequence[End], gap: float) -> None:
    """Name each line at its right end, pushed apart so that no two names overlap; gap: a share of the axes' height."""
    from matplotlib.lines import Line2D

    low, high = axes.get_ylim()
    ends = sorted(ends)
    heights = _apart([end.value for end in ends], gap * (high - low), high)
    several = len({end.style for end in ends}) > 1  # a colour alone does not tell whose name it is
    for height, end in zip(heights, ends):
        where = axes.get_yaxis_transform()  # across in shares of the axes, up in values
        if several:
            sample = Line2D([1.01, 1.07], [height, height], color=end.colour, linestyle=end.style, linewidth=2)
            sample.set(transform=where, clip_on=False)
            axes.add_artist(sample)
        axes.annotate(
            f"{end.label} {end.value:.1f}",
            (1.08 if several else 1.01, height),
            xycoords=where,
            color=end.colour,
            va="center",
            fontsize=9,
            annotation_clip=False,
        )


def _apart(heights: list[float], gap: float, high: float) -> list[float]:
    """Heights in ascending order, moved as little as it takes to be `gap` apart and not above `high`."""
    for _ in range(200):
        for i in range(len(heights) - 1):
            push = max(0.0, gap - (heights[i + 1] - heights[i])) / 2
            heights[i], heights[i + 1] = heights[i] - push, heights[i + 1] + push
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], high)
        high = heights[i] - gap
    return heights
