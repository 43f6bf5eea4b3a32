"""Rotation and label-swap: balance, blocks, disjointness inside a cluster, and involutions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfolk.data.partition import Labels, LabelSwap, Rotation, class_counts, exchange, rotate
from kinfolk.errors import UserError


def stocked(train: list[int], test: list[int]) -> Labels:
    return Labels(np.repeat(np.arange(len(train)), train), np.repeat(np.arange(len(test)), test), len(train))


@settings(max_examples=40, deadline=None)
@given(
    clusters=st.sampled_from([2, 4]),
    clients=st.integers(4, 41),
    train=st.integers(1, 35),
    test=st.integers(1, 25),
    kind=st.sampled_from([Rotation, LabelSwap]),
)
def test_clients_are_balanced_and_disjoint_inside_their_cluster(clusters, clients, train, test, kind) -> None:
    labels = stocked([100] * 10, [60] * 10)
    split = kind(clusters).divide(labels, clients, train, test, seed=0)
    for parts, size, stock in ((split.train, train, 100), (split.test, test, 60)):
        counts = class_counts(parts, labels, split.swaps)
        assert (counts.sum(1) == size).all()
        assert set(np.unique(counts)) <= {size // 10, -(-size // 10)}
        for cluster in range(clusters):
            mine = split.clusters == cluster
            held = np.concatenate([parts[i] for i in np.flatnonzero(mine)])
            uses = np.bincount(held)[np.unique(held)]
            wanted = class_counts(parts, labels)[mine].sum(0)
            # As few uses per sample as there can be: one, unless a class has more takers than samples.
            assert uses.max() <= max(1, int(np.ceil(wanted.max() / stock)))


@pytest.mark.parametrize(
    ("clients", "clusters", "sizes"),
    [(100, 2, [50, 50]), (10, 4, [3, 3, 2, 2]), (7, 2, [4, 3]), (4, 4, [1, 1, 1, 1])],
)
def test_clusters_are_contiguous_blocks_and_the_first_get_the_extra_clients(clients, clusters, sizes) -> None:
    split = Rotation(clusters).divide(stocked([200] * 10, [200] * 10), clients, 10, 10, seed=0)
    assert np.array_equal(split.clusters, np.repeat(np.arange(clusters), sizes))


def test_two_clusters_stand_at_half_turns_and_four_at_quarter_turns() -> None:
    labels = stocked([50] * 10, [50] * 10)
    two = Rotation(2).divide(labels, 4, 10, 10, seed=0)
    four = Rotation(4).divide(labels, 4, 10, 10, seed=0)
    assert two.quarter_turns.tolist() == [0, 0, 2, 2]
    assert four.quarter_turns.tolist() == [0, 1, 2, 3]
    assert two.cluster_names == ["0°", "180°"]
    assert four.cluster_names == ["0°", "90°", "180°", "270°"]
    assert two.swaps is None


def test_swaps_are_those_of_the_paper() -> None:
    labels = stocked([50] * 10, [50] * 10)
    two = LabelSwap(2).divide(labels, 2, 10, 10, seed=0)
    four = LabelSwap(4).divide(labels, 4, 10, 10, seed=0)
    assert two.swaps.tolist() == [[0, 1], [6, 7]]
    assert four.swaps.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert two.cluster_names == ["0↔1", "6↔7"]
    assert two.quarter_turns is None


def test_swapping_twice_gives_the_labels_back() -> None:
    labels, pair = np.arange(10), np.array([6, 7])
    once = exchange(labels, pair)
    assert once.tolist() == [0, 1, 2, 3, 4, 5, 7, 6, 8, 9]
    assert np.array_equal(exchange(once, pair), labels)


def test_turning_four_times_gives_the_image_back() -> None:
    image = np.random.default_rng(0).random((2, 3, 5, 5))
    turned = image
    for turns in range(1, 5):
        turned = rotate(turned, 1)
        assert np.array_equal(turned, rotate(image, turns))
        assert np.array_equal(turned, image) == (turns == 4)
    assert np.array_equal(rotate(rotate(image, 2), 2), image)
    assert np.array_equal(rotate(image, 2), image[..., ::-1, ::-1])  # a half turn, not a flip
    assert rotate(np.array([[1, 2], [3, 4]]), 1).tolist() == [[2, 4], [1, 3]]


def test_an_oblong_image_turns_by_halves_only() -> None:
    oblong = np.zeros((1, 28, 32))
    assert rotate(oblong, 2).shape == (1, 28, 32)
    with pytest.raises(UserError, match="images of 28×32 change shape when turned by 90°"):
        rotate(oblong, 1)


def test_clusters_shuffle_anew() -> None:
    split = Rotation(2).divide(stocked([100] * 10, [100] * 10), 10, 100, 50, seed=0)
    first, second = (np.concatenate(split.train[k : k + 5]) for k in (0, 5))
    assert 0 < len(np.intersect1d(first, second)) < 500
    assert not np.array_equal(split.train[0], split.train[5])


def test_an_exhausted_class_is_shared_between_clients_and_noted() -> None:
    """MNIST's class 5 has 892 test images where 1000 are wanted."""
    test = [1000] * 10
    test[5] = 892
    labels = stocked([1000] * 10, test)
    split = Rotation(2).divide(labels, 200, 10, 100, seed=0)
    assert split.notes == [
        f"class 5 exhausted in cluster {cluster}: 108 test samples used by two clients" for cluster in (0, 1)
    ]
    assert (class_counts(split.test, labels) == 10).all()
    held = np.concatenate(split.test[:100])
    shared = np.flatnonzero(np.bincount(held) > 1)
    assert len(shared) == 108
    assert (labels.pool[shared] == 5).all()


def test_the_remainder_goes_to_other_classes_for_other_clients() -> None:
    labels = stocked([100] * 10, [50] * 10)
    counts = class_counts(Rotation(2).divide(labels, 40, 3, 10, seed=0).train, labels)
    assert (counts.max(1) == 1).all()
    assert (counts.sum(0) > 0).all()


def test_the_natural_size_is_the_largest_balanced_one_without_sharing() -> None:
    labels = stocked([100] * 9 + [57], [40] * 10)
    split = Rotation(2).divide(labels, 9, None, None, seed=0)  # blocks of 5 and 4
    assert {len(part) for part in split.train} == {10 * (57 // 5)}
    assert {len(part) for part in split.test} == {10 * (40 // 5)}
    assert split.notes == []


@pytest.mark.parametrize(
    ("kind", "clients", "train", "test", "line"),
    [
        (Rotation(4), 3, 10, 10, "4 clusters need at least 4 clients, data.clients = 3"),
        (Rotation(2), 100, 200, 10, "50 clients of a cluster × 200 train samples need 10000, the set has 1004"),
        (Rotation(2), 2, 60, 10, "data.train = 60 takes 6 samples of every class, "
         "the set has 4 train samples of class 9"),
        (Rotation(2), 2, 49, 10, "data.train = 49 takes one more than 4 from 9 of the classes, "
         "only 8 have so many train samples"),
        (Rotation(2), 10, None, 10, "class 9 has 4 train samples for the 5 clients of a cluster; "
         "give data.train, or fewer clients"),
    ],
)  # fmt: skip
def test_impossible_requests_name_the_numbers(kind, clients, train, test, line) -> None:
    labels = stocked([124] * 8 + [8, 4] if train != 49 else [125] * 8 + [4, 4], [50] * 10)
    with pytest.raises(UserError) as error:
        kind.divide(labels, clients, train, test, seed=0)
    assert str(error.value) == line


def test_settings_and_classes_are_checked() -> None:
    for kind in (Rotation, LabelSwap):
        with pytest.raises(UserError, match=r"split.clusters = 3: must be 2 or 4"):
            kind(3)
    with pytest.raises(UserError, match="label-swap exchanges labels up to 7, the set has 5 classes"):
        LabelSwap(2).divide(stocked([50] * 5, [50] * 5), 4, 5, 5, seed=0)
