"""Test samples common to all clients: even over the classes, never trained on, drawn by the seed alone."""

import numpy as np
import pytest

from kinfolk.data.partition import (
    Alpha,
    Dirichlet,
    Iid,
    Labels,
    LabelSwap,
    Pathological,
    Rotation,
    Shards,
    Split,
    with_common_test,
)
from kinfolk.errors import UserError


def balanced(train: int = 100, test: int = 40, classes: int = 5) -> Labels:
    """So many samples of each class."""
    return Labels(np.repeat(np.arange(classes), train), np.repeat(np.arange(classes), test), classes)


def common(labels: Labels, kind: object, size: int, seed: int = 0) -> tuple[np.ndarray, Split]:
    split = kind.divide(labels, 4, 20, 10, seed)  # type: ignore[attr-defined]
    found = with_common_test(split, labels, size, seed)
    assert found.common is not None
    assert all(np.array_equal(a, b) for a, b in zip(found.train + found.test, split.train + split.test))
    return found.common, found


@pytest.mark.parametrize("kind", [Iid(), Dirichlet(0.1), Pathological(2), Shards(2), Alpha(0.5)])
@pytest.mark.parametrize("size", [5, 52, 100])
def test_classes_are_even_and_nobody_trains_on_them(kind: object, size: int) -> None:
    labels = balanced()
    chosen, split = common(labels, kind, size)
    assert len(chosen) == size == len(np.unique(chosen))
    assert (chosen >= 500).all()  # of the test set
    assert not np.isin(chosen, np.concatenate(split.train)).any()
    counts = np.bincount(labels.pool[chosen], minlength=5)
    assert counts.max() - counts.min() <= 1


def test_another_seed_takes_others_and_the_same_seed_the_same() -> None:
    labels = balanced()
    first, again, other = (common(labels, Dirichlet(1.0), 50, seed)[0] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_smaller_number_takes_some_of_the_same() -> None:
    labels = balanced()
    assert np.isin(common(labels, Iid(), 50)[0], common(labels, Iid(), 100)[0]).all()


def test_asking_for_more_than_there_are_takes_all_and_says_so() -> None:
    chosen, split = common(balanced(), Iid(), 999)
    assert np.array_equal(chosen, np.arange(500, 700))
    assert split.notes[-1] == "data.global_test = 999: the test set has 200 samples for it, all are used"
    assert common(balanced(), Iid(), 200)[1].notes == []


def test_a_rare_class_gives_what_it_has_and_others_fill_up() -> None:
    labels = Labels(np.repeat(np.arange(3), 50), np.repeat(np.arange(3), [2, 30, 40]), 3)
    chosen, _ = common(labels, Iid(), 31)
    assert np.bincount(labels.pool[chosen]).tolist() == [2, 15, 14]


@pytest.mark.parametrize(("kind", "words"), [(Rotation(2), "images turned"), (LabelSwap(2), "labels exchanged")])
def test_clients_that_see_the_same_sample_differently_have_no_common_test(kind: object, words: str) -> None:
    with pytest.raises(UserError, match=rf"data.global_test: .* {words}"):
        common(balanced(classes=10), kind, 10)


def test_no_sample_left_over_is_one_line() -> None:
    labels = balanced(1, 1)
    split = Split([np.arange(10)], [np.arange(5)], None, None, None, [])
    with pytest.raises(UserError, match="no test sample is left that no client trains on"):
        with_common_test(split, labels, 3, 0)
