"""Weighted sums of models: what everybody ends a round with."""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk import kernels


def blend(weights: Tensor, theirs: Tensor, rows: Tensor, shares: Tensor, mine: Tensor, room: int) -> Tensor:
    """mine[i]·weights[i] + Σ_j shares[i, j]·theirs[rows[i, j]] for every client i: [m, d].

    rows: [m, k], -1 for none; room: bytes that a piece of the work may take on a CPU.
    """
    shares, mine = shares.to(weights.dtype), mine.to(weights.dtype)
    if weights.is_cuda and weights.dtype == torch.float32 and theirs.shape[0] and kernels.available():
        from kinfolk.kernels.blend import blend as fused

        return fused(weights, theirs, rows, shares, mine)
    mixed = torch.empty_like(weights)
    gaps = bool((rows < 0).any())
    size = max(1, room // (16 * weights.shape[1] * mixed.element_size())) if not weights.is_cuda else 2**10
    columns = rows.shape[1] if theirs.shape[0] else 0
    for first in range(0, weights.shape[0], size):
        piece = slice(first, first + size)
        mixed[piece] = weights[piece] * mine[piece, None]
        for column in range(columns):  # in the order of the list: the sum does not depend on shards
            their = theirs[rows[piece, column].clamp(min=0)]
            if gaps:  # whatever lies in the row that stands in for a missing one must not count, not even times 0
                their = their.masked_fill(rows[piece, column, None] < 0, 0.0)
            mixed[piece].addcmul_(their, shares[piece, column, None])
    return mixed
