"""Ditto: a common model, and beside it a personal one that is held near it.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.steer import Proximal
from kinfolk.matching import cost
from kinfolk.methods import companions
from kinfolk.methods.choice import Choice, Memory
from kinfolk.methods.fedavg import FedAvg, moved
from kinfolk.methods.registry import register, shared
from kinfolk.peers.base import Peers
from kinfolk.settings import setting


@dataclass(frozen=True)
class State(Memory):
    personal: Tensor  # [m, d] v_i, what a client is tested with
    model: Tensor = shared()  # [d] the server's model (consensus fedavg)


@register("ditto")
@dataclass(frozen=True)
class Ditto:
    """Every client trains a common model that it averages with 10 random peers (or through a server), and a personal
    one with a penalty on its distance from the common model as it was when the round began.

    The personal model is what is tested; it is never sent. A client one of whose models is not finite after training
    is in quarantine with both. Through a server only those drawn for a round train, either model.
    """

    consensus: Literal["gossip", "fedavg"] = setting(
        "gossip", "how the common model is averaged: among peers, or by a server"
    )
    neighbors: int = setting(
        10,
        "peers averaged with each round (gossip, choice random)",
        ge=1,
        peers={"consensus": "gossip", "choice": "random"},
    )
    choice: companions.Kind = setting("random", "gossip: any peers, or peers and weights as AFIND+ finds them")
    participation: float = setting(0.1, "share of the clients that train in a round (fedavg)", gt=0, le=1)
    penalty: float = setting(0.5, "strength of the pull towards the common model (lambda)", ge=0)
    personal_epochs: int = setting(5, "passes of the personal model over the local data per round", ge=1)
    server = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "server", self.consensus == "fedavg")

    def notices(self, rounds: int) -> list[str]:
        """What the user should know of these settings in a run of so many rounds."""
        if self.consensus == "fedavg" and self.choice != "random":
            return ["method.choice: nobody chooses peers where a server averages (method.consensus = fedavg)"]
        return []

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        if self.consensus == "fedavg":
            return cost.fedavg(rounds, FedAvg(self.participation).count(n) / n)
        return companions.nominal(self.choice, self.neighbors, rounds, n)

    def start(self, cohort: Cohort) -> State:
        return State(**self._choice.start(cohort), personal=cohort.weights, model=cohort.initial)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        step = self._among_peers if self.consensus == "gossip" else self._through_server
        return step(t, cohort, state, peers)

    def _among_peers(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        chosen = self._choice.before(t, cohort, state, peers)
        personal = self._train(t, cohort, state)
        peers.publish(t, weights=cohort.weights)
        pool = peers.pull(t, chosen.ids)
        weighed = self._choice.after(t, cohort, state, peers, chosen, pool)
        cohort.mix(pool, chosen.ids, weighed.coefficients, weighed.own)
        return State(**weighed.memory, personal=personal, model=state.model)

    def _through_server(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        cohort.adopt(state.model)
        active = FedAvg(self.participation).participants(t, cohort, peers)
        personal = self._train(t, cohort, state, active)
        sizes = torch.where(active, cohort.data.train.sizes.to(cohort.device), 0)
        mean = peers.mean(t, cohort.weights, sizes, before=state.model)
        model = moved(state.model, mean)
        cohort.adopt(model)
        return replace(state, personal=personal, model=model)

    def _train(self, t: int, cohort: Cohort, state: State, active: Tensor | None = None) -> Tensor:
        """Train both models from where the round found them: the new personal ones [m, d]."""
        pull = Proximal(cohort.weights, self.penalty)
        personal, _ = cohort.trained(state.personal, t, active, epochs=self.personal_epochs, steer=pull)
        cohort.personal = personal
        cohort.train(t, active)
        return personal

    @property
    def _choice(self) -> Choice:
        return companions.choice(self.choice if self.consensus == "gossip" else "random", self.neighbors)
