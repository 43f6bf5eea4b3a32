"""IFCA against its definition."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import make_cohort, make_federation, tiny_experiment
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.methods import find
from kinfolk.methods.ifca import IFCA, State
from kinfolk.peers.faults import Faults

SIZES = [12, 6, 9, 20, 8, 8, 16, 10]


def engine_of(name: str = "ifca", **settings: Any) -> engines.InProcessEngine:
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


def put(engine: engines.InProcessEngine, clusters: list[int]) -> None:
    shard = engine.shards[0]
    shard.state = State(torch.tensor(clusters), shard.state.models)


def trained_from(models: Tensor) -> Tensor:
    """[8, d] What each client trains its own row of `models` to in round 1."""
    engine = engine_of("local")
    engine.shards[0].cohort.weights = models.clone()
    engine.step(1, False)
    return engine.shards[0].cohort.weights


def test_every_client_starts_with_the_model_of_lowest_loss_on_its_training_data() -> None:
    shard = engine_of(models=3).shards[0]
    part = shard.cohort.data.train
    for i in range(8):
        rows = slice(int(part.starts[i]), int(part.starts[i]) + SIZES[i])
        losses = []
        for model in shard.state.models:
            module = nn.Linear(6, 3).double()
            shard.cohort.layout.load(model, module)
            losses.append(nn.functional.cross_entropy(module(part.x[rows]), part.y[rows]).item())
        assert int(shard.state.clusters[i]) == losses.index(min(losses))
        assert shard.cohort.train_losses(shard.state.models)[i].tolist() == pytest.approx(losses, abs=1e-12)


def test_each_model_becomes_the_weighted_mean_of_those_who_trained_it() -> None:
    engine = engine_of(models=2)
    clusters = [0, 1, 0, 0, 1, 1, 0, 1]
    put(engine, clusters)
    models = engine.shards[0].state.models
    trained, sizes = trained_from(models[torch.tensor(clusters)]), torch.tensor(SIZES).double()
    engine.step(1, False)
    after = engine.shards[0].state
    for number in (0, 1):
        members = torch.tensor(clusters) == number
        mean = (trained[members] * (sizes[members] / sizes[members].sum())[:, None]).sum(dim=0)
        torch.testing.assert_close(after.models[number], mean, rtol=1e-12, atol=1e-12)
    cohort = engine.shards[0].cohort
    assert torch.equal(after.clusters, cohort.train_losses(after.models).argmin(dim=1))  # chosen anew for the test
    assert torch.equal(cohort.weights, after.models[after.clusters])


def test_a_model_nobody_trained_stays_as_it_was() -> None:
    engine = engine_of(models=3)
    put(engine, [0, 2, 0, 0, 2, 2, 0, 2])
    before = engine.shards[0].state.models.clone()
    engine.step(1, False)
    unchanged = (engine.shards[0].state.models == before).all(dim=1)
    assert unchanged.tolist() == [False, True, False]


def test_equal_losses_choose_the_lowest_number() -> None:
    shard = engine_of(models=2).shards[0]
    shard.state = State(torch.ones(8, dtype=torch.int64), shard.state.models[:1].expand(2, -1).clone())
    shard.peers.faults = Faults(absent=0.999999)
    shard.step(1, False)
    assert shard.state.clusters.tolist() == [0] * 8


def test_nan_loses_against_any_number_and_without_numbers_the_choice_stays() -> None:
    shard = engine_of(models=2).shards[0]
    broken = shard.state.models.clone()
    broken[0] = torch.nan
    shard.state = State(torch.zeros(8, dtype=torch.int64), broken)
    shard.peers.faults = Faults(absent=0.999999)
    shard.step(1, False)
    assert shard.state.clusters.tolist() == [1] * 8
    shard.state = State(torch.tensor([0, 1] * 4), torch.full_like(broken, torch.nan))
    shard.step(2, False)
    assert shard.state.clusters.tolist() == [0, 1] * 4


def test_one_model_is_fedavg() -> None:
    ifca, fedavg = engine_of(models=1), engine_of("fedavg")
    for t in (1, 2, 3):
        ifca.step(t, False)
        fedavg.step(t, False)
    assert torch.equal(ifca.shards[0].cohort.weights, fedavg.shards[0].cohort.weights)
    assert torch.equal(ifca.shards[0].peers.models_received, fedavg.shards[0].peers.models_received)


def test_every_client_that_takes_part_counts_c_models_down_and_one_up() -> None:
    engine = engine_of(models=3)
    engine.step(1, False)
    assert engine.shards[0].peers.models_received.tolist() == [4] * 8
    assert engine.shards[0].peers.bytes_received.tolist() == [4 * 21 * 8] * 8
    engine = engine_of(models=3, participation=0.4)
    engine.step(1, False)
    assert sorted(engine.shards[0].peers.models_received.tolist()) == [0] * 5 + [4] * 3


def test_only_participants_train() -> None:
    engine = engine_of(models=2, participation=0.2)
    put(engine, [0] * 8)
    models = engine.shards[0].state.models
    engine.step(1, False)
    who = torch.nonzero(engine.shards[0].peers.models_received).flatten()
    trained = trained_from(models[:1].expand(8, -1))[who]
    shares = torch.tensor(SIZES)[who].double()
    mean = (trained * (shares / shares.sum())[:, None]).sum(dim=0)
    assert who.numel() == 2
    torch.testing.assert_close(engine.shards[0].state.models[0], mean, rtol=1e-12, atol=1e-12)


def test_more_models_than_clients_is_refused_with_both_numbers() -> None:
    with pytest.raises(kinfolk.UserError, match=r"'method.models' = 9, but there are only 8 clients"):
        kinfolk.run(tiny_experiment(method={"name": "ifca", "models": 9}), out="a")
    assert not Path("a").exists()  # refused before anything is written
    kinfolk.run(tiny_experiment(method={"name": "ifca", "models": 8}), out="b")


def test_initial_models_differ_and_depend_on_the_seed_only() -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))

    data = make_federation(SIZES)
    cohort = make_cohort(data, factory)
    before = torch.random.get_rng_state()
    first = cohort.fresh(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, make_cohort(data, factory).fresh(1))
    assert torch.equal(first.float(), make_cohort(data, factory, precision="float32").fresh(1))
    assert not torch.isclose(first, cohort.initial).any()
    assert not torch.isclose(first, cohort.fresh(2)).any()
    assert not torch.isclose(first, make_cohort(data, factory, seed=5).fresh(1)).any()
    assert torch.equal(cohort.layout.flatten(cohort.model), cohort.initial)  # the cohort's own module is left alone


def test_a_model_that_cannot_be_drawn_anew_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    with pytest.raises(kinfolk.UserError, match="reset_parameters"):
        IFCA(models=2).start(make_cohort(make_federation(SIZES), Bare))


def test_it_finds_two_rotations_of_digits() -> None:
    sections = tiny_experiment(
        data={"clients": 16, "train": 40},
        training={"epochs": 2, "lr": 0.1},
        method={"name": "ifca", "models": 2},
        run={"rounds": 12, "evaluate_every": 12},
    )
    result = kinfolk.run(sections, out="a")
    assert result.summary["ari"] >= 0.9
    assert result.accuracy > kinfolk.run({**sections, "method": {"name": "fedavg"}}, out="b").accuracy + 0.03
