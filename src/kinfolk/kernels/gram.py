"""Cosines of models with each other from products of all pairs in a GPU's matrix units (Triton).

Each number is split into two of bf16, which together have 16 of its 24 bits: what is left out is at most 2^-17 of it,
to either side, so a sum of many products is off by far less. Of the four products of two numbers the smallest, 2^-16 of
the whole, counts within a tile of clients, and so in everybody's length; among others it has either sign. Matrix units
round their sums towards zero, which would add up: so they sum a block of columns only, the smallest products first; a
program adds up its blocks in float32, and `_sum` the programs in float64.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kinfolk.kernels.dispatch import PROCESSORS, aligned, unit

HALF = tl.bfloat16
SIDE, BLOCK = 128, 64  # rows and columns of a tile
PROGRAMS = PROCESSORS
LONGEST = 16384  # columns that one program adds up
PEERS = 32
STAGES, WARPS = 3, 8  # blocks on their way at a time
LARGE, LARGER = 160_000, 250_000  # bytes of shared memory that so many need; for matrix units from Blackwell on


@triton.jit
def _split(
    models, origin, halves, units, step_units, width, lows,
    ORIGIN: tl.constexpr, HALF: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d, step = units * UNIT, step_units * UNIT  # written so that it is known what divides them
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(models + row * step + column, mask=column < d, other=0.0)
    if ORIGIN:
        x -= tl.load(origin + column, mask=column < d, other=0.0)
    high = x.to(HALF)
    at = row * width + column
    tl.store(halves + at, high, mask=column < width)
    tl.store(halves + lows + at, (x - high.to(tl.float32)).to(HALF), mask=column < width)


@triton.jit
def _within(halves, out, m, width, lows, columns, SIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Products of the models of one tile with each other."""
    row = (tl.program_id(0) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * columns
    total = tl.full([SIDE, SIDE], 0.0, tl.float32)
    crossed = tl.full([SIDE, SIDE], 0.0, tl.float32)  # low with high, which is high with low the other way around
    for first in tl.range(0, tl.minimum(columns, width - start), BLOCK, num_stages=STAGES):
        column = start + first + tl.arange(0, BLOCK)
        here = halves + row[:, None] * width + column[None, :]
        inside = (row < m)[:, None] & (column >= 0)[None, :]
        high, low = tl.load(here, mask=inside, other=0.0), tl.load(here + lows, mask=inside, other=0.0)
        crossed = tl.dot(low, tl.trans(high), crossed)
        block = tl.dot(low, tl.trans(low))
        total += tl.dot(high, tl.trans(high), block)
    total += crossed + tl.trans(crossed)
    at = (tl.program_id(1).to(tl.int64) * m + row[:, None]) * m + row[None, :]
    tl.store(out + at, total, mask=(row < m)[:, None] & (row < m)[None, :])


@triton.jit
def _among(halves, out, m, width, lows, columns, tiles, SIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Products of the models of one tile with those of another."""
    pair, a = tl.program_id(0), 0  # of tiles a < b, row by row
    while pair >= tiles - 1 - a:
        pair -= tiles - 1 - a
        a += 1
    mine = (a * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    theirs = ((a + 1 + pair) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * columns
    total = tl.full([SIDE, SIDE], 0.0, tl.float32)
    for first in tl.range(0, tl.minimum(columns, width - start), BLOCK, num_stages=STAGES):
        column = start + first + tl.arange(0, BLOCK)
        here = halves + mine[:, None] * width + column[None, :]
        there = halves + theirs[:, None] * width + column[None, :]
        inside = (theirs < m)[:, None] & (column >= 0)[None, :]
        high, low = tl.load(here), tl.load(here + lows)  # only the last tile is not full
        other_high, other_low = tl.load(there, mask=inside, other=0.0), tl.load(there + lows, mask=inside, other=0.0)
        block = tl.dot(high, tl.trans(other_low), tl.dot(low, tl.trans(other_high)))
        total += tl.dot(high, tl.trans(other_high), block)
    at = (tl.program_id(1).to(tl.int64) * m + mine[:, None]) * m + theirs[None, :]
    tl.store(out + at, total, mask=(theirs < m)[None, :] & (mine >= 0)[:, None])


@triton.jit(do_not_specialize=["within", "among"])
def _sum(parts, out, m, within, among, SIDE: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // m, i % m
    there = (row < m) & (row // SIDE <= column // SIDE)  # nobody has written to tiles below the diagonal
    total = tl.full([BLOCK], 0.0, tl.float64)
    pieces = tl.where(row // SIDE == column // SIDE, within, among)
    for first in range(0, tl.maximum(within, among), AT_ONCE):
        piece = (first + tl.arange(0, AT_ONCE)).to(tl.int64)
        inside = (piece[:, None] < pieces[None, :]) & there[None, :]
        some = tl.load(parts + piece[:, None] * m * m + i[None, :], mask=inside, other=0.0)
        total += tl.sum(some.to(tl.float64), 0)
    tl.store(out + i, total, mask=there)


@triton.jit(do_not_specialize=["c"])
def _finish(products, rows, out, m, c, SIDE: tl.constexpr, SMALLEST: tl.constexpr, PEERS: tl.constexpr):
    client = tl.program_id(0).to(tl.int64)
    peer = tl.program_id(1) * PEERS + tl.arange(0, PEERS)
    row = tl.load(rows + client * c + peer, mask=peer < c, other=-1)
    there = tl.maximum(row, 0)
    upper = client // SIDE <= there // SIDE  # tiles below the diagonal are not there
    dot = tl.load(products + tl.where(upper, client * m + there, there * m + client))
    mine = tl.sqrt(tl.load(products + (client * m + client) + 0 * there))
    theirs = tl.sqrt(tl.load(products + there * m + there))
    known = (mine > SMALLEST) & (theirs > SMALLEST)
    cosine = tl.where(known, dot / tl.where(known, mine * theirs, 1.0), 0.0)
    cosine = tl.where(cosine > 1.0, 1.0, tl.where(cosine < -1.0, -1.0, cosine))
    tl.store(out + client * c + peer, tl.where(row >= 0, cosine, float("nan")), mask=peer < c)


def shared_memory(where: Tensor) -> int:
    """Bytes that a program can have on the GPU of this tensor."""
    return _shared_memory(where.get_device()) if where.is_cuda else LARGE  # interpreted


@cache
def _shared_memory(number: int) -> int:
    """A GPU takes a millisecond to say it."""
    return int(triton.runtime.driver.active.utils.get_device_properties(number)["max_shared_mem"])


def stages(where: Tensor) -> int:
    """Blocks that may be on their way at a time on the GPU of this tensor."""
    return STAGES if shared_memory(where) >= (LARGER if newer(where) else LARGE) else 2


def newer(where: Tensor) -> bool:
    """Whether the matrix units of the GPU of this tensor are Blackwell's or later ones."""
    return where.is_cuda and torch.cuda.get_device_capability(where.device)[0] >= 10


def _columns(blocks: int, several: int) -> int:
    """How many columns each of so many tiles or pairs of tiles should add up in one program."""
    return min(LONGEST, triton.cdiv(blocks, max(1, PROGRAMS // max(1, several))) * BLOCK)


def cosines(models: Tensor, rows: Tensor, origin: Tensor | None, smallest: float) -> Tensor:
    """`similarity.cosines` of models [m, d] in float32 with each other; rows: [m, c]."""
    models, rows = aligned(models), rows.contiguous()
    (m, d), c = models.shape, rows.shape[1]
    tiles, blocks = triton.cdiv(m, SIDE), triton.cdiv(d, BLOCK)
    width, pairs = blocks * BLOCK, tiles * (tiles - 1) // 2
    kind = torch.bfloat16 if HALF is tl.bfloat16 else torch.float16
    halves = torch.empty((2, m, width), dtype=kind, device=models.device)
    lows = halves.stride(0)
    step = models.stride(0)
    size = unit(d, step)
    _split[(triton.cdiv(width, 1024), m)](
        models, models if origin is None else origin.contiguous(), halves, d // size, step // size, width, lows,
        ORIGIN=origin is not None, HALF=HALF, UNIT=size, BLOCK=1024,
    )  # fmt: skip
    within, among = (_columns(blocks, several) for several in (tiles, pairs))
    pieces = triton.cdiv(width, within), triton.cdiv(width, among)
    parts = torch.empty((max(pieces), m, m), dtype=torch.float32, device=models.device)
    _within[(tiles, pieces[0])](
        halves, parts, m, width, lows, within, SIDE=SIDE, BLOCK=BLOCK, STAGES=stages(models), num_warps=WARPS
    )
    if pairs:
        _among[(pairs, pieces[1])](
            halves, parts, m, width, lows, among, tiles, SIDE=SIDE, BLOCK=BLOCK, STAGES=stages(models), num_warps=WARPS
        )
    products = torch.empty((m, m), dtype=torch.float64, device=models.device)  # torch would copy all in float64 first
    _sum[(triton.cdiv(m * m, 64),)](parts, products, m, *pieces, SIDE=SIDE, AT_ONCE=32, BLOCK=64)
    out = torch.empty((m, c), dtype=torch.float64, device=models.device)
    _finish[(m, triton.cdiv(c, PEERS))](products, rows, out, m, c, SIDE=SIDE, SMALLEST=smallest, PEERS=PEERS)
    return out
