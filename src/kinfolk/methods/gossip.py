"""Gossip: average with some reachable peers at random; the baseline of AFIND+ (with backbone "ft" its FedAvg-FT)."""

from dataclasses import dataclass

from kinfolk.cohort.cohort import Cohort
from kinfolk.matching import cost
from kinfolk.methods import companions
from kinfolk.methods.backbone import HELP, Backbone, Kind
from kinfolk.methods.choice import Choice, Memory
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers
from kinfolk.settings import setting


@register("gossip")
@dataclass(frozen=True)
class Gossip:
    """Each round every client averages with 10 random peers, with a head of its own or tuned before it is tested."""

    neighbors: int = setting(10, "peers averaged with each round (choice random)", ge=1, peers={"choice": "random"})
    choice: companions.Kind = setting("random", "random: any peers; afind: peers and weights as AFIND+ finds them")
    backbone: Kind = setting("alt", HELP)
    tune_epochs: int = setting(1, "epochs on the head alone (alt), or on the copy that is tested (ft)", ge=1)

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return companions.nominal(self.choice, self.neighbors, rounds, n)

    def start(self, cohort: Cohort) -> Memory:
        self._backbone.start(cohort)
        return Memory(**self._choice.start(cohort))

    def step(self, t: int, cohort: Cohort, state: Memory, peers: Peers) -> Memory:
        chosen = self._choice.before(t, cohort, state, peers)
        self._backbone.train(t, cohort)
        peers.publish(t, weights=cohort.weights)
        pool = peers.pull(t, chosen.ids)
        weighed = self._choice.after(t, cohort, state, peers, chosen, pool)
        self._backbone.mix(cohort, pool, chosen.ids, weighed.coefficients, weighed.own)
        return Memory(**weighed.memory)

    @property
    def _backbone(self) -> Backbone:
        return Backbone(self.backbone, self.tune_epochs)

    @property
    def _choice(self) -> Choice:
        return companions.choice(self.choice, self.neighbors, self._backbone)
