"""Pictures of studies, from plain arrays: lines, heat maps, drawn graphs, histograms; PNG, on a white ground."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.errors import UserError
from kinfolk.report.layout import components, layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours without the yellow, which is too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
CLUSTER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
GREY, PALE = "#666666", "#e2e2e2"
DPI = 160


@dataclass(frozen=True)
class Line:
    """A line over `x` [p]; `y` [s, p] has a row per seed: their mean is drawn, with a band or bars for their spread."""

    label: str
    x: np.ndarray
    y: np.ndarray
    colour: str
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    xlabel: str
    ylabel: str
    lines: list[Line] = field(default_factory=list)


def line_picture(grid: Sequence[Sequence[Panel]], path: Path, title: str, points: bool = False) -> None:
    """Write panels of lines: `grid` is rows of panels. With `points` every x is marked and has error bars."""
    tall, wide = len(grid), max(len(row) for row in grid)
    figure = new_figure(3.9 * wide + 0.6, 2.9 * tall + 1.1)
    axes = figure.subplots(tall, wide, squeeze=False)
    for places, panels in zip(axes, grid):
        for place, panel in zip(places, panels):
            for line in panel.lines:
                (_points if points else _curve)(place, line)
            _finish(place, panel.title, panel.xlabel, panel.ylabel)
            if points:
                _mark_points(place, sorted({float(x) for line in panel.lines for x in line.x}))
    lines = {line.label: line for row in grid for panel in row for line in panel.lines}
    _legend(figure, list(lines.values()), points)
    save(figure, path, title)


def heat_picture(panels: Sequence[tuple[str, np.ndarray, np.ndarray]], path: Path, title: str, label: str) -> None:
    """Write heat maps side by side on one scale. panels: (title, values [n, n], cluster of each client [n])."""
    figure, axes = _spread(len(panels), 3.6, 3.9, 1.2)
    # The largest few entries must not darken all the others.
    top = max(float(np.quantile(values, 0.995)) for _, values, _ in panels) or 1.0
    for place, (name, values, clusters) in zip(axes, panels):
        order = np.argsort(clusters, kind="stable")
        image = place.imshow(values[np.ix_(order, order)], cmap="cividis", vmin=0, vmax=top, interpolation="nearest")
        for edge in np.flatnonzero(np.diff(clusters[order])) + 0.5:
            place.axhline(edge, color="white", linewidth=0.8)
            place.axvline(edge, color="white", linewidth=0.8)
        place.set_title(name, fontsize=10)
        place.set_xlabel("peer averaged with")
        place.set_xticks([])
        place.set_yticks([])
        place.set_ylabel("client, ordered by cluster")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label(label, fontsize=9)
    bar.outline.set_visible(False)
    save(figure, path, title)


def topology_picture(panels: Sequence[tuple[str, np.ndarray, np.ndarray, np.ndarray]], path: Path, title: str) -> None:
    """Write graphs side by side. panels: (title, client [e], neighbor [e], cluster of each client [n])."""
    figure, axes = _spread(len(panels), 4.0, 4.1, 0.4)
    shown: set[int] = set()
    for place, (name, client, neighbor, clusters) in zip(axes, panels):
        parts = components(client, neighbor, clusters.size)
        where = layout(client, neighbor, clusters.size)
        for a, b in {(min(pair), max(pair)) for pair in zip(client.tolist(), neighbor.tolist())}:
            same = clusters[a] == clusters[b]
            place.plot(*zip(where[a], where[b]), color=GREY if same else "#D55E00", linewidth=0.5, alpha=0.45, zorder=1)
        colours = [CLUSTER_COLOURS[int(c) % len(CLUSTER_COLOURS)] for c in clusters]
        place.scatter(where[:, 0], where[:, 1], s=34, c=colours, edgecolors="white", linewidths=0.7, zorder=2)
        count = len(np.unique(parts))
        place.set_title(f"{name}: {count} component{'s' if count != 1 else ''}", fontsize=10)
        place.set_aspect("equal", adjustable="datalim")  # so that all panels stay of one size
        place.set_axis_off()
        shown |= {int(c) for c in clusters}
    marks = [_mark(CLUSTER_COLOURS[c % len(CLUSTER_COLOURS)], "o", "") for c in sorted(shown)]
    names = [f"cluster {c}" for c in sorted(shown)]
    marks += [_mark(GREY), _mark("#D55E00")]
    names += ["averages with kin", "with a stranger"]
    figure.legend(marks, names, loc="outside lower center", ncols=min(6, len(marks)), frameon=False, fontsize=9)
    save(figure, path, title)


def similarity_picture(
    panels: Sequence[tuple[str, np.ndarray, np.ndarray, np.ndarray]], path: Path, title: str, label: str
) -> None:
    """Write histograms of similarities, kin and strangers, with a Gaussian over each of the two groups found.

    panels: (title, similarity [p], is_kin [p] bool, group [p] bool: found to be of the same cluster).
    """
    figure, axes = _spread(len(panels), 3.9, 3.2, 0.6)
    from matplotlib.ticker import MaxNLocator

    for place, (name, similarity, is_kin, group) in zip(axes, panels):
        bins = np.histogram_bin_edges(similarity, bins=min(30, max(8, similarity.size // 3))).tolist()
        for part, colour in ((is_kin, COLOURS[0]), (~is_kin, COLOURS[4])):
            place.hist(similarity[part], bins=bins, color=colour, alpha=0.75, edgecolor="white", linewidth=0.5)
        x = np.linspace(bins[0], bins[-1], 400)
        for part, style in ((group, "-"), (~group, "--")):
            share = expected(x, similarity[part], bins[1] - bins[0])
            if share is not None:
                place.plot(x, part.sum() * share, color="black", linestyle=style, linewidth=1.5)
        _finish(place, name, label, "number of peers")
        place.yaxis.set_major_locator(MaxNLocator(integer=True))
    marks = [_mark(COLOURS[0], "s", ""), _mark(COLOURS[4], "s", ""), _mark("black"), _mark("black", style="--")]
    figure.legend(
        marks, ["true kin", "strangers", "Gaussian of those found kin", "of the others"], loc="outside lower center",
        ncols=4 if len(panels) > 1 else 2, frameon=False, fontsize=9,
    )  # fmt: skip
    save(figure, path, title)


def expected(x: np.ndarray, values: np.ndarray, width: float) -> np.ndarray | None:
    """The share of the Gaussian fitted to `values` in a bin of this width around each x [p]; None without a spread."""
    if values.size < 2 or not values.std() > 0:
        return None
    ends = (x - values.mean() + width * np.array([[-0.5], [0.5]])) / (values.std() * math.sqrt(2))
    below = np.array([[math.erf(end) for end in row] for row in ends.tolist()])  # [2, p]
    share: np.ndarray = (below[1] - below[0]) / 2
    return share


def _curve(place: Axes, line: Line) -> None:
    marker = "o" if len(line.x) == 1 else None  # there is no line through one point
    place.plot(line.x, _mean(line.y), color=line.colour, linestyle=line.style, linewidth=1.7, marker=marker)
    if len(line.y) > 1:
        low, high = line.y.min(axis=0), line.y.max(axis=0)
        place.fill_between(line.x, low, high, color=line.colour, alpha=0.15, linewidth=0)


def _points(place: Axes, line: Line) -> None:
    spread = line.y.std(axis=0, ddof=1) if len(line.y) > 1 else None
    place.errorbar(
        line.x, _mean(line.y), yerr=spread, color=line.colour, linestyle=line.style, marker="o", markersize=4,
        linewidth=1.7, capsize=3,
    )  # fmt: skip


def _mark_points(place: Axes, ticks: Sequence[float]) -> None:
    """A tick at every point and nowhere else; sizes mostly double, so the scale is logarithmic."""
    place.set_xscale("log", base=2)
    place.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    place.set_xticks([], minor=True)


def _mean(values: np.ndarray) -> np.ndarray:
    mean: np.ndarray = values.mean(axis=0)
    return mean


def _finish(place: Axes, title: str, xlabel: str, ylabel: str) -> None:
    place.set_title(title, fontsize=10)
    place.set_xlabel(xlabel, fontsize=9)
    place.set_ylabel(ylabel, fontsize=9)
    place.tick_params(labelsize=8)
    place.grid(axis="y", color=PALE, linewidth=0.8)
    place.set_axisbelow(True)
    place.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, lines: Sequence[Line], points: bool) -> None:
    marks = [_mark(line.colour, "o" if points else None, line.style) for line in lines]
    wide = max(1, int(figure.get_figwidth() / 1.9))
    names = [line.label for line in lines]
    figure.legend(marks, names, loc="outside lower center", ncols=min(len(lines), wide), frameon=False, fontsize=9)


def _mark(colour: str, marker: str | None = None, style: Any = "-") -> Any:
    """What stands for a line, or for a dot or a bar, in a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, marker=marker, linestyle=style, linewidth=1.7, markersize=5)


def new_figure(width: float, height: float) -> Figure:
    """An empty picture of this size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'kinfolk[plot]'") from None
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.06)
    return figure


def _spread(count: int, wide: float, tall: float, more: float) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels of a size, three in a row at most."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = new_figure(wide * columns + more, tall * rows + 0.8)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place in places[count:]:
        place.set_axis_off()
    return figure, places[:count]


def save(figure: Figure, path: Path, title: str) -> None:
    """Write the picture, with a title over it."""
    figure.suptitle(textwrap.fill(title, int(10.5 * figure.get_figwidth())), fontsize=11, weight="bold")
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
