"""Centralized training: what one would do if data could move."""

from dataclasses import dataclass

import torch

from kinfolk.cohort.cohort import Cohort
from kinfolk.data.federation import Federation
from kinfolk.data.projection import CPU
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers


@register("centralized")
@dataclass(frozen=True)
class Centralized:
    """One model is trained on everybody's data put together and tested on every client's own test set.

    All samples are handed to client 0 before the run; the others have none, take no steps, and copy its model.
    """

    server = True
    averages = False

    def arrange(self, federation: Federation, device: torch.device = CPU) -> Federation:
        """The data as this method is allowed to see them: all in one place."""
        return federation.pooled()

    def start(self, cohort: Cohort) -> None:
        return None

    def step(self, t: int, cohort: Cohort, state: None, peers: Peers) -> None:
        cohort.train(t)
        peers.publish(t, weights=cohort.weights)
        center = torch.zeros(len(cohort), 1, dtype=torch.int64, device=cohort.device)
        cohort.mix(peers.pull(t, center), center, own=0.0, record=False)
