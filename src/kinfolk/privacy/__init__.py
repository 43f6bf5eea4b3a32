"""Differential privacy: what a release costs, who can still afford one, noisy gradients, and an audit of all that."""

from kinfolk.privacy.accounting import Mechanism, calibrate, cost, epsilon, noble
from kinfolk.privacy.dpsgd import PrivateGradients
from kinfolk.privacy.guarantee import Guarantee
from kinfolk.privacy.ledger import Ledger
from kinfolk.privacy.losses import cross_entropy, distilled
from kinfolk.privacy.plan import Plan, plan
from kinfolk.privacy.sampling import draw
from kinfolk.privacy.source import Seeded, System

__all__ = [
    "Guarantee", "Ledger", "Mechanism", "Plan", "PrivateGradients", "Seeded", "System", "calibrate", "cost",
    "cross_entropy", "distilled", "draw", "epsilon", "noble", "plan",
]  # fmt: skip
