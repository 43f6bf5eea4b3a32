"""Groups of alike clients, made from distances of pairs: P4's first phase.

Every group begins with one client. Groups then join in pairs, again and again, as long as no group becomes larger than
the cap: first those that are each other's nearest, then the others in the order of their distances, and at last those
of which no distance is known, with anybody. A function of its arguments: whoever knows the same distances finds the
same groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kinfolk import randomness

Array = np.ndarray


@dataclass(frozen=True)
class Pairs:
    """Distances that are known: parallel arrays [e]; NaN and infinity mean unknown."""

    first: Array  # ids
    second: Array
    distance: Array

    @classmethod
    def of_lists(cls, ids: Array, sampled: Array, distance: Array) -> Pairs:
        """From lists: the client ids[i] has looked at sampled[i, k] (-1: nobody) and found distance[i, k]."""
        row, column = np.nonzero(sampled >= 0)
        return cls(ids[row], sampled[row, column], distance[row, column])

    def among(self, ids: Array) -> Pairs:
        """Those between these clients, which must be sorted, with places in `ids` instead of ids."""
        first, second = (np.searchsorted(ids, column).clip(max=len(ids) - 1) for column in (self.first, self.second))
        kept = (ids[first] == self.first) & (ids[second] == self.second) & (first != second)
        kept &= np.isfinite(self.distance)
        return Pairs(first[kept], second[kept], self.distance[kept])


def form(ids: Array, pairs: Pairs, cap: int, seed: int) -> Array:
    """The groups of the clients ids [p], ascending: [p], each named after its smallest id.

    cap: the most clients of a group. Ties go to the smaller id; chance, where it decides, is a function of the seed.
    """
    known = pairs.among(ids)
    group = np.arange(len(ids))  # place of the smallest member
    iteration = 0
    while len(joined := _joined(group, known, cap, ids, seed, iteration)):
        target = np.arange(len(ids))
        target[joined[:, 1]] = joined[:, 0]
        group = target[group]
        iteration += 1
    return ids[group]


def _joined(group: Array, known: Pairs, cap: int, ids: Array, seed: int, iteration: int) -> Array:
    """Pairs of groups [j, 2] that join, the smaller first; no group is in two of them."""
    size = np.bincount(group, minlength=len(ids))
    free = size > 0
    near = _neighbors(group, known, size, cap)
    nearest = {g: others[0] for g, others in near.items()}
    found: list[tuple[int, int]] = []

    def join(g: int, h: int) -> None:
        found.append((min(g, h), max(g, h)))
        free[[g, h]] = False

    for g, (_, h) in nearest.items():
        if g < h and nearest[h][1] == g:
            join(g, h)
    for _, g in sorted((distance, g) for g, (distance, _) in nearest.items()):
        partner = next((h for _, h in near[g] if free[h]), None) if free[g] else None
        if partner is not None:
            join(g, partner)
    keys = randomness.bits(seed, "group pairs", iteration, torch.from_numpy(ids), torch.zeros(1)).numpy()
    order = [g for g in np.argsort(keys, kind="stable").tolist() if free[g]]
    for g in order:
        if not free[g] or g in near:
            continue
        partner = next((h for h in order if h != g and free[h] and size[g] + size[h] <= cap), None)
        if partner is not None:
            join(g, partner)
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _neighbors(group: Array, known: Pairs, size: Array, cap: int) -> dict[int, list[tuple[float, int]]]:
    """Of each group that can join another whose distance is known: (distance, group), nearest first.

    The distance of two groups is that of their nearest members.
    """
    first, second = group[known.first], group[known.second]
    fits = (first != second) & (size[first] + size[second] <= cap)
    first, second, distance = first[fits], second[fits], known.distance[fits]
    source, target = np.concatenate([first, second]), np.concatenate([second, first])
    distance = np.concatenate([distance, distance])
    order = np.lexsort((target, distance, source))
    near: dict[int, list[tuple[float, int]]] = {}
    seen: set[tuple[int, int]] = set()
    for g, h, d in zip(source[order].tolist(), target[order].tolist(), distance[order].tolist()):
        if (g, h) not in seen:
            seen.add((g, h))
            near.setdefault(g, []).append((d, h))
    return near


def at_random(n: int, cap: int, seed: int, within: Array | None = None) -> Array:
    """Groups of at most `cap` and nearly equal size, drawn by the seed: [n], each named after its smallest id.

    within: [n] labels; only clients with the same label come together.
    """
    keys = randomness.bits(seed, "random groups", 0, torch.arange(n), torch.zeros(1)).numpy()
    labels = np.zeros(n, dtype=np.int64) if within is None else within
    group = np.empty(n, dtype=np.int64)
    for label in np.unique(labels).tolist():
        clients = np.flatnonzero(labels == label)
        shuffled = clients[np.argsort(keys[clients], kind="stable")]
        for part in np.array_split(shuffled, -(-len(shuffled) // cap)):
            group[part] = part.min()
    return group


def members(ids: Array, group: Array, width: int) -> Array:
    """The others of each client's group, ascending: [p, width], -1 where there are no more. ids ascending [p]."""
    lists = np.full((len(ids), width), -1, dtype=np.int64)
    for name in np.unique(group).tolist():
        rows = np.flatnonzero(group == name)
        for row in rows.tolist():
            others = ids[rows[rows != row]]
            lists[row, : len(others)] = others
    return lists


def within(group: Array, ids: Array, pairs: Pairs) -> Array:
    """Of each client ids [p]: the sum of its known distances to the others of its group [p], NaN if none is known.

    A pair that both know of counts once.
    """
    known = pairs.among(ids)
    inside = group[known.first] == group[known.second]
    keys = np.sort(np.stack([known.first[inside], known.second[inside]], axis=1), axis=1)
    ends, once = np.unique(keys, axis=0, return_index=True)
    found, seen = np.zeros(len(ids)), np.zeros(len(ids), dtype=bool)
    for end in ends.T:
        np.add.at(found, end, known.distance[inside][once])
        seen[end] = True
    return np.where(seen, found, np.nan)


def objective(group: Array, ids: Array, pairs: Pairs) -> float:
    """What grouping makes small: the sum of known distances within groups, each pair counted once (eqs 4 and 5)."""
    return float(np.nansum(within(group, ids, pairs)) / 2)
