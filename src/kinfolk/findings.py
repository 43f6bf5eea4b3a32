"""What rounds have found, once it has come from where it was computed: how clients do, who mixed with whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from kinfolk.cohort.cohort import Mixed
from kinfolk.metrics import Edges
from kinfolk.parcel import Parcel

T = TypeVar("T")
Later = Callable[[], T]  # gives it when the parcel that it travels in has been sent


@dataclass(frozen=True)
class Results:
    """What an evaluation finds, for all n clients in the order of their ids."""

    accuracy: np.ndarray  # [n]
    loss: np.ndarray  # [n] test loss
    before_mixing: np.ndarray  # [n] accuracy after training, before mixing
    neighbors: np.ndarray | None  # [n, *] the method's own list of neighbors, if it keeps one
    clusters: np.ndarray | None  # [n] the cluster the method puts each client in, if it does
    models_received: np.ndarray  # [n] so far
    vectors_received: np.ndarray  # [n] so far: tensors of a model's size
    bytes_received: np.ndarray  # [n] so far
    peak_received: np.ndarray  # [n]
    quarantined: np.ndarray  # [n] rounds in quarantine so far
    global_accuracy: np.ndarray | None  # [n] on the test samples common to all, if there are any
    proxy_accuracy: np.ndarray | None = None  # [n] of what clients send in place of the models they use
    epsilon: np.ndarray | None = None  # [n] accounted so far, if the method is private
    delta: np.ndarray | None = None  # [n]
    releases: np.ndarray | None = None  # [n] noisy gradients and other statistics so far
    apart: np.ndarray | None = None  # [n] sum of the known distances to the others of a client's group
    unusual: np.ndarray | None = None  # [n, q] how often what is out of the ordinary has decided so far
    unusual_names: tuple[str, ...] = ()  # [q] what that is


def together(parts: Sequence[Results]) -> Results:
    """The results of all shards."""
    columns: dict[str, Any] = {}
    for field in fields(Results):
        values = [getattr(part, field.name) for part in parts]
        arrays = isinstance(values[0], np.ndarray)
        columns[field.name] = np.concatenate(_same_width(values)) if arrays else values[0]
    return Results(**columns)


def edges(rounds: Sequence[tuple[int, list[Mixed]]], parcel: Parcel) -> Later[list[tuple[int, Edges]]]:
    """Who mixed with whom in each of these rounds."""
    places = [(t, [[parcel.add(tensor) for tensor in mixed] for mixed in parts]) for t, parts in rounds]

    def found() -> list[tuple[int, Edges]]:
        return [(t, joined([_counted(*(parcel[place].numpy() for place in mixed)) for mixed in parts]))
                for t, parts in places]  # fmt: skip

    return found


def joined(parts: Sequence[Edges]) -> Edges:
    if len(parts) <= 1:
        return parts[0] if parts else Edges.none()
    return Edges(*(np.concatenate(column) for column in zip(*((p.client, p.neighbor, p.weight) for p in parts))))


def _counted(ids: np.ndarray, neighbors: np.ndarray, shares: np.ndarray) -> Edges:
    """What one mixing put down, as one row for each that counted: ids [m], neighbors and shares [m, k]."""
    client, column = np.nonzero(shares > 0)
    return Edges(ids[client], neighbors[client, column], shares[client, column])


def _same_width(lists: list[np.ndarray]) -> list[np.ndarray]:
    """Lists of ids [m, *] may be longer on one shard than on another: pad with -1."""
    if lists[0].ndim != 2 or len({part.shape[1] for part in lists}) == 1:
        return lists
    width = max(part.shape[1] for part in lists)
    return [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=-1) for part in lists]
