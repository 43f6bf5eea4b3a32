"""Accuracy over rounds, one line per method, from the folders of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kinfolk.errors import UserError
from kinfolk.runs.folder import RunFolder

# Okabe and Ito's colours: told apart by everybody.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")


def curves_picture(runs: Mapping[str, Sequence[Path]], path: Path, title: str) -> None:
    """Write a PNG of accuracy over rounds. runs: label -> folders of its seeds (a band shows their range)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'kinfolk[plot]'") from None
    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    ends: list[tuple[float, str, str]] = []
    for number, (label, folders) in enumerate(runs.items()):
        histories = [RunFolder.open(folder).metrics() for folder in folders]
        length = min(len(history) for history in histories)
        if not length:
            continue
        rounds = [row["round"] for row in histories[0][:length]]
        values = np.array(
            [[np.nan if row["accuracy"] is None else 100 * row["accuracy"] for row in h[:length]] for h in histories]
        )
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(rounds, values.mean(axis=0), color=colour, linewidth=2)
        if len(histories) > 1:
            axes.fill_between(rounds, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        ends.append((float(values.mean(axis=0)[-1]), label, colour))
    _label_ends(axes, ends)
    axes.set_title(title, loc="left", fontsize=11, weight="bold")
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy of the clients' own models, %")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _label_ends(axes: object, ends: list[tuple[float, str, str]]) -> None:
    """Name each line at its right end, pushed apart so that no two names overlap."""
    low, high = axes.get_ylim()  # type: ignore[attr-defined]
    gap = (high - low) / 22
    ends = sorted(ends)
    heights = [value for value, _, _ in ends]
    for _ in range(200):
        for i in range(len(heights) - 1):
            push = max(0.0, gap - (heights[i + 1] - heights[i])) / 2
            heights[i], heights[i + 1] = heights[i] - push, heights[i + 1] + push
    for height, (value, label, colour) in zip(heights, ends):
        axes.annotate(  # type: ignore[attr-defined]
            f"{label} {value:.1f}",
            (1.01, height),
            xycoords=("axes fraction", "data"),
            color=colour,
            va="center",
            fontsize=9,
            annotation_clip=False,
        )
