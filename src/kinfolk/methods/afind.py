"""AFIND and AFIND+: find friendly neighbors, as many as deserve it, and average with them by what they are worth.

Wang, Chen, Guo, Tang: Smart Sampling: Helping from Friendly Neighbors for Decentralized Federated Learning. 2024.

Each round a client takes for friends all whose probability reaches its threshold, sends them its model and hears how
well their gradients at that model agree with its own; everybody trains; it averages with its friends, and updates
probabilities and threshold by what it has heard (`methods/friends.py`, arithmetic in `matching/friendly.py`).

Departures: everybody is a friend in round 1 (the printed threshold is undefined there). A client's own model counts. A
client for whom nobody passes takes the most probable peer. The printed threshold has the wrong direction and the wrong
scale, so that it lets nearly everybody in or, in the end, only that one; "calibrated" is ours. Preset "paper" is
otherwise as printed; preset "robust" remembers similarities and takes opposite gradients for uncertain ones; in AFIND+
it also judges friends' models on a client's own data and asks one more peer at random in every round.
"""

from __future__ import annotations

from dataclasses import dataclass

from kinfolk.cohort.cohort import Cohort
from kinfolk.matching import cost
from kinfolk.methods.backbone import HELP, Backbone, Kind
from kinfolk.methods.choice import Memory
from kinfolk.methods.friends import Contribution, Friends, Taste
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers
from kinfolk.settings import setting


@register("afind")
@dataclass(frozen=True)
class AFIND(Taste):
    """Every client averages with all whose gradients agree with its own, as many as pass a threshold that adapts."""

    backbone: Kind = setting("alt", HELP)
    tune_epochs: int = setting(1, "epochs on the head alone (alt), or on the copy that is tested (ft)", ge=1)

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost at most."""
        return cost.afind(n, self._friends.exchanges, rounds)

    def start(self, cohort: Cohort) -> Memory:
        self._backbone.start(cohort)
        return Memory(**self._friends.start(cohort))

    def step(self, t: int, cohort: Cohort, state: Memory, peers: Peers) -> Memory:
        friends, backbone = self._friends, self._backbone
        chosen = friends.before(t, cohort, state, peers)  # C_i, and what they say of my model
        backbone.train(t, cohort)
        peers.publish(t, weights=cohort.weights)
        pool = peers.pull(t, chosen.ids)
        weighed = friends.after(t, cohort, state, peers, chosen, pool)  # weights, p_i and theta_i
        backbone.mix(cohort, pool, chosen.ids, weighed.coefficients, weighed.own)
        return Memory(**weighed.memory)

    @property
    def _backbone(self) -> Backbone:
        return Backbone(self.backbone, self.tune_epochs)

    @property
    def _friends(self) -> Friends:
        return Friends(self, self._backbone)


@register("afind+")
@dataclass(frozen=True)
class AFINDPlus(AFIND, Contribution):
    """AFIND in which friends count by their contribution: the lower the loss, the more of a model is taken over."""

    weighs = True
