"""PENS against its definition."""

from typing import Any

import pytest
import torch
from torch import nn

import kinfolk
from conftest import last_edges, make_federation, tiny_experiment
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.methods.pens import MOST, PENS
from kinfolk.peers.faults import Faults
from kinfolk.runs import checkpoint

SIZES = [12, 6, 9, 20, 8, 8, 16, 10]


def engine_of(shards: int = 1, faults: Faults | None = None, **settings: Any) -> engines.Engine:
    cohort = {"training": Training(epochs=1, batch_size=5, lr=0.1), "seed": 4, "device": "cpu", "precision": "float64"}
    parts = engines.Parts(
        make_federation(SIZES),
        lambda: initial_model(lambda: nn.Linear(6, 3), 4),
        PENS(**settings),
        faults or Faults(),
        cohort,
    )
    return engines.InProcessEngine(parts) if shards == 1 else engines.ShardedEngine(parts, shards)


def mixed_with(engine: engines.Engine) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {i: set() for i in range(8)}
    edges = last_edges(engine)
    for client, neighbor in zip(edges.client.tolist(), edges.neighbor.tolist()):
        found[client].add(neighbor)
    return found


def rows(lists: torch.Tensor) -> list[set[int]]:
    return [{j for j in row if j >= 0} for row in lists.tolist()]


def test_stage_one_averages_with_the_k_candidates_of_lowest_loss() -> None:
    engine = engine_of(candidates=5, neighbors=2)
    shard = engine.shards[0]
    shard.cohort.train(1)
    trained = shard.cohort.weights
    candidates = shard.peers.sample(1, 5)
    losses = shard.cohort.train_losses(trained)  # [client, model]
    shard.cohort.weights = shard.cohort.initial.expand(8, -1).clone()
    engine.step(1, False)
    for i in range(8):
        best = sorted(candidates[i].tolist(), key=lambda j: float(losses[i, j]))[:2]
        assert set(shard.state.neighbors[i].tolist()) == set(best) == mixed_with(engine)[i]
        torch.testing.assert_close(shard.cohort.weights[i], trained[[i, *best]].mean(dim=0), rtol=1e-12, atol=1e-12)
        assert torch.nonzero(shard.state.selected[i]).flatten().tolist() == sorted(best)
        assert torch.nonzero(shard.state.sampled[i]).flatten().tolist() == sorted(candidates[i].tolist())
    assert shard.peers.models_received.tolist() == [5] * 8


def test_counts_add_up_over_the_rounds() -> None:
    engine = engine_of(candidates=5, neighbors=2)
    for t in (1, 2, 3):
        engine.step(t, False)
    state = engine.shards[0].state
    assert state.selected.sum(dim=1).tolist() == [6] * 8
    assert state.sampled.sum(dim=1).tolist() == [15] * 8
    assert not state.selected.diagonal().any()
    assert (state.selected <= state.sampled).all()


def test_stage_two_stays_on_the_permanent_list_and_receives_only_k() -> None:
    engine = engine_of(candidates=5, neighbors=2, discover_rounds=6)
    for t in range(1, 7):
        engine.step(t, False)
    shard = engine.shards[0]
    permanent, received = shard.state.neighbors, shard.peers.models_received.clone()
    before = None
    for t in range(7, 12):
        engine.step(t, False)
        assert torch.equal(shard.state.neighbors, permanent)
        now = mixed_with(engine)
        assert all(now[i] <= mine and len(now[i]) == min(2, len(mine)) for i, mine in enumerate(rows(permanent)))
        assert now != before  # drawn anew
        before = now
    expected = torch.tensor([min(2, len(mine)) for mine in rows(permanent)])
    assert (shard.peers.models_received - received).tolist() == (5 * expected).tolist()
    assert shard.state.selected.shape == (8, 0)  # the counts have done their work


def test_each_rule_keeps_whom_it_says() -> None:
    # n = 8, l = 4, k = 2, T1 = 10: expected > 20/7 = 2.86; paper >= 60/8 = 7.5; conditional > sampled / 2
    selected = torch.tensor([[0, 3, 2, 8, 7, 4, 0, 0]], dtype=torch.int16)
    sampled = torch.tensor([[0, 9, 2, 9, 9, 8, 3, 0]], dtype=torch.int16)
    for rule, kept in (("expected", [1, 3, 4, 5]), ("paper", [3]), ("conditional", [2, 3, 4])):
        method = PENS(candidates=4, neighbors=2, discover_rounds=10, rule=rule)  # type: ignore[arg-type]
        assert method.permanent(selected, sampled).tolist() == [kept], rule


def test_thresholds_are_met_exactly_at_the_border() -> None:
    # n = 8, T1 = 7: expected means more than 7·2/7 = 2, paper at least 7·(6+2)/8 = 7, conditional more than 6·2/6 = 2
    selected = torch.tensor([[0, 2, 3, 6, 7, 0, 0, 0]], dtype=torch.int16)
    sampled = torch.tensor([[0, 6, 6, 7, 7, 6, 0, 0]], dtype=torch.int16)
    for rule, kept in (("expected", [2, 3, 4]), ("paper", [4]), ("conditional", [2, 3, 4])):
        method = PENS(candidates=6, neighbors=2, discover_rounds=7, rule=rule)  # type: ignore[arg-type]
        assert method.permanent(selected, sampled).tolist() == [kept], rule


def test_an_empty_list_becomes_the_most_often_selected() -> None:
    selected = torch.zeros(3, 8, dtype=torch.int16)
    selected[0, [2, 5, 6, 7]] = torch.tensor([1, 3, 3, 2], dtype=torch.int16)  # nobody reaches 8
    selected[1, 4] = 9
    method = PENS(candidates=4, neighbors=3, discover_rounds=10, rule="paper")
    assert method.permanent(selected, selected).tolist() == [[5, 6, 7], [4, -1, -1], [-1, -1, -1]]


def test_who_never_selected_anybody_gossips_at_random() -> None:
    engine = engine_of(candidates=5, neighbors=2, discover_rounds=0)
    seen = []
    for t in (1, 2, 3):
        engine.step(t, False)
        now = mixed_with(engine)
        assert all(len(peers) == 2 and i not in peers for i, peers in now.items())
        seen.append(now)
    assert seen[0] != seen[1] != seen[2]
    assert engine.shards[0].state.neighbors.shape == (8, 0)


def test_lost_answers_are_neither_selected_nor_counted_as_looked_at() -> None:
    engine = engine_of(candidates=7, neighbors=7, faults=Faults(loss=0.5))
    engine.step(1, False)
    state = engine.shards[0].state
    asked = torch.arange(8).expand(8, 8)
    lost = engine.shards[0].peers.faults.lost(4, 1, torch.arange(8)[:, None], asked)
    arrived = ~lost & ~torch.eye(8, dtype=torch.bool)
    assert torch.equal(state.sampled > 0, arrived)
    assert torch.equal(state.selected > 0, arrived)
    assert 0 < int(arrived.sum()) < 56


def test_both_stages_are_the_same_over_shards() -> None:
    results = []
    for shards in (1, 3):
        engine = engine_of(shards, Faults(loss=0.2, absent=0.2), candidates=4, neighbors=2, discover_rounds=4)
        for t in range(1, 9):
            engine.step(t, False)
        found = engines.results(engine).neighbors
        assert found is not None
        results.append((engines.snapshot(engine)["weights"], rows(torch.from_numpy(found))))
    assert (results[0][0] - results[1][0]).abs().max() <= 1e-10
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_it_resumes_bit_exactly_before_at_and_after_the_change_of_stages(stop: int) -> None:
    method = {"name": "pens", "candidates": 4, "neighbors": 2, "discover_rounds": 3}
    whole = kinfolk.run(tiny_experiment(method=method, run={"rounds": 6}), out="whole")
    kinfolk.run(tiny_experiment(method=method, run={"rounds": stop}), out="cut")
    resumed = kinfolk.resume("cut", rounds=6)
    assert torch.equal(whole.weights(), resumed.weights())
    assert "state/neighbors" in checkpoint.load(resumed.folder / "checkpoint").tensors


def test_too_many_clients_are_refused_with_the_number() -> None:
    cohort = engine_of().shards[0].cohort
    cohort.n = MOST
    PENS().start(cohort)
    cohort.n = MOST + 1
    with pytest.raises(kinfolk.UserError, match=f"{MOST + 1} clients"):
        PENS().start(cohort)


def test_it_tells_two_rotations_apart_on_digits() -> None:
    sections = tiny_experiment(
        data={"clients": 20, "train": 40},
        training={"epochs": 3, "lr": 0.1},
        method={"name": "pens", "candidates": 6, "neighbors": 3, "discover_rounds": 15},
        run={"rounds": 20, "evaluate_every": 20},
    )
    summary = kinfolk.run(sections, out="a").summary
    assert summary["neighbor_precision"] > 0.8
    assert summary["neighbor_recall"] > 0.5
