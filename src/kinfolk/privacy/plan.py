"""How much noise each client needs for its budget: from its number of records, the rounds, and a rule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kinfolk.errors import UserError
from kinfolk.privacy.accounting import Adjacency, Mechanism, Sampling, calibrate, check_budget, noble
from kinfolk.privacy.sampling import batch_sizes

Rule = Literal["calibrated", "rdp", "noble"]


@dataclass(frozen=True)
class Plan:
    """One mechanism for each kind of client; `releases` of a mechanism are the steps of one round."""

    mechanisms: tuple[Mechanism, ...]
    which: Tensor  # [m] the mechanism of each client
    delta: Tensor  # [m] float64
    nominal: float | None  # the epsilon that a paper's formula claims, if it was used

    def deviation(self, clip: float) -> Tensor:
        """[m] float64: standard deviation of the noise on each client's sum."""
        each = torch.tensor([one.deviation(clip) for one in self.mechanisms], dtype=torch.float64)
        return each[self.which]

    def rate(self) -> Tensor:
        """[m] float64: share of its records that a client samples."""
        return torch.tensor([one.rate for one in self.mechanisms], dtype=torch.float64)[self.which]


def plan(
    sizes: Tensor,
    epsilon: float,
    rounds: int,
    *,
    delta: float | None = None,
    steps: int = 1,
    rate: float = 1.0,
    sampling: Sampling = "none",
    adjacency: Adjacency = "replace-one",
    rule: Rule = "calibrated",
) -> Plan:
    """Noise with which clients of `sizes` [m] records can release `steps` gradients in each of `rounds` rounds.

    delta: none for 1/records of each client. rule: calibrated, the least noise that the best accountant allows; rdp,
    the same by Rényi divergences; noble, the paper's formula, whose epsilon is nominal.
    """
    sizes = sizes.cpu()
    if not sizes.numel() or int(sizes.max()) < 1:
        raise UserError("nobody has any records to protect")
    smallest = int(sizes[sizes > 0].min())
    if delta is None and smallest < 2:
        raise UserError("a client with a single record cannot have delta = 1/records: give another delta")
    check_budget(epsilon, 1 / smallest if delta is None else delta, smallest)
    known: dict[tuple[float, Mechanism], int] = {}
    deltas, which = [], []
    kinds, members = torch.unique(sizes.clamp(min=smallest), return_inverse=True)  # who has none releases noise only
    for size in kinds.tolist():
        own = 1 / size if delta is None else delta
        share = float(batch_sizes(torch.tensor(size), rate)) / size if sampling == "without-replacement" else rate
        blank = Mechanism(1.0, share, sampling if share < 1 else "none", adjacency, releases=rounds * steps)
        mechanism = _with_noise(blank, epsilon, own, rounds, steps, rule)
        which.append(known.setdefault((own, mechanism), len(known)))
        deltas.append(own)
    return Plan(
        tuple(mechanism for _, mechanism in known),
        torch.tensor(which)[members],
        torch.tensor(deltas, dtype=torch.float64)[members],
        epsilon if rule == "noble" else None,
    )


@lru_cache(maxsize=4096)
def _with_noise(blank: Mechanism, epsilon: float, delta: float, rounds: int, steps: int, rule: Rule) -> Mechanism:
    if rule == "noble":
        multiplier = noble(epsilon, delta, blank.rate, rounds, steps)
    else:
        multiplier = calibrate(epsilon, delta, blank, "rdp" if rule == "rdp" else "best")
    return Mechanism(multiplier, blank.rate, blank.sampling, blank.adjacency, releases=steps)
