"""The one model that all clients use, tested on clients that never train."""

from __future__ import annotations

from dataclasses import dataclass

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


def tested(cohort: Cohort, model: Tensor, part: Part) -> Outsiders:
    """The model [d] on the samples of each client in the part."""
    scores = one_for_all(cohort, model, part, cohort.program.samples(part.x))
    return Outsiders(scores.accuracy.cpu().numpy(), scores.loss.cpu().numpy(), part.sizes.numpy())
