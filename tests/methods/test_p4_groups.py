"""P4: who is with whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_p4 import PAPER, engine_of, published, quiet, run, state_of
from torch import Tensor

from conftest import make_federation
from kinfolk import engines
from kinfolk.data.federation import Federation
from kinfolk.matching.grouping import at_random
from kinfolk.methods.groups import l1_distances
from kinfolk.methods.p4 import P4
from kinfolk.methods.private import Releases, account
from kinfolk.metrics import grouping
from kinfolk.peers.faults import Faults


def mains(clients: int, records: int, classes: int = 4, seed: int = 0) -> Federation:
    """Clients that mostly hold one class."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(classes, 12, generator=generator)

    def samples(client: int, count: int) -> tuple[Tensor, Tensor]:
        y = torch.where(torch.rand(count, generator=generator) < 0.8, client % classes, 0)
        y = torch.where(torch.rand(count, generator=generator) < 0.2, torch.randint(classes, (count,)), y)
        return places[y] + 0.5 * torch.randn(count, 12, generator=generator), y

    names = range(clients)
    return Federation.from_arrays(
        [samples(i, records) for i in names], [samples(i, 10) for i in names], classes=classes,
        clusters=[i % classes for i in names],
    )  # fmt: skip


def purity(engine: engines.Engine, data: Federation) -> tuple[float, float]:
    found = grouping(state_of(engine).clusters.numpy(), data.class_counts() / data.class_counts().sum(1, keepdims=True))
    return found["group_purity"], found["group_purity_chance"]


def test_without_noise_alike_clients_find_each_other_and_with_the_papers_they_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    data = mains(32, 30)
    noisy = engine_of(P4(cap=4, noise="noble", preset="paper"), data, rounds=100)
    noisy.step(1, False)
    noise = purity(noisy, data)
    quiet(monkeypatch)
    clean = engine_of(P4(cap=4, noise="noble", preset="paper"), data, rounds=100)
    clean.step(1, False)
    right, chance = purity(clean, data)
    assert right > 0.8
    assert chance < 0.4
    assert noise[0] < right - 0.2


def test_a_noisy_histogram_finds_alike_clients_within_the_budget() -> None:
    torch.manual_seed(0)
    data = mains(16, 60)
    engine = engine_of(P4(groups="histogram", cap=4, histogram_share=0.3), data, rounds=3)
    for t in range(1, 4):
        engine.step(t, False)
    right, chance = purity(engine, data)
    assert right > 0.8 > chance
    releases = account(engine.shards[0].cohort)
    assert releases.ledger.releases().tolist() == [4] * 16  # three rounds and the histogram
    spent = releases.ledger.spent()
    assert float(spent.max()) <= 15.0
    assert float(spent.min()) > 14.9


def test_the_histograms_noise_is_as_planned() -> None:
    data = make_federation([50] * 400, classes=10)
    engine = engine_of(P4(groups="histogram", epsilon=2.0), data, rounds=5)
    cohort = engine.shards[0].cohort
    counts = torch.zeros(400, 10)
    noisy = account(cohort).statistic(1, "histogram", counts, 2**0.5)
    planned = account(cohort).aside[0].noise_multiplier * 2**0.5
    assert float(noisy.std()) == pytest.approx(planned, rel=0.05)


def test_replacing_a_record_moves_a_histogram_by_what_the_noise_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, float]] = []

    def spy(self: Releases, t: int, name: str, values: Tensor, moved: float) -> Tensor:
        seen.append((values, moved))
        return values

    monkeypatch.setattr(Releases, "statistic", spy)
    for label in (0, 1):
        data = make_federation([6] * 4)
        data.train.y[0] = label
        engine_of(P4(groups="histogram", cap=2), data).step(1, False)
    (first, moved), (second, _) = seen
    assert float((first - second).norm()) == pytest.approx(moved)


@pytest.mark.parametrize("kind", ["l1", "histogram", "random", "oracle"])
@pytest.mark.parametrize("cap", [1, 2, 3, 8])
def test_groups_are_a_partition_under_the_cap(kind: Any, cap: int) -> None:
    data = make_federation([6] * 11, clusters=[i % 2 for i in range(11)])
    engine = engine_of(P4(groups=kind, cap=cap, sampled=4), data)
    engine.step(1, False)
    state = state_of(engine)
    for row in range(11):
        group = sorted([row, *(i for i in state.neighbors[row].tolist() if i >= 0)])
        assert len(group) <= cap
        assert int(state.clusters[row]) == group[0]
        assert all(sorted([i, *(j for j in state.neighbors[i].tolist() if j >= 0)]) == group for i in group)


def test_groups_are_the_same_over_shards_though_messages_are_lost() -> None:
    data = make_federation([6] * 12)
    faults = Faults(loss=0.3, absent=0.3)
    one, three = (engine_of(P4(groups="l1", cap=4, sampled=5), data, faults=faults, shards=s) for s in (0, 3))
    for t in range(1, 5):
        one.step(t, False)
        three.step(t, False)
    several = torch.cat([shard.state.neighbors for shard in three.shards])
    assert torch.equal(state_of(one).neighbors, several)
    assert torch.equal(one.shards[0].cohort.weights, torch.cat([s.cohort.weights for s in three.shards]))


def test_who_was_absent_in_round_one_joins_those_who_count_on_it() -> None:
    data = make_federation([6] * 12)
    faults = Faults(absent=0.3)
    engine = engine_of(P4(groups="l1", cap=4), data, rounds=20, faults=faults)
    engine.step(1, False)
    late = torch.nonzero(state_of(engine).clusters < 0).flatten().tolist()
    assert late
    for t in range(2, 12):
        engine.step(t, False)
    state = state_of(engine)
    for client in late:
        others = [i for i in state.neighbors[client].tolist() if i >= 0]
        naming = [i for i in range(12) if client in state.neighbors[i].tolist()]
        assert set(others) <= set(range(12)) - {client}
        assert set(others) == set(naming)


def test_distances_are_sums_of_absolute_differences() -> None:
    own, theirs = torch.randn(3, 50, dtype=torch.float64), torch.randn(4, 50, dtype=torch.float64)
    rows = torch.tensor([[0, -1], [3, 1], [2, 2]])
    found = l1_distances(own, theirs, rows)
    assert torch.isnan(found[0, 1])
    assert float(found[1, 0]) == pytest.approx(float((own[1] - theirs[3]).abs().sum()))
    assert found[2, 0] == found[2, 1]


def test_quality_of_groups_is_measured_over_pairs() -> None:
    labels = np.array([[1.0, 0.0], [0.8, 0.2], [0.0, 1.0], [0.1, 0.9]])
    found = grouping(np.array([0, 0, 2, 2]), labels)
    assert found["group_purity"] == 1.0
    assert found["group_purity_chance"] == pytest.approx(2 / 6)
    assert found["group_label_distance"] == pytest.approx(0.3)
    assert np.isnan(grouping(np.array([0, 1, 2, -1]), labels)["group_purity"])


def test_the_objective_is_the_sum_of_distances_within_groups() -> None:
    data = make_federation([6] * 9)
    one, three = (engine_of(P4(groups="l1", cap=4, sampled=8, **PAPER), data, shards=n) for n in (0, 3))  # type: ignore[arg-type]
    proxies = published(one, 1)[0]["weights"]
    three.step(1, True)
    state = state_of(one)
    for i in range(9):
        group = [j for j in range(9) if state.clusters[j] == state.clusters[i] and j != i]
        expected = sum(float((proxies[i] - proxies[j]).abs().sum()) for j in group)
        assert float(state.apart[i].nan_to_num()) == pytest.approx(expected, rel=1e-6)
    assert float(state.apart.nansum()) > 0
    several = torch.cat([shard.state.apart for shard in three.shards])
    assert torch.equal(several.nan_to_num(), state.apart.nan_to_num())


def test_the_objective_is_logged_where_distances_made_the_groups() -> None:
    with_distances = run("a", preset="paper", cap=4)
    assert all(row["group_objective"] > 0 for row in with_distances.metrics)
    assert len({row["group_objective"] for row in with_distances.metrics}) == 1
    assert "group_objective" not in run("b", groups="random", cap=4).summary
    assert "group_objective" not in run("c", preset="paper", cap=1).summary


def test_without_noise_the_objective_is_below_that_of_random_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    data = mains(32, 30)
    engine = engine_of(P4(cap=4, noise="noble", preset="paper", rotate_every=0), data, rounds=100)
    messages = published(engine, 1)
    proxies = messages[0]["weights"]
    apart = torch.cdist(proxies, proxies, p=1)
    found = float(state_of(engine).apart.nansum())
    names = torch.from_numpy(at_random(32, 4, 0))
    by_chance = float(apart[names[:, None] == names].sum())
    assert found < 0.6 * by_chance
