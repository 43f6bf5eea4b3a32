"""How similar watched clients found their peers: `similarity.csv`, one row per round, client and peer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kinfolk.runs.csv_log import CsvLog

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


class SimilarityLog(CsvLog):
    """What was seen in each round."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE)

    def sound(self, row: dict[str, Any]) -> bool:
        return (
            tuple(row) == COLUMNS
            and all(isinstance(row[name], int) for name in ("round", "client", "peer"))
            and all(isinstance(row[name], bool) for name in ("listed", "chosen", "looked_at"))
        )

    def add(self, round: int, columns: Mapping[str, Array]) -> None:
        """Rows of one round: an array [s] for each column but `round`, in the order they are to be kept in."""
        count = len(columns["client"])
        self.append([_row(round, {name: columns[name][e] for name in COLUMNS[1:]}) for e in range(count)])


def read_similarity(folder: Path) -> Similarity:
    """What the watched clients of a run saw, in the order of round, client and peer; no rows if none was watched."""
    rows = SimilarityLog(folder).rows()

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
