"""Personalized peer-to-peer federated learning: every client trains its own model and learns with its kin."""

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.training import Training
from kinfolk.comparison import Comparison, compare
from kinfolk.config import Config
from kinfolk.data.federation import Federation
from kinfolk.errors import UserError
from kinfolk.experiment import Interrupted, Observer, Result, load_federation, resume, run
from kinfolk.methods.registry import register, shared
from kinfolk.peers.base import Peers, Pool
from kinfolk.settings import setting
from kinfolk.version import __version__

__all__ = [
    "Cohort",
    "Comparison",
    "Config",
    "Federation",
    "Interrupted",
    "Observer",
    "Peers",
    "Pool",
    "Result",
    "Training",
    "UserError",
    "__version__",
    "compare",
    "load_federation",
    "register",
    "resume",
    "run",
    "setting",
    "shared",
]
