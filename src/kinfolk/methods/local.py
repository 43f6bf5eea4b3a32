"""Local training: what a client reaches with nobody's help, and so the line every other method must beat."""

from dataclasses import dataclass

from kinfolk.cohort.cohort import Cohort
from kinfolk.matching import cost
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers


@register("local")
@dataclass(frozen=True)
class Local:
    """Every client trains alone on its own data; nothing is exchanged."""

    averages = False

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.nothing()

    def start(self, cohort: Cohort) -> None:
        return None

    def step(self, t: int, cohort: Cohort, state: None, peers: Peers) -> None:
        cohort.train(t)
