"""FedAvg-FT: one model for all, which every client tunes on its own data before it uses it.

The global model is trained as in FedAvg (McMahan et al., AISTATS 2017). What is tested is a copy that a client has
trained for one more epoch; nobody ever sees that copy.
"""

from dataclasses import dataclass

from kinfolk.cohort.cohort import Cohort
from kinfolk.methods.fedavg import FedAvg, State
from kinfolk.methods.registry import register
from kinfolk.settings import setting


@register("fedavg-ft")
@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg with a tenth of the clients each round; every client is tested with a copy of the global model that it has
    tuned on its own data for an epoch."""

    participation: float = setting(0.1, "share of the clients that train in a round (C)", gt=0, le=1)
    tune_epochs: int = setting(1, "epochs on the copy that is tested", ge=1)
    one_model = False

    def start(self, cohort: Cohort) -> State:
        cohort.tuning = self.tune_epochs
        return super().start(cohort)
