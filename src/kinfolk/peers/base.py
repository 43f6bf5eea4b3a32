"""Peers: what a cohort can see of everybody else.

A method talks to its peers through `sample`, `publish`, `pull` and (with a server) `mean` and `gather`, and through
nothing else. How rows travel is an `Exchange`, one per place to run; who can be reached, what gets lost and what it
costs is the same everywhere and written here once.
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

    def __or__(self, other: Pool) -> Pool:
        """Both pulls of one round as one pool."""
        mine, theirs = self._tensors["weights"], other._tensors["weights"]
        if mine is theirs:  # one process holds everything: a pull copies nothing
            return self
        new = (self._position < 0) & (other._position >= 0)
        joined = torch.where(new, other._position + mine.shape[0], self._position)
        both = Pool(joined.numel(), joined[:0], {"weights": torch.cat([mine, theirs])}, self._arrives)
        both._position = joined
        return both

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
        self._means = (0, 0)  # round, and calls to the server in it so far

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

    def mean(self, t: int, values: Tensor, weights: Tensor, transfers: int = 2) -> Tensor:
        """Weighted mean over all clients, through a server: values [m, ...], weights [m] -> [...].

        Clients that are absent or quarantined, or whose upload is lost, do not count; NaN where nobody does. Every
        client with a positive weight counts `transfers` models: one up and one down, which is how the papers count
        FedAvg, unless the method says otherwise.
        """
        name = self._server_call(t)
        counted = torch.where(self._unheard(t), 0.0, weights.to(self.host.ids.device, torch.float64))
        self.publish(t, **{name: values, name + "-weights": counted})
        _, tensors = self.exchange.fetch(t, self._everybody(), (name, name + "-weights"))
        shares = tensors[name + "-weights"]
        total = shares.sum()
        self._count(counted > 0, transfers, values)
        flat = tensors[name].flatten(1)
        mean = (shares / total).to(flat.dtype) @ flat
        return torch.where(total > 0, mean, torch.nan).view(values.shape[1:])

    def gather(self, t: int, values: Tensor, **facts: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What a server sees: (ids [p] ascending, their values [p, ...], their facts name -> [p, ...]).

        Clients that are absent or quarantined, or whose upload is lost, are not among them. Every process gets the same
        rows, so each can work out the server's decision for itself. `values` [m, ...] count one model up and one down
        for every client that was heard; `facts` are small things that travel along (sizes, labels) and are not counted.
        """
        name = self._server_call(t)
        heard = ~self._unheard(t)
        offer = {f"{name}-{fact}": tensor[heard] for fact, tensor in facts.items()} | {name: values[heard]}
        self.exchange.publish(t, self.host.ids[heard], offer)
        ids, tensors = self.exchange.fetch(t, self._everybody(), tuple(offer))
        self._count(heard, 2, values)
        return ids, tensors[name], {fact: tensors[f"{name}-{fact}"] for fact in facts}

    def _server_call(self, t: int) -> str:
        """A name for the next exchange with the server in round t, the same on every shard."""
        round, calls = self._means
        self._means = (t, calls + 1) if round == t else (t, 1)
        return f"mean-{self._means[1]}"

    def _unheard(self, t: int) -> Tensor:
        """[m] Clients that a server does not hear of this round; the server goes by the number n."""
        ids = self.host.ids
        return self.host.silent() | self.faults.lost(self.host.seed, t, torch.full_like(ids, self.n), ids)

    def _everybody(self) -> Tensor:
        return torch.arange(self.n, device=self.host.ids.device)

    def _count(self, clients: Tensor, transfers: int, values: Tensor) -> None:
        """`transfers` rows of `values` for each of the clients [m] bool."""
        models = transfers * clients.to(torch.int64).cpu()
        self.models_received += models
        self.bytes_received += models * row_bytes(values)

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
