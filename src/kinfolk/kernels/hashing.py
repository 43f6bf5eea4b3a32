"""Draws without a generator, as in `kinfolk.randomness`, bit for bit (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kinfolk import randomness

CLIENT, INDEX = tl.constexpr(randomness.CLIENT), tl.constexpr(randomness.INDEX)
MIX_1, MIX_2 = tl.constexpr(randomness.MIX_1), tl.constexpr(randomness.MIX_2)
LARGEST, UNIT = tl.constexpr(randomness.LARGEST), tl.constexpr(randomness.UNIT)


@triton.jit
def shifted(x, BY: tl.constexpr):
    return (x >> BY) & (LARGEST >> (BY - 1))


@triton.jit
def stirred(x):
    x = (x ^ shifted(x, 30)) * MIX_1
    x = (x ^ shifted(x, 27)) * MIX_2
    return x ^ shifted(x, 31)


@triton.jit
def hashed(key, client, index):
    """63 random bits; client and index are int64."""
    start = stirred(client * CLIENT + key)
    return shifted(stirred(start + index * INDEX), 1)


@triton.jit
def fraction(bits):
    """Uniform float64 in [0, 1) of random bits."""
    return (bits >> 10).to(tl.float64) * UNIT


@triton.jit
def floyd(key, client, size, count, SLOTS: tl.constexpr):
    """[SLOTS] the first min(size, count) are different numbers below `size`, the others -1; size is int64."""
    slot = tl.arange(0, SLOTS)
    wanted = tl.minimum(size, count)
    last = size - wanted
    draws = (fraction(hashed(key, client, slot.to(tl.int64))) * (last + slot + 1).to(tl.float64)).to(tl.int64)
    chosen = tl.full([SLOTS], -1, tl.int64)
    for column in range(count):
        draw = tl.sum(tl.where(slot == column, draws, 0))
        taken = tl.max((chosen == draw).to(tl.int32))
        chosen = tl.where(slot == column, tl.where(taken > 0, last + column, draw), chosen)
    return tl.where(slot < wanted, chosen, -1)


@triton.jit(do_not_specialize=["key"])
def _bits(
    client, index, out, key, total, middle, inner, c0, c1, c2, i0, i1, i2, FRACTION: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < total
    x, y, z = at // inner // middle, at // inner % middle, at % inner
    whose = tl.load(client + x * c0 + y * c1 + z * c2, mask=here, other=0).to(tl.int64)
    which = tl.load(index + x * i0 + y * i1 + z * i2, mask=here, other=0).to(tl.int64)
    found = hashed(key.to(tl.int64), whose, which)
    tl.store(out + at, fraction(found) if FRACTION else found, mask=here)


def bits(key: int, client: Tensor, index: Tensor, unit: bool = False) -> Tensor:
    """`randomness.bits`, or with `unit` `randomness.uniform`, for a key; at most three dimensions."""
    client, index = torch.broadcast_tensors(client, index)
    out = torch.empty(client.shape, dtype=torch.float64 if unit else torch.int64, device=client.device)
    if not out.numel():
        return out
    sizes = [1] * (3 - out.dim()) + list(out.shape)
    steps = [[0] * (3 - x.dim()) + list(x.stride()) for x in (client, index)]
    _bits[(triton.cdiv(out.numel(), 256),)](
        client, index, out, key, out.numel(), sizes[1], sizes[2], *steps[0], *steps[1], FRACTION=unit, BLOCK=256
    )
    return out


@triton.jit(do_not_specialize=["key", "count"])
def _positions(client, sizes, out, key, count, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    chosen = floyd(key.to(tl.int64), tl.load(client + row).to(tl.int64), tl.load(sizes + row), count, SLOTS)
    tl.store(out + row * count + slot, chosen, mask=slot < count)


def positions(key: int, client: Tensor, sizes: Tensor, count: int) -> Tensor:
    """`randomness.positions` for a key."""
    out = torch.empty((client.numel(), count), dtype=torch.int64, device=client.device)
    _positions[(client.numel(),)](
        client.contiguous(), sizes.contiguous(), out, key, count, SLOTS=triton.next_power_of_2(count)
    )
    return out
