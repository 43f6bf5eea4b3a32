"""A coarse look at a sample, and who says by it which domain the sample belongs to: for domains found by sums.

The look is a few numbers: the mean of an image in each field of a coarse grid, put to mean 0 and variance 1. All that a
server has to know of a domain is then in sums of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kinfolk.errors import UserError

GRID = 7  # fields of an image in each direction; an image with up to GRID + 1 pixels keeps all of them
WIDEST = 1024  # numbers of a look


def look(input_shape: tuple[int, ...]) -> nn.Sequential:
    """x [b, ...] -> [b, F]."""
    size = math.prod(input_shape)
    fields: list[nn.Module] = []
    if len(input_shape) == 3:
        sides = [side if side <= GRID + 1 else GRID for side in input_shape[1:]]
        fields, size = [nn.AdaptiveAvgPool2d(tuple(sides))], input_shape[0] * math.prod(sides)
    if size > WIDEST:
        raise UserError(
            f'method.source = "sums" looks at up to {WIDEST} numbers of a sample, these have {size}: '
            "give images [channels, height, width], or fewer features"
        )
    return nn.Sequential(*fields, nn.Flatten(), nn.GroupNorm(1, size, affine=False))


def width(input_shape: tuple[int, ...]) -> int:
    """F"""
    found: int = look(input_shape)[-1].num_channels  # type: ignore[assignment]
    return found


def student(input_shape: tuple[int, ...], domains: int) -> nn.Sequential:
    """x [b, ...] -> scores [b, D]: linear in the look, and nothing of a class in it. Says nothing at first."""
    last = nn.Linear(width(input_shape), domains)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*look(input_shape), last)


class Teacher(nn.Module):
    """Scores [b, D] of looks [b, F] of samples whose classes [b] are known."""

    def __init__(self, features: int, classes: int, domains: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(domains, features))
        self.offset = nn.Parameter(torch.zeros(classes, domains))

    def forward(self, features: Tensor, classes: Tensor) -> Tensor:
        return features @ self.weight.T + self.offset[classes]
