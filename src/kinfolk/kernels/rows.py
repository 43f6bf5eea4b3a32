"""Copies of whole models (Triton): the library is slow at rows that do not begin at multiples of 16 bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kinfolk.kernels.dispatch import aligned

BLOCK = 4096


@triton.jit
def _copy(models, rows, out, d, step, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + number * d + column, tl.load(models + row * step + column, mask=column < d), mask=column < d)


def copied(models: Tensor, rows: Tensor) -> Tensor:
    """models[rows]: [p, d] for rows [p] of models [*, d]."""
    models, rows = aligned(models), rows.contiguous()
    out = torch.empty((rows.numel(), models.shape[1]), dtype=models.dtype, device=models.device)
    _copy[(rows.numel(), triton.cdiv(models.shape[1], BLOCK))](
        models, rows, out, models.shape[1], models.stride(0), BLOCK=BLOCK, num_warps=8
    )
    return out
