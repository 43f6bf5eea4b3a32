"""DP-FedAvg, DP-SCAFFOLD and DP-DSGT: what they cost, what they refuse, and that shards change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_private_baselines import RATE, engine_of, steps, weights

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk.errors import UserError
from kinfolk.methods.dp_dsgt import DPDSGT
from kinfolk.methods.dp_fedavg import DPFedAvg
from kinfolk.methods.dp_scaffold import DPScaffold
from kinfolk.methods.private import account


def test_two_vectors_travel_over_every_link() -> None:
    ring = kinfolk.run(tiny_experiment(method={"name": "dp-dsgt"}, peers={"topology": "ring"}), out="ring")
    assert ring.summary["models_received"] == 4 * 8 * 2
    assert ring.summary["vectors_received"] == 2 * ring.summary["models_received"]
    full = kinfolk.run(tiny_experiment(method={"name": "dp-dsgt"}), out="full")
    assert full.summary["models_received"] == full.summary["nominal_models"] == 4 * 8 * 7


def test_who_is_drawn_less_often_spends_less() -> None:
    settings = tiny_experiment(method={"name": "dp-fedavg", "participation": 0.25})
    result = kinfolk.run(settings, out="a")
    assert sum(row["releases"] for row in result.clients) == 4 * 2
    for row in result.clients:
        assert (row["epsilon"] > 14.9) == (row["releases"] == 4)
    assert result.summary["models_received"] == result.summary["nominal_models"] == 4 * 2 * 2


@pytest.mark.parametrize("name", ["dp-fedavg", "dp-scaffold", "dp-dsgt"])
def test_the_whole_budget_is_used_and_nothing_is_left_uncovered(name: str) -> None:
    promise = kinfolk.run(tiny_experiment(method={"name": name, "epsilon": 5.0}), out="a").summary["privacy"]
    assert 4.99 < promise["epsilon"] <= 5.0
    assert promise["gaps"] == []


@pytest.mark.parametrize("method", [DPFedAvg, DPScaffold, DPDSGT])
def test_who_cannot_pay_is_not_heard(method: Any) -> None:
    engine = engine_of(method(lr=RATE), make_federation([6] * 4), rounds=2)
    steps(engine, 2)
    before, spent = weights(engine), account(engine.shards[0].cohort).ledger.spent()
    heard = engine.shards[0].peers.models_received.clone()
    engine.step(3, False)
    assert engine.shards[0].cohort.silent().all()
    assert torch.equal(account(engine.shards[0].cohort).ledger.spent(), spent)
    assert torch.equal(engine.shards[0].peers.models_received, heard)
    if method is not DPDSGT:
        assert torch.equal(weights(engine), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "dp-dsgt", "local_steps": 2}, "local_steps = 2: dp-dsgt takes one noisy gradient a round"),
        ({"name": "dp-fedavg", "participation": 0.0}, "'method.participation' = 0.0: must be greater than 0"),
        ({"name": "dp-scaffold", "server_lr": 0.0}, "'method.server_lr' = 0.0: must be greater than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        kinfolk.run(tiny_experiment(method=settings), out="a")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_of_links_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinfolk.methods.dp_dsgt.MANY", 3)
    engine_of(DPDSGT(), make_federation([6] * 3), rounds=2)
    with pytest.raises(UserError, match="at most 3 clients, not 4"):
        engine_of(DPDSGT(), make_federation([6] * 4), rounds=2)


def test_trackers_need_the_mean() -> None:
    settings = tiny_experiment(method={"name": "dp-dsgt"}, aggregation={"rule": "median"})
    with pytest.raises(UserError, match="keeps track of a sum of gradients"):
        kinfolk.run(settings, out="a")
    settings = tiny_experiment(method={"name": "dp-fedavg"}, aggregation={"rule": "median"})
    assert kinfolk.run(settings, out="b").summary["privacy"]["epsilon"] <= 15


VARIANTS: list[dict[str, Any]] = [
    {"name": "dp-fedavg", "participation": 0.5, "local_steps": 2, "sample_rate": 0.5, "server_lr": 0.7},
    {"name": "dp-scaffold", "participation": 0.5, "local_steps": 2},
    {"name": "dp-scaffold", "warm_start": True, "participation": 1.0},
]


@pytest.mark.parametrize("method", VARIANTS, ids=["fedavg", "scaffold", "warm"])
def test_every_variant_is_independent_of_shards(method: dict[str, Any]) -> None:
    run = {"rounds": 6, "precision": "float64"}
    sections: dict[str, Any] = {"faults": {"loss": 0.2, "absent": 0.2}, "method": method}
    one = kinfolk.run(tiny_experiment(run=run, **sections), out="one")
    many = kinfolk.run(tiny_experiment(run={**run, "engine": "sharded", "shards": 3}, **sections), out="many")
    assert (one.weights() - many.weights()).abs().max() < 1e-10
    assert one.summary["models_received"] == many.summary["models_received"]
    assert one.summary["privacy"] == many.summary["privacy"]
