"""Graphs that clients can be linked by, drawn once from the seed, and whether such a graph hangs together.

A graph is its links, two arrays [e] of clients, each pair once with the smaller id first. Links work both ways.
"""

from __future__ import annotations

import numpy as np
import torch

from kinfolk import randomness
from kinfolk.errors import UserError
from kinfolk.peers.reach import BLOCK, PairNetwork

TOPOLOGIES = ("full", "half", "ring", "line", "star", "regular", "random")
Links = tuple[np.ndarray, np.ndarray]
SWAPS = 20  # times that every link of a regular graph is offered a swap


def ring(n: int, degree: int = 2) -> Links:
    """Every client with its `degree` nearest in a circle, half of them on each side."""
    ahead = np.arange(1, degree // 2 + 1)[:, None]
    client, peer = np.broadcast_arrays(np.arange(n), (np.arange(n) + ahead) % n)
    return _links(client.ravel(), peer.ravel(), n)


def line(n: int) -> Links:
    """Every client with the one before and the one after it."""
    client = np.arange(n - 1)
    return client, client + 1


def star(n: int) -> Links:
    """Every client with client 0."""
    client = np.arange(1, n)
    return np.zeros_like(client), client


def random(n: int, probability: float, seed: int, attempt: int = 0) -> Links:
    """Every two clients with this probability, each pair for itself (Erdős and Rényi)."""
    found = []
    for rows in torch.split(torch.arange(n), max(1, BLOCK // n)):
        peers = torch.arange(int(rows[0]) + 1, n)
        drawn = randomness.uniform(seed, "links", attempt, rows[:, None], peers) < probability
        row, column = torch.nonzero(drawn & (peers > rows[:, None]), as_tuple=True)
        found.append(torch.stack([rows[row], peers[column]]))
    a, b = torch.cat(found, dim=1).numpy()
    return a, b


def half(n: int, seed: int) -> Links:
    """Every two clients with probability one half, drawn again until the graph is connected."""
    attempt = 0
    while True:
        links = random(n, 0.5, seed, attempt)
        if not components(*links, n).any():
            return links
        attempt += 1


def regular(n: int, degree: int, seed: int) -> Links:
    """A random graph in which every client has `degree` peers.

    A ring in which pairs of links then swap ends, over and over, where that makes no link twice: every such graph can
    come out, and in the long run all equally often.
    """
    if 2 * degree > n - 1:  # few swaps are possible in a dense graph: draw who is not linked
        return _complement(*regular(n, n - 1 - degree, seed), n)
    a, b = ring(n, degree)
    if degree % 2:  # and the one opposite
        opposite = np.arange(n // 2)
        a, b = np.concatenate([a, opposite]), np.concatenate([b, opposite + n // 2])
    for turn in range(SWAPS):
        a, b = _swap(a, b, n, seed, turn)
    return a, b


def _swap(a: np.ndarray, b: np.ndarray, n: int, seed: int, turn: int) -> Links:
    """Pair up the links at random: a-b and c-d become a-c and b-d, where these are new and no client's own."""
    draws = randomness.bits(seed, "swap", turn, torch.arange(a.size), torch.tensor(0)).numpy()
    order = np.argsort(draws, kind="stable")
    one, two = order[: a.size // 2], order[a.size // 2 : a.size // 2 * 2]
    turned = draws[two] % 2 == 1
    c, d = np.where(turned, b[two], a[two]), np.where(turned, a[two], b[two])
    wanted = np.concatenate([_keys(a[one], c, n), _keys(b[one], d, n)])
    _, place, times = np.unique(wanted, return_inverse=True, return_counts=True)
    good = (times[place] == 1) & ~np.isin(wanted, _keys(a, b, n)) & (wanted // n != wanted % n)
    done = good[: one.size] & good[one.size :]
    keys = _keys(a, b, n)
    keys[one[done]], keys[two[done]] = wanted[: one.size][done], wanted[one.size :][done]
    return keys // n, keys % n


def _complement(a: np.ndarray, b: np.ndarray, n: int) -> Links:
    """All links but these."""
    free = np.ones((n, n), dtype=bool)
    free[a, b] = False
    one, two = np.nonzero(np.triu(free, 1))
    return one, two


def _keys(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    """One number for each link, whichever way round it is."""
    keys: np.ndarray = np.minimum(a, b) * n + np.maximum(a, b)
    return keys


def _links(a: np.ndarray, b: np.ndarray, n: int) -> Links:
    """Each link once, none of a client with itself."""
    keys = np.unique(_keys(a, b, n)[a != b])
    return keys // n, keys % n


def draw(name: str, n: int, seed: int, degree: int | None, probability: float | None) -> PairNetwork | None:
    """The graph called `name` of n clients; None: everybody is linked with everybody."""
    if degree is not None and degree >= n:
        raise UserError(f"peers.degree = {degree}, but there are {n} clients: nobody has more than {n - 1} peers")
    if degree is not None and degree * n % 2:
        raise UserError(f"peers.degree = {degree}, but an odd number of clients, {n}, cannot each have an odd number")
    match name:
        case "half":
            links = half(n, seed)
        case "ring":
            links = ring(n, degree or 2)
        case "line":
            links = line(n)
        case "star":
            links = star(n)
        case "regular" if degree is not None:
            links = regular(n, degree, seed)
        case "random" if probability is not None:
            links = random(n, probability, seed)
        case _:
            return None
    a, b = (torch.from_numpy(side) for side in links)
    return PairNetwork(n, torch.cat([a, b]), torch.cat([b, a]), drawn=True)


def components(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    """[n] the connected part of each client, by its smallest member; links a [e], b [e] count in both directions."""
    part = np.arange(n)
    while True:
        one, two = part[a], part[b]
        lower = np.minimum(one, two)
        joined = part.copy()
        np.minimum.at(joined, one, lower)
        np.minimum.at(joined, two, lower)
        while (joined[joined] != joined).any():  # to the end of each chain, in steps that double
            joined = joined[joined]
        if (joined == part).all():
            return part
        part = joined
