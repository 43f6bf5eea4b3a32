"""Cosines of the wanted pairs of rows only (Triton), in two passes.

The first multiplies pieces of PIECE columns in the run's own precision, the second adds them up in float64. Rows are
read where they lie. Programs that run at the same time read the same piece of all rows, which stays in the GPU's cache:
its memory is read about once, whatever the number of pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kinfolk.kernels.dispatch import aligned

PIECE, BLOCK, PEERS = 8192, 256, 8


@triton.jit(do_not_specialize=["c"])
def _products(
    mine, theirs, rows, origin, dots, squares, own, m, d, c, mine_step, theirs_step,
    ORIGIN: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    peer = tl.program_id(2) * PEERS + tl.arange(0, PEERS)
    row = tl.load(rows + client * c + peer, mask=peer < c, other=-1)
    there = theirs + tl.maximum(row, 0) * theirs_step
    kind = mine.dtype.element_ty
    dot = tl.full([PEERS, BLOCK], 0.0, kind)
    square = tl.full([PEERS, BLOCK], 0.0, kind)
    length = tl.full([BLOCK], 0.0, kind)
    for first in range(0, tl.minimum(PIECE, d - piece * PIECE), BLOCK):
        column = piece * PIECE + first + tl.arange(0, BLOCK)
        here = column < d
        a = tl.load(mine + client * mine_step + column, mask=here, other=0.0)
        wanted = here[None, :] & (row >= 0)[:, None]
        b = tl.load(there[:, None] + column[None, :], mask=wanted, other=0.0)
        if ORIGIN:
            start = tl.load(origin + column, mask=here, other=0.0)
            a -= start
            b -= start[None, :]  # of who is not there too: nobody asks what comes of it
        dot += a[None, :] * b
        square += b * b
        length += a * a
    at = (piece * m + client) * c + peer
    tl.store(dots + at, tl.sum(dot, 1).to(tl.float64), mask=peer < c)
    tl.store(squares + at, tl.sum(square, 1).to(tl.float64), mask=peer < c)
    if tl.program_id(2) == 0:
        tl.store(own + piece * m + client, tl.sum(length).to(tl.float64))


@triton.jit(do_not_specialize=["c"])
def _finish(dots, squares, own, rows, out, m, c, pieces, SMALLEST: tl.constexpr, PEERS: tl.constexpr):
    client = tl.program_id(0).to(tl.int64)
    peer = tl.program_id(1) * PEERS + tl.arange(0, PEERS)
    here = peer < c
    dot = tl.full([PEERS], 0.0, tl.float64)
    square = tl.full([PEERS], 0.0, tl.float64)
    mine = tl.full([PEERS], 0.0, tl.float64)
    for piece in range(pieces):
        at = (piece * m + client) * c + peer
        dot += tl.load(dots + at, mask=here, other=0.0)
        square += tl.load(squares + at, mask=here, other=0.0)
        mine += tl.load(own + piece * m + client)
    known = (tl.sqrt(mine) > SMALLEST) & (tl.sqrt(square) > SMALLEST)
    lengths = tl.sqrt(mine) * tl.sqrt(square)
    cosine = tl.where(known, dot / tl.where(known, lengths, 1.0), 0.0)
    cosine = tl.where(cosine > 1.0, 1.0, tl.where(cosine < -1.0, -1.0, cosine))
    row = tl.load(rows + client * c + peer, mask=here, other=-1)
    tl.store(out + client * c + peer, tl.where(row >= 0, cosine, float("nan")), mask=here)


def cosines(mine: Tensor, theirs: Tensor, rows: Tensor, origin: Tensor | None, smallest: float) -> Tensor:
    """`similarity.cosines`; a row no longer than `smallest` has cosine 0 with everything."""
    (m, d), c = mine.shape, rows.shape[1]
    mine, theirs = aligned(mine), aligned(theirs)
    rows = rows.contiguous()
    pieces = triton.cdiv(d, PIECE)
    sums = torch.empty((2 * c + 1, pieces * m), dtype=torch.float64, device=mine.device)
    dots, squares, own = sums[:c], sums[c : 2 * c], sums[2 * c :]  # [pieces, m, c] twice and [pieces, m]
    out = torch.empty((m, c), dtype=torch.float64, device=mine.device)
    groups = triton.cdiv(c, PEERS)
    _products[(m, pieces, groups)](
        mine, theirs, rows, mine if origin is None else origin.contiguous(), dots, squares, own, m, d, c,
        mine.stride(0), theirs.stride(0), ORIGIN=origin is not None, PIECE=PIECE, BLOCK=BLOCK, PEERS=PEERS,
    )  # fmt: skip
    _finish[(m, groups)](dots, squares, own, rows, out, m, c, pieces, SMALLEST=smallest, PEERS=PEERS)
    return out
