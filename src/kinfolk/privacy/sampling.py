"""Which records of its own each client takes at a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.privacy.accounting import Sampling
from kinfolk.privacy.source import Source

_STEP = 16  # batches are widened to a multiple of this, so that few different widths come up


@dataclass(frozen=True)
class Batches:
    """The records of one step, on the CPU."""

    positions: Tensor  # [m, width] places in a client's own data; 0 where there is none
    counts: Tensor  # [m] records taken; the first of a row
    divisor: Tensor  # [m] float64: what a sum is divided by; for Poisson sampling the expected number
    widths: Tensor  # [m] how wide a client's batch is computed: a function of its own counts alone, 0 if it is empty
    whole: bool = False  # everybody takes all records in their order

    def rows(self, starts: Tensor) -> Tensor:
        """[m, width] the same records in data that lie flat; starts [m]: where each client's begin."""
        return starts[:, None] + self.positions.to(starts.device)


def batch_sizes(sizes: Tensor, rate: float | Tensor) -> Tensor:
    """[m] max(1, floor(rate · size)), 0 for a client without records: the batches of sampling without replacement."""
    return torch.minimum((sizes * rate + 1e-9).floor().to(torch.int64).clamp(min=1), sizes)


def draw(
    source: Source,
    t: int,
    ids: Tensor,
    sizes: Tensor,
    sampling: Sampling,
    rate: float | Tensor = 1.0,
    purpose: str = "private batch",
) -> Batches:
    """Draw a step's records. ids, sizes [m]; rate: one for all or [m].

    poisson: each record on its own with probability `rate`, so a batch may be empty. without-replacement: `batch_sizes`
    of them. none: all. Different steps of a round need different purposes.
    """
    ids, sizes = ids.cpu(), sizes.cpu()
    width = int(sizes.max()) if sizes.numel() else 0
    place = torch.arange(width)
    there = place < sizes[:, None]
    rate = torch.as_tensor(rate, dtype=torch.float64).expand(sizes.shape)
    if sampling == "none":
        return Batches(torch.where(there, place, 0), sizes, sizes.to(torch.float64), sizes, whole=True)
    keys = source.uniform(purpose, t, ids[:, None], place)
    if sampling == "poisson":
        taken = there & (keys < rate[:, None])
        counts, divisor = taken.sum(dim=1), sizes * rate
        order = (~taken).to(torch.int8).argsort(dim=1, stable=True)
    else:
        order = keys.masked_fill(~there, 2.0).argsort(dim=1, stable=True)
        counts = batch_sizes(sizes, rate)
        divisor = counts.to(torch.float64)
    widths = torch.minimum((counts + _STEP - 1) // _STEP * _STEP, sizes)
    order = order[:, : int(widths.max())] if widths.numel() else order
    inside = torch.arange(order.shape[1]) < counts[:, None]
    return Batches(torch.where(inside, order, 0), counts, divisor, widths)
