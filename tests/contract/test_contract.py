"""One contract for every registered method, shipped or yet to be written."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kinfolk
from conftest import tiny_experiment
from kinfolk import methods
from kinfolk.config import read
from kinfolk.experiment import resume
from kinfolk.peers.access import Access
from kinfolk.peers.reach import RandomNetwork
from kinfolk.runs import checkpoint
from kinfolk.runs.folder import RunFolder
from kinfolk.runs.graph import read_graph
from kinfolk.settings import describe

METHODS = [name for name in methods.names() if methods.find(name).__module__.startswith("kinfolk.")]
DOCS = Path(__file__).parents[2] / "docs" / "methods"
GRAPHS: list[dict[str, Any]] = [
    *({"topology": name} for name in ("full", "half", "ring", "line", "star")),
    {"topology": "regular", "degree": 3},
    {"topology": "random", "probability": 0.2},  # falls into parts, with clients that reach nobody
    {"reachable": 2},
]
QUICK: dict[str, dict[str, Any]] = {"p4": {"tune_steps": 2}}  # what takes most of a tiny run, and is the same again
Runs = Callable[..., kinfolk.Result]
FAULTS = {"loss": 0.2, "absent": 0.2}
STEADY = (
    *("accuracy", "loss", "worst10", "before_mixing", "quarantined"),
    *("models_received", "vectors_received", "bytes_received", "nominal_models"),
)


def experiment(name: str, settings: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    return tiny_experiment(method={"name": name, **QUICK.get(name, {}), **(settings or {})}, **sections)


def run(method: str, out: str, **sections: Any) -> kinfolk.Result:
    return kinfolk.run(experiment(method, **sections), out=out)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run that several tests look at, done once: as it comes, or in float64 with losses and absences."""

    @cache
    def found(method: str, faulty: bool = False) -> kinfolk.Result:
        sections = {"run": {"precision": "float64"}, "faults": FAULTS} if faulty else {}
        return run(method, str(tmp_path_factory.mktemp(method) / "run"), **sections)

    return found


def rows(result: kinfolk.Result) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result.metrics]


def graph(result: kinfolk.Result) -> np.ndarray:
    found = read_graph(result.folder)
    return np.stack([found.round, found.client, found.neighbor, found.weight])


@pytest.mark.parametrize("method", METHODS)
def test_it_runs_and_every_client_ends_with_a_finite_model(method: str, done: Runs) -> None:
    result = kinfolk.run(tiny_experiment(method={"name": method}), out="a") if method in QUICK else done(method)
    assert torch.isfinite(result.weights()).all()
    assert 0 <= result.accuracy <= 1
    assert [row["round"] for row in result.metrics] == [1, 2, 4]
    assert len(result.clients) == 8


@pytest.mark.parametrize("method", METHODS)
def test_it_is_deterministic(method: str, done: Runs) -> None:
    first, second = done(method), run(method, "b")
    assert torch.equal(first.weights(), second.weights())
    assert rows(first) == rows(second)
    assert not torch.equal(run(method, "c", run={"seed": 1}).weights(), first.weights())


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_it_does_not_depend_on_the_number_of_shards(method: str, shards: int, done: Runs) -> None:
    one = done(method, faulty=True)
    many = run(method, "many", run={"precision": "float64", "engine": "sharded", "shards": shards}, faults=FAULTS)
    assert (one.weights() - many.weights()).abs().max() <= 1e-10
    assert np.array_equal(graph(one)[:3], graph(many)[:3])  # the same choices, in the same order
    for a, b in zip(one.metrics, many.metrics):
        assert all(a[key] == pytest.approx(b[key], abs=1e-9) for key in STEADY)


@pytest.mark.parametrize("method", METHODS)
def test_shards_that_train_the_same_chunks_are_bit_equal(method: str) -> None:
    one = run(method, "one", run={"chunk": 2})
    two = run(method, "two", run={"chunk": 2, "engine": "sharded", "shards": 2})
    assert torch.equal(one.weights(), two.weights())


@pytest.mark.parametrize("method", METHODS)
def test_float32_runs_agree_over_shards_to_its_precision(method: str, done: Runs) -> None:
    one = done(method)
    four = run(method, "four", run={"engine": "sharded", "shards": 4})
    assert (one.weights() - four.weights()).abs().max() <= 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_it_resumes_bit_exactly(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(method, "whole", run={"rounds": 5, "checkpoint_every": 1})

    class Stop(kinfolk.Observer):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if t == 4:
                raise KeyboardInterrupt  # in the middle: round 4 is measured but not saved

    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(experiment(method, run={"rounds": 5, "checkpoint_every": 1}), out="cut", observer=Stop())
    assert RunFolder.open(Path("cut")).status().round == 3
    resumed = resume("cut")
    assert torch.equal(whole.weights(), resumed.weights())
    assert rows(whole) == rows(resumed)
    assert np.array_equal(graph(whole), graph(resumed))
    assert whole.clients == resumed.clients


@pytest.mark.parametrize("method", METHODS)
def test_it_survives_lost_answers_and_absent_clients(method: str) -> None:
    result = run(method, "a", faults={"loss": 0.9, "absent": 0.5, "absent_rounds": 2})
    assert torch.isfinite(result.weights()).all()


@pytest.mark.parametrize("method", METHODS)
def test_nobody_averages_with_a_peer_out_of_reach(method: str) -> None:
    sections: dict[str, Any] = {"peers": {"reachable": 3}, "faults": {"loss": 0.1}}
    one = run(method, "one", run={"precision": "float64", "rounds": 5}, **sections)
    many = run(method, "many", run={"precision": "float64", "rounds": 5, "engine": "sharded", "shards": 3}, **sections)
    assert torch.isfinite(one.weights()).all()
    assert (one.weights() - many.weights()).abs().max() <= 1e-10
    assert np.array_equal(graph(one)[:3], graph(many)[:3])
    lists = RandomNetwork(8, 3, seed=0).reach(torch.arange(8)).at(1)
    found = read_graph(one.folder)
    for client, neighbor in zip(found.client, found.neighbor):
        assert lists.contains(torch.full((8, 1), int(neighbor)))[client]


@pytest.mark.parametrize("peers", GRAPHS, ids=lambda peers: peers.get("topology", "sets"))
@pytest.mark.parametrize("method", [name for name in METHODS if not getattr(methods.find(name), "server", False)])
def test_it_runs_on_every_graph_with_three_of_ten_clients_away(method: str, peers: dict[str, Any]) -> None:
    peers = {**peers, "away": 0.3}
    stages = {"discover_rounds": 2} if hasattr(methods.find(method), "discover_rounds") else {}
    settings = experiment(method, stages, peers=peers, run={"precision": "float64"})
    settings["run"]["evaluate_every"] = 4
    one = kinfolk.run(settings, out="one")
    settings["run"] |= {"engine": "sharded", "shards": 3}
    many = kinfolk.run(settings, out="many")
    assert torch.isfinite(one.weights()).all()
    assert (one.weights() - many.weights()).abs().max() <= 1e-10
    assert np.array_equal(graph(one)[:3], graph(many)[:3])
    assert one.summary["models_received"] == many.summary["models_received"]
    network, _ = Access(**peers).network(8, seed=0)
    assert network is not None
    found, reach = read_graph(one.folder), network.reach(torch.arange(8))
    for t, client, neighbor in zip(found.round, found.client, found.neighbor):
        assert reach.at(int(t)).contains(torch.full((8, 1), int(neighbor)))[client]


# Methods whose clients train otherwise than `local` does, whoever is in reach.
OTHER_TRAINING = {"ditto", "dispfl", "dp-dsgt", "fomo", "p4", "proxyfl"}


@pytest.mark.parametrize("method", METHODS)
def test_without_anybody_in_reach_it_is_local_training(method: str, done: Runs) -> None:
    settings = {"backbone": "full"} if hasattr(methods.find(method), "backbone") else {}
    alone = run(method, "alone", settings=settings, peers={"reachable": 0})
    if method in OTHER_TRAINING:
        assert torch.isfinite(alone.weights()).all()
        assert alone.summary["models_received"] == 0
        return
    if getattr(methods.find(method), "server", False):
        assert torch.equal(alone.weights(), done(method).weights())  # the server reaches everybody
    else:
        assert torch.equal(alone.weights(), done("local").weights())
        assert alone.summary["models_received"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_what_it_should_cost_is_logged_beside_what_it_did_cost(method: str, done: Runs) -> None:
    result = done(method)
    for row in result.metrics:
        assert row["vectors_received"] >= row["models_received"] >= row["peak_received"] >= 0
        if method != "centralized":  # moves data, not models
            assert isinstance(row["nominal_models"], int)
            assert row["nominal_models"] >= row["models_received"]
            assert 0 <= row["nominal_peak"] <= 2 * 8


@pytest.mark.parametrize("method", METHODS)
def test_a_client_that_trains_to_nan_harms_nobody_else(method: str) -> None:
    everybody = {"participation": 1.0} if hasattr(methods.find(method), "participation") else {}
    config = read(experiment(method, everybody))
    data = kinfolk.load_federation(config)
    data.train.x[data.train.starts[2] : data.train.starts[3]] = torch.inf
    result = kinfolk.run(config, data=data, out="a")
    assert torch.isfinite(result.weights()).all()
    assert result.summary["quarantined"] >= 4  # once in every round
    found = read_graph(result.folder)
    if method != "centralized":  # there everybody copies client 0, which holds the bad sample
        assert 2 not in found.neighbor
        assert result.clients[2]["quarantined"] == 4


@pytest.mark.parametrize("method", METHODS)
def test_one_client_alone_is_a_federation_too(method: str) -> None:
    lonely = {"clients": 1, "split": {"kind": "iid"}}
    data = kinfolk.load_federation(read(tiny_experiment(data=lonely)))
    data = dataclasses.replace(data, clusters=torch.zeros(1, dtype=torch.int64))
    result = kinfolk.run(experiment(method), data=data, out="a")
    assert torch.isfinite(result.weights()).all()


@pytest.mark.parametrize("method", METHODS)
def test_its_state_is_a_dataclass_of_tensors(method: str, done: Runs) -> None:
    saved = checkpoint.load(done(method).folder / "checkpoint").tensors
    for name, tensor in saved.items():
        assert name.startswith("shared/") or tensor.shape[0] == 8, name


@pytest.mark.parametrize("method", METHODS)
def test_it_is_described_and_documented(method: str) -> None:
    cls = methods.find(method)
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    assert len(methods.summary(cls)) > 30
    assert all(help for _, _, _, help in describe(cls))
    page = DOCS / f"{method}.md"
    assert page.is_file(), f"docs/methods/{method}.md is missing"
    text = page.read_text()
    assert f"kinfolk run digits method.name={method}" in text  # the exact command
    assert all(f"`{name}`" in text for name, *_ in describe(cls))  # every setting
