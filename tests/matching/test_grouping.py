"""P4's groups: a partition under the cap, the same for whoever knows the same, and right where distances are."""

from __future__ import annotations

import numpy as np
import pytest

from kinfolk.matching.grouping import Pairs, at_random, form, members, objective, within


def all_pairs(place: np.ndarray, ids: np.ndarray | None = None) -> Pairs:
    """Distances between all clients that lie at these places [n] on a line."""
    ids = np.arange(len(place)) if ids is None else ids
    first, second = np.triu_indices(len(place), 1)
    return Pairs(ids[first], ids[second], np.abs(place[first] - place[second]))


def sampled_pairs(place: np.ndarray, count: int, seed: int) -> Pairs:
    generator, n = np.random.default_rng(seed), len(place)
    lists = np.stack([generator.choice(np.delete(np.arange(n), i), count, replace=False) for i in range(n)])
    return Pairs.of_lists(np.arange(n), lists, np.abs(place[:, None] - place[lists]))


def sizes(group: np.ndarray) -> list[int]:
    return sorted(np.unique(group, return_counts=True)[1].tolist())


def test_the_nearest_join_first_and_sizes_double() -> None:
    place = np.array([0.0, 10.0, 0.1, 10.1, 0.4, 10.4, 0.5, 10.5])
    assert form(np.arange(8), all_pairs(place), 2, 0).tolist() == [0, 1, 0, 1, 4, 5, 4, 5]
    assert form(np.arange(8), all_pairs(place), 4, 0).tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert form(np.arange(8), all_pairs(place), 8, 0).tolist() == [0] * 8
    assert form(np.arange(8), all_pairs(place), 1, 0).tolist() == list(range(8))


@pytest.mark.parametrize("cap", [1, 2, 3, 4, 7, 8, 50])
@pytest.mark.parametrize("n", [1, 2, 5, 16, 33])
def test_groups_are_a_partition_under_the_cap(n: int, cap: int) -> None:
    place = np.random.default_rng(n).normal(size=n)
    pairs = sampled_pairs(place, min(3, n - 1), n) if n > 1 else all_pairs(place)
    group = form(np.arange(n), pairs, cap, 0)
    assert max(sizes(group)) <= cap
    for name in np.unique(group):
        assert np.flatnonzero(group == name).min() == name
    small = [size for size in sizes(group) if 2 * size <= cap]
    assert len(small) <= 1  # two of them would have joined


def test_perfect_distances_give_pure_groups() -> None:
    main = np.arange(64) % 8
    place = 10.0 * main + np.random.default_rng(0).uniform(size=64)
    group = form(np.arange(64), all_pairs(place), 8, 0)
    assert sizes(group) == [8] * 8
    assert all(len(np.unique(main[group == name])) == 1 for name in np.unique(group))
    group = form(np.arange(64), sampled_pairs(place, 35, 1), 8, 0)  # some kin never met
    same = group[:, None] == group
    purity = (same & (main[:, None] == main)).sum() / same.sum()
    assert purity > 0.7  # by chance 0.125


def test_it_is_what_a_plain_reading_of_the_procedure_gives() -> None:
    for seed in range(20):
        n = 17
        place = np.random.default_rng(seed).uniform(size=n)
        pairs = sampled_pairs(place, 6, seed)
        assert form(np.arange(n), pairs, 4, 0).tolist() == plain(n, pairs, 4)


def plain(n: int, pairs: Pairs, cap: int) -> list[int]:
    """The procedure with sets and a table of distances, where every distance that decides is finite."""
    table = np.full((n, n), np.inf)
    for i, j, d in zip(pairs.first, pairs.second, pairs.distance):
        table[i, j] = table[j, i] = min(d, table[i, j])
    groups = [{i} for i in range(n)]
    while True:

        def between(g: set[int], h: set[int]) -> float:
            if g is h or len(g) + len(h) > cap:
                return float("inf")
            return float(min(table[i, j] for i in g for j in h))

        best = [min(groups, key=lambda h, g=g: (between(g, h), min(h))) for g in groups]  # type: ignore[misc]
        reach = [between(g, h) for g, h in zip(groups, best)]
        merged: list[set[int]] = []
        used: list[set[int]] = []

        def take(g: set[int], h: set[int]) -> None:
            merged.append(g | h)  # noqa: B023
            used.extend([g, h])  # noqa: B023

        for a, g in enumerate(groups):
            b = groups.index(best[a])
            if a < b and np.isfinite(reach[a]) and best[b] == g:
                take(g, best[a])
        for a in sorted(range(len(groups)), key=lambda a: (reach[a], min(groups[a]))):
            g = groups[a]
            if g in used or not np.isfinite(reach[a]):
                continue
            open_ones = [h for h in groups if h not in used and np.isfinite(between(g, h))]
            if open_ones:
                take(g, min(open_ones, key=lambda h, g=g: (between(g, h), min(h))))  # type: ignore[misc]
        alone = [g for a, g in enumerate(groups) if g not in used and not np.isfinite(reach[a])]
        assert all(len(g) + len(h) > cap for g in alone for h in groups if h not in used and h is not g)
        if not merged:
            return [min(next(g for g in groups if i in g)) for i in range(n)]
        groups = sorted([*merged, *(g for g in groups if g not in used)], key=min)


def test_unknown_distances_are_never_preferred_and_those_without_any_are_paired_by_chance() -> None:
    nothing = Pairs(np.array([0, 1]), np.array([1, 2]), np.array([np.nan, np.inf]))
    group = form(np.arange(6), nothing, 2, 0)
    assert sizes(group) == [2, 2, 2]
    assert group.tolist() == form(np.arange(6), nothing, 2, 0).tolist()
    others = {tuple(form(np.arange(6), nothing, 2, seed).tolist()) for seed in range(10)}
    assert len(others) > 1
    known = Pairs(np.array([0, 1, 1]), np.array([5, 2, 3]), np.array([9.0, 1.0, np.nan]))
    assert form(np.arange(6), known, 2, 0).tolist() == [0, 1, 1, 3, 3, 0]


def test_ties_go_to_the_smaller_id_and_the_order_of_pairs_does_not_matter() -> None:
    pairs = all_pairs(np.zeros(5))
    assert form(np.arange(5), pairs, 2, 0).tolist() == [0, 0, 2, 2, 4]
    place = np.random.default_rng(3).uniform(size=20)
    pairs = sampled_pairs(place, 5, 3)
    order = np.random.default_rng(4).permutation(pairs.first.size)
    turned = Pairs(pairs.second[order], pairs.first[order], pairs.distance[order])
    assert form(np.arange(20), pairs, 8, 0).tolist() == form(np.arange(20), turned, 8, 0).tolist()


def test_only_clients_in_view_are_grouped() -> None:
    place = np.array([0.0, 0.1, 0.2, 5.0, 5.1, 5.2])
    group = form(np.array([0, 2, 3, 5]), all_pairs(place), 2, 0)
    assert group.tolist() == [0, 0, 3, 3]


def test_random_groups_are_a_partition_and_keep_to_labels() -> None:
    group = at_random(21, 8, 0)
    assert sizes(group) == [7, 7, 7]
    assert at_random(21, 8, 1).tolist() != group.tolist()
    within = np.arange(21) % 3
    group = at_random(21, 4, 0, within)
    assert max(sizes(group)) <= 4
    assert all(len(np.unique(within[group == name])) == 1 for name in np.unique(group))


def test_members_are_the_others_of_the_group() -> None:
    ids = np.array([1, 4, 6, 9])
    assert members(ids, np.array([1, 4, 1, 1]), 3).tolist() == [[6, 9, -1], [-1, -1, -1], [1, 9, -1], [1, 6, -1]]


def test_the_objective_counts_every_known_pair_once() -> None:
    pairs = Pairs(np.array([0, 1, 0, 2]), np.array([1, 0, 2, 3]), np.array([2.0, 2.0, 5.0, 1.5]))
    assert objective(np.array([0, 0, 2, 2]), np.arange(4), pairs) == 3.5
    assert objective(np.arange(4), np.arange(4), pairs) == 0.0


def test_each_client_has_its_own_part_of_the_objective() -> None:
    ids = np.array([2, 3, 5, 7, 11])
    pairs = Pairs(np.array([2, 3, 2, 5]), np.array([3, 2, 5, 7]), np.array([2.0, 2.0, 5.0, np.nan]))
    found = within(np.array([2, 2, 2, 5, 11]), ids, pairs)
    assert found[:3].tolist() == [7.0, 2.0, 5.0]
    assert np.isnan(found[3:]).all()  # of a pair whose distance is not known, and alone
