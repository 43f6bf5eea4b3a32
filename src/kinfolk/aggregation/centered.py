"""Rules in which a client trusts its own model first: self-centered clipping, BALANCE and UBAR.

A client whose own model is not finite has nothing to hold on to, and keeps it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.aggregation.inbox import Inbox, order, scaled
from kinfolk.aggregation.registry import register
from kinfolk.settings import setting


@register("clipping")
@dataclass(frozen=True)
class Clipping:
    """The weighted mean of all models, after each peer's was drawn towards the own until it is at most τ away.

    He et al. (2022), "Byzantine-robust decentralized learning via ClippedGossip". Where no radius is given, τ is
    the root mean square, by weight, of the distances to all peers but the f farthest; f or fewer peers: own model.
    """

    radius: float | None = setting(None, "how far a peer may pull (τ); none: from the distances, by `byzantine`", gt=0)
    byzantine: int = setting(1, "bad peers that a client's list may hold (f), where no radius is given", ge=0)
    judges: ClassVar[bool] = False

    @property
    def least(self) -> int:
        return 1 if self.radius is not None else self.byzantine + 2

    def combine(self, inbox: Inbox) -> tuple[Tensor, Tensor]:
        distances = inbox.distances()
        factors = torch.where(torch.isfinite(distances), 1.0, 0.0)
        if self.radius is not None:
            limits = torch.full_like(distances[:, :1], self.radius)
        else:
            limits = self._limits(inbox, distances)
        factors = torch.where(distances > limits, limits / distances, factors)
        shares, _ = scaled(inbox.weights, inbox.own_weight.clamp(min=0.0))
        shares = torch.where(inbox.peers >= 0, shares * factors, 0.0)
        return inbox.blended(shares, (1.0 - shares.sum(dim=1)).clamp(min=0.0))

    def _limits(self, inbox: Inbox, distances: Tensor) -> Tensor:
        """τ of each client: [m, 1]."""
        peers = (inbox.peers >= 0).sum(dim=1, keepdim=True)
        near = (order(distances) < peers - self.byzantine) & torch.isfinite(distances)
        weights = torch.where(near, inbox.weights, 0.0)
        squares = torch.where(near, distances.square(), 0.0)
        total = weights.sum(dim=1, keepdim=True)
        mean = (weights * squares).sum(dim=1, keepdim=True) / torch.where(total > 0, total, 1.0)
        return torch.where(total > 0, mean.sqrt(), 0.0)


@register("balance")
@dataclass(frozen=True)
class Balance:
    """α of the own model and 1 - α of the mean of the peers' that are near it, for its length; nearer as rounds pass.

    Fang et al. (2024), "Byzantine-robust decentralized federated learning": a peer j of client i is accepted if
    |w_i - w_j| <= γ·exp(-κ·t/T)·|w_i|. Nobody accepted: own model. The mean is by the method's coefficients.
    """

    tolerance: float = setting(0.3, "distance accepted, in lengths of the own model (γ)", gt=0)  # γ
    tightening: float = setting(1.0, "how fast the accepted distance shrinks over all rounds (κ)", ge=0)  # κ
    own: float = setting(0.5, "share of the own model (α)", ge=0, le=1)  # α
    judges: ClassVar[bool] = False
    least: ClassVar[int] = 1

    def combine(self, inbox: Inbox) -> tuple[Tensor, Tensor]:
        bound = self.tolerance * math.exp(-self.tightening * inbox.progress) * inbox.lengths()
        distances = inbox.distances()
        return _beside(inbox, torch.isfinite(distances) & (distances <= bound[:, None]), self.own)


@register("ubar")
@dataclass(frozen=True)
class Ubar:
    """α of the own model and 1 - α of the mean of peers' models that are near it and do well on the client's own data.

    Guo et al. (2021), "Byzantine-resilient decentralized stochastic gradient descent": of the nearest peers, a share ρ
    of all, those whose loss is not above that of the own model; if there are none, the one with the least loss. No
    peer with a finite loss: own model. The mean is by the method's coefficients.
    """

    honest: float = setting(0.5, "share of the peers that is looked at, the nearest, rounded up (ρ)", gt=0, le=1)  # ρ
    own: float = setting(0.5, "share of the own model (α)", ge=0, le=1)  # α
    judges: ClassVar[bool] = True
    least: ClassVar[int] = 1

    def combine(self, inbox: Inbox) -> tuple[Tensor, Tensor]:
        if inbox.losses is None:
            raise ValueError("UBAR needs the losses of peers' models on a client's own data")
        places, part = self._shortlist(inbox)
        if not places.shape[1]:
            return inbox.blended(inbox.weights, torch.ones_like(inbox.own_weight))
        own, theirs = inbox.losses(torch.where(part, inbox.peers.gather(1, places), -1))
        theirs = torch.where(part & torch.isfinite(theirs), theirs.to(torch.float64), torch.inf)
        limit = own.to(torch.float64).nan_to_num(nan=torch.inf, posinf=torch.inf)
        good = torch.isfinite(theirs) & (theirs <= limit[:, None])
        best = torch.isfinite(theirs) & (order(theirs) == 0)
        good = torch.where(good.any(dim=1, keepdim=True), good, best)
        chosen = torch.zeros_like(inbox.peers, dtype=torch.bool).scatter_(1, places, good)
        return _beside(inbox, chosen, self.own)

    def _shortlist(self, inbox: Inbox) -> tuple[Tensor, Tensor]:
        """Places in the list of the nearest peers, in its order, and which of them are any: both [m, c]."""
        distances = inbox.distances()
        near = torch.isfinite(distances) & (order(distances) < self._looked_at(torch.isfinite(distances).sum(dim=1)))
        most = math.ceil(self.honest * distances.shape[1] - 1e-9)
        places = (~near).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        return places, near.gather(1, places)

    def _looked_at(self, peers: Tensor) -> Tensor:
        """How many of so many peers [m] are looked at: [m, 1]."""
        return torch.ceil(self.honest * peers.to(torch.float64) - 1e-9)[:, None]


def _beside(inbox: Inbox, accepted: Tensor, own: float) -> tuple[Tensor, Tensor]:
    """`own` of the own model and the rest of the mean of the accepted [m, k] ones; all of it where there are none."""
    nothing = torch.zeros_like(inbox.own_weight)
    shares, _ = scaled(torch.where(accepted, inbox.weights, 0.0), nothing)
    return inbox.blended(shares * (1.0 - own), torch.where(accepted.any(dim=1), nothing + own, 1.0))
