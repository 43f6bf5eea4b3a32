"""Linear layers of many clients on a GPU (Triton): samples are read where they lie, with bias and ReLU in one pass.

Each client has weights of its own. The library would have samples gathered first, and takes a pass of its own for the
bias, the ReLU, the sum of a bias's gradients: with few samples and small layers a step is mostly such passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kinfolk.kernels.dispatch import PROCESSORS

DOTS = {"float32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}  # how the matrix units multiply


@triton.jit
def _product(a, b, total, DOT: tl.constexpr):
    if DOT == "bf16":
        total = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    else:
        total = tl.dot(a, b, total, input_precision=DOT)
    return total


@triton.jit
def _place(tall, wide):
    """Which client and which of its tiles a program is for; those of a client follow each other."""
    number, tiles = tl.program_id(0), tall * wide
    return (number // tiles).to(tl.int64), number % tiles // wide, number % wide


@triton.jit(do_not_specialize=["batch"])
def _forward(
    x, index, weight, bias, out, batch, inputs, outputs, x_client, x_step, index_step, w_step, b_step,
    GATHER: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, DOT: tl.constexpr,
    BB: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    client, down, right = _place(tl.cdiv(batch, BB), tl.cdiv(outputs, BO))
    sample = down * BB + tl.arange(0, BB)
    output = right * BO + tl.arange(0, BO)
    if GATHER:
        base = tl.load(index + client * index_step + sample, mask=sample < batch, other=0) * x_step
    else:
        base = client * x_client + sample.to(tl.int64) * x_step
    own = weight + client * w_step
    total = tl.full([BB, BO], 0.0, tl.float32)
    for first in tl.range(0, inputs, BK, num_stages=STAGES):
        k = first + tl.arange(0, BK)
        a = tl.load(x + base[:, None] + k[None, :], mask=(sample < batch)[:, None] & (k < inputs)[None, :], other=0.0)
        w = tl.load(
            own + output[:, None] * inputs + k[None, :], mask=(output < outputs)[:, None] & (k < inputs)[None, :],
            other=0.0,
        )  # fmt: skip
        total = _product(a, tl.trans(w), total, DOT)
    if BIAS:
        total += tl.load(bias + client * b_step + output, mask=output < outputs, other=0.0)[None, :]
    if RELU:
        total = tl.where(total < 0, 0.0, total)  # NaN stays
    at = (client * batch + sample)[:, None] * outputs + output[None, :]
    tl.store(out + at, total, mask=(sample < batch)[:, None] & (output < outputs)[None, :])


@triton.jit(do_not_specialize=["batch"])
def _weights(
    x, index, grad, out, weight, bias, batch, inputs, outputs, x_client, x_step, index_step, w_step, b_step,
    GATHER: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, DOT: tl.constexpr,
    BB: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    client, down, right = _place(tl.cdiv(outputs, BO), tl.cdiv(inputs, BK))
    output = down * BO + tl.arange(0, BO)
    k = right * BK + tl.arange(0, BK)
    total = tl.full([BO, BK], 0.0, tl.float32)
    along = tl.full([BO], 0.0, tl.float32)
    for first in tl.range(0, batch, BB, num_stages=STAGES):
        sample = first + tl.arange(0, BB)
        here = sample < batch
        if GATHER:
            base = tl.load(index + client * index_step + sample, mask=here, other=0) * x_step
        else:
            base = client * x_client + sample.to(tl.int64) * x_step
        at = (client * batch + sample)[:, None] * outputs + output[None, :]
        g = tl.load(grad + at, mask=here[:, None] & (output < outputs)[None, :], other=0.0)
        if RELU:
            g = tl.where(tl.load(out + at, mask=here[:, None] & (output < outputs)[None, :], other=0.0) <= 0, 0.0, g)
            if right == 0:  # for the gradient of the inputs; whoever reads it before or after gets the same
                tl.store(grad + at, g, mask=here[:, None] & (output < outputs)[None, :])
        a = tl.load(x + base[:, None] + k[None, :], mask=here[:, None] & (k < inputs)[None, :], other=0.0)
        total = _product(tl.trans(g), a, total, DOT)
        if BIAS:
            along += tl.sum(g, 0)
    at = output[:, None] * inputs + k[None, :]
    tl.store(weight + client * w_step + at, total, mask=(output < outputs)[:, None] & (k < inputs)[None, :])
    if BIAS and right == 0:
        tl.store(bias + client * b_step + output, along, mask=output < outputs)


HEAD = 16  # outputs of a layer up to which TF32 is not worth it
FEW = 32  # samples of a step up to which the library is slower at all of a layer but the gradients of its inputs
# Samples, outputs, inputs of a tile, warps, steps that are loaded ahead.
WEIGHTS = (32, 128, 4, 1)  # without the samples
FORWARD = {
    FEW: {"float32": (64, 32, 4, 4), "tf32": (64, 64, 4, 3), "bf16": (64, 64, 4, 3)},
    64: {"float32": (64, 32, 4, 3), "tf32": (64, 32, 4, 3), "bf16": (64, 32, 4, 3)},
    128: {"float32": (128, 32, 8, 3), "tf32": (64, 32, 4, 3), "bf16": (128, 32, 8, 3)},
}
# With too few programs to keep a GPU busy, what counts is how soon each is done.
ALONE = {"float32": (16, 64, 4, 6), "tf32": (16, 128, 4, 3), "bf16": (16, 128, 4, 3)}


def _tile(clients: int, bb: int, tiles: int, outputs: int, precision: str) -> tuple[int, int, int, int]:
    """How a forward pass is cut up, with so many tiles of samples."""
    usual = FORWARD[max(FEW, bb)][precision]
    few = outputs <= HEAD or clients * tiles * triton.cdiv(outputs, usual[0]) < PROCESSORS
    return ALONE[precision] if few and bb <= FEW else usual


def _coarseness(precision: str, outputs: int) -> str:
    """What a layer of so many outputs is computed in: TF32 costs a head its last digits and saves it next to no time.
    In the library's products of many clients a head is not rounded either."""
    return "float32" if precision == "tf32" and outputs <= HEAD else precision


def _samples(batch: int) -> int:
    """Samples of a tile."""
    return next((size for size in (16, 32, 64) if size >= batch), 128)


def _read(x: Tensor, index: Tensor, gather: bool) -> tuple[Tensor, Tensor, int, int, int]:
    """The samples, their index, and how far clients, samples and indices lie apart."""
    if gather:
        index = index if index.stride(1) == 1 else index.contiguous()
        return x, index, 0, x.stride(0), index.stride(0)
    x = x.contiguous()
    return x, x, x.stride(0), x.stride(1), 0


def forward(
    x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, gather: bool, precision: str
) -> Tensor:
    """x [m, b, in], or rows of the data set [N, in] by index [m, b]; weight [m, out, in] -> [m, b, out]."""
    (clients, outputs, inputs), batch = weight.shape, index.shape[1]
    out = torch.empty((clients, batch, outputs), dtype=weight.dtype, device=weight.device)
    read = _read(x, index, gather)
    bb, precision = _samples(batch), _coarseness(precision, outputs)
    tiles = triton.cdiv(batch, bb)
    bo, bk, warps, stages = _tile(clients, bb, tiles, outputs, precision)
    _forward[(clients * tiles * triton.cdiv(outputs, bo),)](
        *read[:2], weight, weight if bias is None else bias, out, batch, inputs, outputs, *read[2:], weight.stride(0),
        0 if bias is None else bias.stride(0),
        GATHER=gather, BIAS=bias is not None, RELU=relu, DOT=DOTS[precision], BB=bb, BO=bo, BK=bk, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return out


def weights_backward(
    x: Tensor, index: Tensor, grad: Tensor, out: Tensor, weight: Tensor, bias: Tensor | None, relu: bool,
    gather: bool, precision: str,
) -> None:  # fmt: skip
    """Write the gradients of weight [m, out, in] and bias [m, out] from `grad`, those of `out` [m, b, out], which are
    set to zero where the ReLU has let nothing through.

    For few samples: of many the library makes faster work.
    """
    (clients, outputs, inputs), batch = weight.shape, index.shape[1]
    read = _read(x, index, gather)
    bo, bk, warps, stages = WEIGHTS
    _weights[(clients * triton.cdiv(outputs, bo) * triton.cdiv(inputs, bk),)](
        *read[:2], grad, out, weight, weight if bias is None else bias, batch, inputs, outputs, *read[2:],
        weight.stride(0), 0 if bias is None else bias.stride(0),
        GATHER=gather, BIAS=bias is not None, RELU=relu, DOT=DOTS[_coarseness(precision, outputs)],
        BB=min(FEW, _samples(batch)), BO=bo, BK=bk, STAGES=stages, num_warps=warps,
    )  # fmt: skip
