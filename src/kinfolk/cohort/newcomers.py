"""The one model that all clients use, or the best of a few, tested on clients that never train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.visit import one_for_all
from kinfolk.data.federation import Part


@dataclass(frozen=True)
class Outsiders:
    """How a model does for each of k clients it has not met."""

    accuracy: np.ndarray  # [k]
    loss: np.ndarray  # [k]
    sizes: np.ndarray  # [k] samples

    @property
    def pooled(self) -> float:
        """Accuracy over the samples of all."""
        return float((self.accuracy * self.sizes).sum() / self.sizes.sum())


def meets_others(method: Any) -> bool:
    """Whether a method has anything to offer to clients that never train."""
    return hasattr(method, "meets") or getattr(method, "one_model", False)


def met(method: Any, cohort: Cohort, state: Any, part: Part) -> Outsiders:
    """How the clients in the part fare: as the method says, or with the one model that all others use."""
    if not hasattr(method, "meets"):
        return tested(cohort, state.model, part)
    found: Outsiders = method.meets(cohort, state, part)
    return found


def tested(cohort: Cohort, model: Tensor, part: Part) -> Outsiders:
    """The model [d] on the samples of each client in the part."""
    scores = one_for_all(cohort, model, part, cohort.program.samples(part.x))
    return Outsiders(scores.accuracy.cpu().numpy(), scores.loss.cpu().numpy(), part.sizes.numpy())


def best_of(cohort: Cohort, models: Tensor, part: Part) -> Outsiders:
    """Of models [c, d] for each client the one with the lowest loss on its samples, the first of equals.

    The choice looks at the labels of the samples that it is tested on.
    """
    found = [tested(cohort, model, part) for model in models]
    loss = np.stack([each.loss for each in found])
    best = np.where(np.isnan(loss), np.inf, loss).argmin(axis=0)
    columns = np.arange(best.size)
    accuracy = np.stack([each.accuracy for each in found])
    return Outsiders(accuracy[best, columns], loss[best, columns], found[0].sizes)
