"""Several methods on the same experiment, the same split and the same initial model, over one or more seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kinfolk import origins
from kinfolk.assembly import clip, load_federation, prepare
from kinfolk.cohort.layout import Layout
from kinfolk.config import Config, read, resolve
from kinfolk.data.federation import Federation
from kinfolk.errors import UserError, nearest
from kinfolk.experiment import Interrupted, Observer, Result, read_result, resume, run
from kinfolk.methods import find
from kinfolk.metrics import helped_and_hurt
from kinfolk.models import Factory
from kinfolk.runs import checkpoint
from kinfolk.runs import comparison as table
from kinfolk.runs.folder import RunFolder, free_path
from kinfolk.stopping import interruptible


@dataclass(frozen=True)
class Row:
    """One method over all seeds: means, with the sample standard deviation of the accuracy over seeds.

    Where no client has test samples, accuracies are NaN.
    """

    method: str
    seeds: int
    accuracy: float
    accuracy_std: float | None
    best_accuracy: float
    worst10: float
    helped: float | None
    hurt: float | None
    neighbor_precision: float | None
    neighbor_recall: float | None
    models_received: float
    bytes_received: float
    seconds: float
    epsilon: float | None = None  # accounted, of private methods
    privacy: str | None = None  # what is promised, of the run with the largest epsilon


@dataclass(frozen=True)
class Comparison:
    """The table of a comparison and the runs behind it."""

    folder: Path
    rows: list[Row]
    runs: dict[str, list[Result]]  # method -> one finished run per seed

    def row(self, method: str) -> Row:
        """The line of one method."""
        for row in self.rows:
            if row.method == method:
                return row
        raise UserError(f"{self.folder} does not compare '{method}': {nearest(method, self.runs)}")

    def as_dict(self) -> dict[str, Any]:
        folders = {method: [str(result.folder) for result in results] for method, results in self.runs.items()}
        return {"folder": str(self.folder), "rows": [asdict(row) for row in self.rows], "runs": folders}


def compare(
    experiment: str | Path | dict[str, Any] | Config,
    methods: Sequence[str],
    seeds: int | Sequence[int] = 1,
    overrides: Sequence[str] = (),
    *,
    references: bool = True,
    data: Federation | None = None,
    model: Factory | None = None,
    out: str | Path | None = None,
    observer: Observer | None = None,
) -> Comparison:
    """Run `methods` on one experiment and compare them client by client with `local`.

    `local`, and `oracle` where true clusters are known, are run beside them unless `references=False`. `seeds` is a
    number (seed, seed+1, …) or a list. With an `out` that exists, finished runs are taken as they are and unfinished
    ones are resumed.
    """
    config = experiment if isinstance(experiment, Config) else read(experiment, overrides)
    observer = observer or Observer()
    numbers = [config.run.seed + i for i in range(seeds)] if isinstance(seeds, int) else list(seeds)
    if not numbers or not methods:
        raise UserError("a comparison needs at least one method and one seed")
    known = _has_clusters(config, data, observer.notice)
    plan = list(
        dict.fromkeys([*(["local"] if references else []), *methods, *(["oracle"] if references and known else [])])
    )
    for name in plan:
        if getattr(find(name), "needs_clusters", False) and not known:
            raise UserError(f"method '{name}' needs true clusters, which this split of the data does not have")
    folder = free_path(Path("runs") / config.name) if out is None else Path(out)
    if (folder / "config.toml").exists():
        raise UserError(f"{folder} holds a single run, not a comparison; choose another --out")
    cells = {name: [config.with_method(name).with_run(seed=seed) for seed in numbers] for name in plan}
    runs: dict[str, list[Result]] = {name: [] for name in cells}
    with interruptible(observer.notice) as stop:
        for name, cell in [(name, cell) for name, column in cells.items() for cell in column]:
            path = folder / f"{name}-seed{cell.run.seed}"
            runs[name].append(complete(cell, path, data, model, observer))
            if stop.is_set() and cell is not cells[plan[-1]][-1]:  # asked for in its last round
                raise Interrupted(path, cell.run.rounds)
    comparison = Comparison(folder, [_row(name, results, runs.get("local")) for name, results in runs.items()], runs)
    folders = {name: [result.folder for result in results] for name, results in runs.items()}
    table.write(folder, [asdict(row) for row in comparison.rows], folders, config.run.rounds)
    return comparison


def complete(
    config: Config,
    path: Path,
    data: Federation | None = None,
    model: Factory | None = None,
    observer: Observer | None = None,
) -> Result:
    """The finished run of `config` at `path`: run now, gone on with, or taken as it is."""
    if not path.exists():
        return run(config, data=data, model=model, out=path, observer=observer)
    found = RunFolder.open(path)
    before = resolve(found.config())
    asked, _ = clip(config, before.data.clients)  # what is kept is what was really used
    if data is not None:
        asked = replace(asked, data=before.data, split=before.split)  # of which own data use nothing
    if before.identity() != asked.identity():
        raise UserError(f"{path} holds another experiment: choose another --out")
    if before.run.rounds != config.run.rounds:
        lengths = f"{before.run.rounds} rounds where {config.run.rounds} are asked for"
        raise UserError(f"{path} holds another experiment, of {lengths}: choose another --out")
    origins.refuse_others(found, before, data, model, "kinfolk.compare")
    if found.status().state == "finished":
        if model is not None:
            _refuse_other_net(found, before, data, model, (observer or Observer()).notice)
        return read_result(path)
    return resume(path, data=data, model=model, device=config.run.device, observer=observer)


def _refuse_other_net(
    folder: RunFolder, config: Config, data: Federation | None, model: Factory, notice: Callable[[str], None]
) -> None:
    """Of a finished run: one that goes on is looked at where it does."""
    if not checkpoint.rounds(folder.checkpoints):
        return
    try:
        saved = checkpoint.load(folder.checkpoints)
    except UserError as error:  # its row of the table needs no checkpoint
        notice(f"whether {folder.path} was run with this net is not known: {error}")
        return
    parts, _ = prepare(config, torch.device("cpu"), data, model, lambda text: None, folder.path)
    hint = "choose another --out for another model"
    origins.refuse_other_net(folder.path, saved, Layout.of(parts.model()), hint)


def _has_clusters(config: Config, data: Federation | None, notice: Callable[[str], None]) -> bool:
    return (load_federation(config, notice) if data is None else data).clusters is not None


def _row(method: str, results: list[Result], local: list[Result] | None) -> Row:
    def mean(key: str) -> float | None:
        values = [result.summary.get(key) for result in results]
        return None if any(v is None for v in values) else float(np.mean([v for v in values if v is not None]))

    def known(key: str) -> float:
        return math.nan if (value := mean(key)) is None else value

    helped = hurt = None
    if local is not None and method != "local":
        pairs = [_helped(result, reference) for result, reference in zip(results, local)]
        helped, hurt = (float(np.mean(column)) for column in zip(*pairs))
    accuracies = [result.accuracy for result in results]
    return Row(
        method=method,
        seeds=len(results),
        accuracy=float(np.mean(accuracies)),
        accuracy_std=float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else None,
        best_accuracy=known("best_accuracy"),
        worst10=known("worst10"),
        helped=helped,
        hurt=hurt,
        neighbor_precision=mean("neighbor_precision"),
        neighbor_recall=mean("neighbor_recall"),
        models_received=known("models_received"),
        bytes_received=known("bytes_received"),
        seconds=known("seconds"),
        epsilon=mean("epsilon"),
        privacy=_promise(results),
    )


def _promise(results: list[Result]) -> str | None:
    promises = [result.summary["privacy"] for result in results if result.summary.get("privacy")]
    return str(max(promises, key=lambda one: float(one["epsilon"]))["statement"]) if promises else None


def _helped(result: Result, local: Result) -> tuple[float, float]:
    column = [np.array([row[key] for row in run.clients], dtype=float) for run, key in _columns(result, local)]
    lying = np.array([bool(row.get("attacker")) for row in result.clients])
    return helped_and_hurt(np.where(lying, np.nan, column[0]), *column[1:])


def _columns(result: Result, local: Result) -> list[tuple[Result, str]]:
    return [(result, "accuracy"), (local, "accuracy"), (local, "test_samples")]
