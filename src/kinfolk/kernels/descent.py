"""SGD with momentum over the whole matrix of models in one pass (Triton): each number is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _descend(
    w, v, g, rates, d, stride, v_stride, g_stride, momentum, decay,
    FIRST: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < d
    at = client * stride + i
    weight = tl.load(w + at, mask=here)
    step = tl.load(g + client * g_stride + i, mask=here)
    if DECAY:
        step += decay * weight
    if not FIRST:
        step += momentum * tl.load(v + client * v_stride + i, mask=here)
    tl.store(v + client * v_stride + i, step, mask=here)
    tl.store(w + at, weight - tl.load(rates + client) * step, mask=here)


def descend(
    weights: Tensor, velocity: Tensor, gradients: Tensor, rates: Tensor, momentum: float, decay: float, first: bool
) -> None:
    """weights [m, d] and velocity [m, d] in place; rates [m]; the velocity counts as zero if it is the `first` step.

    Each may be some columns of a wider matrix.
    """
    clients, d = weights.shape
    _descend[(triton.cdiv(d, 1024), clients)](
        weights, velocity, gradients, rates.contiguous(), d, weights.stride(0), velocity.stride(0),
        gradients.stride(0), momentum, decay,
        FIRST=first, DECAY=decay != 0, BLOCK=1024,
    )  # fmt: skip
