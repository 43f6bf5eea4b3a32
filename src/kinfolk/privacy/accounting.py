"""What releases cost: mechanisms, and the epsilon at a delta that an accountant gives them.

The noise multiplier is the standard deviation of the noise on a sum over the most that one record can move this sum:
C if neighbouring data sets differ by one record more or less, 2C if one record is replaced. It is σ_g of the
P4 and Noble papers.

Accountants:
- gaussian: no sampling. Releases with multipliers σ compose to one with 1/σ² summed, whose epsilon is known exactly.
- pld: Poisson sampling, perhaps beside plain releases. Privacy loss distributions of dp-accounting, rounded up.
- rdp: sampling without replacement under replace-one, perhaps beside plain releases. Rényi divergences
  of orders 2 to 200.
- unsampled: the exact value as if nothing had been sampled, which bounds any of the above.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from kinfolk.errors import UserError

Sampling = Literal["none", "poisson", "without-replacement"]
Adjacency = Literal["replace-one", "add-remove"]
Accountant = Literal["best", "rdp", "unsampled"]

RECORD = "one record of one client"
FINE, COARSE = 1e-4, 1e-3  # widths of the grid that privacy losses are rounded up to
ORDERS = np.arange(2, 201)
WIDEST = 300.0  # privacy loss of one release above which a grid would be too long
CLOSE = 1e-5  # how near a calibrated multiplier is to the least that would do
DECIMALS = 1e6  # an epsilon is rounded up to the sixth decimal, and half a unit more for what floats have lost


@dataclass(frozen=True, order=True)
class Mechanism:
    """Sums of clipped gradients, released with Gaussian noise."""

    noise_multiplier: float  # standard deviation of the noise over the most one record can move the sum
    rate: float = 1.0  # share of a client's records that is sampled (Poisson: probability of each)
    sampling: Sampling = "none"
    adjacency: Adjacency = "replace-one"
    unit: str = RECORD
    releases: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise UserError(f"noise multiplier {self.noise_multiplier:g}: must be a positive number")
        if not 0 < self.rate <= 1:
            raise UserError(f"sampling rate {self.rate:g}: must be greater than 0 and at most 1")
        if self.releases < 0:
            raise UserError(f"{self.releases} releases: must not be negative")
        if self.sampling not in ("none", "poisson", "without-replacement"):
            raise UserError(f"unknown sampling '{self.sampling}': known: none, poisson, without-replacement")
        if self.adjacency not in ("replace-one", "add-remove"):
            raise UserError(f"unknown adjacency '{self.adjacency}': known: replace-one, add-remove")
        if self.sampling == "none" and self.rate < 1:
            raise UserError(f"a sampling rate of {self.rate:g} needs a way of sampling: poisson or without-replacement")
        if self.sampling == "without-replacement" and self.adjacency != "replace-one":
            raise UserError("sampling without replacement is accounted for adjacency 'replace-one' only")

    @property
    def sampled(self) -> bool:
        """Whether some records are left out."""
        return self.rate < 1

    @property
    def sensitivity(self) -> int:
        """The most that one record can move the sum, in clipping norms."""
        return 2 if self.adjacency == "replace-one" else 1

    def deviation(self, clip: float) -> float:
        """Standard deviation of the noise on the sum of gradients clipped to `clip`."""
        return self.noise_multiplier * self.sensitivity * clip


@dataclass(frozen=True)
class Cost:
    """An epsilon and who computed it."""

    epsilon: float
    accountant: str  # gaussian, pld, rdp or unsampled


def epsilon(mechanisms: Sequence[Mechanism], delta: float, accountant: Accountant = "best") -> float:
    """What all the mechanisms together cost at `delta`."""
    return cost(mechanisms, delta, accountant).epsilon


def cost(
    mechanisms: Sequence[Mechanism], delta: float, accountant: Accountant = "best", interval: float = FINE
) -> Cost:
    """What all the mechanisms together cost at `delta`, rounded up; interval: width of the grid of the pld.

    best: the smallest of the bounds that hold; rdp: that bound whatever else is known.
    """
    check_delta(delta)
    merged = merge(mechanisms)
    if not merged:
        return Cost(0.0, "gaussian")
    found = _sampled_cost(merged, delta, accountant, interval)
    if accountant == "rdp" and found is not None:
        return found
    name = "unsampled" if any(one.sampled for one in merged) else "gaussian"
    plain = Cost(_rounded(_gaussian_epsilon(merged, delta)), name)
    return plain if found is None or plain.epsilon < found.epsilon else found


def _rounded(value: float) -> float:
    return math.ceil(value * DECIMALS + 0.5) / DECIMALS


def _sampled_cost(mechanisms: tuple[Mechanism, ...], delta: float, accountant: str, interval: float) -> Cost | None:
    """The bound that knows of sampling; none if that knows no more than the one that does not."""
    kinds = {one.sampling for one in mechanisms if one.sampled}
    if len(kinds) > 1:
        raise UserError("Poisson sampling and sampling without replacement cannot be accounted together")
    if accountant == "rdp" and "poisson" in kinds:
        raise UserError("Poisson sampling is accounted by privacy loss distributions, not by 'rdp'")
    if accountant == "rdp" or (accountant == "best" and "without-replacement" in kinds):
        return Cost(_rounded(_renyi_epsilon(mechanisms, delta)), "rdp")
    if accountant == "unsampled" or not kinds or max(_longest_loss(one) for one in mechanisms) > WIDEST:
        return None
    return Cost(_rounded(_composed(mechanisms, interval).get_epsilon_for_delta(delta)), "pld")


def within(
    mechanisms: Sequence[Mechanism], budget: float, delta: float, accountant: Accountant = "best", fine: bool = True
) -> bool:
    """Whether all the mechanisms together cost at most `budget`, by the quickest bound that can tell.

    It says the same as `cost`. fine: if a coarse grid says no, a fine one is asked.
    """
    merged = merge(mechanisms)
    if not merged:
        return True
    if accountant != "rdp":
        room = _deviation(merged) / _needed_deviation(budget, delta)
        if abs(room - 1) < 1e-3:  # too close to tell without the exact value
            return any(cost(merged, delta, accountant, grid).epsilon <= budget for grid in (COARSE, FINE)[: 1 + fine])
        if room > 1:
            return True
    for grid in (COARSE, FINE)[: 1 + fine]:
        found = _sampled_cost(merged, delta, accountant, grid)
        if found is None or found.epsilon <= budget or found.accountant != "pld":
            break
    return found is not None and found.epsilon <= budget


@lru_cache(maxsize=65536)
def _needed_deviation(budget: float, delta: float) -> float:
    """The noise multiplier with which a single release costs `budget`."""
    return float(_dp_accounting("gaussian_mechanism").get_sigma_gaussian(budget, delta))


def _deviation(mechanisms: tuple[Mechanism, ...]) -> float:
    """The noise multiplier of one release that says as much as all of them would without sampling."""
    return 1 / math.sqrt(sum(one.releases / one.noise_multiplier**2 for one in mechanisms))


def merge(mechanisms: Sequence[Mechanism]) -> tuple[Mechanism, ...]:
    """The same releases with equal mechanisms joined, in a fixed order."""
    if len({(one.adjacency, one.unit) for one in mechanisms}) > 1:
        raise UserError("releases under different adjacencies or units cannot be added up")
    counts: dict[Mechanism, int] = {}
    for one in mechanisms:
        if one.sampling != "none" and not one.sampled:
            one = replace(one, sampling="none")
        single = replace(one, releases=1)
        counts[single] = counts.get(single, 0) + one.releases
    return tuple(replace(single, releases=count) for single, count in sorted(counts.items()) if count)


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise UserError(f"delta = {delta:g}: must lie between 0 and 1")


def check_budget(epsilon: float, delta: float, smallest: int | None = None) -> None:
    """Refuse a budget that promises nothing; smallest: records of the client that has fewest."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise UserError(f"epsilon = {epsilon:g}: must be a positive number")
    check_delta(delta)
    if smallest is not None and delta * smallest > 1 + 1e-9:
        raise UserError(
            f"delta = {delta:g} is more than 1/{smallest} for a client with {smallest} records: it would allow "
            f"publishing a record outright; take at most {1 / smallest:g}"
        )


# -- calibration -------------------------------------------------------------------------------------------------


def calibrate(target: float, delta: float, mechanism: Mechanism, accountant: Accountant = "best") -> float:
    """The smallest noise multiplier (to 1 in 100,000, on the safe side) with which `mechanism` costs at most `target`.

    The multiplier that `mechanism` already has plays no part.
    """
    check_budget(target, delta)

    def excess(multiplier: float) -> float:
        """Logarithm of how far above the target it is; at most 0 is within."""
        found = cost([replace(mechanism, noise_multiplier=multiplier)], delta, accountant, COARSE).epsilon
        return math.log(max(found, 1e-9) / target)

    high = _needed_deviation(target, delta) * math.sqrt(mechanism.releases)
    above = excess(high)
    while above > 0:
        high *= 1.5
        above = excess(high)
    low, below = high, above
    while below <= 0:  # epsilon is about inversely proportional to the noise, or falls faster
        high, above = low, below
        low *= max(math.exp(1.2 * below), 0.05) * 0.99
        below = excess(low)
    return _crossing(excess, low, below, high, above)


def _crossing(excess: Callable[[float], float], low: float, below: float, high: float, above: float) -> float:
    """The upper end of a narrow bracket of where `excess` crosses 0, by false position in logarithms (Illinois)."""
    kept = 0
    while high / low > 1 + CLOSE:
        slope = below / (below - above) if below > above else 0.5
        middle = low * (high / low) ** min(max(slope, 0.02), 0.98)
        middle = min(max(middle, low * (1 + CLOSE / 3)), high / (1 + CLOSE / 3))
        value = excess(middle)
        if value > 0:
            low, below, above, kept = middle, value, above / 2 if kept > 0 else above, 1
        else:
            high, above, below, kept = middle, value, below / 2 if kept < 0 else below, -1
    return high


def noble(target: float, delta: float, rate: float, rounds: int, steps: int = 1) -> float:
    """The noise multiplier by the closed formula of the paper, for a nominal epsilon of `target`.

    The formula leaves out a constant, so it is no guarantee: the accounted epsilon is another one.
    """
    check_budget(target, delta)
    return rate * math.sqrt(rounds * steps * math.log(2 * rounds / delta) * math.log(2 / delta)) / target


# -- the accountants ---------------------------------------------------------------------------------------------


def _gaussian_epsilon(mechanisms: tuple[Mechanism, ...], delta: float) -> float:
    """Exact for releases without sampling; an upper bound for sampled ones."""
    return gaussian_epsilon(_deviation(mechanisms), delta)


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """The exact epsilon of one release without sampling."""
    return float(_dp_accounting("gaussian_mechanism").get_epsilon_gaussian(multiplier, delta))


def _renyi_epsilon(mechanisms: tuple[Mechanism, ...], delta: float) -> float:
    total = sum(
        (one.releases * renyi_curve(one.noise_multiplier, one.rate) for one in mechanisms), np.zeros(ORDERS.size)
    )
    return float((total + math.log(1 / delta) / (ORDERS - 1)).min())


@lru_cache(maxsize=4096)
def renyi_curve(multiplier: float, rate: float) -> np.ndarray:
    """Rényi divergence of one release at the orders 2..200, sampled without replacement under replace-one: [199].

    Wang, Balle, Kasiviswanathan 2019, Theorem 9, in logarithms: the terms overflow for small multipliers.
    """
    plain = ORDERS / (2 * multiplier**2)
    if rate >= 1:
        return plain
    order, j = ORDERS[:, None].astype(float), ORDERS[None, :].astype(float)
    choose = _log_factorial(order) - _log_factorial(j) - _log_factorial(np.clip(order - j, 0, None))
    terms = math.log(2) + j * math.log(rate) + choose + (j - 1) * j / (2 * multiplier**2)
    second = 1 / multiplier**2
    gentler = math.log(4) + second + math.log(-math.expm1(-second)) if second > 0 else -math.inf
    terms[:, 0] = 2 * math.log(rate) + choose[:, 0] + min(gentler, math.log(2) + second)
    terms = np.where(j <= order, terms, -np.inf)
    top = np.maximum(terms.max(axis=1), 0)
    total = top + np.log(np.exp(-top) + np.exp(terms - top[:, None]).sum(axis=1))
    curve: np.ndarray = np.minimum(total / (ORDERS - 1), plain)
    return curve


def _log_factorial(x: np.ndarray) -> np.ndarray:
    table = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, ORDERS[-1] + 1)))])
    result: np.ndarray = table[x.astype(np.int64)]
    return result


def _longest_loss(mechanism: Mechanism) -> float:
    """Privacy loss of one release that is exceeded with a probability of about e^-50."""
    shift = 1 / mechanism.noise_multiplier
    return 10 * shift + shift**2 / 2


def _composed(mechanisms: tuple[Mechanism, ...], interval: float) -> Any:
    """Privacy loss distribution of all releases together."""
    total = None
    for one in mechanisms:
        repeated = _repeated(one, interval)
        total = repeated if total is None else total.compose(repeated)
    return total


@lru_cache(maxsize=64)
def _repeated(mechanism: Mechanism, interval: float) -> Any:
    if mechanism.sampled:
        return _loss(replace(mechanism, releases=1), interval).self_compose(mechanism.releases)
    alike = mechanism.noise_multiplier / math.sqrt(mechanism.releases)  # one release that says as much as all of them
    return _loss(replace(mechanism, releases=1, noise_multiplier=alike), interval)


@lru_cache(maxsize=64)
def _loss(mechanism: Mechanism, interval: float) -> Any:
    """Privacy loss distribution of one release. dp-accounting measures noise in clipping norms in both adjacencies."""
    relation = _dp_accounting("privacy_accountant").NeighboringRelation
    replaced = mechanism.adjacency == "replace-one"
    return _dp_accounting("pld.privacy_loss_distribution").from_gaussian_mechanism(
        mechanism.deviation(1.0),
        sampling_prob=mechanism.rate,
        value_discretization_interval=interval,
        neighboring_relation=relation.REPLACE_ONE if replaced else relation.ADD_OR_REMOVE_ONE,
    )


def _dp_accounting(name: str) -> Any:
    """A module of dp-accounting, which takes more than a second to import."""
    try:
        return importlib.import_module(f"dp_accounting.{name}")
    except ImportError as error:
        raise UserError(
            f"privacy accounting needs the package dp-accounting ({error}): pip install 'kinfolk[privacy]'"
        ) from None


def accountant_version() -> str:
    """dp-accounting and its version."""
    try:
        return f"dp-accounting {importlib.metadata.version('dp-accounting')}"
    except importlib.metadata.PackageNotFoundError:
        return "dp-accounting (not installed)"
