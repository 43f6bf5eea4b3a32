"""Dirichlet in both modes, pathological, and the test sets matched to them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfolk.data.partition import Classes, Dirichlet, Labels, Pathological, class_counts
from kinfolk.data.partition.filling import fill
from kinfolk.errors import UserError


def stocked(train: list[int], test: list[int]) -> Labels:
    return Labels(np.repeat(np.arange(len(train)), train), np.repeat(np.arange(len(test)), test), len(train))


EVEN = stocked([200] * 10, [100] * 10)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    clients=st.integers(1, 12),
    classes=st.integers(1, 8),
    seed=st.integers(0, 3),
)
def test_filling_keeps_sizes_and_never_exceeds_the_stock(data, clients, classes, seed) -> None:
    stock = np.array(data.draw(st.lists(st.integers(0, 30), min_size=classes, max_size=classes)))
    size = data.draw(st.integers(0, int(stock.sum()) // clients))
    weights = data.draw(
        st.lists(st.sampled_from([0.0, 1e-13, 0.1, 1.0]), min_size=clients * classes, max_size=clients * classes)
    )
    prior = np.array(weights).reshape(clients, classes)
    counts, _ = fill(prior, np.full(clients, size), stock, seed, "test")
    assert (counts.sum(1) == size).all()
    assert (counts.sum(0) <= stock).all()


def test_filling_a_client_whose_only_class_runs_out_ends_and_is_counted() -> None:
    """The infinite loop of the public code: redrawing for ever from a prior that has nothing left."""
    prior = np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    counts, beside = fill(prior, np.array([6, 6]), np.array([4, 10, 10]), 0, "test")
    assert counts[:, 0].sum() == 4
    assert beside == 2
    easy, none = fill(prior, np.array([2, 2]), np.array([4, 10, 10]), 0, "test")
    assert easy.tolist() == [[2, 0, 0], [2, 0, 0]]
    assert none == 0


def test_filling_outside_the_prior_is_even_over_what_is_left() -> None:
    prior = np.array([[1.0, 0.0, 0.0, 0.0]])
    counts, _ = fill(prior, np.array([3000]), np.array([0, 0, 5000, 5000]), 0, "test")
    assert counts[0, :2].tolist() == [0, 0]
    assert abs(counts[0, 2] - 1500) < 150  # 5 standard deviations of a fair coin are 137


def test_filling_follows_the_prior_and_redraws_from_what_remains_of_it() -> None:
    prior = np.array([[0.5, 0.3, 0.2]])
    free, _ = fill(prior, np.array([10000]), np.array([10000] * 3), 0, "test")
    assert np.abs(free[0] / 10000 - prior[0]).max() < 0.02
    short, _ = fill(prior, np.array([10000]), np.array([1000, 10000, 10000]), 0, "test")
    # 2000 draws exhaust class 0; the other 8000 are divided 3 : 2.
    assert np.abs(short[0] - [1000, 600 + 4800, 400 + 3200]).max() < 250


def filled_one_by_one(
    prior: np.ndarray, sizes: np.ndarray, stock: np.ndarray, draws: np.random.Generator
) -> np.ndarray:
    """The process as it is defined, a sample at a time."""
    counts, left = np.zeros(prior.shape, dtype=int), stock.copy()
    while (hungry := np.flatnonzero(counts.sum(1) < sizes)).size:
        client = draws.choice(hungry)
        weight = np.where(left > 0, prior[client], 0.0)
        weight = weight if weight.sum() > 0 else (left > 0).astype(float)
        c = draws.choice(len(stock), p=weight / weight.sum())
        counts[client, c] += 1
        left[c] -= 1
    return counts


def test_filling_at_once_has_the_law_of_filling_one_by_one() -> None:
    """Class 0 runs out first and sends its clients to class 1, which then runs out too."""
    prior = np.array([[0.8, 0.2, 0.0], [0.0, 0.5, 0.5], [0.4, 0.4, 0.2]])
    sizes, stock = np.array([30, 30, 10]), np.array([10, 18, 60])
    draws = np.random.default_rng(0)
    ours = np.mean([fill(prior, sizes, stock, seed, "test")[0] for seed in range(400)], axis=0)
    slow = np.mean([filled_one_by_one(prior, sizes, stock, draws) for _ in range(400)], axis=0)
    # A count has a standard deviation below 3, so a difference of two such means has one below 0.21.
    assert np.abs(ours - slow).max() < 0.85


def test_every_client_is_served_throughout_the_filling() -> None:
    """Clients compete for a scarce class on equal terms, whatever their id."""
    prior = np.tile([0.5, 0.5], (40, 1))
    counts, _ = fill(prior, np.full(40, 100), np.array([1000, 4000]), 0, "test")
    assert counts[:, 0].min() > 5  # 25 expected each; first come, first served would leave the last with none
    assert abs(counts[:20, 0].sum() - 500) < 100


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 1.0, 100.0])
def test_client_prior_gives_equal_sizes_and_uses_no_sample_twice(alpha: float) -> None:
    split = Dirichlet(alpha).divide(EVEN, 20, None, None, seed=0)
    assert {len(part) for part in split.train} == {100}
    assert np.array_equal(np.sort(np.concatenate(split.train)), np.arange(2000))


def test_smaller_alpha_means_fewer_classes_per_client() -> None:
    held = [
        (class_counts(Dirichlet(alpha).divide(EVEN, 20, 50, 20, seed=0).train, EVEN) > 0).sum(1).mean()
        for alpha in (0.01, 0.1, 1.0, 100.0)
    ]
    assert held == sorted(held)
    assert held[0] < 2.5
    assert held[-1] > 9


def test_priors_that_ran_dry_are_noted() -> None:
    assert Dirichlet(100.0).divide(EVEN, 20, 20, 20, seed=0).notes == []
    notes = Dirichlet(1e-6).divide(EVEN, 20, 100, 20, seed=0).notes
    assert any("of 20 clients hold classes outside their prior: their own ran out" in note for note in notes)


@pytest.mark.parametrize("kind", [Dirichlet(0.3), Dirichlet(0.3, mode="class-split"), Pathological(3)], ids=str)
def test_test_sets_match_the_train_proportions_rounded_up(kind) -> None:
    split = kind.divide(EVEN, 20, None, 40, seed=0)
    train, test = class_counts(split.train, EVEN), class_counts(split.test, EVEN)
    for mine, matched in zip(train, test):
        wanted = [-(-40 * int(count) // int(mine.sum())) for count in mine]
        assert matched.tolist() == wanted
    assert test.sum(1).min() >= 40
    natural = kind.divide(EVEN, 30, None, None, seed=0)
    assert min(len(part) for part in natural.test) >= 34  # ceil(1000 / 30)


def test_a_test_set_takes_all_of_a_class_that_is_too_small_and_says_so() -> None:
    labels = stocked([100] * 2, [5, 5])
    split = Pathological(1).divide(labels, 2, 50, 20, seed=0)
    assert {len(part) for part in split.test} == {5}
    assert split.notes == [
        "2 of 2 clients want more test samples of a class than the set has (data.test = 20): they hold all of them"
    ]
    with pytest.raises(UserError, match=r"client \d would have no test samples: the set has none of its classes"):
        Pathological(1).divide(stocked([100] * 2, [5, 0]), 2, 50, 20, seed=0)
    with pytest.raises(UserError, match="the set has no test samples"):
        Pathological(1).divide(stocked([100] * 2, [0, 0]), 2, 50, None, seed=0)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_class_split_gives_everything_out_and_respects_min_size(alpha: float, balance: bool) -> None:
    split = Dirichlet(alpha, mode="class-split", balance=balance, min_size=15).divide(EVEN, 20, None, None, seed=0)
    assert np.array_equal(np.sort(np.concatenate(split.train)), np.arange(2000))
    assert min(len(part) for part in split.train) >= 15


def test_balancing_evens_out_the_sizes() -> None:
    spread = {
        balance: np.std([
            len(part)
            for part in Dirichlet(0.3, mode="class-split", balance=balance, min_size=1)
            .divide(EVEN, 20, None, None, seed=0).train
        ])
        for balance in (False, True)
    }  # fmt: skip
    assert spread[True] < 0.8 * spread[False]


def test_a_balanced_client_with_its_share_gets_no_further_class() -> None:
    labels = stocked([200] * 10 + [0], [100] * 11)  # an empty last class must not matter
    for seed in range(20):
        kind = Dirichlet(1e-3, mode="class-split", balance=True, min_size=1)  # shares underflow to zero here
        counts = class_counts(kind.divide(labels, 5, None, None, seed).train, labels)
        before = np.cumsum(counts, axis=1) - counts
        assert (counts[before >= 400] == 0).all()


def test_train_is_the_mean_size_in_class_split() -> None:
    split = Dirichlet(1.0, mode="class-split", min_size=1).divide(EVEN, 20, 30, 20, seed=0)
    assert sum(len(part) for part in split.train) == 600
    assert len({len(part) for part in split.train}) > 1


def test_class_split_gives_up_after_a_thousand_tries() -> None:
    with pytest.raises(UserError) as error:
        Dirichlet(0.01, mode="class-split", min_size=10).divide(EVEN, 50, None, None, seed=0)
    assert str(error.value) == (
        "in 1000 tries the smallest of 50 clients had at most 0 train samples, split.min_size = 10; "
        "raise split.alpha, or lower split.min_size or data.clients"
    )
    with pytest.raises(UserError, match=r"50 clients × split.min_size = 41 need 2050 train samples, there are 2000"):
        Dirichlet(1.0, mode="class-split", min_size=41).divide(EVEN, 50, None, None, seed=0)


def test_dirichlet_settings_are_checked() -> None:
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"split.alpha = .*: must be above 0 and finite"):
            Dirichlet(wrong)
    with pytest.raises(UserError, match=r"split.mode = 'x': must be 'client-prior' or 'class-split'"):
        Dirichlet(mode="x")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"split.balance belongs to mode = 'class-split'"):
        Dirichlet(balance=True)
    with pytest.raises(UserError, match=r"split.min_size = 0"):
        Dirichlet(mode="class-split", min_size=0)


@settings(max_examples=40, deadline=None)
@given(clients=st.integers(2, 40), held=st.integers(1, 10), seed=st.integers(0, 20))
def test_pathological_clients_hold_their_number_of_classes_and_all_are_held(clients, held, seed) -> None:
    if clients * held < 10:
        with pytest.raises(UserError, match=f"{clients} clients × {held} classes cannot hold all 10 of the set"):
            Pathological(held).divide(EVEN, clients, 50, 20, seed)
        return
    counts = class_counts(Pathological(held).divide(EVEN, clients, 50, 20, seed).train, EVEN)
    assert ((counts > 0).sum(1) <= held).all()
    assert (counts.sum(1) == 50).all()
    owned = Pathological(held)._owned(np.arange(10), clients, seed)
    assert all(len(set(row)) == held for row in owned.tolist())
    assert set(owned.ravel().tolist()) == set(range(10))


def test_pathological_draws_its_classes_evenly() -> None:
    counts = class_counts(Pathological(2).divide(EVEN, 100, 20, 20, seed=0).train, EVEN)
    assert 0.4 < counts.max(1).mean() / 20 < 0.7


def test_pathological_shares_an_exhausted_class_between_clients_and_says_so() -> None:
    labels = stocked([50, 450], [50, 50])
    split = Pathological(1).divide(labels, 10, 50, 20, seed=0)
    holders = int((class_counts(split.train, labels)[:, 0] > 0).sum())
    assert holders > 2
    assert split.notes[0] == f"class 0 exhausted: 50 train samples used by up to {holders} clients"


def test_pathological_moves_on_to_its_other_class_when_one_is_too_small() -> None:
    split = Pathological(2).divide(stocked([5, 195], [50, 50]), 2, 100, 20, seed=0)
    assert {len(part) for part in split.train} == {100}


def test_pathological_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UserError, match=r"split.classes_per_client = 11: the set has 10 classes"):
        Pathological(11).divide(EVEN, 10, 20, 20, seed=0)
    with pytest.raises(UserError, match=r"split.classes_per_client = 0: must be at least 1"):
        Pathological(0)
    with pytest.raises(UserError, match=r"client \d needs 60 train samples of its 1 classes, the set has 40"):
        Pathological(1).divide(stocked([40, 400], [50, 50]), 4, 60, 20, seed=0)


# -- classes written down ----------------------------------------------------------------------------------------


def test_clients_hold_the_classes_written_down_and_are_tested_on_those() -> None:
    held = [[4, 5, 6, 7], [4, 5, 6, 7], [0, 1, 2, 3]]
    split = Classes(held).divide(EVEN, 4, 50, 20, seed=0)
    for part, size in ((split.train, 50), (split.test, 20)):
        counts = class_counts(part, EVEN)
        assert all(row.sum() >= size for row in counts)
        for client, row in enumerate(counts):
            assert set(np.flatnonzero(row)) <= set(held[client % 3])  # the fourth begins again
            assert row[held[client % 3]].min() > 0


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([], "not empty"),
        ([[1], []], "not empty"),
        ([[1, 1]], "different"),
        ([[-1]], "different"),
        ([[3, 10]], "class 10"),
    ],
)
def test_classes_that_make_no_sense_are_refused(held: list[list[int]], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Classes(held).divide(EVEN, 3, 50, 20, seed=0)
