"""Access: the settings of `[peers]`, and the files they may name."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kinfolk.errors import UserError, nearest
from kinfolk.peers import topology
from kinfolk.peers.availability import AWAY, Availability, ChangingNetwork, Spells, Trace
from kinfolk.peers.reach import REACHABLE, Network, PairNetwork, Pairs, RandomNetwork
from kinfolk.settings import setting

FOREVER = 2**62  # a round that never comes


@dataclass(frozen=True)
class Access:
    """Whom clients can reach, and when."""

    topology: str | None = setting(None, "full, half, ring, line, star, regular or random: a graph; none: everybody")
    degree: int | None = setting(None, "peers of each client in a regular graph, or in a ring; none: 2", ge=1)
    probability: float | None = setting(None, "that two clients are linked in a random graph", ge=0, le=1)
    reachable: int | None = setting(None, "random others each client can reach in all rounds; none: everybody", ge=0)
    reachable_from: str | None = setting(None, "CSV file of who can reach whom, columns client,peer; none: everybody")
    away: float | None = setting(None, "probability that a client trains but is out of reach; none: 0", ge=0, lt=1)
    away_rounds: int | None = setting(None, "how many rounds it stays out of reach; none: 1", ge=1)
    away_from: str | None = setting(None, "CSV file of who is out of reach when, columns client,first,last")

    def __post_init__(self) -> None:
        self._only_one("say who can reach whom", "topology", "reachable", "reachable_from")
        self._only_one("say who is out of reach when", "away", "away_from")
        if self.topology is not None and self.topology not in topology.TOPOLOGIES:
            raise UserError(f"unknown topology '{self.topology}': {nearest(self.topology, topology.TOPOLOGIES)}")
        self._belongs("degree", self.topology in ("ring", "regular"), 'topology = "regular" or "ring"')
        self._belongs("probability", self.topology == "random", 'topology = "random"')
        self._belongs("away_rounds", self.away is not None, "'away'")
        if self.topology == "regular" and self.degree is None:
            raise UserError("topology 'regular' needs 'degree', the number of each client's peers")
        if self.topology == "random" and self.probability is None:
            raise UserError("topology 'random' needs 'probability', that two clients are linked")
        if self.topology == "ring" and (self.degree or 2) % 2:
            raise UserError(f"degree = {self.degree}: a ring has as many peers on either side, so an even number")

    def _only_one(self, what: str, *names: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"both '{given[0]}' and '{given[1]}' {what}: leave one out")

    def _belongs(self, name: str, there: bool, to: str) -> None:
        if getattr(self, name) is not None and not there:
            raise UserError(f"'{name}' goes with {to}, which is not given")

    def most(self, n: int) -> int:
        """How many of n clients one can reach at most."""
        limits = {"line": 2, "ring": self.degree or 2, "regular": self.degree, None: self.reachable}
        limit = limits.get(self.topology)
        return n - 1 if limit is None else min(n - 1, limit)

    def network(self, n: int, seed: int, kept: Path | None = None) -> tuple[Network | None, list[str]]:
        """(who can reach whom, None for everybody; what the user should know). `kept`: a folder whose copies stand in
        for the files and for what was drawn, as far as it has them."""
        steady, notices = self._steady(n, seed, None if kept is None else kept / REACHABLE)
        when = self._availability(n, seed, None if kept is None else kept / AWAY)
        return (steady if when is None else ChangingNetwork(steady, when)), notices

    def _steady(self, n: int, seed: int, kept: Path | None) -> tuple[Pairs | None, list[str]]:
        """Who can reach whom when nobody is away."""
        if self.reachable is not None:
            return self._random_sets(n, self.reachable, seed)
        notices: list[str] = []
        if kept is not None and kept.exists():
            where, (found, notices) = str(kept), read_network(kept, n)
        elif self.reachable_from is not None:
            where, (found, notices) = self.reachable_from, read_network(Path(self.reachable_from), n)
        else:
            where = f"peers.topology = {self.topology}"
            drawn = topology.draw(self.topology or "full", n, seed, self.degree, self.probability)
            if drawn is None:
                return None, []
            found = drawn
        return found, notices + connectivity(found, n, where)

    def _random_sets(self, n: int, count: int, seed: int) -> tuple[RandomNetwork | None, list[str]]:
        where = f"peers.reachable = {count}"
        if count >= n - 1:
            return None, [f"{where}, but a client has only {n - 1} peers: it reaches all"]
        found = RandomNetwork(n, count, seed)
        # Two parts in which everybody has half of the others for peers would be more than there are.
        return found, [] if 2 * count >= n - 1 else connectivity(found, n, where)

    def _availability(self, n: int, seed: int, kept: Path | None) -> Availability | None:
        if self.away_from is not None:
            return read_trace(kept if kept is not None and kept.exists() else Path(self.away_from), n)
        return Spells(n, self.away, self.away_rounds or 1, seed) if self.away else None


def connectivity(network: Pairs, n: int, where: str) -> list[str]:
    """A notice if some clients never hear of each other, not over any number of steps, or somebody reaches nobody."""
    client, peer = (side.numpy() for side in network.pairs())
    alone = int(n - np.unique(client).size)
    sizes = np.bincount(topology.components(client, peer, n))
    parts = np.count_nonzero(sizes)
    words = []
    if parts > 1:
        words.append(f"{parts} components, the largest has {sizes.max()} of {n} clients")
    if alone:
        words.append("1 client reaches nobody" if alone == 1 else f"{alone} clients reach nobody")
    return [f"{where}: {'; '.join(words)}"] if words else []


def read_network(path: Path, n: int) -> tuple[PairNetwork, list[str]]:
    """Who can reach whom from a CSV file with the columns client and peer, and what the user should know of it."""
    pairs = [_pair(cells, where, n) for cells, where in _lines(path, ["client", "peer"])]
    others = [pair for pair in pairs if pair[0] != pair[1]]
    notices = []
    if len(others) < len(pairs):
        notices.append(f"{path}: {len(pairs) - len(others)} lines in which a client reaches itself are ignored")
    found = torch.tensor(others, dtype=torch.int64).view(-1, 2)
    return PairNetwork(n, found[:, 0], found[:, 1]), notices


def read_trace(path: Path, n: int) -> Trace:
    """Who is away when from a CSV file with the columns client, first and last (empty: for good)."""
    spells = [_spell(cells, where, n) for cells, where in _lines(path, ["client", "first", "last"])]
    found = torch.tensor(spells, dtype=torch.int64).view(-1, 3)
    return Trace(n, found[:, 0], found[:, 1], found[:, 2])


def _lines(path: Path, columns: list[str]) -> Iterator[tuple[list[str], str]]:
    """The cells of each line of a CSV file below its heading, and where the line is."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file: {error}") from None
    if not lines or [cell.strip() for cell in lines[0]] != columns:
        raise UserError(f"{path}: the first line must be {','.join(columns)}")
    return ((cells, f"{path}, line {number}") for number, cells in enumerate(lines[1:], start=2) if cells)


def _pair(cells: list[str], where: str, n: int) -> tuple[int, int]:
    try:
        client, peer = (int(cell) for cell in cells)
    except ValueError:
        raise UserError(f"{where}: '{','.join(cells)}' must be two clients' numbers") from None
    _check_client(client, where, n)
    _check_client(peer, where, n)
    return client, peer


def _spell(cells: list[str], where: str, n: int) -> tuple[int, int, int]:
    try:
        client, first, last = (int(cell) for cell in [*cells[:-1], cells[-1].strip() or FOREVER])
    except ValueError:
        raise UserError(f"{where}: '{','.join(cells)}' must be a client's number and two rounds") from None
    _check_client(client, where, n)
    last = min(last, FOREVER)
    if not 1 <= first <= last:
        raise UserError(f"{where}: '{','.join(cells)}' must have a first round of at least 1 and a last not before it")
    return client, first, last


def _check_client(client: int, where: str, n: int) -> None:
    if not 0 <= client < n:
        raise UserError(f"{where}: there is no client {client}, only 0 to {n - 1}")
