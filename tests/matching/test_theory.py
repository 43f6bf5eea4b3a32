"""Theorem 1 of PANM and the exact chain: golden values, rules, and a simulation that plays the game."""

import numpy as np
import pytest

from kinfolk import UserError
from kinfolk.matching import theory

# (n, a, l, k): after rounds 1 to 4 by the theorem, by the chain over all peers, by the chain over non-neighbors
GOLDEN = {
    (100, 50, 10, 5): (
        [0.616700, 0.995290, 0.999983, 1.0],
        [0.616700, 0.993658, 0.999966, 1.0],
        [0.616700, 0.995554, 0.999985, 1.0],
    ),
    (100, 25, 10, 5): (
        [0.059226, 0.560512, 0.896878, 0.983558],
        [0.059226, 0.510766, 0.858005, 0.970702],
        [0.059226, 0.538324, 0.880735, 0.978607],
    ),
    (100, 50, 10, 3): (
        [0.950934, 0.999874, 1.0, 1.0],
        [0.950934, 0.999846, 1.0, 1.0],
        [0.950934, 0.999884, 1.0, 1.0],
    ),
    (100, 50, 20, 10): (
        [0.578748, 0.999896, 1.0, 1.0],
        [0.578748, 0.999593, 1.0, 1.0],
        [0.578748, 0.999910, 1.0, 1.0],
    ),
    (100, 25, 4, 2): (
        [0.246608, 0.617739, 0.831693, 0.931165],
        [0.246608, 0.610017, 0.824074, 0.926153],
        [0.246608, 0.616502, 0.830769, 0.930646],
    ),
}
SIX_DECIMALS = 5.1e-7


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_golden_tables_to_six_decimals(case: tuple[int, int, int, int]) -> None:
    formula, everybody, others = GOLDEN[case]
    assert np.abs(theory.confident(*case, rounds=4) - formula).max() < SIX_DECIMALS
    assert np.abs(theory.exact(*case, rounds=4, pool="all") - everybody).max() < SIX_DECIMALS
    assert np.abs(theory.exact(*case, rounds=4, pool="non-neighbors") - others).max() < SIX_DECIMALS


def test_kin_among_the_sampled_are_hypergeometric() -> None:
    chances = theory.sampled_kin(100, 50, 10)
    golden = [0.00065936, 0.00788010, 0.04052622, 0.11812294, 0.21611129, 0.25933355]
    assert np.abs(chances[:6] - golden).max() < 5e-9
    assert chances.shape == (11,)
    assert chances.sum() == pytest.approx(1, abs=1e-14)


def test_at_least_is_the_upper_tail_of_the_sampled() -> None:
    tail = theory.at_least(100, 25, 10)
    assert tail[0] == 1
    np.testing.assert_allclose(tail, theory.sampled_kin(100, 25, 10)[::-1].cumsum()[::-1], atol=1e-14)


def test_a_sample_larger_than_the_federation_is_everybody() -> None:
    np.testing.assert_array_equal(theory.sampled_kin(6, 3, 9), [0, 0, 1, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(theory.at_least(6, 3, 9), [1, 1, 1, 0, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("case", [*GOLDEN, (30, 10, 3, 6), (12, 9, 4, 2), (20, 5, 2, 4)], ids=str)
def test_confidence_never_falls_and_grows_in_the_generic_regime(case: tuple[int, int, int, int]) -> None:
    for chances in (theory.confident(*case, rounds=12), theory.exact(*case, rounds=12)):
        steps = np.diff(chances)
        assert (steps >= -1e-12).all()
        generic = (chances[:-1] > 0) & (chances[:-1] < 1 - 1e-9)
        assert (steps[generic] > 0).all()


def test_confidence_is_one_from_the_start_when_strangers_are_too_few_to_fill_the_sample() -> None:
    assert theory.at_least(20, 17, 8)[5] == 1  # 3 strangers at most among 8
    np.testing.assert_array_equal(theory.confident(20, 17, 8, 5, rounds=3), 1)
    np.testing.assert_allclose(theory.exact(20, 17, 8, 5, rounds=3), 1, atol=1e-12)


def test_confidence_is_zero_until_enough_peers_can_have_been_seen() -> None:
    for chances in (theory.confident(50, 25, 2, 5, rounds=3), theory.exact(50, 25, 2, 5, rounds=3)):
        assert chances[:2].tolist() == [0, 0]  # 5 neighbors out of 4 seen
        assert chances[2] > 0


def test_more_neighbors_than_kin_is_reported_as_zero() -> None:
    assert not theory.confident(100, 5, 10, 5, rounds=50).any()
    assert not theory.exact(100, 5, 10, 5, rounds=50).any()
    assert theory.confident(100, 6, 10, 5, rounds=200)[-1] > 0.99


def test_pens_forgets_so_its_chance_is_that_of_the_first_round() -> None:
    assert theory.pens(100, 25, 10, 5) == theory.confident(100, 25, 10, 5, rounds=1)[0]
    assert theory.pens(100, 25, 4, 5) == 0


def test_pens_selection_rates() -> None:
    assert theory.pens_selection_rate(100, 50, 10, 5) == pytest.approx(0.0896, abs=5e-5)
    assert theory.pens_selection_rate(100, 25, 10, 5) == pytest.approx(0.1004, abs=5e-5)
    assert theory.pens_selection_rate(100, 1, 10, 5) == 0


@pytest.mark.parametrize("pool", ["all", "non-neighbors"])
@pytest.mark.parametrize("case", [(40, 10, 6, 4), (20, 8, 3, 5)], ids=str)
def test_the_chain_agrees_with_a_simulation(case: tuple[int, int, int, int], pool: theory.Pool) -> None:
    simulated = simulate(*case, rounds=4, pool=pool, trials=100_000)
    assert np.abs(theory.exact(*case, rounds=4, pool=pool) - simulated).max() < 0.005


def simulate(n: int, a: int, l: int, k: int, rounds: int, pool: str, trials: int) -> np.ndarray:  # noqa: E741
    """Play it: peers 0..a-2 are kin; look at l random ones, keep the k best of those and of the neighbors."""
    random = np.random.default_rng(1)
    kin = np.arange(n - 1) < a - 1
    neighbor = np.zeros((trials, n - 1), dtype=bool)
    found = []
    for _ in range(rounds):
        keys = random.random((trials, n - 1), dtype=np.float32)
        if pool == "non-neighbors":
            keys += 2 * neighbor
        seen = neighbor.copy()
        np.put_along_axis(seen, keys.argpartition(l - 1, axis=1)[:, :l], True, axis=1)
        similarity = np.where(seen, kin + random.random((trials, n - 1), dtype=np.float32), -1)
        best = similarity.argpartition(-k, axis=1)[:, -k:]
        neighbor[:] = False
        np.put_along_axis(neighbor, best, np.take_along_axis(seen, best, axis=1), axis=1)
        found.append(((neighbor & kin).sum(axis=1) == k).mean())
    return np.array(found)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.sampled_kin(10, 0, 3),
        lambda: theory.at_least(10, 11, 3),
        lambda: theory.confident(10, 5, 0, 3, 1),
        lambda: theory.exact(10, 5, 3, 0, 1),
        lambda: theory.exact(10, 5, 3, 2, 1, pool="everybody"),  # type: ignore[arg-type]
    ],
)
def test_impossible_numbers_are_refused(call: object) -> None:
    with pytest.raises(UserError, match="needed"):
        call()  # type: ignore[operator]
