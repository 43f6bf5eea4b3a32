"""Weighted sums of models: what everybody ends a round with."""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk import kernels
from kinfolk.cohort.room import SMALL
from kinfolk.cohort.workers import side_by_side
from kinfolk.kernels import dispatch

LARGE = 2048  # numbers of a model from which on a CPU adds up one at a time as fast as many at once


def mix(
    weights: Tensor,
    theirs: Tensor,
    rows: Tensor,
    coefficients: Tensor | None,
    own: Tensor | float,
    absent: Tensor,
    room: int,
) -> tuple[Tensor, Tensor]:
    """Weighted means of own models [m, d] and theirs[rows[i, j]], and the share of each of those: ([m, d], [m, k]).

    coefficients: [m, k] and own: [m], or all alike; those that count are scaled to sum to one. A client with nothing to
    mix, or absent [m] bool, keeps its model. rows and room as in `blend`.
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
    return blend(weights, theirs, rows, shares, mine, room), shares


def blend(weights: Tensor, theirs: Tensor, rows: Tensor, shares: Tensor, mine: Tensor, room: int) -> Tensor:
    """mine[i]·weights[i] + Σ_j shares[i, j]·theirs[rows[i, j]] for every client i: [m, d].

    rows: [m, k], -1 for none; room: bytes that a piece of the work may take on a CPU.
    """
    shares, mine = shares.to(weights.dtype), mine.to(weights.dtype)
    if weights.is_cuda and weights.dtype == torch.float32 and theirs.shape[0] and kernels.available():
        from kinfolk.kernels.blend import blend as fused

        return fused(weights, theirs, rows, shares, mine)
    mixed = torch.empty_like(weights)
    if not weights.is_cuda and 2 * int((some := (rows >= 0).any(dim=1)).sum()) < rows.shape[0]:
        torch.mul(weights, mine[:, None], out=mixed)
        if bool(some.any()):  # most have nothing to mix: only for the others is a look at every column worth it
            mixed[some] = blend(weights[some], theirs, rows[some], shares[some], mine[some], room)
        return mixed
    rows = rows if theirs.shape[0] else rows[:, :0]
    alone = not weights.is_cuda and weights.shape[1] >= LARGE
    size = 16 if alone else 2**10 if weights.is_cuda else max(1, room // (16 * weights.shape[1] * mixed.element_size()))

    def work(first: int) -> None:
        piece = slice(first, first + size)
        mix_some = _one_by_one if alone else _at_once
        mix_some(mixed[piece], weights[piece], theirs, rows[piece], shares[piece], mine[piece])

    busy = not weights.is_cuda and weights.numel() * (rows.shape[1] + 1) >= SMALL
    side_by_side(work, range(0, weights.shape[0], size), torch.get_num_threads() if busy else 1)
    return mixed


def _one_by_one(mixed: Tensor, own: Tensor, theirs: Tensor, rows: Tensor, shares: Tensor, mine: Tensor) -> None:
    """Large models [p, d]: the others' are read where they lie."""
    for into, mine_i, own_i, peers, parts in zip(mixed, mine.tolist(), own, rows.tolist(), shares.tolist()):
        torch.mul(own_i, mine_i, out=into)
        for row, part in zip(peers, parts):
            if row >= 0:
                into.add_(theirs[row], alpha=part)


def _at_once(mixed: Tensor, own: Tensor, theirs: Tensor, rows: Tensor, shares: Tensor, mine: Tensor) -> None:
    """Models [p, d] at once, in the order of the list: the sum does not depend on shards."""
    torch.mul(own, mine[:, None], out=mixed)
    gaps = bool((rows < 0).any())
    for column in range(rows.shape[1]):
        their = theirs[rows[:, column].clamp(min=0)]
        if gaps:  # whatever lies in the row that stands in for a missing one must not count, not even times 0
            their = their.masked_fill(rows[:, column, None] < 0, 0.0)
        mixed.addcmul_(their, shares[:, column, None])
