"""One file per method. Importing this package registers them all."""

from kinfolk.methods import centralized, fedavg, fixed, local, oracle, random
from kinfolk.methods.registry import Method, find, names, register, shared, summary

__all__ = [
    "Method",
    "centralized",
    "fedavg",
    "find",
    "fixed",
    "local",
    "names",
    "oracle",
    "random",
    "register",
    "shared",
    "summary",
]
