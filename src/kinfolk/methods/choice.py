"""Whom to average with and with what weights, apart from what is averaged: a part that methods are composed of.

A round has two halves, with the local training between them:

    chosen = choice.before(t, cohort, state, peers)           # whom, from what is known so far
    ...train, publish "weights", pull the chosen...
    weighed = choice.after(t, cohort, state, peers, chosen, pool)

The state of a choice is part of the method's own: `class State(choice.Memory)`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.peers.base import Peers, Pool


@dataclass(frozen=True)
class Memory:
    """What a choice remembers of each peer; [m, 0] where it remembers nothing."""

    neighbors: Tensor  # [m, *] ids chosen last, -1 for none
    probability: Tensor  # [m, n] float64
    threshold: Tensor  # [m] float64
    similarity: Tensor  # [m, n] float64, NaN: never seen
    loss: Tensor  # [m, n] float64, smoothed; NaN: never seen
    fallbacks: Tensor  # [m] rounds in which nobody was good enough and the best was taken all the same
    counted: ClassVar = "fallbacks", ("nobody_passed",)


def nothing(cohort: Cohort, width: int = 0) -> dict[str, Tensor]:
    """The fields of a memory before round 1, with `width` columns for peers."""
    m, device = len(cohort), cohort.device
    unknown = torch.full((m, width), torch.nan, dtype=torch.float64, device=device)
    return {
        "neighbors": torch.zeros(m, 0, dtype=torch.int64, device=device),
        "probability": torch.zeros(m, width, dtype=torch.float64, device=device),
        "threshold": torch.zeros(m, dtype=torch.float64, device=device),
        "similarity": unknown,
        "loss": unknown,
        "fallbacks": torch.zeros(m, dtype=torch.int64, device=device),
    }


@dataclass(frozen=True)
class Chosen:
    """The first half of a round."""

    ids: Tensor  # [m, k] peers, -1 for none
    seen: Any = None  # whatever the choice wants to know again in the second half


@dataclass(frozen=True)
class Weighed:
    """The second half: weights of the chosen beside one's own, scaled to sum to one when models are mixed."""

    coefficients: Tensor | None  # [m, k]; None: all alike
    own: Tensor | float
    memory: dict[str, Tensor]  # the fields of the new memory


class Choice(Protocol):
    """A way to choose peers."""

    def start(self, cohort: Cohort) -> dict[str, Tensor]:
        """The fields of the memory before round 1."""

    def before(self, t: int, cohort: Cohort, memory: Memory, peers: Peers) -> Chosen:
        """Whom to average with in round t. The cohort's models are those before training."""

    def after(self, t: int, cohort: Cohort, memory: Memory, peers: Peers, chosen: Chosen, pool: Pool) -> Weighed:
        """With what weights. The cohort's models are trained and published as "weights"; pool holds the chosen's."""


@dataclass(frozen=True)
class Anybody:
    """Peers at random, all with the same weight as oneself: gossip."""

    count: int

    def start(self, cohort: Cohort) -> dict[str, Tensor]:
        return nothing(cohort)

    def before(self, t: int, cohort: Cohort, memory: Memory, peers: Peers) -> Chosen:
        return Chosen(peers.sample(t, self.count))

    def after(self, t: int, cohort: Cohort, memory: Memory, peers: Peers, chosen: Chosen, pool: Pool) -> Weighed:
        known = {field.name: getattr(memory, field.name) for field in fields(Memory)}
        return Weighed(None, 1.0, known | {"neighbors": chosen.ids})
