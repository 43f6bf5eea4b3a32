"""A picture of domains: what is in them, how they match the true ones, who trains them when, and the graph they share.

From plain arrays, as a PNG on a white ground.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING

import numpy as np

from kinfolk.report.figures import CLUSTER_COLOURS, COLOURS, PALE, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTHS = (4.9, 2.2, 2.4, 2.1)  # of the columns, in inches
TALL = 2.8  # a run


@dataclass(frozen=True)
class Domains:
    """What is known of a run's D domains."""

    name: str
    labels: Sequence[str]  # [L]
    images: np.ndarray  # [D, L, height, width] mean images, 0 to 255
    true: Sequence[str]  # [T] names of the true domains; none: they are not known
    table: np.ndarray  # [T, D] samples of a true domain that are found in each
    rounds: np.ndarray  # [r]
    occupancy: np.ndarray  # [r, D] share of the round's samples
    weights: np.ndarray  # [r, layers] of the branches, lambda
    graph: np.ndarray  # [D, D] how much a domain takes of each

    def ordered(self) -> Domains:
        """The domains in the order of the true ones that most of their samples are of."""
        if not len(self.true):
            return self
        order = np.argsort(self.table.argmax(axis=0), kind="stable")
        return Domains(
            self.name, self.labels, self.images[order], self.true, self.table[:, order], self.rounds,
            self.occupancy[:, order], self.weights, self.graph[np.ix_(order, order)],
        )  # fmt: skip


def domains_picture(runs: Sequence[Domains], path: Path, title: str) -> None:
    """Write a row of panels for each run."""
    figure = new_figure(sum(WIDTHS), TALL * len(runs) + 0.5)
    bands = figure.subfigures(len(runs), 1, squeeze=False)[:, 0]
    for band, run in zip(bands, (run.ordered() for run in runs)):
        names = [ascii_uppercase[d] if d < len(ascii_uppercase) else str(d) for d in range(len(run.graph))]
        if len(runs) > 1:
            band.suptitle(run.name, fontsize=10, x=0.01, ha="left", weight="bold")
        grid = band.add_gridspec(2, len(WIDTHS), width_ratios=WIDTHS, height_ratios=(3, 2))
        _portraits(band.add_subplot(grid[:, 0]), run, names)
        _matches(band.add_subplot(grid[:, 1]), run, names)
        above = band.add_subplot(grid[0, 2])
        _occupancy(above, run, names)
        _lambdas(band.add_subplot(grid[1, 2], sharex=above), run)
        _graph(band.add_subplot(grid[:, 3]), run, names)
    save(figure, path, title)


def _portraits(place: Axes, run: Domains, names: Sequence[str]) -> None:
    """The mean images, a row for each domain."""
    domains, labels, height, width = run.images.shape
    gap = max(1, width // 14)
    sheet = np.zeros((domains * (height + gap) - gap, labels * (width + gap) - gap))
    for d in range(domains):
        for label in range(labels):
            top, left = d * (height + gap), label * (width + gap)
            sheet[top : top + height, left : left + width] = run.images[d, label]
    place.imshow(sheet, cmap="Greys", vmin=0, vmax=255, interpolation="nearest")
    for d in range(1, domains):
        place.axhline(d * (height + gap) - gap / 2 - 0.5, color=PALE, linewidth=0.8)
    place.set_xticks([label * (width + gap) + width / 2 - 0.5 for label in range(labels)], run.labels)
    place.set_yticks([d * (height + gap) + height / 2 - 0.5 for d in range(domains)], names)
    _dress(place, "mean image of each label in each domain", "label", "domain found")
    _coloured(place.get_yticklabels())


def _matches(place: Axes, run: Domains, names: Sequence[str]) -> None:
    """Where samples of each true domain are found."""
    if not len(run.true):
        place.set_axis_off()
        place.text(0.5, 0.5, "true domains\nare not known", ha="center", va="center", fontsize=9)
        return
    shares = 100 * run.table / np.maximum(run.table.sum(axis=1, keepdims=True), 1)
    _heat(place, shares, 100, lambda share: f"{share:.1f}" if 0 < share < 99.95 else f"{share:.0f}")
    place.set_xticks(range(len(names)), names)
    place.set_yticks(range(len(run.true)), run.true)
    _dress(place, "samples of a true domain, %", "domain found", "true domain")
    _coloured(place.get_xticklabels())


def _occupancy(place: Axes, run: Domains, names: Sequence[str]) -> None:
    """Who trains which domain over rounds."""
    known = np.isfinite(run.occupancy).all(axis=1)
    colours = [CLUSTER_COLOURS[d % len(CLUSTER_COLOURS)] for d in range(len(names))]
    rounds, shares = run.rounds[known], 100 * run.occupancy[known]
    wide = 0.8 * float(np.diff(rounds).min()) if len(rounds) > 1 else 0.8
    below = np.cumsum(shares, axis=1) - shares
    for d, colour in enumerate(colours):
        place.bar(rounds, shares[:, d], wide, below[:, d], color=colour)
    place.set_ylim(0, 100)
    place.set_yticks([0, 50, 100])
    place.spines[["top", "right"]].set_visible(False)
    _dress(place, "training samples in round, %", "", "")
    place.tick_params(labelbottom=False, length=2.5)


def _lambdas(place: Axes, run: Domains) -> None:
    """The weight of the branches over rounds."""
    for layer, values in enumerate(run.weights.T):
        place.plot(run.rounds, values, color=COLOURS[layer % len(COLOURS)], linewidth=1.7)
    place.grid(axis="y", color=PALE, linewidth=0.8)
    place.spines[["top", "right"]].set_visible(False)
    _dress(place, "weight of the branches, λ", "round", "")
    place.tick_params(length=2.5)


def _graph(place: Axes, run: Domains, names: Sequence[str]) -> None:
    """How much each domain takes of the others."""
    _heat(
        place, run.graph, 1, lambda weight: f"{weight:.2f}".removeprefix("0") if 0 < weight < 0.995 else f"{weight:.0f}"
    )
    place.set_xticks(range(len(names)), names)
    place.set_yticks(range(len(names)), names)
    _dress(place, "graph", "takes from", "domain")
    _coloured(place.get_xticklabels())
    _coloured(place.get_yticklabels())


def _heat(place: Axes, values: np.ndarray, top: float, written: Callable[[float], str]) -> None:
    """A heat map with its numbers."""
    place.imshow(values, cmap="cividis", vmin=0, vmax=top, interpolation="nearest")
    size = 8 if values.shape[1] <= 5 else 6
    for (row, column), value in np.ndenumerate(values):
        colour = "black" if value > 0.55 * top else "white"
        place.text(column, row, written(value), ha="center", va="center", color=colour, fontsize=size)


def _dress(place: Axes, title: str, xlabel: str, ylabel: str) -> None:
    place.set_title(title, fontsize=9)
    place.set_xlabel(xlabel, fontsize=8)
    place.set_ylabel(ylabel, fontsize=8)
    place.tick_params(labelsize=8, length=0)
    for side in place.spines.values():
        side.set_linewidth(0.6)


def _coloured(labels: Sequence[object]) -> None:
    """Names of domains in their colours."""
    for d, label in enumerate(labels):
        label.set_color(CLUSTER_COLOURS[d % len(CLUSTER_COLOURS)])  # type: ignore[attr-defined]
        label.set_fontweight("bold")  # type: ignore[attr-defined]
