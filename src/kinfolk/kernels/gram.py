"""Cosines of models with each other from products of all pairs in a GPU's matrix units (Triton).

Each number is split into two of bf16, which together have 16 of its 24 bits. Of the four products of two numbers the
smallest is left out, so what is found is off by about 2^-16 of it, and a sum of many by far less, as errors have either
sign. Matrix units may round their sums towards zero, which adds up: so every program takes a few columns only, and what
programs have found is added up in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kinfolk.kernels.dispatch import aligned

HALF = tl.bfloat16
SIDE, BLOCK = 128, 64  # rows and columns of a tile
PROGRAMS = 264  # twice as many as an H200 has processors
LONGEST = 16384  # columns that one program adds up
PEERS = 32
STAGES, WARPS = 3, 8  # blocks on their way at a time
LARGE, LARGER = 160_000, 250_000  # bytes of shared memory that so many need; for matrix units from Blackwell on


@triton.jit
def _split(models, origin, halves, d, step, width, lows, ORIGIN: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
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
def _products(
    halves, out, m, width, lows, columns, tiles,
    ONE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pair, a = tl.program_id(0), 0  # of tiles a <= b, row by row
    if not ONE:
        while pair >= tiles - a:
            pair -= tiles - a
            a += 1
    mine = (a * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    theirs = ((a + pair) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * columns
    total = tl.full([SIDE, SIDE], 0.0, tl.float32)
    for first in tl.range(0, tl.minimum(columns, width - start), BLOCK, num_stages=STAGES):
        column = start + first + tl.arange(0, BLOCK)
        here = halves + mine[:, None] * width + column[None, :]
        inside = (mine < m)[:, None] & (column >= 0)[None, :]
        high, low = tl.load(here, mask=inside, other=0.0), tl.load(here + lows, mask=inside, other=0.0)
        if ONE:
            other_high, other_low = high, low
        else:
            there = halves + theirs[:, None] * width + column[None, :]
            inside = (theirs < m)[:, None] & (column >= 0)[None, :]
            other_high, other_low = (
                tl.load(there, mask=inside, other=0.0),
                tl.load(there + lows, mask=inside, other=0.0),
            )
        total = tl.dot(high, tl.trans(other_high), total)
        total = tl.dot(high, tl.trans(other_low), total)
        total = tl.dot(low, tl.trans(other_high), total)
    at = (tl.program_id(1).to(tl.int64) * m + mine[:, None]) * m + theirs[None, :]
    tl.store(out + at, total, mask=(mine < m)[:, None] & (theirs < m)[None, :])


@triton.jit(do_not_specialize=["pieces"])
def _sum(parts, out, m, pieces, SIDE: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // m, i % m
    there = (row < m) & (row // SIDE <= column // SIDE)  # nobody has written to tiles below the diagonal
    total = tl.full([BLOCK], 0.0, tl.float64)
    for first in range(0, pieces, AT_ONCE):
        piece = (first + tl.arange(0, AT_ONCE)).to(tl.int64)
        inside = (piece < pieces)[:, None] & there[None, :]
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
    if not where.is_cuda:  # interpreted
        return LARGE
    return int(triton.runtime.driver.active.utils.get_device_properties(where.get_device())["max_shared_mem"])


def stages(where: Tensor) -> int:
    """Blocks that may be on their way at a time on the GPU of this tensor."""
    return STAGES if shared_memory(where) >= (LARGER if newer(where) else LARGE) else 2


def newer(where: Tensor) -> bool:
    """Whether the matrix units of the GPU of this tensor are Blackwell's or later ones."""
    return where.is_cuda and torch.cuda.get_device_capability(where.device)[0] >= 10


def cosines(models: Tensor, rows: Tensor, origin: Tensor | None, smallest: float) -> Tensor:
    """`similarity.cosines` of models [m, d] in float32 with each other; rows: [m, c]."""
    models, rows = aligned(models), rows.contiguous()
    (m, d), c = models.shape, rows.shape[1]
    tiles, blocks = triton.cdiv(m, SIDE), triton.cdiv(d, BLOCK)
    width, pairs = blocks * BLOCK, tiles * (tiles + 1) // 2
    kind = torch.bfloat16 if HALF is tl.bfloat16 else torch.float16
    halves = torch.empty((2, m, width), dtype=kind, device=models.device)
    lows = halves.stride(0)
    _split[(triton.cdiv(width, 1024), m)](
        models, models if origin is None else origin.contiguous(), halves, d, models.stride(0), width, lows,
        ORIGIN=origin is not None, HALF=HALF, BLOCK=1024,
    )  # fmt: skip
    columns = min(LONGEST, triton.cdiv(blocks, max(1, PROGRAMS // pairs)) * BLOCK)
    parts = torch.empty((triton.cdiv(width, columns), m, m), dtype=torch.float32, device=models.device)
    _products[(pairs, parts.shape[0])](
        halves, parts, m, width, lows, columns, tiles,
        ONE=tiles == 1, SIDE=SIDE, BLOCK=BLOCK, STAGES=stages(models), num_warps=WARPS,
    )  # fmt: skip
    products = torch.empty((m, m), dtype=torch.float64, device=models.device)  # torch would copy all in float64 first
    _sum[(triton.cdiv(m * m, 64),)](parts, products, m, parts.shape[0], SIDE=SIDE, AT_ONCE=32, BLOCK=64)
    out = torch.empty((m, c), dtype=torch.float64, device=models.device)
    _finish[(m, triton.cdiv(c, PEERS))](products, rows, out, m, c, SIDE=SIDE, SMALLEST=smallest, PEERS=PEERS)
    return out
