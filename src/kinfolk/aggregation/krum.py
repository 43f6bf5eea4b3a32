"""Krum and m-Krum: the models that lie closest to most of the others.

Blanchard et al. (2017), "Machine learning with adversaries: Byzantine tolerant gradient descent". A model's score is
the sum of its squared distances to the nearest others. Of n models, f of them bad, we take the n - f - 1 nearest, which
holds for n > 2f; the paper takes n - f - 2 and asks for n > 2f + 2 (`printed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.aggregation.inbox import Inbox, order, scaled
from kinfolk.aggregation.registry import register
from kinfolk.settings import setting

PRINTED = "score by the n - f - 2 nearest, as published (needs n > 2f + 2), not by n - f - 1 (needs n > 2f)"


@register("krum")
@dataclass(frozen=True)
class Krum:
    """The one model, own or a peer's, with the smallest score.

    Coefficients only say who takes part; of equal scores the first in the list wins, and the own stands before it. A
    client with too few models keeps its own.
    """

    byzantine: int = setting(1, "bad peers that a client's list may hold (f)", ge=0)
    printed: bool = setting(False, PRINTED)
    judges: ClassVar[bool] = False

    @property
    def least(self) -> int:
        return 2 * self.byzantine + (3 if self.printed else 1)

    def combine(self, inbox: Inbox) -> tuple[Tensor, Tensor]:
        chosen = order(scores(inbox, self.byzantine, self.printed)) == 0
        return _mean(inbox, chosen.to(torch.float64), inbox.count >= self.least)


@register("m-krum")
@dataclass(frozen=True)
class MKrum(Krum):
    """The weighted mean of the models, own or peers', with the smallest scores (multi-Krum).

    Of equal scores the first in the list go first, and the own stands before it. A client with too few models keeps
    its own.
    """

    keep: int | None = setting(None, "models averaged (m), at most n - f of them; none: n - f", ge=1)

    def combine(self, inbox: Inbox) -> tuple[Tensor, Tensor]:
        ranks = order(scores(inbox, self.byzantine, self.printed))
        keep = inbox.count - self.byzantine
        if self.keep is not None:
            keep = keep.clamp(max=self.keep)
        weights = torch.cat([torch.where(inbox.fit, inbox.own_weight, 0.0)[:, None], inbox.weights], dim=1)
        return _mean(inbox, torch.where(ranks < keep[:, None], weights, 0.0), inbox.count >= self.least)


def scores(inbox: Inbox, byzantine: int, printed: bool = False) -> Tensor:
    """Of the own model (first) and the peers': [m, 1 + k] float64; infinite for those that take no part, and only them.

    Only the order of the scores of one client means anything.
    """
    squares = _squares(inbox)
    nearest = squares.sort(dim=2).values
    count = inbox.count - byzantine - (2 if printed else 1)
    counted = torch.arange(nearest.shape[2], device=nearest.device) < count[:, None, None]
    total = torch.where(counted, nearest, 0.0).sum(dim=2)
    largest = torch.finfo(torch.float64).max  # distances too large for a number are still better than no model
    return torch.where(_part(inbox), total.clamp(max=largest), torch.inf)


def _squares(inbox: Inbox) -> Tensor:
    """Squared distances between the own model (first) and the peers': [m, 1 + k, 1 + k].

    Infinite to oneself, and to and from those that take no part.
    """
    products = inbox.products()
    lengths = products.diagonal(dim1=1, dim2=2)
    n = lengths.shape[1] + 1
    squares = torch.zeros((lengths.shape[0], n, n), dtype=torch.float64, device=lengths.device)
    squares[:, 1:, 1:] = (lengths[:, :, None] + lengths[:, None, :] - 2 * products).clamp(min=0.0)
    squares[:, 0, 1:] = lengths
    squares[:, 1:, 0] = lengths
    part = _part(inbox)
    none = ~(part[:, :, None] & part[:, None, :]) | torch.eye(n, dtype=torch.bool, device=part.device)
    return squares.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill_(none, torch.inf)


def _part(inbox: Inbox) -> Tensor:
    """[m, 1 + k] which models take part, the own first."""
    return torch.cat([inbox.fit[:, None], inbox.peers >= 0], dim=1)


def _mean(inbox: Inbox, weights: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """The mean by weights [m, 1 + k], the own first; the own model without `enough` [m]."""
    weights = torch.where(enough[:, None] & _part(inbox), weights, 0.0)
    return inbox.blended(*scaled(weights[:, 1:], weights[:, 0]))
