"""Weighted sums of models: what everybody ends a round with."""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.cohort.pairs import matrix, same
from kinfolk.cohort.room import SMALL
from kinfolk.cohort.workers import side_by_side
from kinfolk.kernels import dispatch

NEAR = 2**20  # numbers of models that a CPU thread takes at a time: they should stay in a cache
NARROWEST, WIDEST = 256, 4096  # columns of them; fewer are slower to read than more that do not stay
HELD = 2**28  # bytes that copies of pieces may take, on all threads together
FAR = 2**31  # numbers between first and last model from which MKL, which counts with 32 bits, would read elsewhere
PIECE = 2**10  # clients that a GPU gathers a peer for at a time


def mix(
    weights: Tensor,
    theirs: Tensor,
    rows: Tensor,
    coefficients: Tensor | None,
    own: Tensor | float,
    absent: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weighted means of own models [m, d] and theirs[rows[i, j]], and the share of each of those: ([m, d], [m, k]).

    coefficients: [m, k] and own: [m], or all alike; those that count are scaled to sum to one. A client with nothing to
    mix, or absent [m] bool, keeps its model. rows as in `blend`.
    """
    if dispatch.fused(rows, rows.shape[1]) and theirs.shape[0]:
        from kinfolk.kernels.mixing import mix as fused

        return fused(weights, theirs, rows, coefficients, own, absent)
    shares = torch.ones_like(rows) if coefficients is None else coefficients
    shares = torch.where(rows >= 0, shares.to(torch.float64), 0.0)
    mine = torch.ones(rows.shape[0], dtype=torch.float64, device=rows.device) * own
    total = mine + shares.sum(dim=1)
    alone = (total <= 0) | absent
    shares = torch.where(alone[:, None], 0.0, shares / total[:, None])
    mine = torch.where(alone, 1.0, mine / total)
    return blend(weights, theirs, rows, shares, mine), shares


def blend(weights: Tensor, theirs: Tensor, rows: Tensor, shares: Tensor, mine: Tensor) -> Tensor:
    """mine[i]·weights[i] + Σ_j shares[i, j]·theirs[rows[i, j]] for every client i: [m, d].

    rows: [m, k], -1 for none.
    """
    shares, mine = shares.to(weights.dtype), mine.to(weights.dtype)
    if not weights.is_cuda:
        return _in_cache(weights, theirs, rows, shares, mine)
    if weights.dtype == torch.float32 and theirs.shape[0] and dispatch.fused(weights):
        from kinfolk.kernels.blend import blend as fused

        return fused(weights, theirs, rows, shares, mine)
    return _gathered(weights, theirs, rows, shares, mine)


def _in_cache(weights: Tensor, theirs: Tensor, rows: Tensor, shares: Tensor, mine: Tensor) -> Tensor:
    """On a CPU: some columns of all models at a time, which are then near for everybody who wants them."""
    mixed = torch.empty_like(weights)
    among, m = same(weights, theirs), weights.shape[0]
    here = torch.cat([torch.ones((m, 1), dtype=torch.bool), rows >= 0], dim=1)
    rows = torch.cat([torch.arange(m)[:, None], rows if among else rows + m], dim=1)
    shares = torch.cat([mine[:, None], shares], dim=1)
    models = m if among else m + theirs.shape[0]
    wanted = matrix(here.sum(dim=1), rows[here], shares[here], models)
    far = among and m * weights.stride(0) >= FAR
    busy = (m + rows.numel()) * weights.shape[1] >= SMALL
    threads, width = torch.get_num_threads() if busy else 1, _columns(models)
    if far or not among:
        threads, width = _held(models * weights.element_size(), threads, width)
    nothing = weights.new_zeros(())  # not what lies in `mixed`: some builds of torch multiply it, even by 0

    def work(first: int) -> None:
        columns = slice(first, first + width)
        # One's own is one of those to look at, wherever theirs are: rounded alike, with shards and without.
        near = theirs[:, columns] if among else torch.cat([weights[:, columns], theirs[:, columns]])
        near, out = near.contiguous() if far else near, mixed[:, columns]
        torch.addmm(nothing.expand_as(out), wanted, near, beta=0, out=out)

    side_by_side(work, range(0, weights.shape[1], width), threads)
    return mixed


def _columns(models: int) -> int:
    """How many columns of all models to take at a time: a power of two, so that pieces are whole vectors."""
    width = NEAR >> models.bit_length()
    return min(width, WIDEST) if width >= NARROWEST else WIDEST


def _held(column: int, threads: int, width: int) -> tuple[int, int]:
    """How many threads take how many columns at a time where pieces are copied, of so many bytes a column."""
    while width > NARROWEST and threads * width * column > HELD:
        width //= 2
    return max(1, min(threads, HELD // (width * column))), width


def _gathered(weights: Tensor, theirs: Tensor, rows: Tensor, shares: Tensor, mine: Tensor) -> Tensor:
    """Elsewhere: a copy of one peer for some clients at a time."""
    mixed = weights * mine[:, None]
    if not theirs.shape[0]:
        return mixed
    for first in range(0, weights.shape[0], PIECE):
        piece = slice(first, first + PIECE)
        for row, share in zip(rows[piece].unbind(dim=1), shares[piece].unbind(dim=1)):
            # Whatever lies in the row that stands in for a missing one must not count, not even times 0.
            their = theirs[row.clamp(min=0)].masked_fill(row[:, None] < 0, 0.0)
            mixed[piece].addcmul_(their, share[:, None])
    return mixed
