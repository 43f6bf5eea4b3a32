"""ProxyFL: proxies go round a circle, once each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.training import Training
from kinfolk.methods.private import account
from kinfolk.methods.proxyfl import ProxyFL, places
from kinfolk.peers.faults import Faults


def engine_of(method: ProxyFL, clients: int, rounds: int = 8) -> engines.InProcessEngine:
    settings = {"training": Training(), "seed": 0, "device": "cpu", "precision": "float64", "rounds": rounds}

    def build() -> nn.Module:
        return initial_model(lambda: nn.Sequential(nn.Linear(6, 3)), 0)

    return engines.InProcessEngine(
        engines.Parts(make_federation([6] * clients), build, method, Faults(), settings)
    )  # fmt: skip


def test_the_way_doubles_from_round_to_round_and_begins_again() -> None:
    assert [places(t, 9) for t in range(1, 9)] == [2, 4, 8, 1, 2, 4, 8, 1]
    assert [places(t, 8) for t in range(1, 5)] == [2, 4, 1, 2]
    assert [places(t, 2) for t in range(1, 4)] == [1, 1, 1]
    assert places(1, 1) == 0


@pytest.mark.parametrize("clients", [2, 5, 8])
def test_every_round_permutes_the_proxies(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(ProxyFL(), clients)
    cohort = engine.shards[0].cohort
    sent: list[torch.Tensor] = []
    publish = engine.exchange.publish

    def spy(t: int, ids: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        sent.append(tensors["weights"].clone())
        publish(t, ids, tensors)

    monkeypatch.setattr(engine.exchange, "publish", spy)
    for t in range(1, 6):
        engine.step(t, False)
        expected = sent[-1].roll(places(t, clients), dims=0)
        assert torch.equal(cohort.weights, expected)


def test_half_of_each_is_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(ProxyFL(mixing="half"), 4)
    sent: list[torch.Tensor] = []
    publish = engine.exchange.publish
    monkeypatch.setattr(
        engine.exchange, "publish", lambda t, ids, tensors: (sent.append(tensors["weights"]), publish(t, ids, tensors))
    )
    engine.step(1, False)
    expected = (sent[0] + sent[0].roll(places(1, 4), dims=0)) / 2
    assert torch.allclose(engine.shards[0].cohort.weights, expected, atol=1e-12)


def test_after_all_ways_everybody_has_learnt_from_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """With half and half and no training, one client's proxy has spread to all after three rounds among eight."""
    monkeypatch.setattr("kinfolk.methods.twins.Twins.train", lambda self, t, cohort, personal: personal)
    engine = engine_of(ProxyFL(mixing="half"), 8)
    cohort = engine.shards[0].cohort
    cohort.weights = torch.zeros_like(cohort.weights)
    cohort.weights[3] = 1.0
    for t in (1, 2, 3):
        engine.step(t, False)
    assert torch.allclose(cohort.weights, torch.full_like(cohort.weights, 1 / 8))


def test_each_round_is_charged_and_the_private_model_is_tested() -> None:
    engine = engine_of(ProxyFL(), 3, rounds=2)
    for t in (1, 2, 3):
        engine.step(t, False)
    assert account(engine.shards[0].cohort).ledger.releases().tolist() == [2, 2, 2]
    result = kinfolk.run(tiny_experiment(method={"name": "proxyfl"}), out="a")
    assert result.summary["privacy"]["epsilon"] <= 15
    assert "not covered: what proxies learn" in result.summary["privacy"]["statement"]
    assert 0 <= result.summary["proxy_accuracy"] <= 1
    assert result.summary["models_received"] == result.summary["nominal_models"] == 4 * 8


def test_a_proxy_that_does_not_arrive_is_kept_at_home() -> None:
    sections: dict[str, Any] = {"peers": {"topology": "ring"}, "run": {"rounds": 3}}
    result = kinfolk.run(tiny_experiment(method={"name": "proxyfl"}, **sections), out="a")
    assert result.summary["models_received"] == 8  # one place away in round 3 alone
