"""What a client makes of its own model and those of peers when some of these may be bad."""

from kinfolk.aggregation.centered import Balance, Clipping, Ubar
from kinfolk.aggregation.coordinates import Mean, Median, TrimmedMean
from kinfolk.aggregation.inbox import Inbox, Losses
from kinfolk.aggregation.krum import Krum, MKrum
from kinfolk.aggregation.registry import Rule, check, find, make, names, register

__all__ = [
    "Balance", "Clipping", "Inbox", "Krum", "Losses", "MKrum", "Mean", "Median", "Rule", "TrimmedMean", "Ubar",
    "check", "find", "make", "names", "register",
]  # fmt: skip
