"""AFIND's arithmetic: what must always hold, golden values, and the three defects of the printed threshold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kinfolk import randomness
from kinfolk.matching import friendly

NAN = math.nan


def table(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def random_state(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Probabilities of three clients that sum to one, and what they saw this round, NaN of some."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.rand(3, n, generator=generator, dtype=torch.float64).pow(4)
    similarity = 2 * torch.rand(3, n, generator=generator, dtype=torch.float64) - 1
    hidden = torch.rand(3, n, generator=generator) < 0.4
    return before / before.sum(dim=1, keepdim=True), similarity.masked_fill(hidden, NAN)


# -- probabilities -----------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 10**6), nu=st.sampled_from([0.003, 0.05, 0.1, 1.0]))
def test_probabilities_sum_to_one_and_the_unobserved_keep_theirs(n: int, seed: int, nu: float) -> None:
    before, _ = random_state(n, seed)
    after = before
    for step in range(4):  # over several rounds: what is lost to rounding must not pile up
        _, similarity = random_state(n, seed + 7919 * step)
        earlier, after = after, friendly.probabilities(after, similarity, nu)
        assert (after >= 0).all()
        assert torch.allclose(after.sum(dim=1), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12)
        unseen = similarity.isnan()
        held = torch.where(unseen, 0.0, earlier).sum(dim=1) >= friendly.SMALLEST_MASS
        assert torch.equal(after[held][unseen[held]], earlier[held][unseen[held]])


def test_probabilities_against_the_formula() -> None:
    before = table([0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25])
    similarity = table([0.5, NAN, -0.2, NAN], [0.9, 0.8, 0.7, 0.6])
    after = friendly.probabilities(before, similarity, 0.1)
    a, b = math.exp(5), math.exp(-2)
    assert after[0].tolist() == pytest.approx([0.4 * a / (a + b), 0.2, 0.4 * b / (a + b), 0.4], abs=1e-15)
    whole = [math.exp(x) for x in (9, 8, 7, 6)]  # everybody was seen: eq. 8
    assert after[1].tolist() == pytest.approx([w / sum(whole) for w in whole], abs=1e-15)


def test_one_friend_alone_or_none_leaves_probabilities_as_they_were() -> None:
    before = table([0.1, 0.2, 0.7], [0.3, 0.3, 0.4])
    assert torch.equal(friendly.probabilities(before, table([NAN, 0.9, NAN], [NAN, NAN, NAN]), 0.1), before)


def test_mass_that_rounding_has_eaten_is_given_back() -> None:
    after = friendly.probabilities(table([0.0, 0.0, 1.0]), table([0.3, 0.3, NAN]), 0.1)
    assert float(after.sum()) == pytest.approx(1.0, abs=1e-15)
    assert 0 < float(after[0, 0]) == float(after[0, 1]) < 1e-11


def test_before_anybody_is_known_all_reachable_are_alike() -> None:
    reachable = torch.tensor([[False, True, True, True], [True, False, False, False], [False] * 4])
    assert friendly.uniform(reachable).tolist() == [[0, 1 / 3, 1 / 3, 1 / 3], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_similarities_are_remembered_from_the_first_sight_on() -> None:
    kept = friendly.remembered(table([NAN, 0.5, 0.5, NAN]), table([0.2, 0.3, NAN, NAN]), 0.9)
    assert kept[0, :3].tolist() == pytest.approx([0.2, 0.48, 0.5])
    assert kept[0, 3].isnan()
    assert friendly.remembered(table([0.5]), table([0.3]), 0.0).item() == 0.3  # as printed: nothing is


def test_what_was_not_seen_moves_with_what_was() -> None:
    before = table([0.5, 0.7, 0.4, NAN, NAN], [0.5, 0.7, 0.4, NAN, NAN])
    seen = table([0.3, 0.1, NAN, 0.2, NAN], [NAN, NAN, NAN, 0.9, NAN])
    after = friendly.shifted(before, friendly.remembered(before, seen, 0.9), seen)
    assert after[0, :4].tolist() == pytest.approx([0.48, 0.64, 0.36, 0.2])  # by (-0.02 - 0.06) / 2
    assert after[1, :4].tolist() == pytest.approx([0.5, 0.7, 0.4, 0.9])  # nobody was seen again
    assert after[:, 4].isnan().all()


# -- threshold ---------------------------------------------------------------------------------------------------


def threshold(similarity: list[float], tau: float = 0.5, kind: friendly.Threshold = "calibrated", n: int = 99) -> float:
    """Of one client that has observed these, of n peers in all."""
    return friendly.thresholds(table([0.0])[0], table(similarity), torch.tensor([n]), tau, kind, "monotone").item()


def test_calibrated_lets_in_more_of_the_alike_and_fewer_with_a_larger_tau() -> None:
    similar = [threshold([s] * 99) for s in (1.0, 0.9, 0.5, 0.0, -0.2)]
    assert similar == sorted(similar)
    assert similar[0] < 1e-6
    assert threshold([-0.9, -0.5]) == pytest.approx(0.5 / 99)  # all strange: half the uniform probability
    rising = [threshold([0.3, 0.5], tau) for tau in (0.1, 0.5, 1.0, 1.5)]
    assert rising == sorted(rising)
    assert rising[3] == pytest.approx(15 * rising[0])
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(99, generator=generator, dtype=torch.float64)
    p = p / p.sum()
    chosen = [int((p >= threshold([0.3, 0.5], tau)).sum()) for tau in (0.1, 0.5, 1.0, 1.5)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[3]


def test_uncertainty_lies_between_zero_and_one_and_only_ours_never_turns_back() -> None:
    similarity = torch.linspace(-1, 1, 401, dtype=torch.float64)[None]
    printed, monotone = (friendly.uncertainty(similarity, kind)[0] for kind in ("printed", "monotone"))
    for u in (printed, monotone):
        assert float(u.min()) >= 0
        assert float(u.max()) <= 1 + 1e-15
    assert (monotone[1:] <= monotone[:-1] + 1e-15).all()
    assert printed[0] < 1e-5  # a peer that points the other way counts as certain
    assert monotone[0] == 1
    above = (similarity[0] + 1) / 2 >= math.exp(-1)
    assert torch.equal(printed[above], monotone[above])
    assert friendly.uncertainty(table([NAN])).isnan().all()


def test_the_threshold_stays_where_nobody_was_observed() -> None:
    before = table([0.1, 0.2])[0]
    after = friendly.thresholds(before, table([NAN, NAN], [0.5, NAN]), torch.tensor([2, 2]), 0.5, "calibrated")
    assert after[0] == 0.1
    e = 0.75
    assert float(after[1]) == pytest.approx(0.5 / 2 * -math.e * e * math.log(e))


def test_remark_is_the_sigmoid_of_the_mean_entropy() -> None:
    e = 0.8
    expected = 0.5 / 99 / (1 + math.exp(e * math.log(e)))
    assert threshold([0.6] * 7, kind="remark") == pytest.approx(expected)
    flat = [threshold([s] * 20, kind="remark") * 99 / 0.5 for s in (0.999, 0.5, 0.0, -0.2)]
    assert all(0.5 <= value <= 0.6 for value in flat)  # hardly a threshold that adapts


def test_literal_defect_a_aligned_neighbors_give_a_high_threshold() -> None:
    assert threshold([1.0] * 10, kind="literal") == pytest.approx(0.25, abs=1e-5)
    assert threshold([0.0] * 10, kind="literal") < 0.02 < threshold([0.8] * 10, kind="literal")  # the wrong direction


def test_literal_defect_b_the_sum_over_neighbors_selects_everybody_or_nobody() -> None:
    e = torch.full((99,), 0.6, dtype=torch.float64)
    assert float(-(e * e.log()).sum()) == pytest.approx(30.3, abs=0.1)  # h
    assert threshold([0.2] * 99, kind="literal") == pytest.approx(3.3e-14, rel=0.05)  # everybody, always
    aligned = threshold([0.98] * 99, kind="literal")
    assert aligned == pytest.approx(0.135, abs=0.002)  # e = 0.99
    assert aligned > 10 / 99  # nobody of 99 that are all alike


def test_literal_defect_b_every_friend_lost_makes_the_next_one_easier_to_lose() -> None:
    """So that a client ends with nearly everybody or with one, and tau says only how soon."""
    for tau in (0.1, 0.5, 1.5):
        fewer = [threshold([0.2] * count, tau, "literal") for count in (29, 20, 10, 5, 1)]
        assert fewer == sorted(fewer)
        assert fewer[0] < tau / 29 / 100  # hardly anybody is below it
        assert fewer[-1] > tau / 3  # and one friend alone puts it where no second one can be for long
    assert threshold([0.2] * 29) == pytest.approx(threshold([0.2]))  # ours does not know how many there are


def test_literal_defect_c_tau_knows_nothing_of_how_many_peers_there_are() -> None:
    assert threshold([1.0] * 9, kind="literal", n=9) == threshold([1.0] * 9, kind="literal", n=1999)
    assert threshold([0.5] * 9, n=9) == pytest.approx(threshold([0.5] * 9, n=1998) * 222)


@pytest.mark.parametrize("entropy", ["printed", "monotone"])
def test_literal_is_as_printed_for_opposite_gradients_too(entropy: friendly.Entropy) -> None:
    nothing, others = table([0.0])[0], torch.tensor([99])
    found = friendly.thresholds(nothing, table([-0.9] * 7), others, 0.5, "literal", entropy)
    h = -7 * 0.05 * math.log(0.05)
    assert found.item() == pytest.approx(0.5 * (1 - 1 / (1 + math.exp(-h))))
    adapted = friendly.thresholds(nothing, table([-0.9] * 7), others, 0.5, "remark", entropy)
    mean = h / 7 if entropy == "printed" else math.exp(-1)
    assert adapted.item() == pytest.approx(0.5 / 99 / (1 + math.exp(-mean)))


def test_similarities_of_one_and_minus_one_are_kept_from_the_logarithm_by_very_little() -> None:
    u = friendly.uncertainty(table([1.0, -1.0]), "printed")[0].tolist()
    assert u == pytest.approx([math.e * 1e-7, -math.e * 1e-7 * math.log(1e-7)], rel=1e-6)


# -- choosing ----------------------------------------------------------------------------------------------------


def test_the_most_probable_are_taken_and_equals_by_their_keys() -> None:
    p = table([0.3, 0.1, 0.3, 0.2, 0.1])
    here = torch.tensor([[True, True, True, False, True]])
    keys = torch.tensor([[5, 2, 1, 0, 9]])
    assert friendly.top(p, here, 1, keys).tolist() == [[False, False, True, False, False]]
    assert friendly.top(p, here, 3, keys).tolist() == [[True, True, True, False, False]]
    assert friendly.top(p, here, 9, keys).tolist() == here.tolist()
    assert not friendly.top(p, torch.zeros_like(here), 2, keys).any()


# -- weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_weights_against_the_formula(temperature: float) -> None:
    shares, own = friendly.boltzmann(table([0.5, 2.0, 1000.0]), table([0.1])[0], temperature)
    each = [math.exp(-loss / temperature) for loss in (0.5, 2.0, 1000.0, 0.1)]
    assert [*shares[0].tolist(), own.item()] == pytest.approx([w / sum(each) for w in each], abs=1e-15)


def test_losses_that_are_not_finite_weigh_nothing() -> None:
    shares, own = friendly.boltzmann(
        table([1.0, NAN, math.inf], [NAN, math.inf, -math.inf], [2.0, 2.0, NAN]), torch.tensor([1.0, NAN, NAN]), 1.0
    )
    assert shares.tolist() == [[0.5, 0, 0], [0, 0, 0], [0.5, 0.5, 0]]
    assert own.tolist() == [0.5, 1.0, 0.0]  # with nobody left one is alone


def test_huge_losses_do_not_overflow() -> None:
    shares, own = friendly.boltzmann(table([1e6, 1e6 + 1]), table([1e7])[0], 1.0)
    assert shares[0].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])
    assert own.item() == 0


# -- noise -------------------------------------------------------------------------------------------------------


def test_noise_is_standard_normal_and_depends_on_the_sender_alone() -> None:
    sender = torch.arange(20)
    drawn = randomness.normal(3, "proxy noise", 7, sender, 5000)
    assert abs(float(drawn.mean())) < 0.015
    assert float(drawn.std()) == pytest.approx(1, abs=0.01)
    assert float((drawn.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.01)
    assert float(drawn.pow(4).mean()) == pytest.approx(3, abs=0.15)
    assert torch.isfinite(drawn).all()
    assert torch.equal(randomness.normal(3, "proxy noise", 7, sender[[4, 2]], 100), drawn[[4, 2], :100])
    assert abs(float(torch.corrcoef(drawn).fill_diagonal_(0).abs().max())) < 0.08
    assert not torch.equal(randomness.normal(3, "proxy noise", 8, sender, 5000), drawn)


def test_long_vectors_are_cut_and_short_ones_are_not() -> None:
    vectors = table([3.0, 4.0], [0.3, 0.4], [0.0, 0.0])
    cut = friendly.noisy(vectors, 1.0, 0.0, 0, 1, torch.arange(3))
    torch.testing.assert_close(cut, table([0.6, 0.8], [0.3, 0.4], [0.0, 0.0]))
    assert torch.equal(friendly.noisy(vectors, 100.0, 0.0, 0, 1, torch.arange(3)), vectors)


def test_noise_has_the_asked_deviation_on_top_of_the_cut_vector() -> None:
    vectors = torch.ones(4, 10_000, dtype=torch.float64)
    added = friendly.noisy(vectors, 1.0, 0.25, 0, 1, torch.arange(4)) - 0.01
    assert float(added.std()) == pytest.approx(0.25, rel=0.02)


def test_lists_spread_over_a_table() -> None:
    spread = friendly.spread(torch.tensor([[2, 0, -1], [-1, -1, -1]]), table([0.5, 0.7, 9.0], [1.0, 2.0, 3.0]), 3)
    assert spread[0, [0, 2]].tolist() == [0.7, 0.5]
    assert spread[0, 1].isnan()
    assert spread[1].isnan().all()
