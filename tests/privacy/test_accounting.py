"""What releases cost: against dp-accounting and Opacus, closed forms, and the figures of the P4 setting."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kinfolk.errors import UserError
from kinfolk.privacy import Guarantee, Mechanism, calibrate, cost, epsilon, noble
from kinfolk.privacy.accounting import Adjacency, check_budget, merge, renyi_curve, within

RECORDS, ROUNDS = 160, 100
DELTA = 1 / RECORDS
GRID = [  # multiplier, rate, releases; at two deltas each
    *product([4.0, 8.0, 16.0], [0.02, 0.2, 0.5], [60]),
    *product([4.0], [0.01, 0.1], [500]),
    *product([4.0, 8.0], [1.0], [1, 100]),
]
DELTAS = (1e-5, 1e-3)


def paper(rate: float, multiplier: float, releases: int = ROUNDS) -> Mechanism:
    """As the paper samples: without replacement, unless everything is taken."""
    return Mechanism(multiplier, rate, "none" if rate == 1 else "without-replacement", releases=releases)


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_epsilon_is_that_of_dp_accounting_and_never_below(adjacency: str) -> None:
    import dp_accounting
    from dp_accounting import dp_event, pld

    assert len(GRID) * len(DELTAS) == 30
    replaced, relation = adjacency == "replace-one", dp_accounting.NeighboringRelation
    for multiplier, rate, releases in GRID[::4] if replaced else GRID:
        event = dp_event.GaussianDpEvent((2 if replaced else 1) * multiplier)
        accountant = pld.PLDAccountant(relation.REPLACE_ONE if replaced else relation.ADD_OR_REMOVE_ONE)
        accountant.compose(dp_event.PoissonSampledDpEvent(rate, event), releases)
        mechanism = Mechanism(multiplier, rate, "poisson", adjacency, releases=releases)  # type: ignore[arg-type]
        for delta in DELTAS:
            expected, found = accountant.get_epsilon(delta), epsilon([mechanism], delta)
            assert expected <= found <= 1.01 * expected + 2e-6, (mechanism, delta)


@pytest.mark.parametrize(
    ("multiplier", "rate", "releases", "delta", "adjacency", "expected"),
    [
        (2.0, 0.1, 100, 1e-3, "add-remove", 1.5439),
        (8.0, 1.0, 100, 1e-3, "add-remove", 4.1454),
        (0.5, 0.01, 1000, 1e-5, "replace-one", 2.8434),  # noise of C, sensitivity of 2C
        pytest.param(1.0, 0.01, 1000, 1e-5, "add-remove", 1.8282, marks=pytest.mark.slow),
        pytest.param(1.1, 0.01, 10000, 1e-5, "add-remove", 5.1926, marks=pytest.mark.slow),
    ],
)
def test_figures_that_are_known(
    multiplier: float, rate: float, releases: int, delta: float, adjacency: Adjacency, expected: float
) -> None:
    found = epsilon([Mechanism(multiplier, rate, "poisson", adjacency, releases=releases)], delta)
    assert found == pytest.approx(expected, abs=1e-4)


def test_the_closed_form_without_sampling() -> None:
    from scipy.stats import norm

    for multiplier, releases, delta in [(8.0, 100, 1e-3), (2.0, 10, 1e-5), (30.0, 5, 1e-6)]:
        found = epsilon([Mechanism(multiplier, releases=releases)], delta)
        shift = math.sqrt(releases) / multiplier
        reached = norm.cdf(shift / 2 - found / shift) - math.exp(found) * norm.cdf(-shift / 2 - found / shift)
        assert reached == pytest.approx(delta, rel=1e-4)
        assert reached <= delta * (1 + 1e-6)
    assert epsilon([Mechanism(8, releases=100)], 1e-3) == pytest.approx(4.145447, abs=2e-6)


@pytest.mark.filterwarnings("ignore")
def test_opacus_agrees() -> None:
    accountants = pytest.importorskip("opacus.accountants")
    for multiplier, rate, releases, delta in [(3.0, 0.05, 200, 1e-5), (4.0, 0.2, 60, 1e-3)]:
        other = accountants.PRVAccountant()
        other.history = [(multiplier, rate, releases)]
        found = epsilon([Mechanism(multiplier, rate, "poisson", "add-remove", releases=releases)], delta)
        assert found == pytest.approx(other.get_epsilon(delta), abs=0.02)


# -- the P4 setting ----------------------------------------------------------------------------------------------


def test_the_papers_noise_does_not_depend_on_the_rate() -> None:
    for rate in (0.1, 0.25, 0.5, 1.0):
        deviation = paper(rate, noble(15, DELTA, rate, ROUNDS)).deviation(1.0) / (rate * RECORDS)
        assert deviation == pytest.approx(0.0645, abs=5e-5)
    single, four = (noble(15, DELTA, 0.5, ROUNDS, steps) for steps in (1, 4))
    assert four == pytest.approx(2 * single)


@pytest.mark.parametrize(("rate", "expected"), [(0.5, 20.1), (0.2, 23.7), (0.1, 67), (1.0, 8.2)])
def test_what_the_papers_noise_really_costs(rate: float, expected: float) -> None:
    found = epsilon([paper(rate, noble(15, DELTA, rate, ROUNDS))], DELTA, "rdp")
    assert found == pytest.approx(expected, abs=0.5 if expected == 67 else 0.05)


@pytest.mark.parametrize(("rate", "expected"), [(0.1, 0.097), (0.25, 0.085), (0.5, 0.079), (1.0, 0.040)])
def test_calibrated_noise_is_least_without_sampling(rate: float, expected: float) -> None:
    multiplier = calibrate(15, DELTA, paper(rate, 1.0), "rdp")
    assert paper(rate, multiplier).deviation(1.0) / (rate * RECORDS) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("target", "calibrated", "formula"), [(3, 12.02, 12.89), (15, 3.17, 2.58), (20, 2.59, 1.93)])
def test_calibrated_and_nominal_multipliers(target: float, calibrated: float, formula: float) -> None:
    assert calibrate(target, DELTA, paper(0.5, 1.0), "rdp") == pytest.approx(calibrated, abs=0.005)
    assert noble(target, DELTA, 0.5, ROUNDS) == pytest.approx(formula, abs=0.005)


def test_the_exact_value_beside_that_of_rdp() -> None:
    mechanism = paper(1.0, noble(15, DELTA, 1.0, ROUNDS))
    assert epsilon([mechanism], DELTA, "rdp") == pytest.approx(8.18, abs=0.005)
    assert epsilon([mechanism], DELTA) == pytest.approx(6.09, abs=0.005)


def test_the_subsampled_bound_is_the_formula_as_printed() -> None:
    multiplier, rate = 1.7, 0.2

    def plain(order: int) -> float:
        return order / (2 * multiplier**2)

    for order in (2, 3, 7, 12):
        inner = 1 + rate**2 * math.comb(order, 2) * min(4 * math.expm1(plain(2)), 2 * math.exp(plain(2)))
        inner += sum(2 * rate**j * math.comb(order, j) * math.exp((j - 1) * plain(j)) for j in range(3, order + 1))
        expected = min(math.log(inner) / (order - 1), plain(order))
        assert renyi_curve(multiplier, rate)[order - 2] == pytest.approx(expected, rel=1e-12)


def test_small_multipliers_do_not_overflow() -> None:
    curve = renyi_curve(0.02, 0.1)
    assert np.isfinite(curve).all()
    assert math.isfinite(epsilon([paper(0.1, 0.02)], DELTA))
    assert cost([Mechanism(0.01, 0.1, "poisson", releases=5)], DELTA).accountant == "unsampled"


# -- composition and calibration ---------------------------------------------------------------------------------


def test_unlike_mechanisms_compose_whatever_their_order() -> None:
    first = Mechanism(4.0, 0.2, "poisson", releases=30)
    other = Mechanism(6.0, releases=3)
    both = epsilon([first, other], 1e-4)
    assert both == epsilon([other, replace(first, releases=10), replace(first, releases=20)], 1e-4)
    assert max(epsilon([first], 1e-4), epsilon([other], 1e-4)) < both < epsilon([first], 5e-5) + epsilon([other], 5e-5)


def test_plain_releases_compose_to_one_with_the_inverse_squares_added() -> None:
    mixed = [Mechanism(3.0, releases=2), Mechanism(5.0, releases=4)]
    assert epsilon(mixed, 1e-4) == pytest.approx(epsilon([Mechanism((2 / 9 + 4 / 25) ** -0.5)], 1e-4), abs=2e-6)


def test_releases_without_replacement_compose_with_plain_ones_in_rdp() -> None:
    mixed = [paper(0.1, 3.0, 50), Mechanism(9.0, releases=2)]
    curve = 50 * renyi_curve(3.0, 0.1) + 2 * renyi_curve(9.0, 1.0)
    expected = (curve + math.log(1e4) / (np.arange(2, 201) - 1)).min()
    assert epsilon(mixed, 1e-4, "rdp") == pytest.approx(expected, abs=2e-6)


def test_what_cannot_be_added_up_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be accounted together"):
        epsilon([paper(0.1, 3.0), Mechanism(3.0, 0.1, "poisson")], 1e-4)
    with pytest.raises(UserError, match="different adjacencies"):
        epsilon([Mechanism(3.0), Mechanism(3.0, adjacency="add-remove")], 1e-4)
    with pytest.raises(UserError, match="not by 'rdp'"):
        epsilon([Mechanism(3.0, 0.1, "poisson")], 1e-4, "rdp")


def test_sampling_everything_is_no_sampling() -> None:
    assert merge([Mechanism(2.0, 1.0, "poisson"), Mechanism(2.0, 1.0, "without-replacement")]) == (
        Mechanism(2.0, releases=2),
    )
    assert epsilon([], 1e-5) == 0


@pytest.mark.parametrize(
    "mechanism",
    [
        Mechanism(1, releases=40),
        Mechanism(1, 0.1, "poisson", releases=40),
        Mechanism(1, 0.1, "poisson", "add-remove", releases=90),
    ],
)
def test_calibration_reaches_its_target_and_not_more(mechanism: Mechanism) -> None:
    multiplier = calibrate(2.0, 1e-4, mechanism)
    found = replace(mechanism, noise_multiplier=multiplier)
    assert 1.995 < epsilon([found], 1e-4) <= 2.0
    assert within([found], 2.0, 1e-4)
    assert not within([replace(found, releases=found.releases + 1)], 2.0, 1e-4)


def test_epsilon_falls_with_noise_and_delta_and_grows_with_rate_and_releases() -> None:
    base = Mechanism(2.0, 0.2, "poisson", releases=20)
    here = epsilon([base], 1e-4)
    assert epsilon([replace(base, noise_multiplier=2.5)], 1e-4) < here < epsilon([replace(base, rate=0.3)], 1e-4)
    assert epsilon([base], 1e-3) < here < epsilon([replace(base, releases=25)], 1e-4)


# -- mistakes, and how a guarantee reads -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise_multiplier": 0.0}, "must be a positive number"),
        ({"noise_multiplier": math.nan}, "must be a positive number"),
        ({"rate": 0.0}, "greater than 0"),
        ({"rate": 1.5}, "at most 1"),
        ({"sampling": "shuffled"}, "unknown sampling"),
        ({"adjacency": "zero-out"}, "unknown adjacency"),
        ({"sampling": "none"}, "needs a way of sampling"),
        ({"sampling": "without-replacement", "adjacency": "add-remove"}, "'replace-one' only"),
        ({"releases": -1}, "must not be negative"),
    ],
)
def test_wrong_mechanisms_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Mechanism(**{"noise_multiplier": 1.0, "rate": 0.5, "sampling": "poisson", **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [(0.0, 1e-3), (-1.0, 1e-3), (math.inf, 1e-3), (3.0, 0.0), (3.0, 1.0)])
def test_wrong_budgets_are_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="must"):
        check_budget(*bad)
    with pytest.raises(UserError, match="must"):
        calibrate(*bad, Mechanism(1.0))


def test_a_delta_that_lets_a_record_out_is_refused() -> None:
    check_budget(3.0, 1 / 160, 160)
    with pytest.raises(UserError, match=r"more than 1/160 .* take at most 0.00625"):
        check_budget(3.0, 0.01, 160)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.gaussian_mechanism", None)
    with pytest.raises(UserError, match=r"pip install 'kinfolk\[privacy\]'"):
        epsilon([Mechanism(3.0)], 1e-5)


def test_a_guarantee_says_everything_in_one_line() -> None:
    mechanism = paper(0.5, noble(15, DELTA, 0.5, ROUNDS))
    found = Guarantee.of([mechanism], DELTA, simulated=True, accountant="rdp", nominal=15, gaps=["the KL term"])
    assert str(found) == (
        "simulated, not private: epsilon 20.12 accounted (nominal 15, which is no guarantee) at delta 0.00625 for "
        f"replacing one record of one client, 100 releases, sampling without-replacement, by rdp ({found.version}); "
        "not covered: the KL term"
    )
    assert found.as_dict() == {
        "epsilon": found.epsilon, "delta": DELTA, "adjacency": "replace-one", "unit": "one record of one client",
        "sampling": "without-replacement", "releases": 100, "accountant": "rdp", "version": found.version,
        "simulated": True, "nominal": 15, "gaps": ["the KL term"],
    }  # fmt: skip
    real = Guarantee.of([Mechanism(8.0, releases=100)], 1e-3, simulated=False)
    assert str(real).startswith("private: epsilon 4.145 at delta 0.001 for replacing")
    assert found.version.startswith("dp-accounting ")
