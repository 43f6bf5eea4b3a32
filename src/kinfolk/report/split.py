"""Show me the split: who holds how much of which class, as a table for the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from kinfolk.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ints = npt.NDArray[np.int64]

ROWS = 40  # of the table, before the rest is summed up
BARS = "▁▂▃▄▅▆▇█"
WIDE = 30  # classes beyond which a bar per class does not fit a terminal

# Okabe and Ito's colours, which people with any colour vision tell apart; with the ink that is legible on each.
CLUSTER_COLOURS = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999999"]
CLUSTER_INKS = ["black", "black", "white", "black", "black", "white", "white", "black"]
NEUTRAL = ["#d9d9d9", "#9e9e9e"]  # alternating, when there are more clusters than colours
INK, GREY, PALE = "#222222", "#666666", "#f4f4f2"
DPI = 160


def split_table(
    counts: Ints,
    clusters: Ints | None,
    train_sizes: Sequence[int] | Ints,
    test_sizes: Sequence[int] | Ints,
    cluster_names: Sequence[str] | None = None,
) -> Table:
    """A row per client, the same number from every cluster when there are too many to show.

    counts: [n, C] train samples per class; clusters: [n] or None; cluster_names: a name per cluster id.
    """
    clients, classes = counts.shape
    train, test = np.asarray(train_sizes), np.asarray(test_sizes)
    table = Table(header_style="bold", row_styles=["", "on grey7"] if clients > 4 else None)
    table.add_column("client", justify="right")
    if clusters is not None:
        table.add_column("cluster", justify="center")
    table.add_column("train", justify="right")
    table.add_column("test", justify="right")
    table.add_column(_histogram_title(classes), no_wrap=True)
    shown = _shown(clients, clusters)
    for position, client in enumerate(shown):
        cells: list[str | Text] = [str(client), str(train[client]), str(test[client]), _histogram(counts[client])]
        ends = position + 1 == len(shown)
        if clusters is not None:
            cells.insert(1, _cluster_text(int(clusters[client]), cluster_names))
            ends = ends or clusters[shown[position + 1]] != clusters[client]
        table.add_row(*cells, end_section=ends)
    rest = np.setdiff1d(np.arange(clients), shown)
    if rest.size:
        held = (counts[rest] > 0).sum(1)
        cells = [f"+ {len(rest)}", _span(train[rest]), _span(test[rest]), f"{_span(held)} classes each"]
        if clusters is not None:
            cells.insert(1, "")
        table.add_row(*cells, style="dim")
    return table


def split_picture(
    counts: Ints,
    clusters: Ints | None,
    path: Path,
    title: str,
    cluster_names: Sequence[str] | None = None,
) -> None:
    """Write a heat map of clients × classes as a PNG; the clients of a cluster stand together under its name.

    The shade is the class's share of the client's samples, on the same scale in every picture, so that two splits
    can be compared by eye.
    counts: [n, C] train samples per class; clusters: [n] or None; cluster_names: a name per cluster id.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'kinfolk[plot]'") from None
    clients, classes = counts.shape
    order = np.arange(clients) if clusters is None else np.argsort(clusters, kind="stable")
    sizes = counts.sum(1)
    uneven = sizes.min() != sizes.max()

    # A cell is at most 0.34 inch, so that ten clients give a small picture and not large tiles.
    width = float(np.clip(0.34 * clients, 4.2, 11.0))
    if 400 < clients <= 2000:  # every client the same whole number of pixels, or some look twice as wide
        width = clients * np.ceil(width * DPI / clients) / DPI
    height = float(np.clip(0.34 * classes, 1.2, 7.5))
    strip, bars = (0.26 if clusters is not None else 0.0), (0.7 if uneven else 0.0)
    left, right, top, bottom, gap = 0.75, 1.05, 0.74, 0.62, 0.06
    full_width, full_height = left + width + right, top + bars + strip + 2 * gap + height + bottom
    figure = Figure(figsize=(full_width, full_height), dpi=DPI, facecolor="white")

    def panel(base: float, tall: float, start: float = left, wide: float = width) -> Axes:
        box = (start / full_width, base / full_height, wide / full_width, tall / full_height)
        return figure.add_axes(box)

    cells = panel(bottom, height)
    image = _draw_cells(cells, counts[order], order)
    _draw_scale(figure, panel(bottom, height, left + width + 0.18, 0.13), image)
    base = bottom + height + gap
    if clusters is not None:
        _draw_strip(panel(base, strip), clusters[order], cluster_names, width)
        for edge in _edges(clusters[order]):
            cells.axvline(edge - 0.5, color="white", linewidth=2.4 if clients <= 200 else 1.4)
        base += strip + gap
    if uneven:
        _draw_sizes(panel(base, bars), sizes[order])
    moved = (order != np.arange(clients)).any()
    cells.set_xlabel("clients, grouped by cluster" if moved else "client", color=INK)
    if moved and clients > ROWS:  # a few ids picked out of shuffled ones help nobody
        cells.set_xticks([])
    cells.set_ylabel("class", color=INK)

    line = full_height - 0.3
    figure.text(left / full_width, line / full_height, title, fontsize=13, weight="bold", color=INK)
    figure.text(
        left / full_width,
        (line - 0.24) / full_height,
        f"{clients} clients · {classes} classes · {_span(sizes)} samples each",
        fontsize=9,
        color=GREY,
    )
    figure.savefig(path, format="png")


def _shown(clients: int, clusters: Ints | None) -> Ints:
    """The clients that get a row: all, or the first of every cluster, so that no cluster goes unseen."""
    if clients <= ROWS:
        return np.arange(clients)
    if clusters is None:
        return np.arange(ROWS)
    ids = np.unique(clusters)
    each = max(1, ROWS // len(ids))
    return np.concatenate([np.flatnonzero(clusters == c)[:each] for c in ids[:ROWS]])


def _histogram_title(classes: int) -> str:
    if classes > WIDE:
        return "largest classes (class×samples)"
    if classes <= 10:
        return "classes " + "".join(str(c) for c in range(classes))
    return f"classes 0 to {classes - 1}"


def _histogram(row: Ints) -> Text:
    """A bar per class; where they would not fit, the largest classes by name."""
    classes = len(row)
    if classes > WIDE:
        largest = np.argsort(-row, kind="stable")[:5]
        words = [f"{c}×{row[c]}" for c in largest if row[c]]
        more = np.count_nonzero(row) - len(words)
        return Text(" ".join(words) + (f" and {more} more" if more > 0 else ""))
    text = Text(" " * len("classes ") if classes <= 10 else "")
    top = max(1, int(row.max()))
    for count in row:
        if count == 0:
            text.append("·", style="dim")
        else:
            level = min(len(BARS) - 1, int(len(BARS) * count / top))
            text.append(BARS[level], style="bright_blue" if level >= 4 else "cyan")
    return text


def _cluster_text(cluster: int, names: Sequence[str] | None) -> Text:
    name = _name(cluster, names)
    many = cluster >= len(CLUSTER_COLOURS)
    return Text(f" {name} ", style="" if many else f"{CLUSTER_INKS[cluster]} on {CLUSTER_COLOURS[cluster]}")


def _name(cluster: int, names: Sequence[str] | None) -> str:
    return names[cluster] if names is not None and cluster < len(names) else str(cluster)


def _span(values: npt.NDArray[Any]) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"


def _draw_cells(axes: Axes, counts: Ints, order: Ints) -> Any:
    """The heat map; numbers in the cells where they have room."""
    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import FixedLocator

    clients, classes = counts.shape
    share = counts / np.maximum(1, counts.sum(1, keepdims=True))
    shades = colormaps["YlGnBu"].with_extremes(bad=PALE)
    # A square-root scale: with a linear one a client's few samples of a class look like none.
    image = axes.imshow(
        np.ma.masked_equal(share.T, 0),
        cmap=shades,
        norm=PowerNorm(0.5, vmin=0, vmax=1),
        aspect="auto",
        interpolation="nearest",
    )
    if clients <= 60 and classes <= 30:  # a grid of white gaps; with more cells it would hide them
        for edge in range(1, clients):
            axes.axvline(edge - 0.5, color="white", linewidth=0.8)
    if classes <= 30:
        for edge in range(1, classes):
            axes.axhline(edge - 0.5, color="white", linewidth=0.8)
    if clients <= 16 and classes <= 20:
        for client, c in zip(*np.nonzero(counts)):
            ink = "white" if share[client, c] > 0.3 else INK
            axes.text(client, c, str(counts[client, c]), ha="center", va="center", fontsize=7, color=ink)
    places = np.arange(0, clients, _step(clients, 20))
    axes.xaxis.set_major_locator(FixedLocator(places.tolist()))
    axes.set_xticklabels([str(order[place]) for place in places])
    axes.yaxis.set_major_locator(FixedLocator(list(range(0, classes, _step(classes, 25)))))
    axes.tick_params(length=0, labelsize=8, colors=INK)
    for side in axes.spines.values():
        side.set_visible(False)
    return image


def _draw_scale(figure: Figure, axes: Axes, image: Any) -> None:
    bar = figure.colorbar(image, cax=axes, ticks=[0, 0.01, 0.1, 0.25, 0.5, 0.75, 1])
    bar.ax.set_yticklabels(["0", "1 %", "10 %", "25 %", "50 %", "75 %", "100 %"])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, colors=INK)
    bar.set_label("share of a client's samples", fontsize=8, color=INK)


def _draw_strip(axes: Axes, clusters: Ints, names: Sequence[str] | None, width: float) -> None:
    """A coloured strip with the name of every cluster: rotations and swaps do not show in the counts."""
    clients = len(clusters)
    few = len(np.unique(clusters)) <= len(CLUSTER_COLOURS)
    for position, (begin, end) in enumerate(_runs(clusters)):
        cluster = int(clusters[begin])
        slot = cluster % len(CLUSTER_COLOURS) if few else position % 2
        colour = CLUSTER_COLOURS[slot] if few else NEUTRAL[slot]
        axes.axvspan(begin, end, color=colour, linewidth=0)
        name = _name(cluster, names)
        room = width * (end - begin) / clients
        for label in (name, name.split()[-1]):  # 'class 7', or just '7' where that does not fit
            if 0.075 * len(label) + 0.05 <= room:
                ink = CLUSTER_INKS[slot] if few else INK
                axes.text((begin + end) / 2, 0.47, label, ha="center", va="center", fontsize=8.5, color=ink)
                break
    for edge in _edges(clusters):
        axes.axvline(edge, color="white", linewidth=2.4 if clients <= 200 else 1.4)
    axes.set_xlim(0, clients)
    axes.set_ylim(0, 1)
    axes.axis("off")


def _draw_sizes(axes: Axes, sizes: Ints) -> None:
    """Samples per client, above the heat map, when they differ."""
    clients = len(sizes)
    axes.bar(np.arange(clients), sizes, width=0.8 if clients <= 200 else 1.0, color="#7a8fa6", linewidth=0)
    axes.set_xlim(-0.5, clients - 0.5)
    axes.set_xticks([])
    axes.set_yticks([0, int(sizes.max())])
    axes.tick_params(length=0, labelsize=7, colors=GREY)
    axes.set_ylabel("samples", fontsize=7.5, color=GREY)
    for side in axes.spines.values():
        side.set_visible(False)


def _edges(clusters: Ints) -> list[int]:
    """The positions where a new cluster begins."""
    return [int(edge) for edge in np.flatnonzero(np.diff(clusters)) + 1]


def _runs(clusters: Ints) -> Iterator[tuple[int, int]]:
    marks = [0, *_edges(clusters), len(clusters)]
    return pairwise(marks)


def _step(count: int, most: int) -> int:
    """A round step between ticks, so that at most `most` fit."""
    for power in (1, 10, 100, 1000, 10000):
        for digit in (1, 2, 5):
            if count <= most * digit * power:
                return digit * power
    return count
