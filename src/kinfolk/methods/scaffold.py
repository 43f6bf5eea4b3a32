"""SCAFFOLD: FedAvg in which every client takes its own bias out of its steps.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning. ICML
2020. Controls are those of the paper's option II. Two things that it does not speak of: where training has momentum, a
client's way is divided by how far unit gradients would have carried it; and whose message to the server is lost has a
new control that the server does not know of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.steer import Shifted
from kinfolk.cohort.training import Training, local_steps
from kinfolk.matching import cost
from kinfolk.methods.fedavg import FedAvg, moved
from kinfolk.methods.registry import register, shared
from kinfolk.peers.base import Peers
from kinfolk.settings import setting


@dataclass(frozen=True)
class State:
    control: Tensor  # [m, d] c_i, the mean gradient of a client when it last took part
    model: Tensor = shared()  # [d] x, the server's model
    common: Tensor = shared()  # [d] c, the mean of all clients' controls


@register("scaffold")
@dataclass(frozen=True)
class Scaffold:
    """FedAvg whose clients step along g + c - c_i: a gradient, with what is usual for the client replaced by what is
    usual for everybody.

    c_i is the mean gradient of the client's last round, c the mean of c_i over all clients, 0 for whoever has not yet
    taken part. In round 1 this is FedAvg. Models are weighted by numbers of samples, controls are not.
    """

    participation: float = setting(1.0, "share of the clients that train in a round (C)", gt=0, le=1)
    server_lr: float = setting(1.0, "how far the server goes towards the mean model (eta_g)", gt=0)
    server = True
    one_model = True

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.scaffold(rounds, FedAvg(self.participation).count(n) / n)

    def visitors(self, t: int, seed: int, n: int, device: torch.device) -> Tensor | None:
        """[k] ids of those of n clients that train in round t; None: all."""
        return FedAvg(self.participation).visitors(t, seed, n, device)

    def start(self, cohort: Cohort) -> State:
        nothing = torch.zeros_like(cohort.initial)
        control = torch.zeros(len(cohort), cohort.layout.size, dtype=cohort.dtype, device=cohort.device)
        return State(control, cohort.initial, nothing)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        cohort.adopt(state.model)
        chosen = FedAvg(self.participation).participants(t, cohort, peers)
        shift = state.common - state.control
        cohort.train(t, active=chosen, steer=Shifted(shift))
        trained = chosen & ~cohort.silent() & (cohort.data.train.sizes > 0).to(cohort.device)
        lengths = path_length(cohort.data.train.sizes, cohort.training, t).to(cohort.device, cohort.dtype)
        found = (state.model - cohort.weights) / lengths[:, None] - shift
        control = torch.where(trained[:, None], found, state.control)
        sizes = torch.where(chosen, cohort.data.train.sizes.to(cohort.device), 0)
        mean = peers.mean(t, cohort.weights, sizes, before=state.model)
        common = state.common + peers.total(t, control - state.control, trained / peers.n)
        model = moved(state.model, mean, self.server_lr)
        cohort.adopt(model)
        return State(control, model, common)


def path_length(sizes: Tensor, training: Training, t: int) -> Tensor:
    """How far clients of sizes [m] would go in round t if every gradient were one: [m] float64, 1 without steps.

    Without momentum that is the number of steps times their size. With it the gradient of a step is followed in all
    later ones too, in the k-th of s in all by (1 - momentum^(s-k)) / (1 - momentum).
    """
    steps = local_steps(sizes, training).to(torch.float64)
    momentum = training.momentum
    carried = momentum * (1 - momentum**steps) / (1 - momentum)
    length = training.rate(t) * (steps - carried) / (1 - momentum)
    return torch.where(steps > 0, length, 1.0)
