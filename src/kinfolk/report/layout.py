"""Where to draw the nodes of a graph: connected parts by springs, packed side by side."""

from __future__ import annotations

import numpy as np

STEPS = 150
GAP = 0.35  # between two parts, in units of the distance of two nodes


def components(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    """[n] the connected part of each node, by its smallest member; edges a [e], b [e] count in both directions."""
    part = np.arange(n)
    while True:
        before = part.copy()
        lowest = np.minimum(part[a], part[b])
        np.minimum.at(part, a, lowest)
        np.minimum.at(part, b, lowest)
        if (part == before).all():
            return part


def layout(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    """[n, 2] positions: every connected part a disc of its own, the discs in rows, the largest first."""
    part = components(a, b, n)
    labels, sizes = np.unique(part, return_counts=True)
    order = labels[np.argsort(-sizes, kind="stable")]
    discs = []
    for label in order:
        members = np.flatnonzero(part == label)
        inside = np.isin(a, members) & (a != b)
        place = np.searchsorted(members, np.stack([a[inside], b[inside]]))
        spots = _springs(place[0], place[1], members.size)
        radius = np.sqrt(members.size) / 2 + GAP
        reach = np.linalg.norm(spots, axis=1).max(initial=0)
        discs.append((members, spots * ((radius - GAP) / reach if reach > 0 else 0), radius))
    where = np.zeros((n, 2))
    wide = int(np.ceil(np.sqrt(len(discs))))
    width = 2 * wide * discs[0][2]
    x = y = height = 0.0
    for members, spots, radius in discs:  # rows of discs from the left, like words in lines
        if x > 0 and x + 2 * radius > width + 1e-9:
            x, y, height = 0.0, y - height, 0.0
        where[members] = spots + np.array([x + radius, y - radius])
        x, height = x + 2 * radius, max(height, 2 * radius)
    return where


def _springs(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    """[n, 2] Fruchterman and Reingold's layout of one connected part: edges pull, all nodes push, steps get shorter."""
    if n == 1:
        return np.zeros((1, 2))
    angle = 2 * np.pi * np.arange(n) / n
    spots = np.stack([np.cos(angle), np.sin(angle)], axis=1) * (1 + 0.1 * np.cos(7 * angle))[:, None]
    linked = np.zeros((n, n), dtype=bool)
    linked[a, b] = linked[b, a] = True
    ideal = 1 / np.sqrt(n)
    for step in range(STEPS):
        apart = spots[:, None] - spots[None]  # [n, n, 2]
        distance = np.linalg.norm(apart, axis=2) + np.eye(n) + 1e-9
        force = ideal**2 / distance**2 - np.where(linked, distance / ideal, 0)
        np.fill_diagonal(force, 0)
        move = (apart * force[..., None]).sum(axis=1)
        length = np.linalg.norm(move, axis=1, keepdims=True) + 1e-12
        spots = spots + move / length * np.minimum(length, 0.2 * (1 - step / STEPS))
    centred: np.ndarray = spots - spots.mean(axis=0)
    return centred
