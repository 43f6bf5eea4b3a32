"""Places to run: the same method over one cohort, or over several that only see each other through their peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kinfolk.cohort.cohort import Cohort
from kinfolk.data.federation import Federation
from kinfolk.metrics import Edges
from kinfolk.peers.base import Exchange, Peers
from kinfolk.peers.faults import Faults
from kinfolk.peers.inprocess import InProcess
from kinfolk.peers.sharded import Board, Stuck


@dataclass(frozen=True)
class Results:
    """What an evaluation finds, for all n clients in the order of their ids."""

    accuracy: np.ndarray  # [n]
    loss: np.ndarray  # [n] test loss
    before_mixing: np.ndarray  # [n] accuracy after training, before mixing
    neighbors: np.ndarray | None  # [n, *] the method's own list of neighbors, if it keeps one
    clusters: np.ndarray | None  # [n] the cluster the method puts each client in, if it does
    models_received: np.ndarray  # [n] so far
    bytes_received: np.ndarray  # [n] so far
    peak_received: np.ndarray  # [n]
    quarantined: np.ndarray  # [n] rounds in quarantine so far


class Shard:
    """A cohort with its peers, its method and its state: all that one process of a run holds."""

    def __init__(self, cohort: Cohort, peers: Peers, method: Any) -> None:
        self.cohort = cohort
        self.peers = peers
        self.method = method
        self.state = method.start(cohort)
        self.quarantined = torch.zeros(len(cohort), dtype=torch.int64)

    def step(self, t: int, evaluate: bool) -> None:
        """One round of the method."""
        absent = self.peers.faults.away(self.cohort.seed, t, self.cohort.ids)
        self.cohort.begin(absent, evaluate)
        self.state = self.method.step(t, self.cohort, self.state, self.peers)
        self.quarantined += self.cohort.round.quarantined.cpu()

    def edges(self) -> Edges:
        """Who of this cohort mixed with whom in the round just done."""
        parts = self.cohort.round.edges
        if not parts:
            return Edges(*(np.zeros(0, dtype=kind) for kind in (np.int64, np.int64, np.float64)))
        client, neighbor, weight = (torch.cat(column).cpu().numpy() for column in zip(*parts))
        return Edges(client, neighbor, weight)

    def results(self) -> Results:
        """Evaluate every client of the cohort."""
        scores = self.cohort.evaluate()
        before = self.cohort.round.before_mixing
        neighbors = getattr(self.state, "neighbors", None)
        clusters = getattr(self.state, "clusters", None)
        return Results(
            scores.accuracy.cpu().numpy(),
            scores.loss.cpu().numpy(),
            (scores.accuracy if before is None else before).cpu().numpy(),
            None if neighbors is None else neighbors.cpu().numpy(),
            None if clusters is None else clusters.cpu().numpy(),
            self.peers.models_received.numpy(),
            self.peers.bytes_received.numpy(),
            self.peers.peak_received.numpy(),
            self.quarantined.numpy(),
        )

    def snapshot(self) -> dict[str, Tensor]:
        """Everything that a later process needs to go on, by name; rows are clients except under `shared/`."""
        tensors = {
            "weights": self.cohort.weights,
            "models_received": self.peers.models_received,
            "bytes_received": self.peers.bytes_received,
            "peak_received": self.peers.peak_received,
            "quarantined": self.quarantined,
        }
        if self.state is not None:
            for field in dataclasses.fields(self.state):
                place = "shared" if field.metadata.get("shared") else "state"
                tensors[f"{place}/{field.name}"] = getattr(self.state, field.name)
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take up a snapshot of just these clients."""
        device = self.cohort.device
        self.cohort.weights = tensors["weights"].to(device)
        self.peers.models_received = tensors["models_received"].clone()
        self.peers.bytes_received = tensors["bytes_received"].clone()
        self.peers.peak_received = tensors["peak_received"].clone()
        self.quarantined = tensors["quarantined"].clone()
        if self.state is not None:
            fields = {key.split("/")[1]: value.to(device) for key, value in tensors.items() if "/" in key}
            self.state = type(self.state)(**fields)


@dataclass(frozen=True)
class Parts:
    """What every shard is made from."""

    federation: Federation
    model: Callable[[], nn.Module]  # makes the module with the run's own initial weights
    method: Any
    faults: Faults
    cohort: dict[str, Any]  # training, seed, device, precision, chunk

    def shard(self, ids: Tensor, exchange: Exchange) -> Shard:
        """The shard that hosts the clients `ids`."""
        data = self.federation.select(ids)
        cohort = Cohort(
            data, self.model(), ids=ids, n=self.federation.clients, clusters=self.federation.clusters, **self.cohort
        )
        return Shard(cohort, Peers(self.federation.clients, cohort, exchange, self.faults), self.method)


class InProcessEngine:
    """One cohort holds all clients: the reference."""

    def __init__(self, parts: Parts) -> None:
        self.exchange = InProcess()
        self.shards = [parts.shard(torch.arange(parts.federation.clients), self.exchange)]

    def step(self, t: int, evaluate: bool) -> None:
        self.shards[0].step(t, evaluate)
        self.exchange.clear()


class ShardedEngine:
    """Several cohorts in one process, each seeing the others only through what they publish."""

    def __init__(self, parts: Parts, shards: int) -> None:
        blocks = torch.arange(parts.federation.clients).tensor_split(min(shards, parts.federation.clients))
        self.board = Board(len(blocks))
        self.shards = [parts.shard(ids, self.board.exchange(number)) for number, ids in enumerate(blocks)]
        self.threads = ThreadPoolExecutor(len(blocks), thread_name_prefix="shard")

    def step(self, t: int, evaluate: bool) -> None:
        def take(shard: Shard) -> None:
            with self.board.turn():
                shard.step(t, evaluate)

        self.board.expect(len(self.shards))
        futures = [self.threads.submit(take, shard) for shard in self.shards]
        failures = [error for error in (future.exception() for future in futures) if error is not None]
        self.board.clear()
        if failures:  # the cause, not the shards that then waited for it in vain
            raise next((error for error in failures if not isinstance(error, Stuck)), failures[0])


Engine = InProcessEngine | ShardedEngine


def edges(engine: Engine) -> Edges:
    """Who mixed with whom in the round just done, over all shards."""
    parts = [shard.edges() for shard in engine.shards]
    return Edges(*(np.concatenate(column) for column in zip(*((p.client, p.neighbor, p.weight) for p in parts))))


def results(engine: Engine) -> Results:
    """The evaluation of all shards together."""
    parts = [shard.results() for shard in engine.shards]
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(Results):
        values = [getattr(part, field.name) for part in parts]
        columns[field.name] = None if values[0] is None else np.concatenate(_same_width(values))
    return Results(**columns)


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """All shards' snapshots as one, in the order of the clients' ids."""
    parts = [shard.snapshot() for shard in engine.shards]
    return {
        name: tensor
        if name.startswith("shared/") or len(parts) == 1
        else torch.cat(_same_width([p[name] for p in parts]))
        for name, tensor in parts[0].items()
    }


def restore(engine: Engine, tensors: dict[str, Tensor]) -> None:
    """Hand every shard its clients' rows of a snapshot; the number of shards may have changed since."""
    for shard in engine.shards:
        ids = shard.cohort.ids.cpu()
        shard.restore({name: value if name.startswith("shared/") else value[ids] for name, value in tensors.items()})


def _same_width(lists: list[Any]) -> list[Any]:
    """Lists of ids [m, *] may be longer on one shard than on another: pad with -1."""
    if lists[0].ndim != 2 or len({part.shape[1] for part in lists}) == 1:
        return lists
    width = max(part.shape[1] for part in lists)
    if isinstance(lists[0], Tensor):
        return [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in lists]
    return [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=-1) for part in lists]
