"""Products of a coarser precision in float64: what rounding their operands alone does to training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DIGITS = {"tf32": 11, "bf16": 8}  # significant bits of a number
CUT = ("tf32",)  # the matrix units drop the bits beyond; bf16 is rounded on the way there
DOUBLE = 53


class _Back(torch.autograd.Function):
    """Lets values through and rounds the gradients that come back: they are operands of the products there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, precision: str) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.precision = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _rounded(gradient, ctx.precision), None


def _rounded(x: Tensor, precision: str) -> Tensor:
    """float64 with the significant bits that the precision has."""
    bits = DIGITS[precision]
    if precision in CUT:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp(torch.trunc(mantissa * 2.0**bits) * 2.0**-bits, exponent)
    scaled = x * (2.0 ** (DOUBLE - bits) + 1)  # Veltkamp
    return scaled - (scaled - x)


def _operand(x: Tensor, precision: str) -> Tensor:
    return x + (_rounded(x.detach(), precision) - x).detach()


@contextmanager
def rounded_operands(precision: str) -> Iterator[None]:
    """Linear layers and convolutions multiply rounded numbers, there and back."""
    plain = {name: getattr(functional, name) for name in ("linear", "conv2d")}

    def coarse(name: str) -> Any:
        def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any) -> Tensor:
            found = plain[name](_operand(x, precision), _operand(weight, precision), None, *more)
            found = _Back.apply(found, precision)
            shape = (-1, 1, 1) if name == "conv2d" else (-1,)
            return found if bias is None else found + bias.view(shape)

        return product

    for name in plain:
        setattr(functional, name, coarse(name))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(functional, name, function)
