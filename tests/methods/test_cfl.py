"""Sattler's clustered federated learning against its definition."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.methods import find
from kinfolk.methods.cfl import CFL, _bipartition
from kinfolk.peers.faults import Faults

SIZES = [12, 6, 9, 20, 8, 8, 16, 10]
ALWAYS: dict[str, Any] = {"eps1": 1e9, "eps2": 0.0, "min_round": 0}  # split whenever it is allowed at all


def engine_of(name: str = "cfl", **settings: Any) -> engines.InProcessEngine:
    cohort = {"training": Training(epochs=1, batch_size=5, lr=0.1), "seed": 4, "device": "cpu", "precision": "float64"}
    return engines.InProcessEngine(
        engines.Parts(
            make_federation(SIZES),
            lambda: initial_model(lambda: nn.Linear(6, 3), 4),
            find(name)(**settings),
            Faults(),
            cohort,
        )
    )


def vectors(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def ones(updates: Tensor) -> Tensor:
    return torch.ones(updates.shape[0], dtype=torch.int64)


OPPOSED = vectors([1.0, 0.1], [1.0, -0.1], [-1.0, 0.1], [-1.0, -0.1])


def test_before_the_first_split_it_is_fedavg() -> None:
    cfl, fedavg = engine_of(), engine_of("fedavg")
    for t in (1, 2, 3):
        cfl.step(t, False)
        fedavg.step(t, False)
    shards = cfl.shards[0], fedavg.shards[0]
    assert (shards[0].cohort.weights - shards[1].cohort.weights).abs().max() < 1e-12
    assert torch.equal(shards[0].peers.models_received, shards[1].peers.models_received)


def test_after_a_split_each_half_moves_by_its_own_mean() -> None:
    engine = engine_of(**ALWAYS)
    shard = engine.shards[0]
    engine.step(1, False)
    local = engine_of("local")
    local.step(1, False)
    trained, sizes = local.shards[0].cohort.weights, torch.tensor(SIZES).double()
    clusters = shard.state.clusters
    assert set(clusters.tolist()) == {0, 1}
    assert int((clusters == 0).sum()) >= 4  # the larger half keeps the number
    for number in (0, 1):
        members = clusters == number
        mean = (trained[members] * (sizes[members] / sizes[members].sum())[:, None]).sum(dim=0)
        torch.testing.assert_close(shard.state.models[number], mean, rtol=1e-10, atol=1e-12)
        assert (shard.cohort.weights[members] == shard.state.models[number]).all()


def test_single_linkage_makes_the_largest_similarity_across_the_cut_smallest() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        directions = torch.nn.functional.normalize(torch.randn(7, 3, generator=generator, dtype=torch.float64))
        cosines = directions @ directions.T
        leaving = _bipartition(cosines, "single")
        found = float(cosines[leaving][:, ~leaving].max())
        best = min(
            float(cosines[list(part)][:, [j for j in range(7) if j not in part]].max())
            for size in (1, 2, 3)
            for part in itertools.combinations(range(7), size)
        )
        assert found == pytest.approx(best, abs=1e-12)


def test_complete_linkage_is_another_cut() -> None:
    angles = torch.tensor([0.0, 25, 50, 76, 103]) * torch.pi / 180  # a chain: each a little farther than the one before
    cosines = torch.cos(angles[:, None] - angles).double()
    assert _bipartition(cosines, "single").tolist() == [False, False, False, False, True]
    assert _bipartition(cosines, "complete").tolist() == [True, True, False, False, False]


def test_a_cluster_splits_when_its_mean_is_short_and_a_member_long() -> None:
    leaving = CFL(eps1=0.4, eps2=0.9).split(OPPOSED, ones(OPPOSED), 1.0)
    assert leaving is not None
    assert leaving.tolist() == [False, False, True, True]
    assert CFL(eps1=0.4, eps2=1.1).split(OPPOSED, ones(OPPOSED), 1.0) is None  # nobody is long
    shifted = OPPOSED + torch.tensor([0.5, 0.0])
    assert CFL(eps1=0.4, eps2=0.9).split(shifted, ones(shifted), 1.0) is None  # the mean is not short


def test_the_mean_is_weighted_by_samples() -> None:
    heavy = torch.tensor([5, 5, 1, 1])  # mean 2/3 to the right
    assert CFL(eps1=0.5, eps2=0.9).split(OPPOSED, heavy, 1.0) is None
    assert CFL(eps1=0.7, eps2=0.9).split(OPPOSED, heavy, 1.0) is not None


def test_auto_measures_in_units_of_the_longest_update_of_the_first_round() -> None:
    longest = float(OPPOSED.norm(dim=1).max())
    assert CFL().split(OPPOSED, ones(OPPOSED), longest / 0.61) is not None  # 0.61 of the first round's
    assert CFL().split(OPPOSED, ones(OPPOSED), longest / 0.59) is None
    engine = engine_of()
    engine.step(1, False)
    local = engine_of("local")
    local.step(1, False)
    cohort = local.shards[0].cohort
    expected = (cohort.weights - cohort.initial).norm(dim=1).max()
    scale = engine.shards[0].state.scale
    torch.testing.assert_close(scale[0], expected)
    engine.step(2, False)
    assert torch.equal(engine.shards[0].state.scale, scale)


def test_two_members_never_split_and_three_may_leave_one_alone() -> None:
    method = CFL(**ALWAYS)
    assert method.split(OPPOSED[[0, 2]], torch.ones(2), 1.0) is None
    leaving = method.split(OPPOSED[:3], torch.ones(3), 1.0)
    assert leaving is not None
    assert leaving.tolist() == [False, False, True]


def test_updates_of_zero_never_split() -> None:
    nothing = torch.zeros(4, 2, dtype=torch.float64)
    assert CFL(**ALWAYS).split(nothing, ones(nothing), 0.0) is None
    assert CFL().split(nothing, ones(nothing), 0.0) is None


def test_no_split_up_to_the_minimal_round() -> None:
    engine = engine_of(**{**ALWAYS, "min_round": 2})
    found = []
    for t in (1, 2, 3):
        engine.step(t, False)
        found.append(len(engine.shards[0].state.models))
    assert found == [1, 1, 2]


def test_the_acceptance_test_wants_halves_that_are_narrower_than_their_distance() -> None:
    method = CFL(eps1=1e9, eps2=0.0, accept=True)
    assert method.split(OPPOSED, ones(OPPOSED), 1.0) is not None
    around = vectors([1, 0], [0.1, 0.9], [-1, 0.2], [0, -1])  # all directions alike
    assert method.split(around, ones(around), 1.0) is None
    assert CFL(eps1=1e9, eps2=0.0).split(around, ones(around), 1.0) is not None


def test_who_is_not_heard_stays_with_the_larger_half_and_nobody_heard_changes_nothing() -> None:
    engine = engine_of(**ALWAYS)
    shard = engine.shards[0]
    for absent in range(8):
        shard.cohort.begin(absent=torch.arange(8) == absent)
        after = shard.method.step(1, shard.cohort, shard.method.start(shard.cohort), shard.peers)
        assert after.clusters[absent] == 0
        assert len(after.models) == 2
    shard.cohort.begin(absent=torch.ones(8, dtype=torch.bool))
    nothing = shard.method.step(1, shard.cohort, shard.method.start(shard.cohort), shard.peers)
    assert torch.equal(nothing.models[0], shard.cohort.initial)
    assert nothing.scale.isnan().all()  # the first round that somebody is heard will set it


def test_splitting_is_the_same_over_shards_and_resumes_bit_exactly() -> None:
    sections: dict[str, Any] = {"method": {"name": "cfl", **ALWAYS}, "faults": {"loss": 0.1, "absent": 0.1}}
    one = kinfolk.run(tiny_experiment(**sections, run={"precision": "float64"}), out="one")
    many = kinfolk.run(
        tiny_experiment(**sections, run={"precision": "float64", "engine": "sharded", "shards": 3}), out="many"
    )
    assert (one.weights() - many.weights()).abs().max() <= 1e-10
    assert one.summary["ari"] == many.summary["ari"]
    kinfolk.run(tiny_experiment(**sections, run={"precision": "float64", "rounds": 2}), out="cut")
    assert torch.equal(kinfolk.resume("cut", rounds=4).weights(), one.weights())


def test_negative_and_odd_thresholds_are_refused() -> None:
    for value in (-0.1, "often"):
        with pytest.raises(kinfolk.UserError, match="eps1"):
            kinfolk.run(tiny_experiment(method={"name": "cfl", "eps1": value}), out="a")


def test_its_first_cuts_are_between_the_rotations_of_digits() -> None:
    sections = tiny_experiment(
        data={"clients": 16, "train": 40, "split": {"kind": "rotation", "clusters": 4}},
        training={"epochs": 3, "lr": 0.05},
        method={"name": "cfl", **ALWAYS},
        run={"rounds": 2, "evaluate_every": 1},
    )
    first, second = kinfolk.run(sections, out="a").metrics
    assert 0.3 < first["ari"] < 0.8  # two halves of four clusters
    assert second["ari"] >= 0.9
