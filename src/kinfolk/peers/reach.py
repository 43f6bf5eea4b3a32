"""Reach: whom each client can reach. By default everybody; with `[peers]` a set B_i of its own.

A `Network` gives, for the clients of a cohort, a `Reach`; a Reach gives, for a round, `Lists`: the ids each client may
draw its peers from. Lists are ragged and lie one after another in one tensor, so memory grows with the number of pairs
that can talk and never with n². A client's list is a function of the seed (or of a file) and its id alone, and so the
same on every shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kinfolk import randomness

BLOCK = 2**22  # pairs of clients looked at together when random sets are drawn
KEPT = 2**22  # pairs of a drawn graph that a run folder has room for; a larger one is drawn again
REACHABLE = "reachable.csv"  # a run's own copy of who can reach whom


class Lists(Protocol):
    """For each of m clients the ids it may draw from, numbered 0 .. sizes[i] - 1: its places."""

    sizes: Tensor  # [m]

    def places(self, ids: Tensor) -> Tensor:
        """Where ids [m, e] stand in their client's list: [m, e]; n or -1 for those that do not."""

    def take(self, places: Tensor) -> Tensor:
        """The ids at places [m, c] of each client's list; -1 for -1, anything for other places that are not in it."""


class Peerage(Lists, Protocol):
    """Lists that can also be asked who is in them, the client itself never."""

    def contains(self, ids: Tensor) -> Tensor:
        """Which of ids [m, e] are in their client's list: [m, e] bool."""

    def alike(self, labels: Tensor, ids: Tensor) -> Lists:
        """Only those with their client's own label; labels: [n], ids: [m] the clients whose lists these are."""

    def padded(self, rows: Tensor) -> Tensor:
        """The lists of the clients in rows [w]: [w, longest], -1 where there are no more."""


class Everybody:
    """All n clients are in everybody's list, each at the place of its id."""

    def __init__(self, n: int, ids: Tensor) -> None:
        """ids: [m] the clients whose lists these are."""
        self.sizes = torch.full_like(ids, n)

    def places(self, ids: Tensor) -> Tensor:
        return ids

    def take(self, places: Tensor) -> Tensor:
        return places


class Alike:
    """A client's list holds those with its own label."""

    def __init__(self, labels: Tensor, ids: Tensor) -> None:
        """labels: [n]; ids: [m]."""
        self.order = torch.argsort(labels, stable=True)  # all ids, those with the same label side by side
        ordered, mine = labels[self.order], labels[ids]
        self.first = torch.searchsorted(ordered, mine)
        self.sizes = torch.searchsorted(ordered, mine, right=True) - self.first
        self._rank = torch.empty_like(self.order)
        self._rank[self.order] = torch.arange(labels.numel(), device=ids.device)

    def places(self, ids: Tensor) -> Tensor:
        places = self._rank[ids] - self.first[:, None]
        inside = (ids >= 0) & (places >= 0) & (places < self.sizes[:, None])
        return torch.where(inside, places, self.order.numel())

    def take(self, places: Tensor) -> Tensor:
        found = self.order[(places + self.first[:, None]).clamp(0, self.order.numel() - 1)]
        return torch.where(places >= 0, found, -1)


class Listed:
    """Each client has a list of its own, in ascending order."""

    def __init__(self, n: int, count: int, keys: Tensor) -> None:
        """keys: [s] ascending, row * n + id for each id in the list of the client in that row; count: m."""
        # One number per pair: finding pairs is one binary search over all lists at once.
        self.n, self.keys = n, keys
        self.rows = torch.arange(count, device=keys.device)[:, None]  # [m, 1]
        bounds = torch.searchsorted(keys, torch.arange(count + 1, device=keys.device) * n)
        self.starts, self.sizes = bounds[:-1], bounds[1:] - bounds[:-1]

    @classmethod
    def of_pairs(cls, n: int, count: int, rows: Tensor, ids: Tensor) -> Listed:
        """The client in row rows[e] may draw ids[e]; both [s], in any order, repeats allowed."""
        return cls(n, count, torch.unique(rows * n + ids))

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where in `keys` ids [m, e] would be, and whether they are there."""
        wanted = (self.rows * self.n + ids).contiguous()
        found = torch.searchsorted(self.keys, wanted)
        there = self.keys[found.clamp(max=self.keys.numel() - 1)] == wanted if self.keys.numel() else found < 0
        return found, there & (ids >= 0)

    def contains(self, ids: Tensor) -> Tensor:
        return self._find(ids)[1]

    def places(self, ids: Tensor) -> Tensor:
        found, there = self._find(ids)
        return torch.where(there, found - self.starts[:, None], self.n)

    def take(self, places: Tensor) -> Tensor:
        if not self.keys.numel():
            return torch.full_like(places, -1)
        found = self.keys[(places + self.starts[:, None]).clamp(0, self.keys.numel() - 1)] - self.rows * self.n
        return torch.where(places >= 0, found, -1)

    def alike(self, labels: Tensor, ids: Tensor) -> Listed:
        kept = labels[self.keys % self.n] == labels[ids][self.keys // self.n]
        return Listed(self.n, self.sizes.numel(), self.keys[kept])

    def among(self, present: Tensor, ids: Tensor) -> Listed:
        """Only those present [n] bool, and nobody for a client that is not; ids: [m] whose lists these are."""
        kept = present[self.keys % self.n] & present[ids][self.keys // self.n]
        return Listed(self.n, self.sizes.numel(), self.keys[kept])

    def padded(self, rows: Tensor) -> Tensor:
        sizes = self.sizes[rows, None]
        place = torch.arange(int(sizes.max()) if sizes.numel() else 0, device=rows.device)
        if not self.keys.numel():
            return place.expand(rows.numel(), -1)  # no columns
        found = self.keys[(self.starts[rows, None] + place).clamp(max=self.keys.numel() - 1)]
        return torch.where(place < sizes, found - rows[:, None] * self.n, -1)


class Reach(Protocol):
    """Whom the clients of one cohort can reach, round by round."""

    @property
    def ever(self) -> Listed | None:
        """Whom they can reach in some round; None: everybody."""

    def at(self, t: int) -> Peerage:
        """The lists of round t; of round 0, before the first, whom they can ever reach."""


class Network(Protocol):
    """Who can reach whom among all n clients."""

    def reach(self, ids: Tensor) -> Reach:
        """The part of it that the clients ids [m] know: theirs."""

    def files(self) -> dict[str, str]:
        """What a run folder keeps of it, name -> text, to go on without the user's files."""


class Pairs(Network, Protocol):
    """A network that is the same in every round."""

    def reach(self, ids: Tensor) -> Steady: ...

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Client e of the first [s] can reach client e of the second [s]."""


@dataclass(frozen=True)
class Steady:
    """The same in every round."""

    lists: Listed

    @property
    def ever(self) -> Listed:
        return self.lists

    def at(self, t: int) -> Listed:
        return self.lists


@dataclass(frozen=True)
class RandomNetwork:
    """Every client can reach `count` (at most n - 1) random others. Being reached does not mean reaching."""

    n: int
    count: int
    seed: int

    def reach(self, ids: Tensor) -> Steady:
        blocks = torch.split(ids, max(1, BLOCK // self.n))
        drawn = torch.cat([_subsets(self.seed, some, self.n - 1, self.count) for some in blocks])  # among the others
        peers = drawn + (drawn >= ids[:, None]).to(drawn.dtype)
        rows = torch.arange(ids.numel(), device=ids.device)[:, None].expand_as(peers)
        return Steady(Listed.of_pairs(self.n, ids.numel(), rows.reshape(-1), peers.reshape(-1)))

    def pairs(self) -> tuple[Tensor, Tensor]:
        keys = self.reach(torch.arange(self.n)).lists.keys
        return keys // self.n, keys % self.n

    def files(self) -> dict[str, str]:
        return {}


def _subsets(seed: int, clients: Tensor, size: int, count: int) -> Tensor:
    """`count` different numbers below `size` for each of the clients [b]: [b, count].

    The first different ones of a long row of draws; where most are wanted, those that are not wanted are drawn.
    Unlike `randomness.positions` it does not compare every draw with all others, so sets may be large.
    """
    fewer = min(count, size - count)
    width = 2 * fewer + 16
    while True:
        draws = randomness.bits(seed, "reach", 0, clients[:, None], torch.arange(width, device=clients.device)) % size
        ordered, order = draws.sort(dim=1, stable=True)
        new = torch.ones_like(draws, dtype=torch.bool)
        new.scatter_(1, order[:, 1:], ordered[:, 1:] != ordered[:, :-1])
        found = new.cumsum(dim=1)
        if bool((found[:, -1] >= fewer).all()):
            break
        width *= 2  # hardly ever; what was drawn before is drawn again
    drawn = draws[new & (found <= fewer)].view(clients.numel(), fewer)
    if fewer == count:
        return drawn
    kept = torch.ones(clients.numel(), size, dtype=torch.bool, device=clients.device).scatter_(1, drawn, False)
    return torch.nonzero(kept)[:, 1].view(clients.numel(), count)


@dataclass(frozen=True)
class PairNetwork:
    """client[e] can reach peer[e]; both [pairs]."""

    n: int
    client: Tensor
    peer: Tensor
    drawn: bool = False  # from the seed, not read from a file

    def reach(self, ids: Tensor) -> Steady:
        row = torch.full((self.n,), -1, dtype=torch.int64, device=ids.device)
        row[ids] = torch.arange(ids.numel(), device=ids.device)
        rows = row[self.client.to(ids.device)]
        return Steady(Listed.of_pairs(self.n, ids.numel(), rows[rows >= 0], self.peer.to(ids.device)[rows >= 0]))

    def pairs(self) -> tuple[Tensor, Tensor]:
        return self.client, self.peer

    def files(self) -> dict[str, str]:
        return {} if self.drawn and self.client.numel() > KEPT else {REACHABLE: self.csv()}

    def csv(self) -> str:
        """The file that gives this network."""
        lines = (f"{client},{peer}\n" for client, peer in zip(self.client.tolist(), self.peer.tolist()))
        return "client,peer\n" + "".join(lines)
