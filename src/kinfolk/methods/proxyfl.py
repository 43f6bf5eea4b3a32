"""ProxyFL: private models at home, noisy proxies handed on around a circle.

Kalra, Wen, Cresswell, Volkovs, Tizhoosh: Decentralized Federated Learning through Proxy Model Sharing. Nature
Communications, 2023.

After local training every client sends its proxy to the one that comes so many places after it, and takes the proxy
that it gets in place of its own (or averages the two). The number of places doubles from round to round, so that what
one client has learnt reaches all others in few rounds. Departures: plain SGD, as in P4, instead of Adam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.matching import cost
from kinfolk.methods.private import Budget, begin
from kinfolk.methods.registry import register
from kinfolk.methods.twins import GAP, Twins
from kinfolk.peers.base import Peers
from kinfolk.settings import setting


@dataclass(frozen=True)
class State:
    personal: Tensor  # [m, d] the private models, what a client is tested with


@register("proxyfl")
@dataclass(frozen=True)
class ProxyFL(Budget):
    """Every client trains a private model and a noisy proxy that learn from each other, and passes the proxy on."""

    mixing: Literal["replace", "half"] = setting("replace", "take the proxy that comes, or average it with one's own")
    alpha: float = setting(0.5, "share of the private model in the proxy's loss", ge=0, le=1)
    beta: float = setting(0.5, "share of the proxy in the private model's loss", ge=0, le=1)
    reverse_kl: bool = setting(False, "distil with KL(own ‖ other) instead of KL(other ‖ own)")
    private_lr: float = setting(0.001, "step of the private model", gt=0)
    only_mean = "hands on one proxy at a time"  # nothing to choose from

    def notices(self, rounds: int) -> list[str]:
        """What the user should know of these settings in a run of so many rounds."""
        return [f"not covered by epsilon: {GAP}"] if self.alpha else []

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.gossip(n, 1 if n > 1 else 0, rounds)

    def start(self, cohort: Cohort) -> State:
        self.open_account(cohort, gaps=[GAP] if self.alpha else [])
        begin(cohort)
        cohort.proxies = True
        cohort.personal = cohort.weights
        return State(cohort.weights)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        both = Twins(self.alpha, self.beta, self.step_size(), self.private_lr, self.reverse_kl)
        personal = both.train(t, cohort, state.personal)
        peers.publish(t, weights=cohort.weights)
        sender = self._sender(t, cohort, peers)
        cohort.mix(peers.pull(t, sender), sender, own=0.0 if self.mixing == "replace" else 1.0)
        cohort.personal = personal
        return State(personal)

    def _sender(self, t: int, cohort: Cohort, peers: Peers) -> Tensor:
        """[m, 1] whose proxy each client gets; -1 for nobody, if that one cannot be reached or there is none."""
        ids = (cohort.ids - places(t, peers.n))[:, None] % peers.n
        return torch.where(peers.reachable(0).gather(1, ids), ids, -1)


def places(t: int, n: int) -> int:
    """How far round t's proxies go among n clients: 2, 4, … from round 1 on, and 1 and again once that is too far."""
    return 2 ** (t % (n - 1).bit_length()) if n > 1 else 0
