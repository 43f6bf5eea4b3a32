"""How similar watched clients found their peers: `similarity.csv`, one row per round, client and peer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kinfolk.errors import UserError
from kinfolk.runs.files import append, truncate_line, write_atomically
from kinfolk.runs.tables import from_csv, to_csv

Array = npt.NDArray[Any]

FILE = "similarity.csv"
COLUMNS = ("round", "client", "peer", "similarity", "listed", "kin", "chosen", "looked_at")
UNKNOWN = -1  # of `kin`
DIGITS = 9  # of a similarity: what different shards agree on, and more than anybody needs


@dataclass(frozen=True)
class Similarity:
    """Row e says how similar `client[e]` found `peer[e]` in `round[e]`, as its method measures it."""

    round: npt.NDArray[np.int64]
    client: npt.NDArray[np.int64]
    peer: npt.NDArray[np.int64]
    similarity: npt.NDArray[np.float64]  # NaN where it was not a finite number
    listed: npt.NDArray[np.bool_]  # the peer was on the client's list before
    kin: npt.NDArray[np.int8]  # 1: of the same true cluster, 0: of another, -1: unknown
    chosen: npt.NDArray[np.bool_]  # the peer is on the client's list afterwards
    looked_at: npt.NDArray[np.bool_]  # the client itself looked; otherwise only the observer did (run.watch_all)


class SimilarityLog:
    """Appends what was seen in a round. It is on the disk when `add` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def add(self, round: int, columns: Mapping[str, Array]) -> None:
        """Rows of one round: an array [s] for each column but `round`, in the order they are to be kept in."""
        count = len(columns["client"])
        if not count:
            return
        rows = [_row(round, {name: columns[name][e] for name in COLUMNS[1:]}) for e in range(count)]
        header, _, lines = to_csv(rows).partition("\n")
        new = not self.path.exists() or self.path.stat().st_size == 0
        append(self.path, (f"{header}\n{lines}" if new else lines).encode(), sync=True)

    def truncate(self, round: int) -> None:
        """Forget every round after `round`: a resumed run will add them again."""
        rows = _rows(self.path)
        kept = [row for row in rows if row["round"] <= round]
        if len(kept) < len(rows):
            write_atomically(self.path, to_csv(kept).encode())

    def repair(self) -> None:
        """Remove half a line that a killed process left."""
        truncate_line(self.path)


def read_similarity(folder: Path) -> Similarity:
    """What the watched clients of a run saw, in the order of round, client and peer; no rows if none was watched."""
    rows = _rows(folder / FILE)

    def column(name: str, kind: Any, missing: Any = None) -> Array:
        return np.array([missing if row[name] is None else row[name] for row in rows], dtype=kind)

    return Similarity(
        round=column("round", np.int64),
        client=column("client", np.int64),
        peer=column("peer", np.int64),
        similarity=column("similarity", np.float64, np.nan),
        listed=column("listed", np.bool_),
        kin=column("kin", np.int8, UNKNOWN),
        chosen=column("chosen", np.bool_),
        looked_at=column("looked_at", np.bool_),
    )


def _row(round: int, values: dict[str, Any]) -> dict[str, Any]:
    row = {"round": round} | {name: value.item() for name, value in values.items()}
    row["similarity"] = float(f"{row['similarity']:.{DIGITS}g}")
    row["kin"] = None if row["kin"] == UNKNOWN else bool(row["kin"])
    return row


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the file; a last line that was never completed is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    rows = from_csv(whole.decode(errors="replace"))
    for number, row in enumerate(rows, start=2):
        sound = tuple(row) == COLUMNS and all(isinstance(row[name], int) for name in ("round", "client", "peer"))
        if not sound or not all(isinstance(row[name], bool) for name in ("listed", "chosen", "looked_at")):
            raise UserError(f"{path} is damaged in line {number}")
    return rows
