"""SGD with momentum over the whole matrix of models in one pass (Triton): each number is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _moved(w, v, g, at, v_at, g_at, here, rate, momentum, decay, FIRST: tl.constexpr, DECAY: tl.constexpr):
    weight = tl.load(w + at, mask=here)
    step = tl.load(g + g_at, mask=here)
    if DECAY:
        step += decay * weight
    if not FIRST:
        step += momentum * tl.load(v + v_at, mask=here)
    tl.store(v + v_at, step, mask=here)
    tl.store(w + at, weight - rate * step, mask=here)


@triton.jit
def _descend(
    w, v, g, rates, d, stride, v_stride, g_stride, momentum, decay,
    FIRST: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, v_at, g_at = client * stride + i, client * v_stride + i, client * g_stride + i
    _moved(w, v, g, at, v_at, g_at, i < d, tl.load(rates + client), momentum, decay, FIRST, DECAY)


@triton.jit(do_not_specialize=["clients"])
def _descend_flat(
    w, v, g, rates, clients, d, momentum, decay, FIRST: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr
):
    """The same where rows follow each other without gaps: numbers are read four at a time, wherever a row begins."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    here = at < clients.to(tl.int64) * d
    client = start // d
    first = tl.load(rates + client)
    second = tl.load(rates + client + 1, mask=client + 1 < clients, other=0.0)
    rate = tl.where(at < (client + 1) * d, first, second)
    _moved(w, v, g, at, at, at, here, rate, momentum, decay, FIRST, DECAY)


def descend(
    weights: Tensor, velocity: Tensor, gradients: Tensor, rates: Tensor, momentum: float, decay: float, first: bool
) -> None:
    """weights [m, d] and velocity [m, d] in place; rates [m]; the velocity counts as zero if it is the `first` step.

    Each may be some columns of a wider matrix.
    """
    clients, d = weights.shape
    rates = rates.contiguous()
    if d >= BLOCK and all(matrix.is_contiguous() for matrix in (weights, velocity, gradients)):  # two rows at most
        _descend_flat[(triton.cdiv(clients * d, BLOCK),)](
            weights, velocity, gradients, rates, clients, d, momentum, decay, FIRST=first, DECAY=decay != 0, BLOCK=BLOCK
        )
        return
    _descend[(triton.cdiv(d, BLOCK), clients)](
        weights, velocity, gradients, rates, d, weights.stride(0), velocity.stride(0), gradients.stride(0),
        momentum, decay, FIRST=first, DECAY=decay != 0, BLOCK=BLOCK,
    )  # fmt: skip
