"""Losses of single samples: (scores [m, b, C], targets [m, b, ...]) -> [m, b]. None reads another sample."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

SampleLoss = Callable[..., Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """labels: [m, b]"""
    losses: Tensor = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


def distilled(weight: float) -> SampleLoss:
    """(1 - weight) · cross-entropy with the labels + weight · cross-entropy with somebody else's scores.

    targets: labels [m, b] and probabilities [m, b, C]. The gradient is that of the Kullback-Leibler divergence of the
    own scores from these probabilities.
    """

    def loss(logits: Tensor, labels: Tensor, others: Tensor) -> Tensor:
        taught = -(others.detach() * F.log_softmax(logits, dim=2)).sum(dim=2)
        return (1 - weight) * cross_entropy(logits, labels) + weight * taught

    return loss
