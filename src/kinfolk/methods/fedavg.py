"""FedAvg: one model for all, averaged by a server.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.steer import Steer
from kinfolk.matching import cost
from kinfolk.methods.registry import register, shared
from kinfolk.peers.base import Peers
from kinfolk.settings import setting


@dataclass(frozen=True)
class State:
    model: Tensor = shared()  # [d] the server's model


@register("fedavg")
@dataclass(frozen=True)
class FedAvg:
    """A server averages the models of all (or of a random share of the) clients every round; everybody uses the result.

    Weights are the clients' numbers of training samples. Accuracy is the one global model's on every client's own test
    set. If nobody reports in a round the global model stays as it was.
    """

    participation: float = setting(1.0, "share of the clients that train in a round (C)", gt=0, le=1)
    server = True
    one_model = True

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.fedavg(rounds, self.count(n) / n)

    def start(self, cohort: Cohort) -> State:
        return State(cohort.initial)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        cohort.adopt(state.model)
        chosen = self.participants(t, cohort, peers)
        cohort.train(t, active=chosen, steer=self.steer(cohort))
        weights = torch.where(chosen, cohort.data.train.sizes.to(cohort.device), 0)
        mean = peers.mean(t, cohort.weights, weights, before=state.model)
        model = moved(state.model, mean)
        cohort.adopt(model)
        return State(model)

    def steer(self, cohort: Cohort) -> Steer | None:
        """What is done to the gradients of clients that have just taken over the server's model: nothing."""
        return None

    def participants(self, t: int, cohort: Cohort, peers: Peers) -> Tensor:
        """[m] Who trains this round: every process draws the same set for all n clients and looks up its own."""
        drawn = self.visitors(t, cohort.seed, peers.n, cohort.device)
        if drawn is None:
            return torch.ones(len(cohort), dtype=torch.bool, device=cohort.device)
        return torch.isin(cohort.ids, drawn)

    def visitors(self, t: int, seed: int, n: int, device: torch.device) -> Tensor | None:
        """[k] ids of those of n clients that train in round t; None: all."""
        count = self.count(n)
        if count >= n:
            return None
        server = torch.tensor([n], device=device)
        return randomness.positions(seed, "participants", t, server, server, count)[0]

    def count(self, n: int) -> int:
        """How many of n clients train in a round."""
        return max(1, round(self.participation * n))


def moved(model: Tensor, mean: Tensor, rate: float = 1.0) -> Tensor:
    """The server's model [d] after a step of size `rate` towards the mean of what it heard; as it was if nobody was."""
    further = mean if rate == 1 else model + rate * (mean - model)
    return torch.where(torch.isfinite(further).all(), further, model)
