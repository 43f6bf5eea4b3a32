"""Rules that look at each number of the models on its own: the plain mean, the median and the trimmed mean."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.aggregation.inbox import Inbox
from kinfolk.aggregation.registry import register
from kinfolk.cohort.mixing import mix
from kinfolk.settings import setting


@register("mean")
@dataclass(frozen=True)
class Mean:
    """The weighted mean of all models that arrived: no defence."""

    judges: ClassVar[bool] = False
    least: ClassVar[int] = 1

    def combine(self, inbox: Inbox) -> tuple[Tensor, Tensor]:
        return mix(inbox.own, inbox.theirs, inbox.rows, inbox.coefficients, inbox.mine, inbox.away)


@register("median")
@dataclass(frozen=True)
class Median:
    """The median of each number over the own model and those of peers; of two in the middle, their mean.

    Coefficients only say who takes part. Holds while fewer than half of the models are bad: with one peer it is the
    mean of two.
    """

    judges: ClassVar[bool] = False
    least: ClassVar[int] = 1

    def combine(self, inbox: Inbox) -> tuple[Tensor, Tensor]:
        return _middle(inbox, (inbox.count - 1) // 2, inbox.count > 0)


@register("trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean:
    """The mean of each number over the own model and those of peers, without the f largest and the f smallest.

    Coefficients only say who takes part. A client with no more than 2f models keeps its own.
    """

    byzantine: int = setting(1, "bad peers that a client's list may hold (f)", ge=0)
    judges: ClassVar[bool] = False

    @property
    def least(self) -> int:
        return 2 * self.byzantine + 1

    def combine(self, inbox: Inbox) -> tuple[Tensor, Tensor]:
        return _middle(inbox, torch.full_like(inbox.count, self.byzantine), inbox.count >= self.least)


def _middle(inbox: Inbox, cut: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of what is left of the sorted numbers when cut [m] are taken off at both ends; own without `enough` [m].

    Each model that took part has the same share, whatever became of its numbers.
    """
    count = inbox.count[:, None]
    places = torch.arange(inbox.rows.shape[1] + 1, device=count.device)
    inside = (places >= cut[:, None]) & (places < count - cut[:, None])
    kept = inbox.away | ~enough
    shares = torch.where(inside & ~kept[:, None], 1.0, 0.0).to(torch.float64)
    shares = shares / shares.sum(dim=1, keepdim=True).clamp(min=1.0)
    part = (inbox.peers >= 0) & ~kept[:, None]
    return _sorted_sum(inbox, shares.to(inbox.own.dtype), kept), part / count.clamp(min=1).to(torch.float64)


def _sorted_sum(inbox: Inbox, shares: Tensor, kept: Tensor) -> Tensor:
    """Σ_s shares[i, s] times the s-th smallest number, in every column: [m, d]; the own model of those kept [m]."""
    k = inbox.rows.shape[1]
    everywhere = range(k + 1)
    wanted = everywhere if shares.is_cuda else (shares > 0).any(dim=0).nonzero().flatten().tolist()
    steps = network(k + 1, frozenset(wanted))
    out = torch.empty_like(inbox.own)
    for clients, columns in inbox.pieces(k + 3):
        own, peers, pool = inbox.own[clients, columns], inbox.peers[clients], inbox.pool[:, columns]
        values = [own.masked_fill(~inbox.fit[clients, None], torch.inf)]
        for column in range(k):
            theirs = pool.index_select(0, peers[:, column].clamp(min=0))
            values.append(theirs.masked_fill_(peers[:, column, None] < 0, torch.inf))
        _exchange(values, steps)
        total = torch.zeros_like(own)
        for place in wanted:
            share = shares[clients, place, None]
            total.addcmul_(values[place].masked_fill_(share <= 0, 0.0), share)
        out[clients, columns] = torch.where(kept[clients, None], own, total)
    return out


def _exchange(values: list[Tensor], steps: tuple[tuple[int, int, bool, bool], ...]) -> None:
    """Sort a list of tensors in place, number by number."""
    spare = torch.empty_like(values[0])
    for low, high, smaller, larger in steps:
        a, b = values[low], values[high]
        if smaller:
            torch.minimum(a, b, out=spare)
            values[low], spare = spare, a
        if larger:
            torch.maximum(a, b, out=b)


@lru_cache(maxsize=256)
def network(size: int, wanted: frozenset[int]) -> tuple[tuple[int, int, bool, bool], ...]:
    """Comparisons (low, high, whether the smaller, whether the larger is needed) that put the wanted places in order.

    Batcher's merge exchange, without what the wanted places do not depend on.
    """
    pairs = []
    top = 1 << max(0, (size - 1).bit_length() - 1)
    p = top
    while p > 0 and size > 1:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(size - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    needed, steps = set(wanted), []
    for low, high in reversed(pairs):
        if low in needed or high in needed:
            steps.append((low, high, low in needed, high in needed))
            needed |= {low, high}
    return tuple(reversed(steps))
