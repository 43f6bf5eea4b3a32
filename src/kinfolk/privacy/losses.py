"""Losses of single samples: (scores [m, b, C], targets [m, b, ...]) -> [m, b]. None reads another sample."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

SampleLoss = Callable[..., Tensor]
SMALLEST = 1e-30  # probability, so that its logarithm is a number


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """labels: [m, b]"""
    losses: Tensor = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


def distilled(weight: float, reverse: bool = False) -> SampleLoss:
    """(1 - weight) · cross-entropy with the labels + weight · divergence from somebody else's scores.

    targets: labels [m, b] and probabilities [m, b, C]. The divergence is KL(others ‖ own) up to a constant, or with
    `reverse` KL(own ‖ others).
    """

    def loss(logits: Tensor, labels: Tensor, others: Tensor) -> Tensor:
        own = F.log_softmax(logits, dim=2)
        if reverse:
            taught = (own.exp() * (own - others.detach().clamp(min=SMALLEST).log())).sum(dim=2)
        else:
            taught = -(others.detach() * own).sum(dim=2)
        return (1 - weight) * cross_entropy(logits, labels) + weight * taught

    return loss
