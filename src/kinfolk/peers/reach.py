"""Reach: whom each client can reach. By default everybody; with `[peers]` a set B_i of its own, fixed for the run.

A `Network` gives, for the clients of a cohort, a `Reach`; a Reach gives, for a round, `Lists`: the ids each client may
draw its peers from. Lists are ragged and lie one after another in one tensor, so memory grows with the number of pairs
that can talk and never with n². A client's list is a function of the seed (or of a file) and its id alone, and so the
same on every shard.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.errors import UserError
from kinfolk.settings import setting

BLOCK = 2**22  # pairs of clients looked at together when random sets are drawn


class Lists(Protocol):
    """For each of m clients the ids it may draw from, numbered 0 .. sizes[i] - 1: its places."""

    sizes: Tensor  # [m]

    def places(self, ids: Tensor) -> Tensor:
        """Where ids [m, e] stand in their client's list: [m, e]; n for those that do not."""

    def take(self, places: Tensor) -> Tensor:
        """The ids at places [m, c] of each client's list; anything for places that are not in it."""


class Everybody:
    """All n clients are in everybody's list, each at the place of its id."""

    def __init__(self, n: int, ids: Tensor) -> None:
        """ids: [m] the clients whose lists these are."""
        self.n = n
        self.sizes = torch.full_like(ids, n)

    def places(self, ids: Tensor) -> Tensor:
        return torch.where(ids >= 0, ids, self.n)

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

    def places(self, ids: Tensor) -> Tensor:
        n = self.order.numel()
        rank = torch.empty_like(self.order)
        rank[self.order] = torch.arange(n, device=rank.device)
        places = rank[ids.clamp(min=0)] - self.first[:, None]
        return torch.where((ids >= 0) & (places >= 0) & (places < self.sizes[:, None]), places, n)

    def take(self, places: Tensor) -> Tensor:
        return self.order[(places + self.first[:, None]).clamp(0, self.order.numel() - 1)]


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
        """Which of ids [m, e] are in their client's list: [m, e] bool."""
        return self._find(ids)[1]

    def places(self, ids: Tensor) -> Tensor:
        found, there = self._find(ids)
        return torch.where(there, found - self.starts[:, None], self.n)

    def take(self, places: Tensor) -> Tensor:
        if not self.keys.numel():
            return torch.full_like(places, -1)
        return self.keys[(places + self.starts[:, None]).clamp(0, self.keys.numel() - 1)] - self.rows * self.n

    def alike(self, labels: Tensor, ids: Tensor) -> Listed:
        """Only those with their client's own label; labels: [n], ids: [m] the clients whose lists these are."""
        kept = labels[self.keys % self.n] == labels[ids][self.keys // self.n]
        return Listed(self.n, self.sizes.numel(), self.keys[kept])

    def padded(self, rows: Tensor) -> Tensor:
        """The lists of the clients in rows [w]: [w, longest], -1 where there are no more."""
        sizes = self.sizes[rows, None]
        place = torch.arange(int(sizes.max()) if sizes.numel() else 0, device=rows.device)
        if not self.keys.numel():
            return place.expand(rows.numel(), -1)  # no columns
        found = self.keys[(self.starts[rows, None] + place).clamp(max=self.keys.numel() - 1)]
        return torch.where(place < sizes, found - rows[:, None] * self.n, -1)


class Reach(Protocol):
    """Whom the clients of one cohort can reach, round by round."""

    def at(self, t: int) -> Listed:
        """The lists of round t, without the clients themselves."""


class Network(Protocol):
    """Who can reach whom among all n clients."""

    def reach(self, ids: Tensor) -> Reach:
        """The part of it that the clients ids [m] know: theirs."""


@dataclass(frozen=True)
class Steady:
    """The same in every round."""

    lists: Listed

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

    def reach(self, ids: Tensor) -> Steady:
        row = torch.full((self.n,), -1, dtype=torch.int64, device=ids.device)
        row[ids] = torch.arange(ids.numel(), device=ids.device)
        rows = row[self.client.to(ids.device)]
        return Steady(Listed.of_pairs(self.n, ids.numel(), rows[rows >= 0], self.peer.to(ids.device)[rows >= 0]))

    def csv(self) -> str:
        """The file that gives this network."""
        lines = (f"{client},{peer}\n" for client, peer in zip(self.client.tolist(), self.peer.tolist()))
        return "client,peer\n" + "".join(lines)


@dataclass(frozen=True)
class Access:
    """Whom clients can reach."""

    reachable: int | None = setting(None, "random others each client can reach in all rounds; none: everybody", ge=0)
    reachable_from: str | None = setting(None, "CSV file of who can reach whom, columns client,peer; none: everybody")

    def __post_init__(self) -> None:
        if self.reachable is not None and self.reachable_from is not None:
            raise UserError("both 'reachable' and 'reachable_from' say who can reach whom: leave one out")

    def network(self, n: int, seed: int, kept: Path | None = None) -> tuple[Network | None, list[str]]:
        """(who can reach whom, None for everybody; what the user should know). `kept`: a copy that stands in for the
        file, if it exists."""
        if self.reachable_from is not None:
            path = kept if kept is not None and kept.exists() else Path(self.reachable_from)
            return read_network(path, n)
        if self.reachable is None:
            return None, []
        if self.reachable >= n - 1:
            return None, [f"peers.reachable = {self.reachable}, but a client has only {n - 1} peers: it reaches all"]
        return RandomNetwork(n, self.reachable, seed), []


def read_network(path: Path, n: int) -> tuple[PairNetwork, list[str]]:
    """Who can reach whom from a CSV file with the columns client and peer, and what the user should know of it."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file: {error}") from None
    if not lines or [cell.strip() for cell in lines[0]] != ["client", "peer"]:
        raise UserError(f"{path}: the first line must be client,peer")
    pairs = [_pair(cells, f"{path}, line {number}", n) for number, cells in enumerate(lines[1:], start=2) if cells]
    others = [pair for pair in pairs if pair[0] != pair[1]]
    notices = []
    if len(others) < len(pairs):
        notices.append(f"{path}: {len(pairs) - len(others)} lines in which a client reaches itself are ignored")
    if alone := n - len({client for client, _ in others}):
        notices.append(f"{path}: {alone} of {n} clients reach nobody and train alone")
    found = torch.tensor(others, dtype=torch.int64).view(-1, 2)
    return PairNetwork(n, found[:, 0], found[:, 1]), notices


def _pair(cells: list[str], where: str, n: int) -> tuple[int, int]:
    try:
        client, peer = (int(cell) for cell in cells)
    except ValueError:
        raise UserError(f"{where}: '{','.join(cells)}' must be two clients' numbers") from None
    for number in (client, peer):
        if not 0 <= number < n:
            raise UserError(f"{where}: there is no client {number}, only 0 to {n - 1}")
    return client, peer
