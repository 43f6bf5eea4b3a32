"""Peers: what a cohort can see of everybody else.

A method talks to its peers through `sample`, `publish`, `pull` and (with a server) `mean` and `gather`, and through
nothing else. How rows travel is an `Exchange`, one per place to run; who can be reached, what gets lost and what it
costs is the same everywhere and written here once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.kernels import dispatch
from kinfolk.peers.faults import Faults
from kinfolk.peers.reach import Alike, Everybody, Lists, Reach

if TYPE_CHECKING:
    from kinfolk.peers.attacks import Attack

LEDGER = ("models_received", "vectors_received", "bytes_received", "peak_received")  # of Peers, kept over a resume


class Exchange(Protocol):
    """Carries published rows from cohort to cohort."""

    def publish(self, t: int, ids: Tensor, tensors: dict[str, Tensor]) -> None:
        """Offer rows: ids [p], -1 for a row that is not offered, each tensor [p, ...]."""

    def fetch(self, t: int, ids: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Rows of round t from those of `ids` (any shape, -1: nobody) that offered them, possibly more.

        Returns ids [p], ascending but for the -1 of rows that were not offered, and the tensors [p, ...].
        """

    def forget(self, t: int, name: str) -> None:
        """Let go what is published in round t under this name, and `name-…`, if anything: all have fetched it."""


class Host(Protocol):
    """The side of a cohort that its peers need to know."""

    ids: Tensor  # [m]
    seed: int

    def silent(self) -> Tensor:
        """[m] bool: clients whose tensors must not be offered this round."""

    def away(self) -> Tensor:
        """[m] bool: clients that are absent this round and receive nothing."""


# missing(ids [m, k]): which of these answers did not arrive, [m, k] bool, and which clients get none, [m] bool
Missing = Callable[[Tensor], tuple[Tensor, Tensor]]
# combine(before [d], models [p, d], weights [p]): what a server makes of models, before being its own so far: [d]
Combine = Callable[[Tensor, Tensor, Tensor], Tensor]


class Pool:
    """What a pull brought in: tensors by name, and in which row each wanted client's lies."""

    def __init__(self, position: Tensor, tensors: dict[str, Tensor], missing: Missing | None = None) -> None:
        """position: as `placed` finds it; missing: what did not arrive, None if everything did."""
        self._position, self._tensors, self._missing = position, tensors, missing
        self._known: dict[str, tuple[Tensor, int, Tensor]] = {}

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
        return Pool(joined, {"weights": torch.cat([mine, theirs])}, self._missing)

    def rows(self, ids: Tensor) -> Tensor:
        """ids: [m, k], one row of wanted clients per client of the cohort -> [m, k] rows, -1 if it did not arrive."""
        find = self._missing
        if find is None:
            return self._position[ids]
        return self.once("rows", ids, lambda: _rows(self._position, ids, *find(ids)))

    def once(self, name: str, ids: Tensor, work: Callable[[], Tensor]) -> Tensor:
        """What work() finds about the clients ids [m, k]; the last such finding of that name is kept."""
        known = self._known.get(name)
        if known is None or known[0] is not ids or known[1] != ids._version:
            known = self._known[name] = (ids, ids._version, work())
        return known[2]

    def count(self, ids: Tensor, ledger: Tensor, models: int, vectors: int, size: int) -> None:
        """Enter the answers of the clients ids [m, k] in the ledger [4, m]: what one counts in models, in vectors of a
        model's size and in bytes."""
        find = self._missing
        if find is not None and dispatch.fused(ids, ids.shape[1]):
            from kinfolk.kernels.drawing import rows

            self.once("rows", ids, lambda: rows(self._position, ids, *find(ids), ledger, models, vectors, size))
            return
        answers = (self.rows(ids) >= 0).sum(dim=1)
        if models:
            ledger[0] += answers
            ledger[1] += answers * vectors
            torch.maximum(ledger[3], answers, out=ledger[3])
        ledger[2] += answers * size


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
        self.attack: Attack | None = None  # what the host's clients do to others, if some of them lie
        self.combine: Combine | None = None  # in place of a server's mean
        self.ledger = torch.zeros(len(LEDGER), host.ids.numel(), dtype=torch.int64, device=host.ids.device)
        self._drawn_from: tuple[Tensor | None, Lists] | None = None  # labels, and the lists they give
        self._placed: tuple[Tensor, Tensor] | None = None  # ids last fetched, and the row of each client among them
        self._means = (0, 0)  # round, and calls to the server in it so far
        self._offered: tuple[str, ...] = ()  # names last published

    @property
    def models_received(self) -> Tensor:
        """[m] answers, each one model."""
        return self.ledger[0]

    @property
    def vectors_received(self) -> Tensor:
        """[m] tensors of a model's size in them."""
        return self.ledger[1]

    @property
    def bytes_received(self) -> Tensor:
        """[m]"""
        return self.ledger[2]

    @property
    def peak_received(self) -> Tensor:
        """[m] most models at one time."""
        return self.ledger[3]

    def sample(
        self, t: int, count: int, exclude: Tensor | None = None, within: Tensor | None = None, purpose: str = "peers"
    ) -> Tensor:
        """`count` different peers that each client can reach, -1 where there are not enough: [m, count].

        exclude: [m, e] ids never to be drawn (-1: none); within: [n] labels, only peers with the client's own label.
        Draws of one round with the same `purpose` are the same.
        """
        ids = self.host.ids
        lists = self._lists(t, within)
        own = lists.places(ids[:, None])
        barred = own[:, :0] if exclude is None else lists.places(exclude)
        return lists.take(_draw(self.host.seed, purpose, t, ids, lists.sizes, own, barred, self.n, count))

    def others(self) -> Tensor:
        """How many peers each client can reach, in some round: [m]."""
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
        for name, tensor in tensors.items():
            if self.attack is not None and self.attack.falsifies(tensor):
                tensors[name] = self.attack.lie(t, name, tensor, self._offering(), self.exchange)
        self._offer(t, self._offering(), tensors)

    def pull(self, t: int, ids: Tensor, names: Sequence[str] = ("weights",), facts: bool = False) -> Pool:
        """Ask for the clients ids [m, k] (-1: none). Whoever did not publish, or whose answer is lost, is not there.

        Nor is a peer that is out of reach in this round. The first of `names` is the model. Asking for somebody who is
        out of reach in all rounds is a mistake in the method: `sample` never draws such a peer. `facts` are small: who
        asks whom, a few numbers. Their bytes count, but they are no models.
        """
        if self.reach is not None:
            ids = _now(self.reach, t, ids)
        here, tensors = self.exchange.fetch(t, ids, names)
        pool = Pool(self._position(here), tensors, lambda asked: self._missing(t, asked))
        size = row_numbers(tensors[names[0]])
        vectors = sum(row_numbers(tensors[name]) == size for name in names)
        received = sum(row_bytes(tensors[name]) for name in names)
        pool.count(ids, self.ledger, 0 if facts else 1, 0 if facts else vectors, received)
        return pool

    def observe(self, t: int, rows: Tensor) -> tuple[Pool, Tensor]:
        """What only an observer sees: everything that was last published, and whom the clients in rows [w] can reach.

        For watching a run, never for a method: nothing is lost on the way and nothing is counted. The ids are [w, *],
        -1 where there are no more.
        """
        here, tensors = self.exchange.fetch(t, self._everybody(), self._offered)
        pool = Pool(self._position(here), tensors)
        if self.reach is not None:
            return pool, self.reach.at(t).padded(rows)
        everybody = self._everybody().expand(rows.numel(), -1)
        return pool, torch.where(everybody == self.host.ids[rows, None], -1, everybody)

    def mean(self, t: int, values: Tensor, weights: Tensor, transfers: int = 2, before: Tensor | None = None) -> Tensor:
        """Weighted mean over all clients, through a server: values [m, ...], weights [m] -> [...].

        Clients that are absent or quarantined, or whose upload is lost, do not count; NaN where nobody does. Every
        client with a positive weight counts `transfers` models: one up and one down, which is how the papers count
        FedAvg, unless the method says otherwise. before: [d] the server's model, where values are models [m, d]: then
        `[aggregation]` says what becomes of them.
        """
        rows, shares = self._heard(t, values, weights, transfers, before)
        total = shares.sum()
        if before is not None and self.combine is not None:
            return self.combine(before, rows, shares)
        flat = rows.flatten(1)
        mean = (shares / total).to(flat.dtype) @ flat
        return torch.where(total > 0, mean, torch.nan).view(values.shape[1:])

    def total(self, t: int, values: Tensor, weights: Tensor, transfers: int = 2) -> Tensor:
        """As `mean`, but the weighted sum: 0 where nobody counts. For what is no model."""
        rows, shares = self._heard(t, values, weights, transfers, None)
        self.exchange.forget(t, f"mean-{self._means[1] - 1}")  # who has published this has fetched that
        return (shares.to(rows.dtype) @ rows.flatten(1)).view(values.shape[1:])

    def _heard(
        self, t: int, values: Tensor, weights: Tensor, transfers: int, before: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What the server hears: values [p, ...] and weights [p], 0 for whoever does not count."""
        name = self._server_call(t)
        counted = torch.where(self._unheard(t), 0.0, weights.to(self.host.ids.device, torch.float64))
        if before is not None and self.attack is not None:
            taking_part = torch.where(counted > 0, self.host.ids, -1)
            values = self.attack.lie(t, name, values, taking_part, self.exchange, before)
            counted = torch.where(self.attack.refused, 0.0, counted)
        here = torch.where(self.host.silent(), -1, self.host.ids)  # who is refused too, but for nothing
        self._offer(t, here, {name: values, name + "-weights": counted})
        _, tensors = self.exchange.fetch(t, self._everybody(), (name, name + "-weights"))
        self._count(counted > 0, transfers, values)
        return tensors[name], tensors[name + "-weights"]

    def gather(
        self, t: int, values: Tensor, before: Tensor | None = None, **facts: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What a server sees: (ids [p] ascending, their values [p, ...], their facts name -> [p, ...]).

        Clients that are absent or quarantined, or whose upload is lost, are not among them. Every process gets the same
        rows, so each can work out the server's decision for itself. `values` [m, ...] count one model up and one down
        for every client that was heard; `facts` are small things that travel along (sizes, labels) and are not counted.
        before: [m, d] what the models [m, d] were before the round, 0 where values are updates.
        """
        name = self._server_call(t)
        heard = ~self._unheard(t)
        if before is not None and self.attack is not None:
            values = self.attack.lie(t, name, values, torch.where(heard, self.host.ids, -1), self.exchange, before)
            heard = heard & ~self.attack.refused
        offer = {f"{name}-{fact}": tensor[heard] for fact, tensor in facts.items()} | {name: values[heard]}
        self.exchange.publish(t, self.host.ids[heard], offer)
        ids, tensors = self.exchange.fetch(t, self._everybody(), tuple(offer))
        self._count(heard, 2, values)
        return ids, tensors[name], {fact: tensors[f"{name}-{fact}"] for fact in facts}

    def _offering(self) -> Tensor:
        """[m] ids of the clients that offer something in this round, -1 for the others."""
        silent = self.host.silent()
        return torch.where(silent if self.attack is None else silent | self.attack.refused, -1, self.host.ids)

    def _offer(self, t: int, ids: Tensor, tensors: dict[str, Tensor]) -> None:
        """Publish as it is, for the clients ids [m]."""
        self._offered = tuple(tensors)
        self.exchange.publish(t, ids, tensors)

    def _lists(self, t: int, within: Tensor | None) -> Lists:
        """What each client draws from."""
        ids = self.host.ids
        if self.reach is not None:
            lists = self.reach.at(t)
            return lists if within is None else lists.alike(within.to(ids.device), ids)
        if self._drawn_from is None or self._drawn_from[0] is not within:
            everybody = Everybody(self.n, ids) if within is None else Alike(within.to(ids.device), ids)
            self._drawn_from = within, everybody
        return self._drawn_from[1]

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
        self.ledger[:2] += models
        self.ledger[2] += models * row_bytes(values)

    def _position(self, ids: Tensor) -> Tensor:
        """[n + 1] the row of each client among ids [p], -1 for those that are not there, and -1."""
        if self._placed is None or self._placed[0] is not ids:  # several pulls of a round fetch the same
            self._placed = ids, placed(ids, self.n)
        return self._placed[1]

    def _missing(self, t: int, asked: Tensor) -> tuple[Tensor, Tensor]:
        """Which answers of those asked [m, k] are lost or out of reach, [m, k]; which clients get none, [m]."""
        lost = self.faults.lost(self.host.seed, t, self.host.ids[:, None], asked)
        if self.reach is not None:
            lost = lost | ~self.reach.at(t).contains(asked)
        return lost, self.host.away()


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


def placed(ids: Tensor, n: int) -> Tensor:
    """[n + 1] the row of each client among ids [p] (-1: nobody), -1 for those that are not there, and -1."""
    if dispatch.fused(ids):
        from kinfolk.kernels.drawing import place

        return place(ids, n)
    position = torch.full((n + 1,), -1, dtype=torch.int64, device=ids.device)
    position[ids] = torch.arange(ids.numel(), device=ids.device)
    position[n] = -1  # where whoever offered nothing has landed
    return position


def _rows(position: Tensor, ids: Tensor, lost: Tensor, away: Tensor) -> Tensor:
    """position[ids] for ids [m, k], -1 for nobody, for what is lost [m, k] and for clients that are away [m]."""
    if dispatch.fused(ids, ids.shape[1]):
        from kinfolk.kernels.drawing import rows

        return rows(position, ids, lost, away)
    return torch.where(lost | away[:, None], -1, position[ids])


def _draw(
    seed: int, purpose: str, t: int, ids: Tensor, sizes: Tensor, own: Tensor, barred: Tensor, n: int, count: int
) -> Tensor:
    """`count` different places below each client's size [m], neither its own [m, 1] nor barred [m, e]: [m, count].

    Places beyond the size bar nothing; -1 where there are not enough.
    """
    if dispatch.fused(ids, max(n, count)) and count:
        from kinfolk.kernels.drawing import draw

        return draw(randomness.key(seed, purpose, t), ids, sizes, own[:, 0], barred, n, count)
    barred = torch.cat([own, barred], dim=1)
    barred = _distinct(torch.where(barred < 0, n, barred), n)
    free = sizes - (barred < sizes[:, None]).sum(dim=1)
    drawn = randomness.positions(seed, purpose, t, ids, free, count)
    return torch.where(drawn >= 0, _skip(drawn, barred, n), -1)


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
