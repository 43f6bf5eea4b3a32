"""How soon a client's neighbors are all kin: the closed forms of PANM's Theorem 1, and the exact chain.

Li, Lu, Luo, Zhu, Shao, Li, Zhang, Wu: Mining Latent Relationships among Clients: Peer-to-peer Federated Learning with
Adaptive Neighbor Matching. Everything here assumes what the theorem assumes: similarities rank every kin above every
stranger.

The paper's letters: n clients, with oneself; `cluster` (a) clients of one's own true cluster, with oneself;
`candidates` (l) looked at each round, all n - 1 peers if there are fewer; `neighbors` (k) kept. Probabilities are
ratios of binomial coefficients, taken in exact integers before the one division.
"""

from __future__ import annotations

from math import comb
from typing import Literal

import numpy as np

from kinfolk.errors import UserError

Pool = Literal["all", "non-neighbors"]


def sampled_kin(n: int, cluster: int, candidates: int) -> np.ndarray:
    """G(x): the chance that exactly x of l sampled peers are kin, for x = 0..l: [l + 1]."""
    _check(n, cluster, candidates)
    return np.array([_drawn(n - 1, cluster - 1, candidates, x) for x in range(candidates + 1)])


def at_least(n: int, cluster: int, candidates: int) -> np.ndarray:
    """R(x): the chance that x or more of l sampled peers are kin, for x = 0..l: [l + 1]. R(0) = 1."""
    _check(n, cluster, candidates)
    drawn = min(candidates, n - 1)
    ways = [_choose(cluster - 1, x) * _choose(n - cluster, drawn - x) for x in range(candidates + 1)]
    return np.array([sum(ways[x:]) / comb(n - 1, drawn) for x in range(candidates + 1)])


def confident(n: int, cluster: int, candidates: int, neighbors: int, rounds: int) -> np.ndarray:
    """P^t(k), Theorem 1: the chance that all k neighbors are kin after round t, for t = 1..rounds: [rounds].

    P^1(x) = R(x) and P^t(x) = sum over m < x of G(m) P^{t-1}(x - m), plus R(x). The theorem counts a peer that is drawn
    twice as two, so it is an approximation (`exact` is not); where a client has fewer than k kin it would even tend to
    1, and 0 is given instead.
    """
    _check(n, cluster, candidates, neighbors)
    if neighbors > cluster - 1:
        return np.zeros(rounds)
    exactly = _padded(sampled_kin(n, cluster, candidates), neighbors + 1)  # G(0..k)
    enough = _padded(at_least(n, cluster, candidates), neighbors + 1)  # R(0..k)
    chance, history = enough, []  # P^1(0..k)
    for _ in range(rounds):
        history.append(chance[neighbors])
        later = [enough[x] + sum(exactly[m] * chance[x - m] for m in range(x)) for x in range(1, neighbors + 1)]
        chance = np.array([1.0, *later])
    return np.array(history)


def pens(n: int, cluster: int, candidates: int, neighbors: int) -> float:
    """R(k): the chance that all k peers PENS selects in a round are kin. It forgets, so all rounds are the same."""
    _check(n, cluster, candidates, neighbors)
    return float(_padded(at_least(n, cluster, candidates), neighbors + 1)[neighbors])


def pens_selection_rate(n: int, cluster: int, candidates: int, neighbors: int) -> float:
    """The chance that PENS selects a given kin in a given round: E[min(k, kin among l sampled)] / (a - 1)."""
    _check(n, cluster, candidates, neighbors)
    if cluster == 1:
        return 0.0
    selected = np.minimum(neighbors, np.arange(candidates + 1))
    return float(selected @ sampled_kin(n, cluster, candidates) / (cluster - 1))


def exact(
    n: int, cluster: int, candidates: int, neighbors: int, rounds: int, pool: Pool = "non-neighbors"
) -> np.ndarray:
    """What `confident` approximates: the chance that all k neighbors are kin after round t = 1..rounds: [rounds].

    A Markov chain on x, the kin among the neighbors: x' = min(k, x + h), where h of the l candidates are kin that were
    not neighbors yet. Candidates are drawn from "all" peers or from "non-neighbors" only, as PANM's first stage does by
    default here.
    """
    _check(n, cluster, candidates, neighbors)
    if pool not in ("all", "non-neighbors"):
        raise UserError(f"pool = {pool!r}: 'all' or 'non-neighbors' is needed")
    chance = np.zeros(neighbors + 1)  # of x = 0..k; before round 1 there are no neighbors
    chance[0] = 1.0
    listed, history = 0, []  # `listed`: length of the list, less than k in the first rounds if k > l
    for _ in range(rounds):
        others = n - 1 if pool == "all" else n - 1 - listed
        later = np.zeros(neighbors + 1)
        for x in np.flatnonzero(chance).tolist():
            for new in range(min(candidates, others) + 1):
                later[min(neighbors, x + new)] += chance[x] * _drawn(others, cluster - 1 - x, candidates, new)
        chance = later
        listed = min(neighbors, n - 1, listed + candidates)
        history.append(chance[neighbors])
    return np.array(history)


def _drawn(others: int, kin: int, count: int, x: int) -> float:
    """Hypergeometric: the chance of x kin among `count` draws without replacement from `others`, `kin` of them kin."""
    count = min(count, others)
    return _choose(kin, x) * _choose(others - kin, count - x) / comb(others, count)


def _choose(p: int, q: int) -> int:
    """Binomial coefficient, 0 outside its triangle."""
    return comb(p, q) if 0 <= q <= p else 0


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    """The first `size` values, with zeros where there are none."""
    return np.pad(values, (0, max(0, size - values.size)))[:size]


def _check(n: int, cluster: int, candidates: int, neighbors: int = 1) -> None:
    if not 1 <= cluster <= n:
        raise UserError(f"a cluster of a = {cluster} among n = {n} clients: 1 <= a <= n is needed")
    if candidates < 1 or neighbors < 1:
        raise UserError(f"l = {candidates} candidates, k = {neighbors} neighbors: at least one of each is needed")
