"""One file per method. Importing this package registers them all."""

from kinfolk.methods import centralized, cfl, fedavg, fedsem, fixed, gossip, ifca, local, oracle, panm, pens, random
from kinfolk.methods.registry import Method, find, names, register, shared, summary

__all__ = [
    "Method",
    "centralized",
    "cfl",
    "fedavg",
    "fedsem",
    "find",
    "fixed",
    "gossip",
    "ifca",
    "local",
    "names",
    "oracle",
    "panm",
    "pens",
    "random",
    "register",
    "shared",
    "summary",
]
