"""Who mixed with whom: one row per round, client and neighbor.

While a run goes on its rows lie in parts, `graph/rounds-00000001-00000010.npz`; a finished run has one
`graph.npz`. One rule covers every state that a crash can leave: sources are read in order, `graph.npz` first
and then the parts by round, and **a source adds only the rounds after those of the sources before it**. So
parts that were merged but not yet removed add nothing; those of a resumed run go on where `graph.npz` ends.
"""

import contextlib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kinfolk.errors import UserError
from kinfolk.runs import checkpoint
from kinfolk.runs.files import explained, sync_folder, write_atomically

Array = npt.NDArray[Any]

MERGED = "graph.npz"
PARTS = "graph"
_COLUMNS = {"round": np.int32, "client": np.int32, "neighbor": np.int32, "weight": np.float32}


@dataclass(frozen=True)
class Graph:
    """Edge e says that in `round[e]` `client[e]` averaged in the model of `neighbor[e]` with `weight[e]`."""

    round: npt.NDArray[np.int32]
    client: npt.NDArray[np.int32]
    neighbor: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Source:
    path: Path
    first: int
    last: int
    after: int = -1  # rows of rounds up to this one are in the sources before

    def column(self, name: str) -> Array:
        rounds = _read_column(self.path, "round")
        column = rounds if name == "round" else _read_column(self.path, name)
        if len(column) != len(rounds):
            raise UserError(f"{self.path} is damaged: {len(column)} rows of {name}, {len(rounds)} of round")
        return column[rounds > self.after]


class GraphLog:
    """Collects the edges of a run. What is flushed is on the disk and no longer in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pending: list[tuple[int, dict[str, Array]]] = []
        self._flushed: int | None = None  # last round on the disk; found when first needed

    def add(self, round: int, client: Array, neighbor: Array, weight: Array) -> None:
        """Note the edges of a round, all arrays of shape [e]. A round that was flushed is closed."""
        if self._flushed is None:
            self._flushed = max((source.last for source in _sources(self.folder)), default=-1)
        if round <= self._flushed:
            raise ValueError(f"round {round} of the graph is already on the disk (up to {self._flushed})")
        if self._pending and round < self._pending[-1][0]:
            raise ValueError(f"round {round} of the graph comes after round {self._pending[-1][0]}")
        shapes = {np.shape(client), np.shape(neighbor), np.shape(weight)}
        if len(shapes) != 1 or len(shapes.pop()) != 1:
            raise ValueError("client, neighbor and weight need one entry per edge each")
        values = (np.full(len(client), round), client, neighbor, weight)
        # Copied: the caller may use its arrays again for the next round.
        rows = {name: np.array(value, kind) for (name, kind), value in zip(_COLUMNS.items(), values)}
        self._pending.append((round, rows))

    def flush(self) -> None:
        """Write what was added as one part. After an error it is still pending."""
        if not self._pending:
            return
        first, last = self._pending[0][0], self._pending[-1][0]
        columns = {name: np.concatenate([rows[name] for _, rows in self._pending]) for name in _COLUMNS}
        if len(columns["round"]):
            _write_part(self.folder, first, last, columns)
        self._flushed = last
        self._pending.clear()

    def truncate(self, round: int) -> None:
        """Forget every round after `round`: a resumed run will add them again."""
        self._pending = [(number, rows) for number, rows in self._pending if number <= round]
        self._flushed = None
        with _explained(self.folder, self.folder / PARTS):
            for source in _sources(self.folder):
                if source.last <= round:
                    continue
                if source.path.name == MERGED:
                    write_atomically(source.path, partial(_write, sources=[source], last=round))
                    continue
                if source.first <= round:
                    rounds = _read_column(source.path, "round")
                    kept = {name: _read_column(source.path, name)[rounds <= round] for name in _COLUMNS}
                    _write_part(self.folder, source.first, round, kept)
                source.path.unlink()
            if (self.folder / PARTS).is_dir():
                sync_folder(self.folder / PARTS)

    def finish(self) -> None:
        """Merge everything into `graph.npz`, reading one part at a time, and then remove the parts."""
        self.flush()
        merged = self.folder / MERGED
        sources = _sources(self.folder)
        with _explained(self.folder, merged):
            if [source.path for source in sources] != [merged]:
                write_atomically(merged, partial(_write, sources=sources))
            for source in sources:
                if source.path != merged:
                    source.path.unlink()
        with contextlib.suppress(OSError):  # nothing was logged, or a stray file keeps it
            (self.folder / PARTS).rmdir()


def read_graph(folder: Path) -> Graph:
    """The graph of a run, finished or not; no rows if none were logged."""
    for _ in range(5):
        # A run that finishes right now removes parts that were just listed; another look finds them merged.
        with contextlib.suppress(FileNotFoundError):
            sources = _sources(folder)
            return Graph(**{name: _joined(sources, name) for name in _COLUMNS})
    raise UserError(f"{folder / PARTS} changes while it is read; try again when the run has finished")


def _joined(sources: list[_Source], name: str) -> Array:
    return np.concatenate([np.empty(0, _COLUMNS[name]), *(source.column(name) for source in sources)])


def _sources(folder: Path) -> list[_Source]:
    """Where the rows are, in the order of reading; see the rule at the top."""
    found = []
    merged = folder / MERGED
    if merged.exists():
        rounds = _read_column(merged, "round")
        found.append(_Source(merged, int(rounds.min(initial=0)), int(rounds.max(initial=-1))))
    for path in sorted((folder / PARTS).glob("rounds-*.npz")):
        try:
            first, last = (int(number) for number in path.stem.split("-")[1:])
        except ValueError as error:
            raise UserError(f"{path} is not a part of a graph: expected rounds-FIRST-LAST.npz") from error
        found.append(_Source(path, first, last, max((source.last for source in found), default=-1)))
    return found


def _write_part(folder: Path, first: int, last: int, columns: dict[str, Array]) -> None:
    path = folder / PARTS / f"rounds-{first:08d}-{last:08d}.npz"
    with _explained(folder, path):
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
            sync_folder(folder)
        write_atomically(
            path, partial(_write_columns, length=len(columns["round"]), pieces=lambda name: [columns[name]])
        )


def _write(file: BinaryIO, sources: list[_Source], last: int | None = None) -> None:
    """Write an npz of all rows (up to round `last`), with no more than one source's column in memory."""
    length = sum(len(column) for column in _kept(sources, "round", last))
    _write_columns(file, length, lambda name: _kept(sources, name, last))


def _write_columns(file: BinaryIO, length: int, pieces: Callable[[str], Iterable[Array]]) -> None:
    """Write an npz of `length` rows; pieces(name) are those of a column, one after another."""
    # The fastest compression: six times as fast as the usual one, and a third larger.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, kind in _COLUMNS.items():
            descr = np.lib.format.dtype_to_descr(np.dtype(kind))
            header = {"descr": descr, "fortran_order": False, "shape": (length,)}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                for piece in pieces(name):
                    member.write(piece.astype(kind, copy=False).tobytes())


def _kept(sources: list[_Source], name: str, last: int | None) -> Iterator[Array]:
    for source in sources:
        column = source.column(name)
        yield column if last is None else column[source.column("round") <= last]


def _read_column(path: Path, name: str) -> Array:
    try:
        # Opened here: numpy leaves a file open that turns out to be damaged.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            column: Array = archive[name]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    return column


def _explained(run: Path, path: Path) -> contextlib.AbstractContextManager[None]:
    saved = max(checkpoint.rounds(run / "checkpoint"), default=None)
    return explained(lambda error: checkpoint.write_error(run, path, error, saved))
