"""Where the randomness of private training comes from: a seed in the simulator, the operating system in real peers.

Normal numbers are made of uniform bits by Box and Muller in float64. On a CPU they are made in blocks of a fixed width,
so that a client's numbers are the same bits whoever else is in the cohort: libraries compute the last elements of a
vector another way than those before them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.cohort.workers import side_by_side

_BLOCK = 2**16  # pairs at a time on a CPU
_WIDE = 2**13  # pairs of a client in a block
_GPU = 2**24  # pairs at a time on a GPU


class Source(Protocol):
    """Uniform numbers for clients."""

    @property
    def simulated(self) -> bool:
        """Whether somebody who knows the seed can repeat them."""

    def uniform(self, purpose: str, t: int, client: Tensor, index: Tensor) -> Tensor:
        """Float64 in [0, 1), of the shape that `client` (ids) and `index` broadcast to."""


@dataclass(frozen=True)
class Seeded:
    """The simulator's: a function of seed, purpose, round, client and index. Not private."""

    seed: int
    simulated = True

    def uniform(self, purpose: str, t: int, client: Tensor, index: Tensor) -> Tensor:
        return randomness.uniform(self.seed, purpose, t, client, index)


@dataclass(frozen=True)
class System:
    """From the operating system, new at every call: for real peers. Nothing is stored or restored."""

    simulated = False

    def uniform(self, purpose: str, t: int, client: Tensor, index: Tensor) -> Tensor:
        shape = (client + index).shape
        count = math.prod(shape)
        bits = torch.frombuffer(bytearray(os.urandom(8 * max(count, 1))), dtype=torch.int64)[:count]
        unit = ((bits >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53
        return unit.view(shape).to(client.device)


def add_noise(source: Source, purpose: str, t: int, ids: Tensor, deviation: Tensor, into: Tensor) -> None:
    """Add independent normal numbers of each client's standard deviation [m] to `into` [m, d], in place.

    The same (seed, purpose, round, client) gives the same numbers: every release needs a purpose or round of its own.
    """
    clients, columns = into.shape
    pairs = -(-columns // 2)
    ids, deviation = ids.to(into.device), deviation.to(into.device, torch.float64)
    if into.is_cuda:
        few = max(1, _GPU // max(pairs, 1))
        for start in range(0, clients, few):
            _add(source, purpose, t, ids, deviation, into, slice(start, start + few), 0, pairs)
        return
    width = min(_WIDE, -(-pairs // 64) * 64)
    few = max(1, _BLOCK // width)
    groups = [slice(start, start + few) for start in range(0, clients, few)]

    def work(rows: slice) -> None:
        for first in range(0, pairs, width):
            _add(source, purpose, t, ids, deviation, into, rows, first, width)

    with one_thread(into.device) as workers:
        side_by_side(work, groups, workers)


@contextmanager
def one_thread(device: torch.device) -> Iterator[int]:
    """One thread for each operation on a CPU, as how many share one changes last bits; how many threads there were."""
    before = torch.get_num_threads()
    if device.type != "cpu":
        yield 1
        return
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def _add(
    source: Source,
    purpose: str,
    t: int,
    ids: Tensor,
    deviation: Tensor,
    into: Tensor,
    rows: slice,
    first: int,
    width: int,
) -> None:
    """The pairs first .. first + width of some clients: the cosine goes to the first half of the columns."""
    radius, angle = _polar(source, purpose, t, ids[rows], first, width)
    radius *= deviation[rows, None]
    half = -(-into.shape[1] // 2)
    for wave, start, end in ((torch.cos, 0, half), (torch.sin, half, into.shape[1])):
        place = into[rows, start + first : min(start + first + width, end)]
        place += (wave(angle) * radius)[:, : place.shape[1]].to(into.dtype)


def _polar(source: Source, purpose: str, t: int, ids: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Radii and angles [m, width] of points in the plane with independent normal coordinates."""
    index = 2 * torch.arange(first, first + width, device=ids.device)
    radius = source.uniform(purpose, t, ids[:, None], index).neg_().add_(1).log_().mul_(-2).sqrt_()
    angle = source.uniform(purpose, t, ids[:, None], index + 1).mul_(2 * math.pi)
    return radius, angle
