"""Seeded trouble: lost messages and absent clients, the same in a simulation and on a network."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.settings import setting


@dataclass(frozen=True)
class Faults:
    """What goes wrong, as probabilities. Every draw is a pure function of the seed, so a bad run can be repeated."""

    loss: float = setting(0.0, "probability that an answer from one client to another is lost", ge=0, lt=1)
    absent: float = setting(0.0, "probability that a client is away for a while (churn)", ge=0, lt=1)
    absent_rounds: int = setting(1, "how many rounds a client stays away", ge=1)

    def lost(self, seed: int, t: int, to: Tensor, sender: Tensor) -> Tensor:
        """Is the message from `sender` to `to` lost in round t? Bool, of the shape the ids broadcast to."""
        if not self.loss:
            return _never(to.device).expand(np.broadcast_shapes(to.shape, sender.shape))
        return randomness.uniform(seed, "loss", t, to, sender) < self.loss

    def away(self, seed: int, t: int, ids: Tensor) -> Tensor:
        """Which of the clients ids [m] are absent in round t."""
        if not self.absent:
            return torch.zeros_like(ids, dtype=torch.bool)
        return spells(seed, t, ids, self.absent, self.absent_rounds, "phase", "churn")


@lru_cache(maxsize=16)
def _never(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=device)


def spells(seed: int, t: int, ids: Tensor, share: float, rounds: int, phase: str, draw: str) -> Tensor:
    """Which of the clients ids [m] are in a spell in round t, each with probability `share`: [m] bool.

    Time is cut into windows of `rounds`, with each client's own phase, so that clients do not all leave and return
    together. `phase` and `draw` are what the two draws are for.
    """
    start = randomness.bits(seed, phase, 0, ids, torch.zeros_like(ids)) % rounds
    return randomness.uniform(seed, draw, 0, ids, (t + start) // rounds) < share
