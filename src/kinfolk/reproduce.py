"""Reproduce a table or a figure: run the cells of a study that are missing, and write down what is there.

Every cell is an ordinary run folder. Its name comes from the resolved experiment, so that equal cells of one study or
of several are one run, and a folder that was computed elsewhere is found when it is copied to its place.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kinfolk import carry, measures, parallel, pictures
from kinfolk.assembly import clip
from kinfolk.comparison import complete
from kinfolk.config import Config, resolve
from kinfolk.errors import UserError, nearest
from kinfolk.experiment import Interrupted, Observer, Result, find_device, read_result
from kinfolk.report.published import Entry, csv_rows, table
from kinfolk.runs import pack as packs
from kinfolk.runs.files import explained, write_atomically
from kinfolk.runs.folder import RunFolder
from kinfolk.runs.graph import MERGED
from kinfolk.runs.tables import to_csv
from kinfolk.stopping import interruptible
from kinfolk.studies import Cell, Study, locate, read_study

HOME = Path("runs") / "reproduce"
LEGEND = (
    "Ours: mean ± standard deviation (n − 1) over seeds, in parentheses how many; – where no run is finished. "
    "Difference: ours − published; (!) where it is more than 3 pooled standard deviations. "
    "Pooled: the root of (published² + ours²) / 2; the published deviation alone where we have one seed."
)
PLAIN_LEGEND = "Mean ± standard deviation (n − 1) over seeds, in parentheses how many; – where no run is finished."
SIMULATED = (
    "Simulated, not private: noise comes from the run's seed. Epsilon is of one record of one client, replaced by "
    "another, with the delta and the accountant that each run's summary names."
)


@dataclass
class Reproduction:
    """A study and what there is of it."""

    study: Study
    command: str
    folder: Path  # of tables and pictures; the runs are in `cells/` below it
    stem: str  # of their names
    cells: list[Cell]
    paths: dict[str, Path]  # name of a cell -> folder of its run; equal cells share one
    results: dict[Path, Result] = field(default_factory=dict)  # the finished ones
    facts: dict[Path, dict[str, Any]] = field(default_factory=dict)  # what made them, read when first needed
    packed: str = ""  # what `pack` has to say

    @property
    def files(self) -> list[Path]:
        """What has been written for people."""
        found = [self.folder / f"{self.stem}.{kind}" for kind in ("md", "csv", "png")]
        return [path for path in found if path.is_file()]

    def result(self, cell: Cell) -> Result | None:
        return self.results.get(self.paths[cell.name])

    def states(self, rows: Iterable[str] = (), columns: Iterable[str] = ()) -> list[tuple[Cell, str]]:
        """How far each cell, or each of some rows and columns, is: finished, unfinished with its rounds, or missing."""
        chosen = _chosen(self.study, rows, columns)
        return [(cell, _state(self.paths[cell.name])) for cell in self.cells if (cell.row, cell.column) in chosen]

    def entries(self) -> list[Entry]:
        """Every row and column of every measure, published or not, run or not."""
        found = []
        for measure in self.study.measures:
            values = self._values(measure)
            for row, column in dict.fromkeys((cell.row, cell.column) for cell in self.cells):
                wanted = self.study.rows[row].measures
                if wanted is None or measure in wanted:
                    found.append(self._entry(measure, row, column, values.get((row, column), [])))
        return found

    def tables(self) -> str:
        """The Markdown tables: one for each measure, or one of all measures where the study has a single column."""
        entries = self.entries()
        if len(self.study.columns) == 1:
            return table([replace(entry, column=measures.find(entry.measure).heading) for entry in entries])
        parts = []
        for name in self.study.measures:
            parts.append(f"**{measures.find(name).heading}**")
            parts.append(table([entry for entry in entries if entry.measure == name]))
        return "\n\n".join(parts)

    def privacy(self) -> list[str]:
        """What must be said of the private runs that are there, if any."""
        promises = [result.summary.get("privacy") for result in self.results.values()]
        return [SIMULATED] if any(isinstance(each, dict) and each.get("simulated") for each in promises) else []

    def write(self) -> None:
        """Write the tables anew from what is there."""
        if self.folder.is_file():
            raise UserError(f"{self.folder} is a file; choose another --out")
        with explained(lambda error: UserError(f"{self.folder} cannot be made: {error.strerror}")):
            self.folder.mkdir(parents=True, exist_ok=True)
        for kind, text in (("md", self._document()), ("csv", to_csv(csv_rows(self.entries())))):
            path = self.folder / f"{self.stem}.{kind}"
            with explained(lambda error, path=path: UserError(f"{path} cannot be written: {error.strerror}")):  # type: ignore[misc]
                write_atomically(path, text.encode())

    def keep(self, path: Path, result: Result) -> None:
        """Another run is finished."""
        self.results[path] = result
        self.write()

    def draw(self, notice: Callable[[str], None] = lambda text: None) -> None:
        """Write the picture, if the study has one and anything to show in it; a run without its graph is left out."""
        if self.study.figure is None:
            return
        runs = []
        for cell in self.cells:
            result = self.result(cell)
            if result is not None and MERGED in pictures.reads(self.study) and not (result.folder / MERGED).is_file():
                notice(f"not in the picture: {result.folder} has no {MERGED}; remove the folder to run it again")
            elif result is not None:
                runs.append((cell, result))
        if runs:
            pictures.draw(self.study, runs, self.folder / f"{self.stem}.png")

    def take(self, source: Path, notice: Callable[[str], None]) -> None:
        """Take finished cells that are not here from a pack or a folder of cells."""
        wanted = {self.paths[cell.name]: cell.config for cell in self.cells if self.result(cell) is None}
        self.results |= carry.take(source, wanted, self.study, notice)

    def pack(self, path: Path, notice: Callable[[str], None]) -> None:
        """Add the finished cells, with what the picture reads, to the pack at `path`."""
        count, lacking = packs.add(path, list(self.results), pictures.reads(self.study))
        self.packed = f"{path}, {count} run{'s' if count != 1 else ''}"
        for name in lacking:
            notice(f"{path}: {name} is another run of the same cell, without what the picture reads; it is kept")

    def _values(self, measure: str) -> dict[tuple[str, str], list[float]]:
        """(row, column) -> one value per finished seed that has one."""
        found: dict[tuple[str, str], list[float]] = {}
        for cell in self.cells:
            result = self.result(cell)
            value = None if result is None else measures.find(measure).of(result)
            if value is not None and value == value:
                found.setdefault((cell.row, cell.column), []).append(value)
        return found

    def _entry(self, measure: str, row: str, column: str, ours: Sequence[float]) -> Entry:
        entry = Entry(measure, row, column, tuple(ours), digits=measures.find(measure).digits)
        known = self.study.value(measure, row, column)
        if known is None:
            return entry
        return replace(entry, published=known.mean, published_std=known.std, printed=known.text)

    def _document(self) -> str:
        study = self.study
        parts = [f"# {study.study}"]
        if study.figure is not None and (self.folder / f"{self.stem}.png").is_file():
            parts.append(f"![{study.study}]({self.stem}.png)")
        parts += [self.tables(), LEGEND if study.published else PLAIN_LEGEND]
        parts += [*self.privacy(), *study.notes]
        if study.unstated:
            parts.append("Not stated in the paper, and chosen here:")
            parts.append("\n".join(f"- {line}" for line in study.unstated))
        parts.append("\n".join(f"- {key}: {value}" for key, value in self._origin().items()))
        return "\n\n".join(parts) + "\n"

    def _origin(self) -> dict[str, str]:
        """What made the numbers."""
        for path in self.results.keys() - self.facts.keys():
            self.facts[path] = RunFolder.open(path).facts()
        facts = [self.facts[path] for path in self.results]
        days = sorted(str(fact["created"])[:10] for fact in facts)
        steps = [result.config.run.evaluate_every for result in self.results.values()]
        often = _counted("every round" if step == 1 else f"every {step} rounds" for step in steps)
        best = any(name.startswith("best_") for name in self.study.measures)  # best of those that were looked at
        return {
            "command": f"`{self.command}`",
            "runs": f"{len(self.results)} of {len(set(self.paths.values()))} finished",
            **({"evaluated": often} if best else {}),
            "seeds": ", ".join(str(seed) for seed in sorted({cell.seed for cell in self.cells})),
            "device": _counted(fact["device"] for fact in facts),
            "kinfolk": _counted(fact["version"] for fact in facts),
            "torch": _counted(fact["torch"] for fact in facts),
            "date": " to ".join(dict.fromkeys(days[:1] + days[-1:])),
        }


class CellsFailed(UserError):
    """Some cells failed, the others did not: `found` has what is there, `reasons` why, by the name of the cell."""

    def __init__(self, found: Reproduction, reasons: dict[str, str], of: int) -> None:
        super().__init__(f"{len(reasons)} of {of} cells failed: {next(iter(reasons))}: {next(iter(reasons.values()))}")
        self.found = found
        self.reasons = reasons


def reproduce(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    rows: Iterable[str] = (),
    columns: Iterable[str] = (),
    seeds: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    cells: Iterable[str | Path] = (),
    pack: str | Path | None = None,
    run: bool = True,
    workers: int = 1,
    observer: Observer | None = None,
) -> Reproduction:
    """Run what is missing of a study, or of some of its rows, columns and seeds, and write its tables and picture.

    What is finished in `out/cells` is taken as it is, what is unfinished is gone on with. The tables are written after
    every cell, and always of all that is there. Cells that are not there are first looked for in `cells`: packs, or
    folders of cells. At the end the finished ones are added to the file `pack`. Without `run` nothing is computed.
    With `workers` that many cells are run at a time, each in a process of its own; those that fail do not hold up the
    others and are told of at the end, by `CellsFailed`.
    """
    if workers < 1:
        raise UserError(f"workers = {workers}: at least 1 is needed, the number of cells to run at a time")
    found = look(source, overrides, seeds=seeds, seed=seed, out=out)
    observer = observer or Observer()
    numbers = range(seed, seed + (seeds or found.study.seeds))
    chosen = _chosen(found.study, rows, columns)
    if pack is not None:
        packs.check_target(Path(pack))
    for place in cells:
        found.take(Path(place), observer.notice)
    missing = _missing(found, chosen, numbers) if run else []
    for cell in missing:
        find_device(cell.config.run.device)
    found.write()
    failed = dict[str, str]()
    if workers > 1:
        jobs = [(cell, found.paths[cell.name]) for cell in missing]
        failed = parallel.complete_all(jobs, workers, observer, found.keep)
    else:
        with interruptible(observer.notice) as stop:
            for number, cell in enumerate(missing, start=1):
                observer.cell(number, len(missing), cell.name)
                path = found.paths[cell.name]
                found.keep(path, complete(cell.config, path, observer=observer))
                if stop.is_set() and number < len(missing):  # asked for in its last round
                    raise Interrupted(path, cell.config.run.rounds)
    if pack is not None:
        found.pack(Path(pack), observer.notice)
    try:
        found.draw(observer.notice)
    except UserError as error:  # the runs and the tables are there all the same
        observer.notice(f"no picture: {error}")
    else:
        found.write()  # which shows the picture from now on
    if failed:
        raise CellsFailed(found, failed, len(missing))
    return found


def look(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    seeds: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
) -> Reproduction:
    """A study and what is finished of it; nothing is run or written."""
    study = read_study(source)
    if study.figure is not None:
        try:
            pictures.figure_of(study)
        except UserError as error:
            raise UserError(f"{locate(source)}: {error}") from None
    numbers = sorted({*range(study.seeds), *range(seed, seed + (seeds or study.seeds))})
    cells = study.cells(overrides, numbers)
    is_name = Path(source).suffix != ".toml"
    folder = Path(out) if out is not None else HOME / (Path(source).parent if is_name else "")
    said = [text for text in overrides if text.partition("=")[0].strip() != "run.device"]  # changes no number
    command = shlex.join(["kinfolk", "reproduce", str(source), *said])
    paths = {cell.name: _path(folder / "cells", cell.config) for cell in cells}
    found = Reproduction(study, command, folder, locate(source).stem, cells, paths)
    if {cell_name(cell.config) for cell in cells} != {cell_name(cell.config) for cell in study.cells([], numbers)}:
        found.stem += "-" + _plain(" ".join(overrides))  # other settings: not the table of the paper
    found.results = {path: read_result(path) for path in dict.fromkeys(paths.values()) if _state(path) == "finished"}
    return found


def cell_name(config: Config) -> str:
    """The name of a cell's folder: words for people, and a hash of everything that changes the numbers."""
    settled, _ = clip(config, config.data.clients)
    return f"{_words(config)}-{settled.identity()[:10]}"


def _words(config: Config) -> str:
    data, run = config.data, config.run
    kind = config.sections()["data"]["split"]["kind"]
    size = f"{data.clients}x{data.train}" if data.train else str(data.clients)
    return _plain(f"{data.name}-{size}-{kind}-{config.method_name}-{run.rounds}rounds-seed{run.seed}")


def _path(folder: Path, config: Config) -> Path:
    """Where a cell's run is, or will be."""
    path = folder / cell_name(config)
    if path.exists():
        return path
    # A version with more settings hashes differently: the same experiment may be there under its former name.
    settled, _ = clip(config, config.data.clients)
    for other in sorted(folder.glob(f"{_words(config)}-*")):
        try:
            there = RunFolder.open(other).config()
            same = resolve(there).identity() == settled.identity()
        except UserError:
            continue
        if same and settled.newly_on(there) is None:
            return other
    return path


def _state(path: Path) -> str:
    return str(RunFolder.open(path).status()) if path.exists() else "missing"


def _missing(found: Reproduction, chosen: set[tuple[str, str]], seeds: Iterable[int]) -> list[Cell]:
    """The cells to run: one of every run that is asked for and not finished."""
    numbers = set(seeds)
    wanted: dict[Path, Cell] = {}
    for cell in found.cells:
        if (cell.row, cell.column) in chosen and cell.seed in numbers and found.result(cell) is None:
            wanted.setdefault(found.paths[cell.name], cell)
    return list(wanted.values())


def _chosen(study: Study, rows: Iterable[str], columns: Iterable[str]) -> set[tuple[str, str]]:
    picked: list[Sequence[str]] = []
    for what, known, asked in (("row", study.rows, list(rows)), ("column", study.columns, list(columns))):
        for name in asked:
            if name not in known:
                raise UserError(f"no {what} '{name}' in this study: {nearest(name, known)}")
        picked.append(asked or list(known))
    return {(row, column) for row in picked[0] for column in picked[1]}


def _plain(text: str) -> str:
    """Fit for the name of a file."""
    return re.sub(r"[^\w.=+-]+", "_", text)


def _counted(values: Iterable[Any]) -> str:
    """a, or b (3 runs), a (2 runs): most first, then by name, whatever order they come in."""
    counts = Counter(str(value) for value in values)
    if len(counts) < 2:
        return "".join(counts) or "–"
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{value} ({count} run{'s' if count > 1 else ''})" for value, count in ordered)
