"""FedSEM against its definition."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.methods import find
from kinfolk.methods.fedsem import State, settle
from kinfolk.peers.faults import Faults

SIZES = [12, 6, 9, 20, 8, 8, 16, 10]


def engine_of(name: str = "fedsem", faults: Faults | None = None, **settings: Any) -> engines.InProcessEngine:
    cohort = {"training": Training(epochs=1, batch_size=5, lr=0.1), "seed": 4, "device": "cpu", "precision": "float64"}
    return engines.InProcessEngine(
        engines.Parts(
            make_federation(SIZES),
            lambda: initial_model(lambda: nn.Linear(6, 3), 4),
            find(name)(**settings),
            faults or Faults(),
            cohort,
        )
    )


def alone() -> Tensor:
    engine = engine_of("local")
    engine.step(1, False)
    return engine.shards[0].cohort.weights


def points(*values: float) -> Tensor:
    return torch.tensor([[value, 0.0] for value in values], dtype=torch.float64)


def test_the_first_centres_are_means_of_groups_and_everybody_is_nearest_to_its_own() -> None:
    engine = engine_of(models=3)
    engine.step(1, False)
    trained, sizes, state = alone(), torch.tensor(SIZES).double(), engine.shards[0].state
    assert set(state.clusters.tolist()) == {0, 1, 2}
    for number in range(3):
        members = state.clusters == number
        mean = (trained[members] * (sizes[members] / sizes[members].sum())[:, None]).sum(dim=0)
        torch.testing.assert_close(state.centers[number], mean, rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.cdist(trained, state.centers).argmin(dim=1), state.clusters)
    assert torch.equal(engine.shards[0].cohort.weights, state.centers[state.clusters])
    assert engine.shards[0].peers.models_received.tolist() == [2] * 8


def test_one_centre_is_fedavg() -> None:
    fedsem, fedavg = engine_of(models=1), engine_of("fedavg")
    for t in (1, 2):
        fedsem.step(t, False)
        fedavg.step(t, False)
    difference = fedsem.shards[0].cohort.weights - fedavg.shards[0].cohort.weights
    assert difference.abs().max() < 1e-12


def test_a_client_trains_from_its_centre_and_joins_the_nearest_to_where_it_came() -> None:
    engine = engine_of(models=2)
    engine.step(1, False)
    before = engine.shards[0].state
    local = engine_of("local")
    local.shards[0].cohort.weights = before.centers[before.clusters]
    local.step(2, False)
    groups, centers = settle(local.shards[0].cohort.weights, torch.tensor(SIZES), before.centers)
    engine.step(2, False)
    assert torch.equal(engine.shards[0].state.clusters, groups)
    assert not torch.equal(groups, before.clusters)  # here somebody does move
    torch.testing.assert_close(engine.shards[0].state.centers, centers, rtol=1e-12, atol=1e-12)


def test_settling_repeats_until_nobody_changes() -> None:
    models, sizes = points(0, 1, 5, 6, 7), torch.ones(5, dtype=torch.int64)
    groups, centers = settle(models, sizes, points(0, 1))
    # first 0 | 1 5 6 7 with means 0 and 4.75, then 0 1 | 5 6 7
    assert groups.tolist() == [0, 0, 1, 1, 1]
    torch.testing.assert_close(centers, points(0.5, 6))


def test_centres_are_weighted_by_samples() -> None:
    _, centers = settle(points(0, 3, 10), torch.tensor([1, 2, 5]), points(1, 10))
    torch.testing.assert_close(centers, points(2, 10))


def test_an_empty_centre_moves_to_the_client_farthest_from_its_own() -> None:
    groups, centers = settle(points(0, 1, 9), torch.tensor([1, 1, 1]), points(1, 100))
    assert groups.tolist() == [0, 0, 1]
    torch.testing.assert_close(centers, points(0.5, 9))


def test_two_empty_centres_move_to_different_clients() -> None:
    groups, centers = settle(points(0, 1, 9, 20), torch.ones(4, dtype=torch.int64), points(1, 1000, 2000))
    assert groups.tolist() == [0, 0, 2, 1]
    torch.testing.assert_close(centers, points(0.5, 20, 9))


def test_equal_models_share_a_centre_and_the_others_stay_where_they_were() -> None:
    groups, centers = settle(points(2, 2, 2), torch.tensor([1, 1, 1]), points(2, 50))
    assert groups.tolist() == [0, 0, 0]
    torch.testing.assert_close(centers, points(2, 50))


def test_a_first_round_without_enough_clients_is_tried_again() -> None:
    engine = engine_of(models=2, faults=Faults(absent=0.999999))
    engine.step(1, False)
    shard = engine.shards[0]
    assert shard.state.centers.shape == (0, 21)
    shard.peers.faults = Faults()
    engine.step(2, False)
    assert shard.state.centers.shape == (2, 21)


def test_who_is_not_heard_keeps_its_centre_and_without_anybody_nothing_changes() -> None:
    engine = engine_of(models=2)
    engine.step(1, False)
    shard = engine.shards[0]
    before = shard.state
    shard.peers.faults = Faults(absent=0.999999)
    engine.step(2, False)
    assert torch.equal(shard.state.centers, before.centers)
    assert torch.equal(shard.state.clusters, before.clusters)
    shard.peers.faults = Faults()
    shard.cohort.begin(absent=torch.arange(8) == 3)
    moved = State(torch.where(torch.arange(8) == 3, 1 - before.clusters, before.clusters), before.centers)
    after = shard.method.step(3, shard.cohort, moved, shard.peers)
    assert after.clusters[3] == moved.clusters[3]


def test_more_centres_than_clients_is_refused_with_both_numbers() -> None:
    with pytest.raises(kinfolk.UserError, match=r"'method.models' = 9, but there are only 8 clients"):
        kinfolk.run(tiny_experiment(method={"name": "fedsem", "models": 9}), out="a")
    result = kinfolk.run(tiny_experiment(method={"name": "fedsem", "models": 8}), out="b")
    assert torch.isfinite(result.weights()).all()


def test_a_client_alone_has_one_centre_and_learns() -> None:
    cohort = {"training": Training(epochs=1, batch_size=5, lr=0.1), "seed": 4, "device": "cpu", "precision": "float64"}
    parts = [
        engines.Parts(
            make_federation([12]), lambda: initial_model(lambda: nn.Linear(6, 3), 4), method, Faults(), cohort
        )
        for method in (find("fedsem")(models=2), find("local")())
    ]
    fedsem, local = (engines.InProcessEngine(part) for part in parts)
    for t in (1, 2):
        fedsem.step(t, False)
        local.step(t, False)
    torch.testing.assert_close(fedsem.shards[0].cohort.weights, local.shards[0].cohort.weights, rtol=1e-12, atol=1e-12)


def test_it_finds_two_rotations_of_digits() -> None:
    sections = tiny_experiment(
        data={"clients": 16, "train": 40},
        training={"epochs": 3, "lr": 0.1},
        method={"name": "fedsem", "models": 2},
        run={"rounds": 12, "evaluate_every": 12},
    )
    result = kinfolk.run(sections, out="a")
    assert result.summary["ari"] >= 0.9
