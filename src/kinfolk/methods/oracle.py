"""Oracle gossip: random gossip among true kin only (the `Oracle` of PANM): what perfect matching would give."""

from dataclasses import dataclass

from kinfolk.cohort.cohort import Cohort
from kinfolk.errors import UserError
from kinfolk.matching import cost
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers
from kinfolk.settings import setting


@register("oracle")
@dataclass(frozen=True)
class Oracle:
    """Each round every client averages its model with k random peers of its own true cluster.

    It is told what no real client knows, so it is a yardstick and not a method to deploy. A client with fewer than k
    kin takes all of them.
    """

    neighbors: int = setting(5, "kin averaged with each round (k)", ge=1, peers=True)
    needs_clusters = True

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.gossip(n, self.neighbors, rounds)

    def start(self, cohort: Cohort) -> None:
        if cohort.clusters is None:
            raise UserError("method 'oracle' needs true clusters, which this split of the data does not have")

    def step(self, t: int, cohort: Cohort, state: None, peers: Peers) -> None:
        cohort.train(t)
        peers.publish(t, weights=cohort.weights)
        kin = peers.sample(t, self.neighbors, within=cohort.clusters)
        cohort.mix(peers.pull(t, kin), kin)
