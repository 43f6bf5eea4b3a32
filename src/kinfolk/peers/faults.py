"""Seeded trouble: lost messages, absent clients and clients that lie, the same in a simulation and on a network."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.errors import UserError
from kinfolk.settings import setting

Kind = Literal["sign-flip", "label-flip", "gaussian", "ipm", "alie", "mimic", "nan", "free-rider", "gaming"]
SCALED = ("sign-flip", "gaussian", "ipm", "alie", "gaming")  # attacks that `attack_scale` says something about
AIMED = ("mimic", "gaming")  # attacks on one client


@dataclass(frozen=True)
class Faults:
    """What goes wrong, as probabilities. Every draw is a pure function of the seed, so a bad run can be repeated."""

    loss: float = setting(0.0, "probability that an answer from one client to another is lost", ge=0, lt=1)
    absent: float = setting(0.0, "probability that a client is away for a while (churn)", ge=0, lt=1)
    absent_rounds: int = setting(1, "how many rounds a client stays away", ge=1)
    attackers: float | list[int] | None = setting(None, "clients that lie: a share, drawn at random, or their numbers")
    attack: Kind | None = setting(None, "what they do: see `kinfolk list attacks`")
    attack_scale: float | None = setting(None, "how strong it is; none: as the attack itself has it", gt=0)
    attack_start: int | None = setting(None, "first round in which they lie; none: 1", ge=1)
    attack_victim: int | None = setting(None, "whom mimic copies and gaming pursues; none: first, or drawn", ge=0)

    def __post_init__(self) -> None:
        if (self.attackers is None) != (self.attack is None):
            there, missing = ("attack", "attackers") if self.attackers is None else ("attackers", "attack")
            raise UserError(f"'{there}' goes with '{missing}', which is not given")
        if self.attack is None:
            for name in ("attack_scale", "attack_start", "attack_victim"):
                if getattr(self, name) is not None:
                    raise UserError(f"'{name}' goes with 'attack', which is not given")
            return
        if self.attack_scale is not None and self.attack not in SCALED:
            raise UserError(f"'attack_scale': {self.attack} has no scale, only {', '.join(SCALED)}")
        if self.attack_victim is not None and self.attack not in AIMED:
            raise UserError(f"'attack_victim': {self.attack} has no victim, only {', '.join(AIMED)}")
        if self.attack == "label-flip" and (self.attack_start or 1) > 1:
            raise UserError(f"'attack_start' = {self.attack_start}: label-flip changes the data before round 1")
        self._check_attackers()

    def _check_attackers(self) -> None:
        given = self.attackers
        if isinstance(given, list):
            if min(given, default=0) < 0 or len(set(given)) < len(given):
                raise UserError(f"'attackers' = {given}: must be different numbers of clients, from 0 on")
        elif given is not None and not 0 <= given < 1:
            raise UserError(f"'attackers' = {given}: must be a share of the clients, at least 0 and less than 1")

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
