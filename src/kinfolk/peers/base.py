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
from kinfolk.peers.reach import Alike, Everybody, Lists, Reach

LEDGER = ("models_received", "vectors_received", "bytes_received", "peak_received")  # of Peers, kept over a resume


class Exchange(Protocol):
    """Carries published rows from cohort to cohort."""

    def publish(self, t: int, ids: Tensor, tensors: dict[str, Tensor]) -> None:
        """Offer rows: ids [p], -1 for a row that is not offered, each tensor [p, ...]."""

    def fetch(self, t: int, ids: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Rows of round t from those of `ids` (any shape, -1: nobody) that offered them, possibly more.

        Returns ids [p], ascending but for the -1 of rows that were not offered, and the tensors [p, ...].
        """


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
        position = torch.full((n + 1,), -1, dtype=torch.int64, device=ids.device)
        position[ids] = torch.arange(ids.numel(), device=ids.device)  # whoever offered nothing lands at the end
        self._position = position[:n]

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

    def __init__(
        self, n: int, host: Host, exchange: Exchange, faults: Faults | None = None, reach: Reach | None = None
    ) -> None:
        """reach: whom the host's clients can reach; None: everybody."""
        self.n = n
        self.host = host
        self.exchange = exchange
        self.faults = faults or Faults()
        self.reach = reach
        self.models_received = torch.zeros_like(host.ids)  # [m] answers, each one model
        self.vectors_received = torch.zeros_like(host.ids)  # [m] tensors of a model's size in them
        self.bytes_received = torch.zeros_like(host.ids)  # [m]
        self.peak_received = torch.zeros_like(host.ids)  # [m] most models at one time
        self._means = (0, 0)  # round, and calls to the server in it so far
        self._offered: tuple[str, ...] = ()  # names last published

    def sample(
        self, t: int, count: int, exclude: Tensor | None = None, within: Tensor | None = None, purpose: str = "peers"
    ) -> Tensor:
        """`count` different peers that each client can reach, -1 where there are not enough: [m, count].

        exclude: [m, e] ids never to be drawn (-1: none); within: [n] labels, only peers with the client's own label.
        Draws of one round with the same `purpose` are the same.
        """
        ids = self.host.ids
        lists = self._lists(t, within)
        barred = ids[:, None] if exclude is None else torch.cat([ids[:, None], exclude], dim=1)
        barred = _distinct(lists.places(barred), self.n)
        free = lists.sizes - (barred < lists.sizes[:, None]).sum(dim=1)
        drawn = randomness.positions(self.host.seed, purpose, t, ids, free, count)
        return torch.where(drawn >= 0, lists.take(_skip(drawn, barred, self.n)), -1)

    def others(self, t: int) -> Tensor:
        """How many peers each client can reach, in round t or another: [m]."""
        ever = None if self.reach is None else self.reach.ever
        return torch.full_like(self.host.ids, self.n - 1) if ever is None else ever.sizes

    def reachable(self, t: int) -> Tensor:
        """[m, n] bool: whom each client can reach in round t; t = 0: in some round."""
        everybody = self._everybody().expand(self.host.ids.numel(), -1)
        return everybody != self.host.ids[:, None] if self.reach is None else self.reach.at(t).contains(everybody)

    def publish(self, t: int, **tensors: Tensor) -> None:
        """Offer tensors [m, ...] to the peers; clients that are absent or quarantined offer nothing.

        A published tensor must not be changed afterwards: it is the snapshot everybody reads.
        """
        self._offered = tuple(tensors)
        self.exchange.publish(t, torch.where(self.host.silent(), -1, self.host.ids), tensors)

    def pull(self, t: int, ids: Tensor, names: Sequence[str] = ("weights",), facts: bool = False) -> Pool:
        """Ask for the clients ids [m, k] (-1: none). Whoever did not publish, or whose answer is lost, is not there.

        Nor is a peer that is out of reach in this round. The first of `names` is the model. Asking for somebody who is
        out of reach in all rounds is a mistake in the method: `sample` never draws such a peer. `facts` are small: who
        asks whom, a few numbers. Their bytes count, but they are no models.
        """
        if self.reach is not None:
            ids = _now(self.reach, t, ids)
        here, tensors = self.exchange.fetch(t, ids, names)
        pool = Pool(self.n, here, tensors, lambda asked: self._arrives(t, asked))
        answers = (pool.rows(ids) >= 0).sum(dim=1)
        if not facts:
            self.models_received += answers
            size = row_numbers(tensors[names[0]])
            self.vectors_received += answers * sum(row_numbers(tensors[name]) == size for name in names)
            self.peak_received = torch.maximum(self.peak_received, answers)
        self.bytes_received += answers * sum(row_bytes(tensors[name]) for name in names)
        return pool

    def observe(self, t: int, rows: Tensor) -> tuple[Pool, Tensor]:
        """What only an observer sees: everything that was last published, and whom the clients in rows [w] can reach.

        For watching a run, never for a method: nothing is lost on the way and nothing is counted. The ids are [w, *],
        -1 where there are no more.
        """
        here, tensors = self.exchange.fetch(t, self._everybody(), self._offered)
        pool = Pool(self.n, here, tensors, lambda asked: torch.ones_like(asked, dtype=torch.bool))
        if self.reach is not None:
            return pool, self.reach.at(t).padded(rows)
        everybody = self._everybody().expand(rows.numel(), -1)
        return pool, torch.where(everybody == self.host.ids[rows, None], -1, everybody)

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

    def _lists(self, t: int, within: Tensor | None) -> Lists:
        """What each client draws from."""
        ids = self.host.ids
        labels = None if within is None else within.to(ids.device)
        if self.reach is None:
            return Everybody(self.n, ids) if labels is None else Alike(labels, ids)
        lists = self.reach.at(t)
        return lists if labels is None else lists.alike(labels, ids)

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
        models = transfers * clients.to(torch.int64)
        self.models_received += models
        self.vectors_received += models
        self.bytes_received += models * row_bytes(values)

    def _arrives(self, t: int, asked: Tensor) -> Tensor:
        lost = self.faults.lost(self.host.seed, t, self.host.ids[:, None], asked)
        arrived = ~(lost | self.host.away()[:, None])
        return arrived if self.reach is None else arrived & self.reach.at(t).contains(asked)


def _now(reach: Reach, t: int, ids: Tensor) -> Tensor:
    """ids [m, k] with -1 for those who are out of reach in round t."""
    if reach.ever is not None and bool(((ids >= 0) & ~reach.ever.contains(ids)).any()):
        raise RuntimeError(f"round {t}: a client was asked to pull from a peer that it cannot reach")
    return torch.where(reach.at(t).contains(ids), ids, -1)


def row_numbers(tensor: Tensor) -> int:
    """How many numbers one client's row of a published tensor has."""
    return tensor.shape[1:].numel()


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one client's row of a published tensor."""
    return row_numbers(tensor) * tensor.element_size()


def _distinct(places: Tensor, n: int) -> Tensor:
    """Places [m, e] sorted and each only once, n for the rest."""
    places = places.sort(dim=1).values
    repeated = torch.zeros_like(places, dtype=torch.bool)
    repeated[:, 1:] = places[:, 1:] == places[:, :-1]
    return torch.where(repeated, n, places).sort(dim=1).values


def _skip(drawn: Tensor, barred: Tensor, n: int) -> Tensor:
    """Turn the j-th free place into its place among all: step over each barred one that is not after it."""
    before = torch.arange(barred.shape[1], device=barred.device)
    free_before = torch.where(barred < n, barred - before, n)  # ascending, as places are distinct
    return drawn + torch.searchsorted(free_before, drawn.contiguous(), right=True)
