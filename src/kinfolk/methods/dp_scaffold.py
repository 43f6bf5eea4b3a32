"""DP-SCAFFOLD: DP-FedAvg in which every client takes its own bias out of its noisy steps.

Noble, Bellet, Dieuleveut: Differentially Private Federated Learning on Heterogeneous Data. AISTATS 2022.

Controls are means of gradients that already are noisy, and charged: they cost nothing and get no noise of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.errors import UserError
from kinfolk.matching import cost
from kinfolk.methods.dp_fedavg import DPFedAvg
from kinfolk.methods.fedavg import moved
from kinfolk.methods.private import account, begin, found
from kinfolk.methods.registry import register, shared
from kinfolk.peers.base import Peers
from kinfolk.settings import setting

WARM = 4  # times that a client takes part in a warm start, on average


@dataclass(frozen=True)
class State:
    control: Tensor  # [m, d] c_i, the mean noisy gradient of a client when it last took part
    model: Tensor = shared()  # [d] x, the server's model
    common: Tensor = shared()  # [d] c, the mean of all clients' controls


@register("dp-scaffold")
@dataclass(frozen=True)
class DPScaffold(DPFedAvg):
    """DP-FedAvg whose clients step along g + c - c_i: a noisy gradient, with what is usual for the client replaced by
    what is usual for everybody.

    Controls are zero until a client first takes part, so round 1 is that of DP-FedAvg.
    """

    warm_start: bool = setting(False, "first round(4/u) rounds in which only controls are found, at the initial model")

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula; in a warm start only controls travel."""
        whole = cost.scaffold(rounds, self.drawing.count(n) / n)
        warm = min(rounds, self.warm_rounds) / rounds
        return replace(whole, total=whole.total * (1 - warm / 2))

    @property
    def warm_rounds(self) -> int:
        return round(WARM / self.participation) if self.warm_start else 0

    def start(self, cohort: Cohort) -> State:  # type: ignore[override]
        if self.warm_rounds and cohort.rounds is not None and cohort.rounds <= self.warm_rounds:
            raise UserError(
                f"method.warm_start takes {self.warm_rounds} rounds (4/participation), but the run has only "
                f"{cohort.rounds}: make it longer, or participation larger"
            )
        self.open_account(cohort)
        model = begin(cohort)
        return State(torch.zeros_like(cohort.weights), model, torch.zeros_like(model))

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:  # type: ignore[override]
        cohort.adopt(state.model)
        chosen = self.chosen(t, cohort, peers)
        if t <= self.warm_rounds:
            return self._control(t, cohort, state, peers, chosen, self._gradient(t, cohort, chosen))
        shift = state.common - state.control
        cohort.weights = account(cohort).trained(t, cohort.weights, self.rate, chosen, shift)
        gradient = (state.model - cohort.weights) / (self.local_steps * self.rate) - shift
        mean = peers.mean(t, cohort.weights, chosen, before=state.model)
        state = self._control(t, cohort, state, peers, chosen, gradient)
        model = moved(state.model, mean, self.server_lr)
        cohort.adopt(model)
        return replace(state, model=model)

    def _gradient(self, t: int, cohort: Cohort, chosen: Tensor) -> Tensor:
        """[m, d] the mean of a round's noisy gradients at the server's model."""
        releases = account(cohort)
        may = releases.charge(t, chosen)
        total = torch.zeros_like(cohort.weights)
        for step in range(self.local_steps):
            batches = releases.batches(t, step, may)
            gradient, sums = releases.gradient(t, step, cohort.weights, batches)
            total += gradient
            loss = found(sums, batches)
        return releases.settled(torch.zeros_like(total), total / self.local_steps, may, loss)

    def _control(
        self, t: int, cohort: Cohort, state: State, peers: Peers, chosen: Tensor, gradient: Tensor
    ) -> State:  # fmt: skip
        """c_i becomes the mean noisy gradient [m, d] of the round, and c moves by 1/M of every change it hears of."""
        took = chosen.to(cohort.device) & ~cohort.silent()
        control = torch.where(took[:, None], gradient, state.control)
        common = state.common + peers.total(t, control - state.control, took.to(torch.float64) / peers.n)
        return replace(state, control=control, common=common)
