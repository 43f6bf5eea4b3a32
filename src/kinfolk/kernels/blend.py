"""Weighted means of models in one pass (Triton): every model that takes part is read once, the mean is written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["clients"])
def _blend(weights, theirs, rows, shares, mine, out, clients, d, k, BLOCK: tl.constexpr):
    """Programs that run at the same time take the same columns of all clients, which stay in the GPU's cache."""
    client = (tl.program_id(0) % clients).to(tl.int64)
    i = tl.program_id(0) // clients * BLOCK + tl.arange(0, BLOCK)
    here = i < d
    mean = tl.load(weights + client * d + i, mask=here) * tl.load(mine + client)
    for column in range(k):
        row = tl.load(rows + client * k + column)
        if row >= 0:  # whatever stands in for a missing model must not count, not even times 0
            mean += tl.load(theirs + row * d + i, mask=here) * tl.load(shares + client * k + column)
    tl.store(out + client * d + i, mean, mask=here)


def blend(weights: Tensor, theirs: Tensor, rows: Tensor, shares: Tensor, mine: Tensor) -> Tensor:
    """mine[i] · weights[i] + the sum over k of shares[i, k] · theirs[rows[i, k]], in this order: [m, d].

    weights: [m, d]; theirs: [p, d]; rows: [m, k] int64, -1 for none; shares: [m, k] and mine: [m] in float32.
    """
    clients, d = weights.shape
    out = torch.empty((clients, d), dtype=weights.dtype, device=weights.device)
    weights, theirs, rows, shares, mine = (each.contiguous() for each in (weights, theirs, rows, shares, mine))
    _blend[(clients * triton.cdiv(d, 1024),)](
        weights, theirs, rows, shares, mine, out, clients, d, rows.shape[1], BLOCK=1024
    )
    return out
