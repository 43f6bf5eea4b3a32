"""Weights of a mixture of models, scaled to sum to one, and the mixture itself in one pass (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kinfolk.kernels.dispatch import aligned, unit

BLOCK = 1024


@triton.jit(do_not_specialize=["clients", "k"])
def _mix(
    weights, theirs, rows, coefficients, own, absent, out, shares, clients, units, k, theirs_units,
    WEIGHED: tl.constexpr, OWN: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs that run at the same time take the same columns of all clients, which stay in the GPU's cache."""
    d, theirs_step = units * UNIT, theirs_units * UNIT  # written so that it is known what divides them
    client, piece = (tl.program_id(0) % clients).to(tl.int64), tl.program_id(0) // clients
    mine = tl.full([], 1.0, tl.float64)
    if OWN:
        mine = tl.load(own + client).to(tl.float64)
    others = tl.full([], 0.0, tl.float64)
    for column in range(k):
        at = client * k + column
        share = tl.full([], 1.0, tl.float64)
        if WEIGHED:
            share = tl.load(coefficients + at).to(tl.float64)
        others += tl.where(tl.load(rows + at) >= 0, share, 0.0)
    total = mine + others
    alone = (total <= 0) | (tl.load(absent + client) != 0)
    whole = tl.where(alone, 1.0, total)
    i = piece * BLOCK + tl.arange(0, BLOCK)
    here = i < d
    kind = weights.dtype.element_ty
    mean = tl.load(weights + client * d + i, mask=here, other=0.0) * tl.where(alone, 1.0, mine / whole).to(kind)
    for column in range(k):
        at = client * k + column
        row = tl.load(rows + at)
        share = tl.full([], 1.0, tl.float64)
        if WEIGHED:
            share = tl.load(coefficients + at).to(tl.float64)
        share = tl.where(alone | (row < 0), 0.0, share / whole)
        if piece == 0:
            tl.store(shares + at, share)
        if row >= 0:  # whatever stands in for a missing model must not count, not even times 0
            mean += tl.load(theirs + row * theirs_step + i, mask=here, other=0.0) * share.to(kind)
    tl.store(out + client * d + i, mean, mask=here)


def mix(
    weights: Tensor, theirs: Tensor, rows: Tensor, coefficients: Tensor | None, own: Tensor | float, absent: Tensor
) -> tuple[Tensor, Tensor]:
    """`cohort.mixing.mix`."""
    clients, d = weights.shape
    out = torch.empty_like(weights)
    shares = torch.empty(rows.shape, dtype=torch.float64, device=rows.device)
    if isinstance(own, Tensor):
        own = own.expand(clients)
    elif own != 1:
        own = torch.full((clients,), own, dtype=torch.float64, device=rows.device)
    theirs, weights, rows = aligned(theirs), weights.contiguous(), rows.contiguous()
    given = rows if coefficients is None else coefficients.contiguous()
    mine = own.contiguous() if isinstance(own, Tensor) else rows
    away = absent.contiguous().view(torch.uint8)
    size = unit(d, theirs.stride(0))
    _mix[(clients * triton.cdiv(d, BLOCK),)](
        weights, theirs, rows, given, mine, away, out, shares, clients, d // size, rows.shape[1],
        theirs.stride(0) // size,
        WEIGHED=coefficients is not None, OWN=isinstance(own, Tensor), UNIT=size, BLOCK=BLOCK,
    )  # fmt: skip
    return out, shares
