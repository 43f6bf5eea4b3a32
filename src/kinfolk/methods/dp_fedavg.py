"""DP-FedAvg: one model for all, averaged by a server that sees noisy models only.

FedAvg by McMahan, Moore, Ramage, Hampson, Agüera y Arcas (AISTATS 2017) with the private steps of Noble, Bellet,
Dieuleveut: Differentially Private Federated Learning on Heterogeneous Data. AISTATS 2022.

The promise is made towards a server that is honest but curious: it sees every client's own model in every round, so
nothing is credited for averaging or for being drawn. A linear model begins at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.matching import cost
from kinfolk.methods.fedavg import FedAvg, moved
from kinfolk.methods.private import Budget, account, begin
from kinfolk.methods.registry import register, shared
from kinfolk.peers.base import Peers
from kinfolk.settings import setting

RATE = 0.3  # eta_0: the best of 0.1, 0.3 and 1 on CIFAR-10 with scattering features, 64 clients, seed 9


@dataclass(frozen=True)
class State:
    model: Tensor = shared()  # [d] x, the server's model


@register("dp-fedavg")
@dataclass(frozen=True)
class DPFedAvg(Budget):
    """Every client takes noisy steps from the server's model; the server moves to the mean of what it gets.

    Everybody who takes part counts alike. Noise is planned for a client that takes part in all rounds; one that is
    drawn less often spends less.
    """

    participation: float = setting(1.0, "share of the clients that take part in a round (u)", gt=0, le=1)
    server_lr: float = setting(1.0, "how far the server goes towards the mean model (eta_g)", gt=0)
    server = True
    one_model = True

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.fedavg(rounds, self.drawing.count(n) / n)

    @property
    def drawing(self) -> FedAvg:
        """Who takes part when."""
        return FedAvg(self.participation)

    @property
    def rate(self) -> float:
        """Of a noisy step (eta_l)."""
        return self.step_size(RATE, self.server_lr)

    def start(self, cohort: Cohort) -> State:
        self.open_account(cohort)
        return State(begin(cohort))

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        cohort.adopt(state.model)
        chosen = self.chosen(t, cohort, peers)
        cohort.weights = account(cohort).trained(t, cohort.weights, self.rate, chosen)
        mean = peers.mean(t, cohort.weights, chosen, before=state.model)
        model = moved(state.model, mean, self.server_lr)
        cohort.adopt(model)
        return State(model)

    def chosen(self, t: int, cohort: Cohort, peers: Peers) -> Tensor:
        """[m] who takes part: nobody without records. On the CPU if all others do, so that no GPU is asked."""
        known = cohort.data.train.sizes > 0
        return known if self.participation == 1 else self.drawing.participants(t, cohort, peers).cpu() & known
