"""Cosines of few clients' rows: products of all pairs on the matrix units, then those of the wanted pairs (Triton).

With some hundred rows this reads every row a few times, however many peers each client looks at. Pieces of PIECE
columns are multiplied in float32 (three products in TF32 for each, whose error is that of float32) and added up in
float64. What two rows give does not depend on which other rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kinfolk.kernels.dispatch import aligned

PIECE, BLOCK, ROWS, PEERS = 2048, 32, 64, 16
LARGEST = 512  # rows up to which this is faster than the wanted pairs alone


@triton.jit
def _products(
    mine, theirs, origin, dots, squares, own, m, p, d, mine_step, theirs_step,
    ORIGIN: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    peer = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    here = mine + row.to(tl.int64) * mine_step
    there = theirs + peer.to(tl.int64) * theirs_step
    dot = tl.zeros([ROWS, ROWS], tl.float32)
    length = tl.zeros([ROWS, BLOCK], tl.float32)
    square = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, PIECE, BLOCK):
        column = piece * PIECE + first + tl.arange(0, BLOCK)
        inside = column < d
        mask_a = (row < m)[:, None] & inside[None, :]
        mask_b = (peer < p)[:, None] & inside[None, :]
        a = tl.load(here[:, None] + column[None, :], mask=mask_a, other=0.0)
        b = tl.load(there[:, None] + column[None, :], mask=mask_b, other=0.0)
        if ORIGIN:
            start = tl.load(origin + column, mask=inside, other=0.0)
            a = tl.where(mask_a, a - start[None, :], 0.0)
            b = tl.where(mask_b, b - start[None, :], 0.0)
        dot = tl.dot(a, tl.trans(b), dot, input_precision="tf32x3")
        length += a * a
        square += b * b
    at = (piece * m + row)[:, None] * p + peer[None, :]
    tl.store(dots + at, dot, mask=(row < m)[:, None] & (peer < p)[None, :])
    if tl.program_id(2) == 0:
        tl.store(own + piece * m + row, tl.sum(length, 1), mask=row < m)
    if tl.program_id(1) == 0:
        tl.store(squares + piece * p + peer, tl.sum(square, 1), mask=peer < p)


@triton.jit(do_not_specialize=["c"])
def _finish(dots, squares, own, rows, out, m, p, c, pieces, SMALLEST: tl.constexpr, PEERS: tl.constexpr):
    client = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PEERS + tl.arange(0, PEERS)
    here = column < c
    row = tl.load(rows + client * c + column, mask=here, other=-1)
    known = row >= 0
    dot = tl.full([PEERS], 0.0, tl.float64)
    square = tl.full([PEERS], 0.0, tl.float64)
    mine = tl.full([PEERS], 0.0, tl.float64)
    for piece in range(pieces):
        dot += tl.load(dots + (piece * m + client) * p + row, mask=known, other=0.0).to(tl.float64)
        square += tl.load(squares + piece * p + row, mask=known, other=0.0).to(tl.float64)
        mine += tl.load(own + piece * m + client).to(tl.float64)
    long = (tl.sqrt(mine) > SMALLEST) & (tl.sqrt(square) > SMALLEST)
    lengths = tl.sqrt(mine) * tl.sqrt(square)
    cosine = tl.where(long, dot / tl.where(long, lengths, 1.0), 0.0)
    cosine = tl.where(cosine > 1.0, 1.0, tl.where(cosine < -1.0, -1.0, cosine))
    tl.store(out + client * c + column, tl.where(known, cosine, float("nan")), mask=here)


def cosines(mine: Tensor, theirs: Tensor, rows: Tensor, origin: Tensor | None, smallest: float) -> Tensor:
    """`similarity.cosines` of float32 rows; one no longer than `smallest` has cosine 0 with everything."""
    (m, d), p, c = mine.shape, theirs.shape[0], rows.shape[1]
    mine, theirs = aligned(mine), aligned(theirs)
    pieces = triton.cdiv(d, PIECE)
    sums = torch.empty(pieces * (m * p + m + p), dtype=torch.float32, device=mine.device)
    dots, own, squares = torch.split(sums, [pieces * m * p, pieces * m, pieces * p])
    out = torch.empty((m, c), dtype=torch.float64, device=mine.device)
    _products[(pieces, triton.cdiv(m, ROWS), triton.cdiv(p, ROWS))](
        mine, theirs, mine if origin is None else origin.contiguous(), dots, squares, own, m, p, d,
        mine.stride(0), theirs.stride(0), ORIGIN=origin is not None, PIECE=PIECE, BLOCK=BLOCK, ROWS=ROWS,
    )  # fmt: skip
    _finish[(m, triton.cdiv(c, PEERS))](
        dots, squares, own, rows.contiguous(), out, m, p, c, pieces, SMALLEST=smallest, PEERS=PEERS
    )
    return out
