"""What holds for every kind of split: sound indices, no sample twice in a client, draws by the seed alone."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from kinfolk.data.partition import (
    SPLITS,
    Alpha,
    ByUser,
    Classes,
    Dirichlet,
    Iid,
    Labels,
    LabelSwap,
    Pathological,
    Rotation,
    Shards,
    class_counts,
    generator,
    tuning_clients,
)
from kinfolk.errors import UserError


def balanced(train_per_class: int, test_per_class: int, classes: int = 10) -> Labels:
    return Labels(
        np.repeat(np.arange(classes), train_per_class), np.repeat(np.arange(classes), test_per_class), classes
    )


def uneven(train: int, test: int, classes: int = 10, seed: int = 0) -> Labels:
    draws = np.random.default_rng(seed)
    return Labels(draws.integers(0, classes, train), draws.integers(0, classes, test), classes)


def with_users() -> Labels:
    found = uneven(900, 300)
    draws = np.random.default_rng(1)
    return dataclasses.replace(found, train_user=draws.integers(0, 30, 900), test_user=draws.integers(20, 40, 300))


KINDS = [
    Iid(),
    Rotation(2),
    Rotation(4),
    LabelSwap(2),
    LabelSwap(4),
    Dirichlet(0.1),
    Dirichlet(1.0, mode="class-split", min_size=2),
    Dirichlet(0.5, mode="class-split", balance=True, min_size=2),
    Pathological(2),
    Classes([[0, 1], [1, 2], [2, 3]]),
    Shards(2),
    Alpha(0.5),
    ByUser(min_samples=10),
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def test_every_kind_is_registered_under_its_name() -> None:
    assert set(SPLITS) == {
        "iid", "rotation", "label-swap", "dirichlet", "pathological", "classes", "shards", "alpha", "by-user",
    }  # fmt: skip
    assert {type(kind) for kind in KINDS} == set(SPLITS.values())


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_settings_are_documented_and_validated(name: str) -> None:
    kind = SPLITS[name]
    assert kind.__doc__
    assert "\n" not in kind.__doc__
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        assert field.metadata["help"]
        assert field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    assert TypeAdapter(kind).validate_python({}) == kind()


def test_a_choice_outside_the_list_is_refused_by_validation() -> None:
    with pytest.raises(ValueError, match="client-prior"):
        TypeAdapter(Dirichlet).validate_python({"mode": "sideways"})


@each_kind
def test_parts_are_sorted_distinct_nonempty_and_apart(kind) -> None:
    labels = with_users()
    split = kind.divide(labels, 20, None, None, seed=0)
    assert len(split.train) == len(split.test) == 20
    for train, test in zip(split.train, split.test):
        assert len(train) > 0
        assert len(test) > 0
        for part in (train, test):
            assert (np.diff(part) > 0).all()  # sorted, and nothing twice
            assert part[0] >= 0
            assert part[-1] < 1200
        assert not np.intersect1d(train, test).size
    if not isinstance(kind, Shards | Alpha | ByUser):  # those pool train and test samples
        assert max(part.max() for part in split.train) < 900 <= min(part.min() for part in split.test)


@each_kind
def test_the_same_seed_gives_the_same_split_whatever_ran_before(kind) -> None:
    labels = with_users()
    np.random.seed(1)  # noqa: NPY002  a split must not read the global state
    first = kind.divide(labels, 12, None, None, seed=3)
    np.random.seed(2)  # noqa: NPY002
    kind.divide(labels, 7, None, None, seed=4)
    again = kind.divide(labels, 12, None, None, seed=3)
    other = kind.divide(labels, 12, None, None, seed=5)
    for side in ("train", "test"):
        assert all(map(np.array_equal, getattr(first, side), getattr(again, side)))
        assert not all(map(np.array_equal, getattr(first, side), getattr(other, side)))
    assert first.notes == again.notes


@each_kind
def test_train_samples_are_disjoint_where_promised(kind) -> None:
    split = kind.divide(with_users(), 12, None, None, seed=0)
    groups = split.clusters if isinstance(kind, Rotation | LabelSwap) else np.zeros(12)
    for group in np.unique(groups):
        held = np.concatenate([split.train[i] for i in np.flatnonzero(groups == group)])
        if not isinstance(kind, Pathological | Classes):  # there a class may have more takers than samples
            assert len(np.unique(held)) == len(held)


@each_kind
@pytest.mark.parametrize("side", ["train", "test"])
def test_clients_without_samples_are_refused(kind, side: str) -> None:
    sizes = {"train": 5, "test": 5, side: 0}
    with pytest.raises(UserError, match=f"data.{side} = 0: every client needs at least 1 {side} sample"):
        kind.divide(with_users(), 5, sizes["train"], sizes["test"], seed=0)


@each_kind
def test_no_clients_are_refused(kind) -> None:
    with pytest.raises(UserError, match=r"data.clients = 0"):
        kind.divide(with_users(), 0, None, None, seed=0)


@pytest.mark.parametrize("kind", [Iid(), Dirichlet(), Dirichlet(mode="class-split"), Pathological(2)], ids=str)
def test_more_than_the_set_has_is_refused_with_the_numbers(kind) -> None:
    with pytest.raises(UserError) as error:
        kind.divide(uneven(1347, 450), 100, 200, 10, seed=0)
    assert str(error.value) == "100 clients × 200 train samples need 20000, the set has 1347"


@pytest.mark.parametrize("kind", [Iid(), Dirichlet(), Pathological(2)], ids=str)
def test_more_clients_than_samples_are_refused(kind) -> None:
    with pytest.raises(UserError, match="30 train samples cannot be shared out among 31 clients"):
        kind.divide(uneven(30, 30), 31, None, None, seed=0)


def test_labels_outside_the_declared_classes_are_refused() -> None:
    with pytest.raises(UserError, match=r"2 train samples have labels outside 0..2 \(the first is 3\)"):
        Labels(np.array([0, 3, 1, -1]), np.array([0]), 3)


def test_iid_shares_everything_out_equally() -> None:
    split = Iid().divide(uneven(1003, 207), 10, None, None, seed=0)
    assert [len(part) for part in split.train] == [100] * 10
    assert [len(part) for part in split.test] == [20] * 10
    assert split.clusters is None
    assert split.notes == []


def test_iid_shares_test_samples_between_clients_and_says_so() -> None:
    split = Iid().divide(uneven(1000, 45), 10, 10, 10, seed=0)
    assert split.notes == ["test set exhausted: 45 test samples used by up to 3 clients"]
    with pytest.raises(UserError, match=r"data.test = 46: the set has 45 test samples"):
        Iid().divide(uneven(1000, 45), 10, 10, 46, seed=0)
    with pytest.raises(UserError, match=r"45 test samples cannot be shared out among 46 clients; give data.test"):
        Iid().divide(uneven(1000, 45), 46, 10, None, seed=0)


def test_draws_depend_on_seed_purpose_and_index() -> None:
    same = [generator(1, "a", 2).random(3) for _ in range(2)]
    assert np.array_equal(*same)
    others = [generator(*key).random(3) for key in ((2, "a", 2), (1, "b", 2), (1, "a", 3))]
    assert not any(np.array_equal(same[0], other) for other in others)


def test_a_clients_draws_do_not_depend_on_how_many_clients_there_are() -> None:
    labels = balanced(500, 100)
    few = Pathological(2).divide(labels, 20, 50, 20, seed=0)
    many = Pathological(2).divide(labels, 80, 50, 20, seed=0)
    assert np.array_equal(class_counts(few.train, labels), class_counts(many.train, labels)[:20])


def test_counts_are_seen_after_the_swap() -> None:
    labels = Labels(np.array([0, 0, 1]), np.array([2]), 3)
    parts = [np.array([0, 1, 2]), np.array([0, 3])]
    assert class_counts(parts, labels).tolist() == [[2, 1, 0], [1, 0, 1]]
    assert class_counts(parts, labels, np.array([[0, 1], [1, 2]])).tolist() == [[1, 2, 0], [1, 1, 0]]


@pytest.mark.parametrize(("clients", "left"), [(200, 160), (260, 208), (60, 48)])
def test_a_fifth_of_the_clients_is_for_tuning(clients: int, left: int) -> None:
    tuning = tuning_clients(clients, seed=0)
    assert len(np.unique(tuning)) == clients - left
    assert tuning.max() < clients
    assert np.array_equal(tuning, tuning_clients(clients, seed=0))
    assert not np.array_equal(tuning, tuning_clients(clients, seed=1))


def test_by_user_gives_a_client_one_users_samples() -> None:
    labels = with_users()
    user = np.concatenate([labels.train_user, labels.test_user])
    split = ByUser(min_samples=20, test_share=0.25).divide(labels, 15, None, None, seed=0)
    assert len(np.unique(split.users)) == 15
    for client, train, test in zip(split.users, split.train, split.test):
        mine = np.flatnonzero(user == client)
        assert len(mine) >= 20
        assert np.array_equal(np.sort(np.concatenate([train, test])), mine)
        assert len(test) == round(0.25 * len(mine))
    capped = ByUser(min_samples=20).divide(labels, 15, 5, 2, seed=0)
    assert {len(part) for part in capped.train} == {5}
    assert {len(part) for part in capped.test} == {2}


def test_by_user_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UserError, match="by-user needs a data set that knows its users"):
        ByUser().divide(uneven(100, 10), 2, None, None, seed=0)
    labels = Labels(np.zeros(30, int), np.zeros(2, int), 1, np.repeat([0, 1, -1], [12, 8, 10]))
    with pytest.raises(UserError) as error:
        ByUser(min_samples=10).divide(labels, 2, None, None, seed=0)
    assert str(error.value) == "data.clients = 2: 1 of 2 users have at least split.min_samples = 10 samples"
    with pytest.raises(UserError, match=r"split.min_samples = 1"):
        ByUser(min_samples=1)
    with pytest.raises(UserError, match=r"split.test_share = 1"):
        ByUser(test_share=1.0)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([k for k in KINDS if not isinstance(k, ByUser)]),
    clients=st.integers(1, 40),
    train=st.one_of(st.none(), st.integers(1, 60)),
    test=st.one_of(st.none(), st.integers(1, 30)),
    seed=st.integers(0, 5),
)
def test_any_request_gives_a_sound_split_or_one_line(kind, clients, train, test, seed) -> None:
    labels = uneven(700, 200, seed=seed)
    try:
        split = kind.divide(labels, clients, train, test, seed)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017  either outcome is right
        return
    assert len(split.train) == len(split.test) == clients
    for part in split.train + split.test:
        assert len(part)
        assert (np.diff(part) > 0).all()
    if train is not None and not isinstance(kind, Dirichlet | Shards):
        assert {len(part) for part in split.train} == {train}


def test_large_splits_are_quick() -> None:
    cifar = balanced(5000, 1000)
    begun = time.perf_counter()
    Dirichlet(0.1).divide(cifar, 100, None, None, seed=0)
    Rotation(4).divide(cifar, 1000, 33, 15, seed=0)
    assert time.perf_counter() - begun < 3  # about 0.15 s on two ordinary cores
