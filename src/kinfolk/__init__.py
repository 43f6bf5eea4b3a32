"""Personalized peer-to-peer federated learning: every client trains its own model and learns with its kin."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from kinfolk.version import __version__

# OpenMP threads spin while they wait. Unbounded, that makes small steps up to ten times slower as soon as another
# process wants a core (measured on two cores); a bound costs an idle machine little. It only takes effect if torch is
# not loaded yet, and a user's own choice wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# On some processors the last bit of MKL's products depends on where in memory a matrix begins, so that a client's would
# on who else is in its chunk. This forbids it (docs/decisions/013). It takes effect before the first product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if TYPE_CHECKING:
    from kinfolk.assembly import load_federation
    from kinfolk.cohort.cohort import Cohort
    from kinfolk.cohort.training import Training
    from kinfolk.comparison import Comparison, compare
    from kinfolk.config import Config
    from kinfolk.data.federation import Federation
    from kinfolk.errors import UserError
    from kinfolk.experiment import Interrupted, Observer, Result, resume, run
    from kinfolk.exporting import export
    from kinfolk.methods.registry import register, shared
    from kinfolk.peers.base import Peers, Pool
    from kinfolk.settings import setting

# Where each public name lives. Loaded when first used, so that `kinfolk --help` does not wait for torch.
_HOMES = {
    "Cohort": "cohort.cohort",
    "Comparison": "comparison",
    "Config": "config",
    "Federation": "data.federation",
    "Interrupted": "experiment",
    "Observer": "experiment",
    "Peers": "peers.base",
    "Pool": "peers.base",
    "Result": "experiment",
    "Training": "cohort.training",
    "UserError": "errors",
    "compare": "comparison",
    "export": "exporting",
    "load_federation": "assembly",
    "register": "methods.registry",
    "resume": "experiment",
    "run": "experiment",
    "setting": "settings",
    "shared": "methods.registry",
}

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
    "export",
    "load_federation",
    "register",
    "resume",
    "run",
    "setting",
    "shared",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kinfolk' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"kinfolk.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
