"""What clients share and what stays their own, the same for every method that takes `backbone`.

full: the whole model is shared and tested as it is. alt: the last linear layer is a private head; each round a client
trains its head with the body frozen, then the body with the head frozen, and only bodies are averaged. ft: the whole
model is shared, and a client is tested with a copy that it has tuned on its own data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.peers.base import Pool

Kind = Literal["full", "alt", "ft"]
HELP = "full: share and test the whole model; alt: private head, shared body; ft: share all, tune a copy for the test"


@dataclass(frozen=True)
class Backbone:
    """How a method's clients train, judge and mix."""

    kind: Kind
    epochs: int = 1  # on the head alone (alt), or on the copy before a test (ft)

    def start(self, cohort: Cohort) -> None:
        """To be called by the method's `start`: refuses a model that has no head, arranges the tuning."""
        if self.kind == "alt":
            _ = cohort.division
        if self.kind == "ft":
            cohort.tuning = self.epochs

    def head(self, cohort: Cohort) -> slice | None:
        """Columns that are each client's own: what to put in place of a peer's when judging its model."""
        return cohort.division.head if self.kind == "alt" else None

    def body(self, cohort: Cohort) -> slice | None:
        """Columns that are shared; None: all."""
        return cohort.division.body if self.kind == "alt" else None

    def train(self, t: int, cohort: Cohort) -> None:
        """A round of local training."""
        if self.kind == "alt":
            cohort.train(t, part=cohort.division.head, epochs=self.epochs, purpose="head", last=False)
        cohort.train(t, part=self.body(cohort))

    def losses(self, cohort: Cohort, pool: Pool, ids: Tensor, name: str = "weights") -> Tensor:
        """Loss of the peers' models ids [m, c], with the client's own head, on its training samples: [m, c]."""
        return cohort.losses(pool, ids, name, self.head(cohort))

    def mix(
        self,
        cohort: Cohort,
        pool: Pool,
        ids: Tensor,
        coefficients: Tensor | None = None,
        own: Tensor | float = 1.0,
    ) -> None:
        """Average what is shared."""
        cohort.mix(pool, ids, coefficients, own, part=self.body(cohort))
