"""From the runs of a study to its picture: each kind of figure is a settings class that knows what it draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from kinfolk import measures
from kinfolk.errors import UserError, nearest
from kinfolk.experiment import Result
from kinfolk.matching import mixture, theory
from kinfolk.report import domains, figures
from kinfolk.report.figures import COLOURS, GREY, Line, Panel
from kinfolk.runs.folder import DOMAINS
from kinfolk.runs.graph import MERGED, Graph, read_graph
from kinfolk.runs.portraits import read_portraits
from kinfolk.runs.similarity import FILE as SIMILARITY
from kinfolk.runs.similarity import read_similarity
from kinfolk.settings import build, setting
from kinfolk.studies import Cell, Row, Study

Runs = Sequence[tuple[Cell, Result]]


class Metric(NamedTuple):
    label: str
    factor: float


METRICS = {
    "accuracy": Metric("accuracy, %", 100),
    "accuracy_client0": Metric("accuracy of client 0, %", 100),
    "global_accuracy": Metric("accuracy on the common test set, %", 100),
    "new_accuracy": Metric("accuracy on new clients, %", 100),
    "validation_accuracy": Metric("accuracy on validation clients, %", 100),
    "before_mixing": Metric("accuracy before mixing, %", 100),
    "loss": Metric("test loss", 1),
    "neighbor_precision": Metric("neighbor precision, %", 100),
    "neighbor_recall": Metric("neighbor recall, %", 100),
    "neighbors": Metric("peers per client", 1),
    "label_overlap": Metric("label overlap with the peers, %", 100),
    "mixing_precision": Metric("kin among those averaged with, %", 100),
    "only_kin": Metric("clients averaging with kin only, %", 100),
}
FROM_GRAPH = ("mixing_precision", "only_kin")  # known for every round, whether it was evaluated or not


@dataclass(frozen=True)
class Curves:
    """Metrics over rounds: a column of panels for each column of the study, a row of panels for each metric."""

    metrics: list[str] = setting(["accuracy"], "what to draw")
    until: int | None = setting(None, "last round shown", ge=1)
    theory: bool = setting(False, "overlay the chance that all k neighbors are kin, by PANM's theorem")

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise UserError(f"unknown metric '{name}': {nearest(name, METRICS)}")

    @property
    def reads(self) -> tuple[str, ...]:
        return (MERGED,) if any(name in FROM_GRAPH for name in self.metrics) else ()

    def draw(self, study: Study, runs: Runs, path: Path) -> None:
        columns = [name for name in study.columns if any(cell.column == name for cell, _ in runs)]
        grid = [[self._panel(study, runs, metric, column) for column in columns] for metric in self.metrics]
        if len(columns) == 1:
            grid = [[row[0] for row in grid]]  # one column: its metrics side by side
        figures.line_picture(grid, path, study.study)

    def _panel(self, study: Study, runs: Runs, metric: str, column: str) -> Panel:
        lines = []
        for row, look in looks(study.rows).items():
            found = [result for cell, result in runs if (cell.row, cell.column) == (row, column)]
            drawn = self._line(metric, found)
            if drawn is not None:
                lines.append(Line(row, drawn[0], drawn[1], *look))
        if self.theory:
            lines += self._theory([result for cell, result in runs if cell.column == column], lines)
        title = column if len(study.columns) > 1 else ""
        return Panel(title, "round", METRICS[metric].label, lines)

    def _line(self, metric: str, results: Sequence[Result]) -> tuple[np.ndarray, np.ndarray] | None:
        """(rounds [p], values [seeds, p]) at the rounds that all seeds have; None where nothing is known."""
        found = [_history(result, metric) for result in results]
        rounds = [t for t in _in_all(found) if self.until is None or t <= self.until]
        if not rounds:
            return None
        return np.array(rounds), METRICS[metric].factor * np.array([[values[t] for t in rounds] for values in found])

    def _theory(self, results: Sequence[Result], lines: Sequence[Line]) -> list[Line]:
        chosen = next((r for r in results if hasattr(r.config.method, "candidates")), None)
        if chosen is None or not lines:
            return []
        method, clusters = chosen.config.method, _clusters(chosen)
        size = int(np.bincount(clusters).max())
        rounds = max(int(line.x.max()) for line in lines)
        x = np.arange(1, rounds + 1)
        args = (clusters.size, size, method.candidates, method.neighbors)
        remembers = 100 * theory.confident(*args, rounds)[None]
        forgets = np.full((1, rounds), 100 * theory.pens(*args))
        return [
            Line("theory: all k are kin, $P^t(k)$", x, remembers, GREY, ":"),
            Line("the same without memory (PENS), $R(k)$", x, forgets, GREY, "-."),
        ]


@dataclass(frozen=True)
class Sweep:
    """The first measure of the study against a setting, one line per row; `panels` says which columns go into which."""

    reads: ClassVar[tuple[str, ...]] = ()
    panels: dict[str, dict[str, Any]] = setting(help='name = { x = "data.train", columns = [...] }')

    def __post_init__(self) -> None:
        for name, panel in self.panels.items():
            if set(panel) != {"x", "columns"}:
                raise UserError(f"panel '{name}' needs x and columns")

    def draw(self, study: Study, runs: Runs, path: Path) -> None:
        measure = measures.find(study.measures[0])
        panels = []
        for name, panel in self.panels.items():
            lines = []
            for row, look in looks(study.rows).items():
                drawn = _points(runs, row, panel["columns"], panel["x"], measure)
                if drawn is not None:
                    lines.append(Line(row, drawn[0], drawn[1], *look))
            panels.append(Panel("", name, measure.heading, lines))
        figures.line_picture([panels], path, study.study, points=True)


@dataclass(frozen=True)
class Mixing:
    """Who averaged with whom in stage one: a heat map for each row, of the first seed."""

    reads: ClassVar[tuple[str, ...]] = (MERGED,)
    until: int | None = setting(None, "last round counted; none: the method's discover_rounds, or all", ge=1)

    def draw(self, study: Study, runs: Runs, path: Path) -> None:
        panels = []
        for name, result in _first(study, runs):
            clusters = _clusters(result)
            stage_one = getattr(result.config.method, "discover_rounds", result.config.run.rounds)
            weights = _weights(read_graph(result.folder), clusters.size, self.until or stage_one)
            among = weights[clusters[:, None] == clusters[None]].sum() / max(weights.sum(), 1e-12)
            panels.append((f"{name}: {100 * among:.0f} % among kin", weights, clusters))
        figures.heat_picture(panels, path, study.study, "weight given, sum over the rounds of stage one")


@dataclass(frozen=True)
class Topology:
    """Who averages with whom in the last rounds: a drawn graph for each row, of the first seed."""

    reads: ClassVar[tuple[str, ...]] = (MERGED,)
    rounds: int = setting(1, "how many rounds at the end", ge=1)

    def draw(self, study: Study, runs: Runs, path: Path) -> None:
        panels = []
        for name, result in _first(study, runs):
            graph = read_graph(result.folder)
            kept = (graph.round > result.config.run.rounds - self.rounds) & (graph.client != graph.neighbor)
            panels.append((name, graph.client[kept], graph.neighbor[kept], _clusters(result)))
        figures.topology_picture(panels, path, study.study)


@dataclass(frozen=True)
class Similarities:
    """How similar the watched client (`run.watch`) found the others in the last watched round: a histogram per row."""

    reads: ClassVar[tuple[str, ...]] = (SIMILARITY,)

    def draw(self, study: Study, runs: Runs, path: Path) -> None:
        panels = []
        for name, result in _first(study, runs):
            seen = read_similarity(result.folder)
            if seen.round.size:
                kept = (seen.round == seen.round.max()) & (seen.client == seen.client[0]) & np.isfinite(seen.similarity)
                values = seen.similarity[kept]
                panels.append((name, values, seen.kin[kept] == 1, two_groups(values)))
        if not panels:
            raise UserError(f"no run of this study has a {SIMILARITY}: {_unwatched(runs[0][1])}")
        figures.similarity_picture(panels, path, study.study, "similarity")


@dataclass(frozen=True)
class Domains:
    """What FedCG's domains hold, how they match the true ones, and their graph: a row of panels for each row."""

    reads: ClassVar[tuple[str, ...]] = (DOMAINS,)

    def draw(self, study: Study, runs: Runs, path: Path) -> None:
        found = [_domains(name, r) for name, r in _first(study, runs) if (r.folder / DOMAINS).is_file()]
        if not found:
            raise UserError(f"no run of this study has a {DOMAINS}: FedCG on images is needed")
        domains.domains_picture(found, path, study.study)


KINDS: dict[str, type[Any]] = {
    "domains": Domains,
    "curves": Curves,
    "sweep": Sweep,
    "mixing": Mixing,
    "topology": Topology,
    "similarities": Similarities,
}


def figure_of(study: Study) -> Any:
    """The figure that a study's file describes, checked."""
    values = dict(study.figure or {})
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise UserError(f"'figure.kind' = {kind!r}: {nearest(str(kind), KINDS)}")
    figure = build(KINDS[kind], values, "figure")
    for panel in getattr(figure, "panels", {}).values():
        for column in panel["columns"]:
            if column not in study.columns:
                raise UserError(f"'figure.panels' names '{column}': {nearest(column, study.columns)}")
    return figure


def reads(study: Study) -> tuple[str, ...]:
    """The files of a run that its picture needs beside metrics, clients and summary."""
    found: tuple[str, ...] = () if study.figure is None else figure_of(study).reads
    return found


def draw(study: Study, runs: Runs, path: Path) -> None:
    """Write the picture of a study from its finished runs."""
    figure_of(study).draw(study, runs, path)


def two_groups(similarity: np.ndarray) -> np.ndarray:
    """[p] bool: the upper of the two Gaussians that hard EM fits, begun from the two halves of the range."""
    values = torch.from_numpy(similarity)[None]
    upper = values > (values.min() + values.max()) / 2
    same: np.ndarray = mixture.match(values, ~values.isnan(), upper, seeds=1).same[0].numpy()
    return same


def looks(rows: dict[str, Row]) -> dict[str, tuple[str, str]]:
    """(colour, line style) of each row: those `beside` another have its colour, dashed, the next of them dotted."""
    own = [label for label, row in rows.items() if row.beside is None]
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(own)}
    styles = {label: ("-", "-.", ":")[i // len(COLOURS) % 3] for i, label in enumerate(own)}
    found: dict[str, tuple[str, str]] = {}
    others: Counter[str] = Counter()
    for label, row in rows.items():
        if row.beside is None:
            found[label] = colours[label], styles[label]
        else:
            found[label] = colours.get(row.beside, GREY), ("--", ":", "-.")[others[row.beside] % 3]
            others[row.beside] += 1
    return found


def _history(result: Result, metric: str) -> dict[int, float]:
    """Round -> value, where there is one."""
    if metric in FROM_GRAPH:
        return _mixed_with_kin(read_graph(result.folder), _clusters(result), metric)
    return {row["round"]: row[metric] for row in result.metrics if row.get(metric) is not None}


def _mixed_with_kin(graph: Graph, clusters: np.ndarray, metric: str) -> dict[int, float]:
    """Round -> share of kin among those averaged with, or share of the clients that averaged with kin only."""
    others = graph.client != graph.neighbor
    round, client, neighbor = (column[others] for column in (graph.round, graph.client, graph.neighbor))
    if not round.size:
        return {}
    key, n = round.astype(np.int64) * clusters.size + client, clusters.size
    kin = np.bincount(key, weights=clusters[client] == clusters[neighbor])
    all_of_them = np.bincount(key)
    asked = np.flatnonzero(all_of_them)
    share = kin[asked] / all_of_them[asked]
    values = share if metric == "mixing_precision" else (share == 1).astype(float)
    rounds = asked // n
    return {int(t): float(values[rounds == t].mean()) for t in np.unique(rounds)}


def _points(
    runs: Runs, row: str, columns: Sequence[str], key: str, measure: measures.Measure
) -> tuple[np.ndarray, np.ndarray] | None:
    """(x [p], values [seeds, p]) for the columns in which the row is finished with the same seeds."""
    found: dict[float, dict[int, float]] = {}
    for cell, result in runs:
        if cell.row == row and cell.column in columns and (value := measure.of(result)) is not None:
            section, _, name = key.partition(".")
            found.setdefault(float(result.config.sections()[section][name]), {})[cell.seed] = value
    if not found:
        return None
    seeds = _in_all(list(found.values()))
    x = sorted(found)
    return (np.array(x), np.array([[found[at][seed] for at in x] for seed in seeds])) if seeds else None


def _in_all(found: Sequence[dict[int, float]]) -> list[int]:
    """The keys that every one of `found` has, in order."""
    return sorted(key for key in found[0] if all(key in values for values in found)) if found else []


def _first(study: Study, runs: Runs) -> list[tuple[str, Result]]:
    """The first finished seed of every row and column, named after what tells them apart."""
    found: dict[str, Result] = {}
    for cell, result in runs:
        name = cell.row if len(study.columns) == 1 else f"{cell.row}, {cell.column}"
        found.setdefault(name, result)
    return list(found.items())


def _domains(name: str, result: Result) -> domains.Domains:
    """What a run of FedCG found, as its picture shows it."""
    seen, rows = read_portraits(result.folder), [row for row in result.metrics if row.get("domain_graph")]
    if not rows:
        raise UserError(f"{result.folder} has no domains in its metrics, which this picture needs")
    last, count = rows[-1], len(seen.samples)
    table = np.array(last.get("new_domain_table") or last.get("domain_table") or np.zeros((0, count)), dtype=float)
    table = np.pad(table, ((0, 0), (0, count - table.shape[1])))  # domains that nobody is in
    turned = getattr(result.config.data, "rotate", None) is not None
    return domains.Domains(
        name=f"{name}: {100 * last['new_accuracy']:.1f} % of new clients' samples right"
        if "new_accuracy" in last
        else name,
        labels=[str(label) for label in seen.labels],
        images=seen.images,
        true=[f"{90 * number}°" if turned else str(number) for number in range(len(table))],
        table=table,
        rounds=np.array([row["round"] for row in rows]),
        occupancy=np.array([row["domain_occupancy"] for row in rows], dtype=float),
        weights=np.array([row["domain_share"] for row in rows], dtype=float).reshape(len(rows), -1),
        graph=np.array(last["domain_graph"], dtype=float),
    )


def _unwatched(result: Result) -> str:
    """Why nobody has watched a client in such a run."""
    run = result.config.run
    if not run.watch:
        return "run.watch names no client"
    if run.watch_rounds and min(run.watch_rounds) > run.rounds:
        return f"run.watch_rounds begins at round {min(run.watch_rounds)}, but there are only {run.rounds}"
    return "in the rounds watched the method compared no models"


def _clusters(result: Result) -> np.ndarray:
    """[n] the true cluster of each client."""
    found = [row["cluster"] for row in result.clients]
    if any(cluster is None for cluster in found):
        raise UserError(f"{result.folder} has no true clusters, which this picture needs")
    return np.array(found, dtype=np.int64)


def _weights(graph: Graph, n: int, last: int) -> np.ndarray:
    """[n, n] the weight that each client (row) gave each peer (column) up to round `last`, itself left out."""
    kept = (graph.round <= last) & (graph.client != graph.neighbor)
    sums = np.zeros((n, n))
    np.add.at(sums, (graph.client[kept], graph.neighbor[kept]), graph.weight[kept])
    return sums
