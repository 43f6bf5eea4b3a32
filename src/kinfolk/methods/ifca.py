"""IFCA: a few global models; every client trains the one that fits its data best, a server averages each.

Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning. NeurIPS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.newcomers import Outsiders, best_of
from kinfolk.data.federation import Part
from kinfolk.errors import UserError
from kinfolk.matching import cost
from kinfolk.methods.fedavg import FedAvg, moved
from kinfolk.methods.registry import register, shared
from kinfolk.peers.base import Peers
from kinfolk.settings import setting


@dataclass(frozen=True)
class State:
    clusters: Tensor  # [m] the model each client uses: of lowest loss on its own training data
    models: Tensor = shared()  # [c, d] the server's models


@register("ifca")
@dataclass(frozen=True)
class IFCA:
    """A server keeps c models; every round each client trains the one with the lowest loss on its own training data,
    and each model becomes the mean of those who trained it, weighted by their numbers of samples.

    The c models start from different random weights, the first from w_0. A model nobody trained stays as it was. A
    client is tested with the model of lowest training loss; where no loss is finite it keeps its last choice. Clients
    that never train choose by the labels of the samples they are tested on, as they have no others. Each participating
    client counts c models down and one up.
    """

    models: int = setting(2, "global models kept by the server (c); at most one for each client", ge=1)
    participation: float = setting(1.0, "share of the clients that train in a round (C)", gt=0, le=1)
    server = True

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.ifca(self.models, rounds, FedAvg(self.participation).count(n) / n)

    def start(self, cohort: Cohort) -> State:
        if self.models > cohort.n > 1:  # a client alone just takes the best of its models
            raise UserError(f"'method.models' = {self.models}, but there are only {cohort.n} clients")
        models = torch.stack([cohort.initial] + [cohort.fresh(number) for number in range(1, self.models)])
        if self.models > 1 and torch.equal(models[0], models[1]):
            raise UserError(
                "method 'ifca' needs different initial models, but no layer of this one has reset_parameters()"
            )
        nobody = torch.zeros(len(cohort), dtype=torch.int64, device=cohort.device)
        return State(_choice(cohort, models, nobody), models)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        # The choice was made at the end of the last round, on these same models.
        cohort.adopt(state.models[state.clusters])
        active = FedAvg(self.participation).participants(t, cohort, peers)
        cohort.train(t, active=active)
        sizes = torch.where(active, cohort.data.train.sizes.to(cohort.device), 0)
        models = []
        for number, before in enumerate(state.models):
            weights = torch.where(state.clusters == number, sizes, 0)
            mean = peers.mean(t, cohort.weights, weights, self.models + 1, before)
            models.append(moved(before, mean))
        state = State(_choice(cohort, torch.stack(models), state.clusters), torch.stack(models))
        cohort.adopt(state.models[state.clusters])
        return state

    def meets(self, cohort: Cohort, state: State, part: Part) -> Outsiders:
        """Clients that never train choose like the others, by the loss on the samples that they are tested on."""
        return best_of(cohort, state.models, part)


def _choice(cohort: Cohort, models: Tensor, before: Tensor) -> Tensor:
    """[m] The model of lowest training loss, the first of equals; the choice `before` where no loss is finite."""
    losses = cohort.train_losses(models).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(losses.isinf().all(dim=1), before, losses.argmin(dim=1))
