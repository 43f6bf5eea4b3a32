"""Draws without a generator: every random number is a pure function of (seed, purpose, round, client, index).

Nothing is stored and nothing is consumed, so a run is the same whatever the number of shards, the order of clients,
or the round it was resumed at, and the integer hashing gives the same bits on a CPU and on a GPU.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kinfolk.kernels import dispatch

CLIENT = -7046029254386353131  # odd 64-bit constants with no pattern: the golden ratio,
INDEX = -4417276706812531889  # and two from the splitmix64 family, as signed integers
MIX_1 = -4658895280553007687
MIX_2 = -7723592293110705685
LARGEST = 2**63 - 1
UNIT = 2.0**-53


@lru_cache(maxsize=4096)
def key(seed: int, purpose: str, round: int = 0) -> int:
    """A signed 64-bit key for one purpose in one round of one seed."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{round}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's >> on int64 drags the sign along."""
    return (x >> by) & (LARGEST >> (by - 1))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def bits(seed: int, purpose: str, round: int, client: Tensor, index: Tensor) -> Tensor:
    """63 random bits as non-negative int64, of the shape that `client` and `index` broadcast to."""
    if _fused(client, index):
        from kinfolk.kernels import hashing

        return hashing.bits(key(seed, purpose, round), client, index)
    start = _mix(client.to(torch.int64) * CLIENT + key(seed, purpose, round))
    return _shift(_mix(start + index.to(torch.int64) * INDEX), 1)


def uniform(seed: int, purpose: str, round: int, client: Tensor, index: Tensor) -> Tensor:
    """Uniform float64 in [0, 1), exact in its 53 bits on every device."""
    if _fused(client, index):
        from kinfolk.kernels import hashing

        return hashing.bits(key(seed, purpose, round), client, index, unit=True)
    return (bits(seed, purpose, round, client, index) >> 10).to(torch.float64) * UNIT


def normal(seed: int, purpose: str, round: int, client: Tensor, width: int, first: int = 0) -> Tensor:
    """Standard normal numbers first .. first + width of each client [p]: [p, width], a pure function of the arguments.

    Box and Muller: two from two uniform ones.
    """
    pair = 2 * torch.arange(first // 2, (first + width + 1) // 2, device=client.device)
    length, angle = (uniform(seed, purpose, round, client[:, None], pair + odd) for odd in (0, 1))
    length, angle = torch.sqrt(-2 * torch.log1p(-length)), 2 * math.pi * angle
    both = torch.stack([length * torch.cos(angle), length * torch.sin(angle)], dim=2).flatten(1)
    return both[:, first % 2 : first % 2 + width]


def _fused(client: Tensor, index: Tensor) -> bool:
    """Whether one program draws all: up to three dimensions, and not too many for a 32-bit number."""
    if not dispatch.fused(client):
        return False
    shape = np.broadcast_shapes(client.shape, index.shape)
    return len(shape) <= 3 and math.prod(shape) < 2**31


def permutations(seed: int, purpose: str, round: int, client: Tensor, sizes: Tensor, count: int = 1) -> Tensor:
    """`count` random orders of 0..sizes[i]-1 for each client: [m, count, max(sizes)]; places past the size come last.

    sizes: [m] on the CPU, where shapes are decided.
    """
    width = int(sizes.max()) if sizes.numel() else 0
    place = torch.arange(width, device=client.device)
    index = (torch.arange(count, device=client.device) << 32)[:, None] + place
    keys = bits(seed, purpose, round, client[:, None, None], index)
    if sizes.numel() and int(sizes.min()) < width:
        keys = keys.masked_fill(place >= dispatch.there(sizes, client.device)[:, None, None], LARGEST)
    return keys.argsort(dim=2, stable=True)


def positions(seed: int, purpose: str, round: int, client: Tensor, sizes: Tensor, count: int) -> Tensor:
    """`count` distinct numbers out of 0..sizes[i]-1 for each client, -1 where there are not enough: [m, count].

    Floyd's sampling, one column at a time for all clients: the cost does not grow with `sizes`, so ten thousand
    clients can each draw five of ten thousand peers.
    """
    if dispatch.fused(client, count):
        from kinfolk.kernels import hashing

        return hashing.positions(key(seed, purpose, round), client, sizes, count)
    columns = torch.arange(count, device=client.device)
    wanted = sizes.clamp(max=count)[:, None]
    top = sizes[:, None] - wanted + columns  # the new number each column makes available
    draws = (uniform(seed, purpose, round, client[:, None], columns) * (top + 1)).floor().to(torch.int64)
    chosen = torch.full_like(draws, -1)
    for column in range(count):
        draw = draws[:, column]
        taken = (chosen == draw[:, None]).any(dim=1)
        chosen[:, column] = torch.where(taken, top[:, column], draw)
    return torch.where(columns < wanted, chosen, -1)


def torch_seed(seed: int, purpose: str) -> int:
    """A non-negative seed for torch's own generator, for code we do not own (a module's initialisation)."""
    return key(seed, purpose) & LARGEST
