"""FedProx: FedAvg whose clients are held near the server's model while they train.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020.
"""

from dataclasses import dataclass

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.steer import Proximal, Steer
from kinfolk.methods.fedavg import FedAvg
from kinfolk.methods.registry import register
from kinfolk.settings import setting


@register("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg in which every client's loss has a penalty on the distance from the server's model of the round.

    The penalty is mu/2 · |w - w_server|². Without it this is FedAvg, bit for bit.
    """

    penalty: float = setting(0.01, "strength of the pull towards the server's model (mu); 0: FedAvg", ge=0)

    def steer(self, cohort: Cohort) -> Steer | None:
        return Proximal(cohort.weights, self.penalty) if self.penalty else None
