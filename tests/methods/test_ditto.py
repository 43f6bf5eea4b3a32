"""Ditto against its definition, and that a personal model is what a run hands out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import last_edges, make_federation, tiny_experiment
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.steer import Proximal
from kinfolk.methods import find
from kinfolk.peers.faults import Faults
from kinfolk.runs import checkpoint

SIZES = [12, 6, 9, 20, 8, 8, 16, 1]


def engine_of(name: str = "ditto", faults: Faults | None = None, **settings: Any) -> engines.InProcessEngine:
    cohort = {"training": Training(epochs=2, batch_size=5, lr=0.1), "seed": 4, "device": "cpu", "precision": "float64"}
    method = find(name)(**settings)
    return engines.InProcessEngine(
        engines.Parts(
            make_federation(SIZES),
            lambda: initial_model(lambda: nn.Linear(6, 3), 4),
            method,
            faults or Faults(),
            cohort,
        )
    )


def steps(engine: engines.InProcessEngine, rounds: int) -> Tensor:
    for t in range(1, rounds + 1):
        engine.step(t, False)
    return engine.shards[0].cohort.weights


def test_both_models_are_trained_from_where_the_round_found_them() -> None:
    engine = engine_of(neighbors=3, penalty=0.7, personal_epochs=3)
    cohort = engine.shards[0].cohort
    personal = cohort.weights
    for t in (1, 2, 3):
        common = cohort.weights
        engine.step(t, False)
        found, mixed, edges = engine.shards[0].state.personal, cohort.weights, last_edges(engine)
        personal = cohort.trained(personal, t, epochs=3, steer=Proximal(common, 0.7))[0]
        torch.testing.assert_close(found, personal, rtol=1e-12, atol=1e-12)
        assert cohort.personal is found
        trained = cohort.trained(common, t)[0]
        for i in range(8):
            peers = edges.neighbor[edges.client == i].tolist()
            assert len(peers) == 3
            torch.testing.assert_close(mixed[i], trained[[i, *peers]].mean(dim=0), rtol=1e-12, atol=1e-12)


def test_without_a_penalty_the_personal_model_is_that_of_local_training() -> None:
    engine = engine_of(neighbors=3, penalty=0.0, personal_epochs=2)
    steps(engine, 3)
    assert torch.equal(engine.shards[0].state.personal, steps(engine_of("local"), 3))
    assert not torch.equal(engine.shards[0].cohort.weights, engine.shards[0].state.personal)


def test_a_stronger_penalty_holds_the_personal_model_nearer() -> None:
    away = []
    for penalty in (0.0, 0.5, 5.0):
        engine = engine_of(neighbors=3, penalty=penalty)
        common = steps(engine, 3)
        engine.step(4, False)
        away.append((engine.shards[0].state.personal - common).norm(dim=1))
    assert (away[0] > away[1]).all()
    assert (away[1] > away[2]).all()


def test_through_a_server_the_common_model_is_fedavgs() -> None:
    engine = engine_of(consensus="fedavg", participation=0.5)
    shard = engine.shards[0]
    assert shard.method.server
    assert not engine_of().shards[0].method.server
    plain = engine_of("fedavg", participation=0.5)
    before = shard.state.personal
    for t in (1, 2, 3):
        drawn = find("fedavg")(0.5).participants(t, shard.cohort, shard.peers)
        engine.step(t, False)
        plain.step(t, False)
        assert torch.equal(shard.state.model, plain.shards[0].state.model)
        assert torch.equal(shard.cohort.weights, plain.shards[0].cohort.weights)
        moved = (shard.state.personal != before).any(dim=1)
        assert torch.equal(moved, drawn)
        before = shard.state.personal
    assert shard.peers.models_received.tolist() == plain.shards[0].peers.models_received.tolist()


def test_who_is_absent_keeps_both_models() -> None:
    engine = engine_of(faults=Faults(absent=0.5), neighbors=3)
    steps(engine, 2)
    cohort, before = engine.shards[0].cohort, engine.shards[0].state.personal
    common = cohort.weights
    engine.step(3, False)
    away = cohort.round.absent
    assert 0 < int(away.sum()) < 8
    assert torch.equal(engine.shards[0].state.personal[away], before[away])
    assert torch.equal(cohort.weights[away], common[away])
    assert (engine.shards[0].state.personal != before).any(dim=1)[~away].all()


def test_a_personal_model_that_diverges_puts_the_client_into_quarantine() -> None:
    engine = engine_of(neighbors=3, penalty=1e9, personal_epochs=50)
    engine.step(1, False)
    shard = engine.shards[0]
    assert shard.cohort.round.quarantined.any()
    assert torch.isfinite(shard.state.personal).all()
    assert not set(torch.nonzero(shard.cohort.round.quarantined).flatten().tolist()) & set(last_edges(engine).neighbor)


@pytest.mark.parametrize("name", ["ditto", "dispfl"])
def test_a_run_hands_out_the_model_that_it_tested(name: str) -> None:
    settings = tiny_experiment(method={"name": name})
    result = kinfolk.run(settings, out="a")
    tensors = checkpoint.load(result.folder / "checkpoint").tensors
    assert torch.equal(result.weights(), tensors["state/personal"])
    assert not torch.equal(result.weights(), tensors["weights"])
    data = kinfolk.load_federation(result.config)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    for client in range(8):
        rows = slice(int(data.test.starts[client]), int(data.test.starts[client] + data.test.sizes[client]))
        right = result.load_into(module, client)(data.test.x[rows]).argmax(dim=1) == data.test.y[rows]
        assert float(right.float().mean()) == pytest.approx(result.clients[client]["accuracy"])


@pytest.mark.parametrize("method", ["ditto", "dispfl", "fedavg-ft"])
def test_a_run_that_only_had_to_be_tested_still_tests_the_right_models(method: str) -> None:
    settings = tiny_experiment(method={"name": method}, run={"rounds": 3})
    whole = kinfolk.run(settings, out="whole")
    for name in ("summary.json", "clients.csv"):  # it was stopped after its last checkpoint
        (Path("whole") / name).unlink()
    again = kinfolk.resume("whole")
    assert [row["accuracy"] for row in again.clients] == [row["accuracy"] for row in whole.clients]
    assert [row["loss"] for row in again.clients] == [row["loss"] for row in whole.clients]
