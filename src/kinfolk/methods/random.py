"""Random gossip: average with a fresh random handful every round (the `Random` baseline of PANM and PENS)."""

from dataclasses import dataclass

from kinfolk.cohort.cohort import Cohort
from kinfolk.matching import cost
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers
from kinfolk.settings import setting


@register("random")
@dataclass(frozen=True)
class Random:
    """Each round every client averages its model with k peers drawn anew at random."""

    neighbors: int = setting(5, "peers averaged with each round (k)", ge=1, peers=True)

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.gossip(n, self.neighbors, rounds)

    def start(self, cohort: Cohort) -> None:
        return None

    def step(self, t: int, cohort: Cohort, state: None, peers: Peers) -> None:
        cohort.train(t)
        peers.publish(t, weights=cohort.weights)
        neighbors = peers.sample(t, self.neighbors)
        cohort.mix(peers.pull(t, neighbors), neighbors)
