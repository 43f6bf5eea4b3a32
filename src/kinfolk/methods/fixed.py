"""Fixed topology: choose a handful of peers once and stay with them (the `FixTopology` baseline of PANM)."""

from dataclasses import dataclass

from kinfolk.cohort.cohort import Cohort
from kinfolk.matching import cost
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers
from kinfolk.settings import setting


@register("fixed")
@dataclass(frozen=True)
class Fixed:
    """Every client draws k peers once, at random, and averages its model with those same peers every round.

    The graph is directed: being chosen by a peer does not mean choosing it. A draw is a function of the seed and the
    round, so drawing "in round 0" every time gives the same peers and needs no state.
    """

    neighbors: int = setting(5, "peers averaged with each round (k)", ge=1, peers=True)

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.gossip(n, self.neighbors, rounds)

    def start(self, cohort: Cohort) -> None:
        return None

    def step(self, t: int, cohort: Cohort, state: None, peers: Peers) -> None:
        cohort.train(t)
        peers.publish(t, weights=cohort.weights)
        neighbors = peers.sample(0, self.neighbors)
        cohort.mix(peers.pull(t, neighbors), neighbors)
