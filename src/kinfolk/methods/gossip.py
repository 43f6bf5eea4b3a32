"""Gossip: average with some reachable peers at random; the baseline of AFIND+ (with backbone "ft" its FedAvg-FT)."""

from dataclasses import dataclass

from kinfolk.cohort.cohort import Cohort
from kinfolk.matching import cost
from kinfolk.methods.backbone import HELP, Backbone, Kind
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers
from kinfolk.settings import setting


@register("gossip")
@dataclass(frozen=True)
class Gossip:
    """Each round every client averages with 10 random peers, with a head of its own or tuned before it is tested."""

    neighbors: int = setting(10, "peers averaged with each round", ge=1, peers=True)
    backbone: Kind = setting("alt", HELP)
    tune_epochs: int = setting(1, "epochs on the head alone (alt), or on the copy that is tested (ft)", ge=1)

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.gossip(n, self.neighbors, rounds)

    def start(self, cohort: Cohort) -> None:
        self._backbone.start(cohort)

    def step(self, t: int, cohort: Cohort, state: None, peers: Peers) -> None:
        self._backbone.train(t, cohort)
        peers.publish(t, weights=cohort.weights)
        neighbors = peers.sample(t, self.neighbors)
        self._backbone.mix(cohort, peers.pull(t, neighbors), neighbors)

    @property
    def _backbone(self) -> Backbone:
        return Backbone(self.backbone, self.tune_epochs)
