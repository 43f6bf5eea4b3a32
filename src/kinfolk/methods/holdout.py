"""Samples that a client keeps to judge models by, and does not train on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.cohort import judging
from kinfolk.cohort.cohort import Cohort
from kinfolk.data.federation import Part
from kinfolk.peers.base import Pool


def hold_out(cohort: Cohort, share: float) -> None:
    """Set aside a random share of each client's training samples, at least one, as `cohort.validation`.

    Nobody trains on them any more; but whoever has a single sample both trains on it and judges by it.
    """
    part = cohort.data.train
    sizes = part.sizes
    held = torch.minimum((share * sizes + 0.5).floor().to(torch.int64).clamp(min=1), (sizes - 1).clamp(min=0))
    order = randomness.permutations(cohort.seed, "validation", 0, cohort.ids, sizes)[:, 0]
    first = torch.zeros_like(sizes)
    cohort.data = replace(cohort.data, train=_cut(part, order, first, sizes - held))
    cohort.train_x = cohort.program.samples(cohort.data.train.x)
    aside = _cut(part, order, torch.where(held > 0, sizes - held, 0), torch.where(held > 0, held, sizes))
    cohort.validation = replace(aside, x=cohort.program.samples(aside.x))


def _cut(part: Part, order: Tensor, first: Tensor, sizes: Tensor) -> Part:
    """Of each client's samples, in its order [m, s], `sizes` [m] beginning with number `first` [m]."""
    place = torch.arange(order.shape[1], device=order.device)
    begin, end = (limit.to(order.device)[:, None] for limit in (first, first + sizes))
    rows = (part.starts[:, None] + order)[(place >= begin) & (place < end)]
    starts = sizes.cumsum(0) - sizes
    return Part(part.x[rows], part.y[rows], starts.to(order.device), sizes)


def losses(cohort: Cohort, pool: Pool, ids: Tensor) -> Tensor:
    """As `Cohort.losses`, on the samples that each client has set aside."""
    part = _aside(cohort)
    return cohort.over_pairs(
        pool, ids, "weights",
        lambda models, clients: judging.score(cohort, pool["weights"], models, clients, part, part.x).loss,
    )  # fmt: skip


def own_losses(cohort: Cohort, models: Tensor) -> Tensor:
    """Loss [m] of each client's model, models [m, d], on the samples it has set aside."""
    rows, part = torch.arange(len(cohort)), _aside(cohort)
    return judging.score(cohort, models, rows, rows, part, part.x).loss


def _aside(cohort: Cohort) -> Part:
    assert cohort.validation is not None
    return cohort.validation
