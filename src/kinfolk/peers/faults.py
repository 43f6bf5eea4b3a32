"""Seeded trouble: lost messages and absent clients, the same in a simulation and on a network."""

from __future__ import annotations

from dataclasses import dataclass

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
            return torch.zeros_like(to + sender, dtype=torch.bool)
        return randomness.uniform(seed, "loss", t, to, sender) < self.loss

    def away(self, seed: int, t: int, ids: Tensor) -> Tensor:
        """Which of the clients ids [m] are absent in round t.

        Time is cut into windows of `absent_rounds`, with each client's own phase, so that clients do not all leave
        and return together.
        """
        if not self.absent:
            return torch.zeros_like(ids, dtype=torch.bool)
        phase = randomness.bits(seed, "phase", 0, ids, torch.zeros_like(ids)) % self.absent_rounds
        window = (t + phase) // self.absent_rounds
        return randomness.uniform(seed, "churn", 0, ids, window) < self.absent
