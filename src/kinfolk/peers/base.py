"""Peers: what a cohort can see of everybody else.

A method talks to its peers through `sample`, `publish`, `pull` and (with a server) `mean`, and through nothing else.
How rows travel is an `Exchange`, one per place to run; who can be reached, what gets lost and what it costs is the same
everywhere and written here once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.peers.faults import Faults


class Exchange(Protocol):
    """Carries published rows from cohort to cohort."""

    def publish(self, t: int, ids: Tensor, tensors: dict[str, Tensor]) -> None:
        """Offer rows: ids [p], each tensor [p, ...]."""

    def fetch(self, t: int, ids: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Rows of round t from those of `ids` (sorted) that offered them, possibly more: (ids [p] sorted, tensors)."""


class Host(Protocol):
    """The side of a cohort that its peers need to know."""

    ids: Tensor  # [m]
    seed: int

    def silent(self) -> Tensor:
        """[m] bool: clients whose tensors must not be offered this round."""

    def away(self) -> Tensor:
        """[m] bool: clients that are absent this round and receive nothing."""


class Pool:
    """What a pull brought in: tensors by name, and in which row each wanted client's lies."""

    def __init__(self, n: int, ids: Tensor, tensors: dict[str, Tensor], arrives: Callable[[Tensor], Tensor]) -> None:
        """ids: [p] whose rows are here; arrives(ids [m, k]) -> [m, k] bool: did it reach the client that asked."""
        self._tensors = tensors
        self._arrives = arrives
        self._position = torch.full((n,), -1, dtype=torch.int64, device=ids.device)
        self._position[ids] = torch.arange(ids.numel(), device=ids.device)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor [p, ...] published under `name`."""
        return self._tensors[name]

    def rows(self, ids: Tensor) -> Tensor:
        """ids: [m, k], one row of wanted clients per client of the cohort -> [m, k] rows, -1 if it did not arrive."""
        rows = self._position[ids.clamp(min=0)]
        return torch.where((ids >= 0) & self._arrives(ids), rows, -1)


class Peers:
    """The view of one cohort on all n clients."""

    def __init__(self, n: int, host: Host, exchange: Exchange, faults: Faults | None = None) -> None:
        self.n = n
        self.host = host
        self.exchange = exchange
        self.faults = faults or Faults()
        count = host.ids.numel()
        self.models_received = torch.zeros(count, dtype=torch.int64)  # [m] answers, each one model
        self.bytes_received = torch.zeros(count, dtype=torch.int64)  # [m]
        self.peak_received = torch.zeros(count, dtype=torch.int64)  # [m] most models at one time
        self._means = (0, 0)

    def sample(
        self, t: int, count: int, exclude: Tensor | None = None, within: Tensor | None = None, purpose: str = "peers"
    ) -> Tensor:
        """`count` different peers for each client, -1 where there are not enough: [m, count].

        exclude: [m, e] ids never to be drawn (-1: none); within: [n] labels, only peers with the client's own label.
        Draws of one round with the same `purpose` are the same.
        """
        ids = self.host.ids
        barred = ids[:, None] if exclude is None else torch.cat([ids[:, None], exclude], dim=1)
        if within is None:
            order, first, sizes = None, torch.zeros_like(ids), torch.full_like(ids, self.n)
        else:
            order, first, sizes = _groups(within.to(ids.device), ids)
        barred = _ranks(barred, order, first, sizes, self.n)
        free = sizes - (barred < sizes[:, None]).sum(dim=1)
        drawn = randomness.positions(self.host.seed, purpose, t, ids, free, count)
        place = _skip(drawn, barred) + first[:, None]
        chosen = place if order is None else order[place.clamp(min=0, max=self.n - 1)]
        return torch.where(drawn >= 0, chosen, -1)

    def publish(self, t: int, **tensors: Tensor) -> None:
        """Offer tensors [m, ...] to the peers; clients that are absent or quarantined offer nothing.

        A published tensor must not be changed afterwards: it is the snapshot everybody reads.
        """
        silent = self.host.silent()
        if bool(silent.any()):
            speak = ~silent
            self.exchange.publish(t, self.host.ids[speak], {name: tensor[speak] for name, tensor in tensors.items()})
        else:
            self.exchange.publish(t, self.host.ids, tensors)

    def pull(self, t: int, ids: Tensor, names: Sequence[str] = ("weights",)) -> Pool:
        """Ask for the clients ids [m, k] (-1: none). Whoever did not publish, or whose answer is lost, is not there."""
        wanted = torch.unique(ids[ids >= 0])
        here, tensors = self.exchange.fetch(t, wanted, names)
        pool = Pool(self.n, here, tensors, lambda asked: self._arrives(t, asked))
        answers = (pool.rows(ids) >= 0).sum(dim=1).cpu()
        self.models_received += answers
        self.peak_received = torch.maximum(self.peak_received, answers)
        self.bytes_received += answers * sum(row_bytes(tensors[name]) for name in names)
        return pool

    def mean(self, t: int, values: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean over all clients, through a server: values [m, ...], weights [m] -> [...].

        Clients that are absent or quarantined, or whose upload is lost, do not count; NaN where nobody does. Every
        client with a positive weight sends one model and gets one back, which is how the papers count FedAvg.
        """
        round, calls = self._means
        self._means = (t, calls + 1) if round == t else (t, 1)
        name = f"mean-{self._means[1]}"
        ids = self.host.ids
        lost = self.faults.lost(self.host.seed, t, torch.full_like(ids, self.n), ids)
        counted = torch.where(self.host.silent() | lost, 0.0, weights.to(ids.device, torch.float64))
        self.publish(t, **{name: values, name + "-weights": counted})
        everybody = torch.arange(self.n, device=ids.device)
        _, tensors = self.exchange.fetch(t, everybody, (name, name + "-weights"))
        shares = tensors[name + "-weights"]
        total = shares.sum()
        transfers = 2 * (counted > 0).to(torch.int64).cpu()
        self.models_received += transfers
        self.bytes_received += transfers * row_bytes(values)
        flat = tensors[name].flatten(1)
        mean = (shares / total).to(flat.dtype) @ flat
        return torch.where(total > 0, mean, torch.nan).view(values.shape[1:])

    def _arrives(self, t: int, asked: Tensor) -> Tensor:
        lost = self.faults.lost(self.host.seed, t, self.host.ids[:, None], asked)
        return ~(lost | self.host.away()[:, None])


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one client's row of a published tensor."""
    return tensor[:1].numel() * tensor.element_size()


def _groups(labels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All ids sorted by label [n]; where each client's group starts in that order [m]; how many it has [m]."""
    order = torch.argsort(labels, stable=True)
    ordered, mine = labels[order], labels[ids]
    first = torch.searchsorted(ordered, mine)
    return order, first, torch.searchsorted(ordered, mine, right=True) - first


def _ranks(barred: Tensor, order: Tensor | None, first: Tensor, sizes: Tensor, n: int) -> Tensor:
    """Barred ids [m, e] as sorted, distinct places inside each client's group; n for those outside it."""
    known = barred >= 0
    place = barred.clamp(min=0)
    if order is not None:
        rank = torch.empty_like(order)
        rank[order] = torch.arange(order.numel(), device=order.device)
        place = rank[place] - first[:, None]
        known &= (place >= 0) & (place < sizes[:, None])
    place = torch.where(known, place, n).sort(dim=1).values
    repeated = torch.zeros_like(known)
    repeated[:, 1:] = place[:, 1:] == place[:, :-1]
    return torch.where(repeated, n, place).sort(dim=1).values


def _skip(drawn: Tensor, barred: Tensor) -> Tensor:
    """Turn the j-th free place into its place among all: step over each barred one that is not after it."""
    place = drawn.clone()
    for column in range(barred.shape[1]):
        place += (place >= barred[:, column, None]).to(place.dtype)
    return place
