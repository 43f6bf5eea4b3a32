"""What is promised, with everything that has to stand beside an epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kinfolk.privacy.accounting import RECORD, Accountant, Mechanism, accountant_version, cost, merge

_ADJACENT = {"replace-one": "replacing", "add-remove": "adding or removing"}


@dataclass(frozen=True)
class Guarantee:
    """An epsilon, and what it means."""

    epsilon: float  # accounted, over all releases
    delta: float
    adjacency: str
    unit: str
    sampling: str  # none, poisson, without-replacement; several joined by " and "
    releases: int
    accountant: str
    version: str  # of the library that computed it
    simulated: bool  # the noise was seeded, so whoever knows the seed can take it off
    nominal: float | None = None  # what a closed formula of a paper claims
    gaps: tuple[str, ...] = ()  # what the epsilon does not cover

    @classmethod
    def of(
        cls,
        mechanisms: Sequence[Mechanism],
        delta: float,
        *,
        simulated: bool,
        accountant: Accountant = "best",
        nominal: float | None = None,
        gaps: Sequence[str] = (),
    ) -> Guarantee:
        """The guarantee of all the mechanisms together."""
        merged = merge(mechanisms)
        paid = cost(merged, delta, accountant)
        kinds = sorted({one.sampling for one in merged})
        first = mechanisms[0] if mechanisms else None
        return cls(
            epsilon=paid.epsilon,
            delta=delta,
            adjacency="replace-one" if first is None else first.adjacency,
            unit=RECORD if first is None else first.unit,
            sampling=" and ".join(kinds) or "none",
            releases=sum(one.releases for one in merged),
            accountant=paid.accountant,
            version=accountant_version(),
            simulated=simulated,
            nominal=nominal,
            gaps=tuple(gaps),
        )

    def as_dict(self) -> dict[str, Any]:
        """For result files."""
        return {**asdict(self), "gaps": list(self.gaps)}

    def __str__(self) -> str:
        """One line for people."""
        start = "simulated, not private" if self.simulated else "private"
        nominal = "" if self.nominal is None else f" accounted (nominal {self.nominal:g}, which is no guarantee)"
        sampling = "no sampling" if self.sampling == "none" else f"sampling {self.sampling}"
        gaps = "" if not self.gaps else f"; not covered: {', '.join(self.gaps)}"
        return (
            f"{start}: epsilon {self.epsilon:.4g}{nominal} at delta {self.delta:.4g} for {_ADJACENT[self.adjacency]} "
            f"{self.unit}, {self.releases} releases, {sampling}, by {self.accountant} ({self.version}){gaps}"
        )
