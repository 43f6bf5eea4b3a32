"""How often something out of the ordinary has decided for a client, in the rows of metrics."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_panm import N, engine_of, see_perfectly, silence

import kinfolk
from conftest import tiny_experiment
from kinfolk import engines
from kinfolk.matching import mixture, outcome
from kinfolk.methods.panm import PANM

NAMES = outcome.COUNTED


def counts(engine: Any) -> dict[str, int]:
    return dict(zip(NAMES, torch.cat([shard.state.cases for shard in engine.shards]).sum(dim=0).tolist()))


@pytest.mark.parametrize("preset", ["paper", "robust"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_matching_in_which_nobody_answers_counts_for_everybody(
    preset: str, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(shards, preset=preset, neighbors=3, candidates=4, discover_rounds=2, match_every=2)
    for t in (1, 2, 3):
        engine.step(t, False)
    assert not any(counts(engine).values())  # stage one, and a round without a matching
    silence(monkeypatch)
    for t in (4, 5, 6):
        engine.step(t, False)
    found = counts(engine)
    assert found.pop("nobody_answered") == 2 * N
    assert not any(found.values())


def test_lists_that_take_in_everybody_leave_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    see_perfectly(monkeypatch)
    engine = engine_of(preset="paper", neighbors=N - 1, candidates=N - 1, discover_rounds=1)
    for t in (1, 2):
        engine.step(t, False)
    assert counts(engine)["no_candidates"] == N


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_who_would_be_left_with_nobody_keeps_the_best_and_is_counted(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strangers_only(looked_at: Any, *rest: Any) -> Any:
        kin, skipped = torch.zeros_like(looked_at, dtype=torch.bool), torch.zeros(len(looked_at), dtype=torch.bool)
        if preset == "paper":
            nothing = torch.zeros(len(looked_at), 2)
            return mixture.Match(kin, skipped, nothing, nothing, torch.zeros(len(looked_at), dtype=torch.int64))
        return kin, skipped, rest[-1]

    if preset == "paper":
        monkeypatch.setattr("kinfolk.methods.panm.mixture.match", strangers_only)
    else:
        monkeypatch.setattr(PANM, "_judge", lambda self, *args: strangers_only(*args))
    engine = engine_of(preset=preset, neighbors=3, candidates=4, discover_rounds=1)
    for t in (1, 2):
        engine.step(t, False)
    assert counts(engine) == {**dict.fromkeys(NAMES, 0), "list_emptied": N}
    assert (engine.shards[0].state.neighbors >= 0).any(dim=1).all()


def test_rows_of_metrics_have_what_came_up_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"name": "panm", "preset": "paper", "neighbors": 2, "candidates": 3, "discover_rounds": 1}
    silence(monkeypatch)
    silent = kinfolk.run(tiny_experiment(method=settings, run={"rounds": 3}), out="silent")
    n = len(silent.weights())
    assert [row.get("unusual") for row in silent.metrics] == [None, {"nobody_answered": n}, {"nobody_answered": 2 * n}]
    shards = {"rounds": 3, "engine": "sharded", "shards": 2}
    apart = kinfolk.run(tiny_experiment(method=settings, run=shards), out="apart")
    assert [row.get("unusual") for row in apart.metrics] == [row.get("unusual") for row in silent.metrics]
    kinfolk.run(tiny_experiment(method=settings, run={"rounds": 2}), out="short")
    assert kinfolk.resume("short", rounds=3).metrics[-1]["unusual"] == {"nobody_answered": 2 * n}


def test_friends_taken_though_nobody_passed_are_counted() -> None:
    method = {"name": "afind+", "threshold": "literal", "tau": 1e9}  # nobody ever passes
    experiment = tiny_experiment(method=method, model={"name": "mlp"}, run={"rounds": 3})
    result = kinfolk.run(experiment, out="a")
    n = len(result.weights())
    assert [row.get("unusual") for row in result.metrics] == [None, {"nobody_passed": n}, {"nobody_passed": 2 * n}]
    plain = kinfolk.run(tiny_experiment(method={"name": "gossip", "backbone": "full"}), out="b")
    assert "unusual" not in plain.metrics[-1]


def test_a_run_of_a_version_that_did_not_count_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"name": "panm", "preset": "paper", "neighbors": 2, "candidates": 3, "discover_rounds": 1}
    snapshot = engines.Shard.snapshot

    def earlier(self: engines.Shard) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in snapshot(self).items() if name != "state/cases"}

    with monkeypatch.context() as patched:
        patched.setattr(engines.Shard, "snapshot", earlier)
        kinfolk.run(tiny_experiment(method=settings, run={"rounds": 2}), out="a")
    whole = kinfolk.run(tiny_experiment(method=settings, run={"rounds": 4}), out="b")
    assert torch.equal(kinfolk.resume("a", rounds=4).weights(), whole.weights())


def test_a_checkpoint_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = engines.Shard.snapshot
    with monkeypatch.context() as patched:
        patched.setattr(engines.Shard, "snapshot", lambda self: {**snapshot(self), "state/more": self.quarantined})
        kinfolk.run(tiny_experiment(method={"name": "fedavg"}, run={"rounds": 1}), out="a")
    with pytest.raises(kinfolk.UserError, match="a: its checkpoint is of another version of the method: remove"):
        kinfolk.resume("a", rounds=2)


def test_a_users_state_may_have_a_field_of_that_name() -> None:
    @dataclass(frozen=True)
    class State:
        counted: torch.Tensor

    @dataclass(frozen=True)
    class Counting:
        def start(self, cohort: Any) -> State:
            return State(torch.zeros_like(cohort.ids))

        def step(self, t: int, cohort: Any, state: State, peers: Any) -> State:
            cohort.train(t)
            return State(state.counted + 1)

    kinfolk.register("counting-test")(Counting)
    assert "unusual" not in kinfolk.run(tiny_experiment(method={"name": "counting-test"}), out="a").metrics[-1]
