"""The folder of one run: config, metrics, graph, checkpoints; safe against crashes and a second writer."""

import contextlib
import datetime
import errno
import importlib.metadata
import json
import numbers
import os
import platform
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import tomli_w

from kinfolk.errors import UserError
from kinfolk.runs import checkpoint
from kinfolk.runs.files import (
    LOCK,
    append_line,
    explained,
    is_temporary,
    lock,
    remove,
    strict_json,
    sweep,
    sync_folder,
    temporary_for,
    truncate_line,
    write_atomically,
    write_synced,
)
from kinfolk.runs.graph import PARTS, GraphLog
from kinfolk.runs.rounds import RoundLog
from kinfolk.runs.similarity import SimilarityLog
from kinfolk.runs.tables import from_csv, to_csv
from kinfolk.version import __version__

CONFIG, METRICS, CLIENTS, SUMMARY = "config.toml", "metrics.jsonl", "clients.csv", "summary.json"
COMPARISON = "comparison.json"  # of a folder of runs
EVALUATED = ("round", "accuracy", "worst10", "before_mixing", "models_received", "bytes_received", "seconds")
NEW_CLIENTS = "new_clients.csv"
DOMAINS = "domains.json"  # as FedCG calls it
REACHABLE, AWAY = "reachable.csv", "away.csv"  # as `peers` calls them


class Status(NamedTuple):
    state: Literal["finished", "unfinished"]
    round: int  # of the last checkpoint; 0 if there is none
    rounds: int  # that the config asks for

    def __str__(self) -> str:
        return self.state if self.state == "finished" else f"unfinished, {self.round} of {self.rounds} rounds"


class RunFolder:
    """A run on the disk.

    `create` and `open(…, write=True)` hold its lock until `close`, or until the process ends.
    """

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self.checkpoints = path / "checkpoint"
        self.graph = GraphLog(path)
        self._similarity = SimilarityLog(path)
        self._rounds = RoundLog(path)
        self._lock = lock

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], facts: Mapping[str, Any]) -> Self:
        """Start a run at `path`, which must be new or an empty folder.

        `config` is the resolved experiment (keys that are None are left out: TOML has no such value), `facts`
        is what else to keep in the table `[kinfolk]`: the device, for one.
        """
        text = tomli_w.dumps(_without_none({**config, "kinfolk": {**_facts(), **facts}})).encode()
        _refuse_content(path)
        with explained(lambda error: checkpoint.write_error(path, path, error, None)):
            try:
                # An existing folder may be a mount point, which no other folder can be renamed over.
                return cls(path, _fill(path, text) if path.is_dir() else _make(path, text))
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    _refuse_content(path)  # another process was quicker
                raise

    @classmethod
    def open(cls, path: Path, *, write: bool = False) -> Self:
        """A run that exists: to read it, or (`write`) to go on with it, alone."""
        if not path.exists():
            raise UserError(f"{path} does not exist; `kinfolk run … --out {path}` would start a run there")
        if not (path / CONFIG).is_file():
            raise UserError(_no_run(path))
        folder = cls(path, None)
        folder.facts()  # says so now if the config cannot be read
        if write:
            folder._take()
        return folder

    def close(self) -> None:
        """Let another process write this run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def config(self) -> dict[str, Any]:
        """The resolved experiment, without the table `[kinfolk]`."""
        return {key: value for key, value in self._toml().items() if key != "kinfolk"}

    def facts(self) -> dict[str, Any]:
        """The table `[kinfolk]`: version, torch, python, command, created, and what the creator added."""
        facts = self._toml().get("kinfolk")
        if not isinstance(facts, dict):
            raise UserError(f"{self.path / CONFIG} is not of a run: it has no table [kinfolk]")
        return facts

    def extend(self, rounds: int) -> None:
        """Make the run longer: it is unfinished again until `finish`."""
        document = self._toml()
        document["run"] = {**document.get("run", {}), "rounds": rounds}
        # The summary goes first: between the two steps the run must not look finished with more rounds.
        with self._writing(self.path / SUMMARY):
            (self.path / SUMMARY).unlink(missing_ok=True)
            sync_folder(self.path)
        self._replace(CONFIG, tomli_w.dumps(document))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add the metrics of one evaluation; `row` has the key `round`. On the disk when this returns."""
        if not isinstance(row.get("round"), numbers.Integral):
            raise ValueError("a line of metrics needs its round")
        with self._writing(self.path / METRICS):
            append_line(self.path / METRICS, strict_json(dict(row)), sync=True)

    def metrics(self) -> list[dict[str, Any]]:
        """One dict per evaluation, in order. A last line that was never completed is left out."""
        path = self.path / METRICS
        if not path.exists():
            return []
        rows = []
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path} is damaged in line {number}: {error}") from error
            if not isinstance(row, dict):
                raise UserError(f"{path} is damaged in line {number}: not an object")
            rows.append(row)
        return rows

    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics, each with what every row has that an engine has written."""
        rows = self.metrics()
        for number, row in enumerate(rows, start=1):
            for key in EVALUATED:
                if key not in row:
                    raise UserError(f"{self.path / METRICS} is damaged in line {number}: it has no '{key}'")
        return rows

    def append_rounds(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add what the method noted in some rounds (see `RoundLog`). On the disk when this returns."""
        with self._writing(self._rounds.path):
            self._rounds.append(rows)

    def append_similarity(self, round: int, columns: Mapping[str, Any]) -> None:
        """Add what watched clients saw in a round (see `SimilarityLog.add`). On the disk when this returns."""
        with self._writing(self._similarity.path):
            self._similarity.add(round, columns)

    def has_similarity(self) -> bool:
        """Whether anything that watched clients saw has been kept."""
        return self._similarity.path.exists()

    def truncate_metrics(self, round: int) -> None:
        """Drop the evaluations after `round`."""
        rows = self.metrics()
        kept = [row for row in rows if row.get("round", 0) <= round]
        if len(kept) < len(rows):
            self._replace(METRICS, "".join(strict_json(row) + "\n" for row in kept))

    def rewind(self, round: int) -> None:
        """Bring metrics, graph, notes and similarities back to the checkpoint of `round`, to go on from there."""
        with self._writing(self.path):
            self.truncate_metrics(round)
            self.graph.truncate(round)
            self._rounds.truncate(round)
            self._similarity.truncate(round)

    def keep(self, files: Mapping[str, Any]) -> None:
        """Keep files, name -> text or what becomes JSON: what the run was made from, for when it is resumed, or what
        its method wants kept at the end."""
        for name, said in files.items():
            self._replace(name, said if isinstance(said, str) else strict_json(said) + "\n")

    def write_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the table of per-client results; its columns are the keys of the rows."""
        self._replace(CLIENTS, to_csv(rows))

    def clients(self) -> list[dict[str, Any]]:
        """The per-client results: numbers as numbers, an empty cell as None."""
        path = self.path / CLIENTS
        return from_csv(path.read_bytes().decode()) if path.exists() else []

    def write_new_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the table of clients that never train."""
        self._replace(NEW_CLIENTS, to_csv(rows))

    def new_clients(self) -> list[dict[str, Any]]:
        """The results of clients that never train; [] if there are none."""
        path = self.path / NEW_CLIENTS
        return from_csv(path.read_bytes().decode()) if path.exists() else []

    def status(self) -> Status:
        run = self._toml().get("run")
        rounds = run.get("rounds", 0) if isinstance(run, dict) else 0
        if not isinstance(rounds, int):
            raise UserError(f"{self.path / CONFIG} is damaged: 'run.rounds' = {rounds!r} is not a number")
        if (self.path / SUMMARY).exists():
            return Status("finished", rounds, rounds)
        return Status("unfinished", max(checkpoint.rounds(self.checkpoints), default=0), rounds)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Merge the graph and write the summary: from then on the run is finished."""
        with self._writing(self.path):
            self.graph.finish()
        self._replace(SUMMARY, strict_json(dict(summary), indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        path = self.path / SUMMARY
        if not path.exists():
            raise UserError(f"{self.path} is {self.status()}: no summary yet; `kinfolk resume {self.path}`")
        try:
            summary: dict[str, Any] = json.loads(path.read_bytes())
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}") from error
        return summary

    def _toml(self) -> dict[str, Any]:
        path = self.path / CONFIG
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not TOML: {error}") from error

    def _replace(self, name: str, text: str) -> None:
        with self._writing(self.path / name):
            write_atomically(self.path / name, text.encode())

    def _writing(self, path: Path) -> contextlib.AbstractContextManager[None]:
        if self._lock is None:
            raise RuntimeError(f"{self.path} was opened for reading")
        return self._explained(path)

    def _explained(self, path: Path) -> contextlib.AbstractContextManager[None]:
        saved = max(checkpoint.rounds(self.checkpoints), default=None)
        return explained(lambda error: checkpoint.write_error(self.path, path, error, saved))

    def _take(self) -> None:
        """Lock the run and clear away what a killed process left: temporary files, half a line."""
        with self._explained(self.path), contextlib.ExitStack() as undo:
            self._lock = lock(self.path)
            undo.callback(self.close)
            for place in (self.path, self.checkpoints, self.path / PARTS):
                sweep(place)
            truncate_line(self.path / METRICS)
            self._rounds.repair()
            self._similarity.repair()
            undo.pop_all()


def free_path(base: Path) -> Path:
    """`base`, or the first of base-2, base-3, … that does not exist."""
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def _no_run(path: Path) -> str:
    """Why a folder without a config is no run, and what to do where it is a comparison."""
    runs: list[Path] = []
    with contextlib.suppress(OSError):
        runs = [each for each in sorted(path.iterdir()) if _is_compared(each)]
    again = f"ask for it again with --out {path}"
    if runs and (path / COMPARISON).is_file():
        return f"{path} is a comparison and no run: name one of its runs, as {runs[0]}, or {again}"
    begun = str(RunFolder(runs[0], None).facts().get("command", "")) if runs else ""
    if begun.startswith("kinfolk compare ") or (len(runs) > 1 and not begun.startswith("kinfolk ")):
        return f"{path} is a comparison that was not completed: to go on, {again} (it was begun by: {begun})"
    return f"{path} is not a run folder: it has no {CONFIG}" + (f"; there is a run in {runs[0]}" if runs else "")


def _is_compared(path: Path) -> bool:
    """Whether a folder is a run, called as those of comparisons are."""
    try:
        folder = RunFolder(path, None)
        config = folder.config() if (path / CONFIG).is_file() and folder.facts() else {}
    except (UserError, OSError):
        return False
    method, run = config.get("method"), config.get("run")
    if not isinstance(method, dict) or not isinstance(run, dict):
        return False
    return path.name == f"{method.get('name')}-seed{run.get('seed')}"


def _make(path: Path, config: bytes) -> int:
    """Make the folder under a temporary name, locked and with its config, and only then give it its own."""
    home = path.resolve()
    home.parent.mkdir(parents=True, exist_ok=True)
    sweep(home.parent, home.name)
    temporary = temporary_for(home)
    with contextlib.ExitStack() as undo:
        undo.callback(remove, temporary)
        temporary.mkdir()
        descriptor = lock(temporary)
        undo.callback(os.close, descriptor)
        write_synced(temporary / CONFIG, config)
        sync_folder(temporary)
        os.rename(temporary, home)
        sync_folder(home.parent)
        undo.pop_all()
    return descriptor


def _fill(path: Path, config: bytes) -> int:
    """Make an empty folder that exists a run: it is one as soon as it has a config."""
    descriptor = lock(path)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        _refuse_content(path)
        sweep(path)
        write_atomically(path / CONFIG, config)
        undo.pop_all()
    return descriptor


def _refuse_content(path: Path) -> None:
    if (path / CONFIG).exists():
        raise UserError(f"{path} already holds a run; `kinfolk resume {path}` goes on with it, or choose another --out")
    if path.is_dir():
        ours = (entry.name == LOCK or is_temporary(entry) for entry in path.iterdir())
        if not all(ours):
            raise UserError(f"{path} exists and is not empty; choose another --out")
    elif path.exists():
        raise UserError(f"{path} is a file; choose another --out")


def _facts() -> dict[str, Any]:
    return {
        "version": __version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
