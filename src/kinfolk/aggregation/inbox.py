"""What clients have before them when they combine models: their own, those of peers, and how far apart these are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kinfolk.cohort.mixing import blend

BLOCK, WIDE = 2**11, 2**16  # columns at a time on a CPU and a GPU; fixed, for the last bits of a sum depend on it
CACHE = 48 * 2**20
WITHIN = 2**21  # bytes that a core keeps close while it works on them
LARGE = 2**31  # bytes that a piece may take on a GPU

Losses = Callable[[Tensor], tuple[Tensor, Tensor]]
"""losses(rows [m, c]): the loss of each client's own model [m] and of theirs[rows[i, j]] [m, c], both on client i's
data; whatever it likes where a row is -1."""


@dataclass(frozen=True)
class Inbox:
    """The models that m clients combine in a round.

    A peer's model takes no part if it is missing, not finite in some number, or has no positive coefficient. A client's
    own takes no part if it is not finite or `mine` is not positive.
    """

    own: Tensor  # [m, d]
    theirs: Tensor  # [p, d]
    rows: Tensor  # [m, k] rows of theirs in the order of the list, -1 for none
    coefficients: Tensor | None = None  # [m, k] weights in a mean, for rules that take one; none: all alike
    mine: Tensor | float = 1.0  # [m] weight of the own model, beside those
    absent: Tensor | None = None  # [m] bool: who keeps its model, whatever arrived
    progress: float = 0.0  # part of all rounds that has passed
    losses: Losses | None = None
    room: int = CACHE  # bytes that a piece of the work may take on a CPU

    @cached_property
    def pool(self) -> Tensor:
        """theirs, or something to point at where nobody answered anybody."""
        return self.theirs if self.theirs.shape[0] else self.own[:1]

    @cached_property
    def peers(self) -> Tensor:
        """[m, k] the rows of models that take part, -1 for the others."""
        part = self.rows >= 0
        if self.coefficients is not None:
            part = part & (self.coefficients > 0)
        return torch.where(part & finite(self.pool)[self.rows.clamp(min=0)], self.rows, -1)

    @cached_property
    def sound(self) -> Tensor:
        """[m] whose own model is finite."""
        return finite(self.own)

    @cached_property
    def fit(self) -> Tensor:
        """[m] whose own model takes part."""
        return self.sound & (self.own_weight > 0)

    @cached_property
    def own_weight(self) -> Tensor:
        """[m] float64."""
        return torch.ones(self.own.shape[0], dtype=torch.float64, device=self.own.device) * self.mine

    @cached_property
    def weights(self) -> Tensor:
        """[m, k] float64 coefficients of the peers, 0 for those that take no part."""
        given = torch.ones_like(self.rows) if self.coefficients is None else self.coefficients
        return torch.where(self.peers >= 0, given.to(torch.float64), 0.0)

    @cached_property
    def count(self) -> Tensor:
        """[m] how many models take part, with the own."""
        return self.fit.long() + (self.peers >= 0).sum(dim=1)

    @cached_property
    def away(self) -> Tensor:
        """[m] bool."""
        if self.absent is not None:
            return self.absent
        return torch.zeros(self.own.shape[0], dtype=torch.bool, device=self.own.device)

    def pieces(self, copies: int) -> Iterator[tuple[slice, slice]]:
        """Clients and columns to work on at a time, when `copies` rows of float64 numbers are needed for each."""
        room = LARGE if self.own.is_cuda else min(self.room, WITHIN)
        clients, columns = self.own.shape
        block = WIDE if self.own.is_cuda else BLOCK
        size = max(1, room // (max(1, copies) * 8 * max(1, min(block, columns))))
        for first in range(0, clients, size):
            for column in range(0, columns, block):
                yield slice(first, first + size), slice(column, column + block)

    def differences(self, clients: slice, columns: slice) -> Tensor:
        """What peers' models have over one's own, or over 0 where that is not finite: [q, k, c].

        Whatever it may be for peers that take no part.
        """
        theirs = self.pool[:, columns][self.peers[clients].clamp(min=0)]
        centers = torch.where(self.sound[clients, None], self.own[clients, columns], 0.0)
        return theirs.sub_(centers[:, None])

    def distances(self) -> Tensor:
        """From one's own model to each peer's: [m, k] float64, infinite for those that take no part or too far away."""
        squares = torch.zeros(self.rows.shape, dtype=torch.float64, device=self.own.device)
        for clients, columns in self.pieces(self.rows.shape[1]):
            squares[clients] += self.differences(clients, columns).square_().sum(dim=2)
        return torch.where((self.peers >= 0) & self.sound[:, None], squares.sqrt(), torch.inf)

    def products(self) -> Tensor:
        """Of the differences of any two peers with one's own model: [m, k, k] float64.

        Float64 from the start: peers may be much closer to each other than to the client.
        """
        k = self.rows.shape[1]
        products = torch.zeros((self.own.shape[0], k, k), dtype=torch.float64, device=self.own.device)
        for clients, columns in self.pieces(2 * k):
            apart = self.differences(clients, columns).to(torch.float64)
            products[clients] += torch.bmm(apart, apart.transpose(1, 2))
        return products

    def lengths(self) -> Tensor:
        """Of the own models: [m] float64."""
        squares = torch.zeros(self.own.shape[0], dtype=torch.float64, device=self.own.device)
        for clients, columns in self.pieces(2):
            squares[clients] += self.own[clients, columns].to(torch.float64).square().sum(dim=1)
        return squares.sqrt()

    def blended(self, shares: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_j shares[i, j]·theirs[j] + mine[i]·own[i], and the shares: ([m, d], [m, k]).

        Absent clients, and those for whom that is a sum of nothing, keep their model.
        """
        alone = self.away | (mine + shares.sum(dim=1) <= 0)
        shares = torch.where(alone[:, None], 0.0, shares)
        mine = torch.where(alone, 1.0, mine)
        own = torch.where((mine > 0)[:, None], self.own, 0.0)  # NaN counts even times 0
        rows = torch.where(shares > 0, self.peers, -1)
        return blend(own, self.pool, rows, shares, mine), shares


def finite(models: Tensor) -> Tensor:
    """[p] whether a row holds neither NaN nor infinity."""
    good = torch.ones(models.shape[0], dtype=torch.bool, device=models.device)
    for first in range(0, models.shape[1], WIDE):
        good &= torch.isfinite(models[:, first : first + WIDE]).all(dim=1)
    return good


def order(values: Tensor) -> Tensor:
    """The rank of each value in its row, from 0 for the smallest; ties in the order of the list: [m, c]."""
    return values.argsort(dim=1, stable=True).argsort(dim=1, stable=True)


def scaled(shares: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
    """Both over their sum, or 0 where that is 0: ([m, k], [m])."""
    total = mine + shares.sum(dim=1)
    safe = torch.where(total > 0, total, 1.0)
    return shares / safe[:, None], mine / safe
