"""Two models of every client that learn from each other: a private one, and a noisy proxy that may be sent.

proxy:   (1 - alpha) · cross-entropy + alpha · divergence from what the private model says, with DP-SGD
private: (1 - beta) · cross-entropy + beta · divergence from what the proxy says, with plain SGD

With alpha > 0 the proxy's loss depends on a model that was trained without noise on the same records. Cutting single
records' gradients does not bound what one record does through it, so epsilon does not cover that (`GAP`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.methods.private import Releases, account, found
from kinfolk.privacy.dpsgd import Sums
from kinfolk.privacy.losses import SampleLoss, distilled
from kinfolk.privacy.sampling import Batches

GAP = "what proxies learn from private models, which are trained without noise (alpha = 0: nothing)"


@dataclass(frozen=True)
class Twins:
    """How both are trained."""

    alpha: float
    beta: float
    proxy_rate: float | Tensor  # [m, 1] or the same for all
    private_rate: float | None  # none: the private models are not trained here
    reverse: bool = False  # distil with KL(own ‖ other) instead of KL(other ‖ own)
    uniform: bool = False  # private models are taught that all classes are alike: a control

    def train(self, t: int, cohort: Cohort, personal: Tensor, sharing: bool = True) -> Tensor:
        """A round's steps, each from where both models were before it: the private models [m, d] after it.

        The proxies are the cohort's weights. Who has no budget left, or shares nothing, trains its private model only.
        A client one of whose models is not finite afterwards is in quarantine with both.
        """
        releases = account(cohort)
        here = releases.present()
        may = releases.charge(t) if sharing else torch.zeros_like(here)
        proxies, private = cohort.weights, personal
        losses: list[Tensor] = []
        for step in range(releases.budget.local_steps):
            batches = releases.batches(t, step, here)
            both = proxies, private
            if self.private_rate is not None:
                private = self._private(releases, *both, batches, losses)
            if sharing:
                proxies = self._proxy(t, step, releases, *both, releases.only(batches, may), losses)
        proxies = releases.settled(cohort.weights, proxies, may, *losses)
        private = releases.settled(personal, private, here, *losses)
        back = cohort.round.quarantined[:, None]
        cohort.weights = torch.where(back, cohort.weights, proxies)
        return torch.where(back, personal, private)

    def _proxy(
        self, t: int, step: int, releases: Releases, proxies: Tensor, private: Tensor, batches: Batches,
        losses: list[Tensor],
    ) -> Tensor:  # fmt: skip
        """One noisy step of the proxies [m, d]."""
        if self.alpha:
            taught = releases.scores(private, batches)
            gradient, sums = releases.gradient(t, step, proxies, batches, self._loss(self.alpha), taught)
        else:
            gradient, sums = releases.gradient(t, step, proxies, batches)
        losses.append(found(sums, batches))
        return proxies - self.proxy_rate * gradient

    def _private(
        self, releases: Releases, proxies: Tensor, private: Tensor, batches: Batches, losses: list[Tensor]
    ) -> Tensor:
        """One plain step of the private models [m, d], on the same records."""
        if self.beta:
            taught = releases.scores(proxies, batches)
            if self.uniform:
                taught = torch.full_like(taught, 1 / taught.shape[2])
            sums = releases.plain(private, batches, self._loss(self.beta), taught)
        else:
            sums = releases.plain(private, batches)
        losses.append(found(sums, batches))
        return private - (self.private_rate or 0.0) * mean_gradient(sums, batches)

    def _loss(self, weight: float) -> SampleLoss:
        return distilled(weight, self.reverse)


def mean_gradient(sums: Sums, batches: Batches) -> Tensor:
    """[m, d]"""
    return sums.total / batches.divisor.clamp(min=1).to(sums.total.device, sums.total.dtype)[:, None]
