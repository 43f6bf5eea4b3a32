"""Filters of convolutions in the order that the programs of `windows.py` and `taps.py` read and write (Triton)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
MOST = 16  # shares of a gradient that are added up at a time


@triton.jit
def _widen(
    weight, wide, step, filter_step,
    C: tl.constexpr, OC: tl.constexpr, KS: tl.constexpr, LYING: tl.constexpr, SPAN: tl.constexpr, END: tl.constexpr,
    FIRST: tl.constexpr, POOL: tl.constexpr, TILE: tl.constexpr, TALL: tl.constexpr, LINE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    numbers: tl.constexpr = POOL * TILE * TALL * LINE
    pieces: tl.constexpr = (numbers + BLOCK - 1) // BLOCK
    client = (tl.program_id(0) // pieces).to(tl.int64)
    i = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    place, tall, out, right = i % LINE, i // LINE % TALL, i // (LINE * TALL) % TILE, i // (LINE * TALL * TILE)
    if FIRST:
        row, along = place // SPAN - tall, place % SPAN
    else:
        row, along = tall, place
    column, channel = along // LYING - right, along % LYING
    inside = (place < END) & (row >= 0) & (row < KS) & (column >= 0) & (column < KS)
    at = client * step + out * filter_step + (channel * KS + row) * KS + column
    x = tl.load(weight + at, mask=inside & (channel < C) & (out < OC) & (i < numbers), other=0.0)
    tl.store(wide + client * numbers + i, x.to(wide.dtype.element_ty), mask=i < numbers)


@triton.jit
def _added(shares, first, splits, clients, client, at, here, numbers, AT_ONCE: tl.constexpr):
    """What lies at `at` of so many numbers, of some shares together."""
    share = first + tl.arange(0, AT_ONCE)
    base = (share * clients + client).to(tl.int64) * numbers
    some = tl.load(shares + base[:, None] + at[None, :], mask=(share < splits)[:, None] & here[None, :], other=0.0)
    return tl.sum(some, 0)


@triton.jit(do_not_specialize=["splits", "clients"])
def _narrow(
    dw, db, weight, bias, splits, clients, weight_step, bias_step,
    C: tl.constexpr, OC: tl.constexpr, KS: tl.constexpr, LYING: tl.constexpr, SPAN: tl.constexpr, FIRST: tl.constexpr,
    POOL: tl.constexpr, TILE: tl.constexpr, TALL: tl.constexpr, LINE: tl.constexpr, WIDE: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, OB: tl.constexpr,
):  # fmt: skip
    pieces: tl.constexpr = (OC * C * KS * KS + BLOCK - 1) // BLOCK
    client, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    i = piece * BLOCK + tl.arange(0, BLOCK)
    here = i < OC * C * KS * KS
    out, channel, column, row = i % OC, i // OC % C, i // (OC * C) % KS, i // (OC * C * KS)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, splits, AT_ONCE):
        if WIDE:
            for right in tl.static_range(POOL):
                if FIRST:
                    for down in tl.static_range(POOL):
                        place = (row + down) * SPAN + (column + right) * LYING + channel
                        at = ((down * LINE + place) * POOL + right) * TILE + out
                        total += _added(
                            dw, first, splits, clients, client, at, here, TALL * LINE * POOL * TILE, AT_ONCE
                        )
                else:
                    at = ((row * LINE + (column + right) * LYING + channel) * POOL + right) * TILE + out
                    total += _added(dw, first, splits, clients, client, at, here, TALL * LINE * POOL * TILE, AT_ONCE)
        else:
            at = ((row * KS + column) * LYING + channel) * OC + out
            total += _added(dw, first, splits, clients, client, at, here, KS * KS * LYING * OC, AT_ONCE)
    to = ((out * C + channel) * KS + row) * KS + column
    tl.store(weight + client.to(tl.int64) * weight_step + to, total, mask=here)
    if piece == 0:
        o = tl.arange(0, OB)
        along = tl.full([OB], 0.0, tl.float32)
        for first in range(0, splits, AT_ONCE):
            along += _added(db, first, splits, clients, client, o, o < OC, OC, AT_ONCE)
        tl.store(bias + client.to(tl.int64) * bias_step + o, along, mask=o < OC)


def widen(weight: Tensor, wide: Tensor, shape: dict[str, Any]) -> Tensor:
    """Write weight [m, O, C, k, k] into `wide` [m, pool, tile, tall, LINE] (`Convolution.widened`), and zeros."""
    if weight[0, 0].numel() and not weight[0, 0].is_contiguous():
        weight = weight.contiguous()
    clients, pool, tile, tall, line = wide.shape
    _widen[(clients * triton.cdiv(pool * tile * tall * line, BLOCK),)](
        weight, wide, weight.stride(0), weight.stride(1), **shape, POOL=pool, TILE=tile, TALL=tall, LINE=line,
        BLOCK=BLOCK,
    )  # fmt: skip
    return wide


def narrow(
    dw: Tensor, db: Tensor, into: tuple[Tensor, Tensor] | None, shape: dict[str, Any], wide: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the weight [m, O, C, k, k] and the bias [m, O] from shares of them, which are added up: of the
    filters as they are [*, m, k, k, lying, O], or of the widened ones [*, m, tall, LINE, pool, tile]; db: [*, m, O].
    Written where `into` says, if anywhere."""
    splits, clients = dw.shape[:2]
    c, o, k = shape["C"], shape["OC"], shape["KS"]
    weight, bias = into or (dw.new_empty((clients, o, c, k, k)), db.new_empty((clients, o)))
    tall, line, pool, tile = dw.shape[2:]  # if they are wide
    at_once = min(MOST, triton.next_power_of_2(splits))
    block = BLOCK // at_once
    _narrow[(clients * triton.cdiv(o * c * k * k, block),)](
        dw, db, weight, bias, splits, clients, weight.stride(0), bias.stride(0),
        C=c, OC=o, KS=k, LYING=shape["LYING"], SPAN=shape["SPAN"], FIRST=shape["FIRST"],
        POOL=pool, TILE=tile, TALL=tall, LINE=line, WIDE=wide,
        AT_ONCE=at_once, BLOCK=block, OB=triton.next_power_of_2(o),
    )  # fmt: skip
    return weight, bias
