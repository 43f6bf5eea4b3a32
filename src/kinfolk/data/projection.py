"""Inputs projected onto a few directions that do not depend on any data, and brought to length one.

A model of fewer numbers needs less noise for the same promise. As directions are the same for everybody and every
sample is looked at alone, this costs no privacy.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.data.federation import Federation, Part

ROWS = 1024  # samples at a time
CPU = torch.device("cpu")


def directions(inputs: int, count: int) -> Tensor:
    """Gaussian numbers [inputs, count] that keep lengths on average; always the same."""
    return randomness.normal(0, "projection", 0, torch.arange(inputs), count).to(torch.float32) / math.sqrt(count)


def projected(federation: Federation, count: int, device: torch.device = CPU) -> Federation:
    """Samples [N, count] of length one; as many numbers as they have if these are not more than `count`.

    Computed on `device`, some samples at a time, and kept where they were.
    """
    inputs = math.prod(federation.input_shape)
    matrix = directions(inputs, count).to(device) if inputs > count else None

    def moved(part: Part) -> Part:
        pieces = [unit(rows.to(device), matrix).to(part.x.device) for rows in torch.split(part.x, ROWS)]
        return replace(part, x=torch.cat(pieces) if pieces else part.x.flatten(1))

    common = None if federation.common is None else moved(federation.common)
    return replace(federation, train=moved(federation.train), test=moved(federation.test), common=common)


def unit(x: Tensor, matrix: Tensor | None) -> Tensor:
    """Samples [N, count] of length one, through the matrix [inputs, count] if there is one."""
    flat = x.flatten(1).to(torch.float32)
    if matrix is not None:
        flat = flat @ matrix
    length: Tensor = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    return flat / length.clamp(min=1e-12)
