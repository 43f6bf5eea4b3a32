"""Availability: who can be reached in which round.

A client that is away trains on, but nobody reaches it and it reaches nobody; `faults.absent` is the other thing, a
client that does nothing at all. Rounds count from 1: before the first nobody is away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kinfolk.peers.faults import spells
from kinfolk.peers.reach import Alike, Listed, Network, Peerage

AWAY = "away.csv"  # a run's own copy of who is away when


class Availability(Protocol):
    """Who of n clients is away."""

    @property
    def n(self) -> int: ...

    def away(self, t: int, device: torch.device) -> Tensor:
        """[n] bool: who is away in round t."""

    def files(self) -> dict[str, str]:
        """What a run folder keeps of it, name -> text."""


@dataclass(frozen=True)
class Spells:
    """Every client is away with probability `share`, for `rounds` rounds at a time."""

    n: int
    share: float
    rounds: int
    seed: int

    def away(self, t: int, device: torch.device) -> Tensor:
        ids = torch.arange(self.n, device=device)
        return spells(self.seed, t, ids, self.share, self.rounds, "away phase", "away")

    def files(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True)
class Trace:
    """client[e] is away from round first[e] to round last[e], which counts too; all [spells]."""

    n: int
    client: Tensor
    first: Tensor
    last: Tensor

    def away(self, t: int, device: torch.device) -> Tensor:
        found = torch.zeros(self.n, dtype=torch.bool)
        found[self.client[(self.first <= t) & (t <= self.last)]] = True
        return found.to(device)

    def files(self) -> dict[str, str]:
        columns = zip(self.client.tolist(), self.first.tolist(), self.last.tolist())
        return {AWAY: "client,first,last\n" + "".join(f"{a},{b},{c}\n" for a, b, c in columns)}


class Present(Alike):
    """Whoever is present can reach all who are, and nobody else reaches anybody.

    Takes no more room than the list of those present, where lists of pairs would take n².
    """

    def __init__(self, present: Tensor, ids: Tensor, labels: Tensor | None = None) -> None:
        """present: [n] bool; ids: [m] whose lists these are; labels: [n], only peers with the client's own."""
        labels = torch.zeros_like(present, dtype=torch.int64) if labels is None else labels
        super().__init__(torch.where(present, labels, labels.min() - 1), ids)
        self.sizes = torch.where(present[ids], self.sizes, 0)
        self.present, self.ids = present, ids

    def contains(self, ids: Tensor) -> Tensor:
        return (self.places(ids) < self.present.numel()) & (ids != self.ids[:, None])

    def alike(self, labels: Tensor, ids: Tensor) -> Present:
        return Present(self.present, ids, labels)

    def padded(self, rows: Tensor) -> Tensor:
        place = torch.arange(int(self.sizes.max()), device=rows.device)
        found = self.order[(self.first[rows, None] + place).clamp(max=self.order.numel() - 1)]
        there = (place < self.sizes[rows, None]) & (found != self.ids[rows, None])
        return torch.where(there, found, -1)


class Changing:
    """Whom the clients ids [m] can reach when some are away; `lists`: whom they could reach if nobody were."""

    def __init__(self, ids: Tensor, lists: Listed | None, availability: Availability) -> None:
        self.ids, self.ever, self.availability = ids, lists, availability
        nobody = torch.zeros(availability.n, dtype=torch.bool, device=ids.device)
        self._always: Peerage = Present(~nobody, ids) if lists is None else lists
        self._last: tuple[int, Peerage] = (0, self._always)

    def at(self, t: int) -> Peerage:
        if t == 0:
            return self._always
        if self._last[0] != t:  # asked for several times in a round
            self._last = (t, self._among(self.availability.away(t, self.ids.device)))
        return self._last[1]

    def _among(self, away: Tensor) -> Peerage:
        return Present(~away, self.ids) if self.ever is None else self.ever.among(~away, self.ids)


@dataclass(frozen=True)
class ChangingNetwork:
    """A network (None: everybody) of which some clients are away now and then."""

    network: Network | None
    availability: Availability

    def reach(self, ids: Tensor) -> Changing:
        return Changing(ids, None if self.network is None else self.network.reach(ids).ever, self.availability)

    def files(self) -> dict[str, str]:
        return ({} if self.network is None else self.network.files()) | self.availability.files()
