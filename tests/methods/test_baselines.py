"""Each simple method against its definition, computed by hand from the trained models."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import last_edges, make_federation, tiny_experiment
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.methods import find
from kinfolk.peers.faults import Faults

CLUSTERS = [0, 0, 0, 0, 1, 1, 1, 2]


def engine_of(name: str, sizes: list[int] | None = None, **settings: Any) -> engines.InProcessEngine:
    method = find(name)(**settings)
    data = make_federation(sizes or [12, 6, 9, 20, 8, 8, 16, 10], clusters=CLUSTERS)
    if hasattr(method, "arrange"):
        data = method.arrange(data)
    cohort = {"training": Training(epochs=1, batch_size=5, lr=0.1), "seed": 4, "device": "cpu", "precision": "float64"}
    return engines.InProcessEngine(
        engines.Parts(data, lambda: initial_model(lambda: nn.Linear(6, 3), 4), method, Faults(), cohort)
    )


def alone(rounds: int = 1) -> Tensor:
    engine = engine_of("local")
    for t in range(1, rounds + 1):
        engine.step(t, False)
    return engine.shards[0].cohort.weights


def neighbors_of(engine: engines.InProcessEngine) -> dict[int, set[int]]:
    edges = last_edges(engine)
    found: dict[int, set[int]] = {i: set() for i in range(8)}
    for client, neighbor in zip(edges.client.tolist(), edges.neighbor.tolist()):
        found[client].add(neighbor)
    return found


@pytest.mark.parametrize("name", ["random", "fixed", "oracle"])
def test_gossip_is_the_uniform_mean_of_self_and_neighbors(name: str) -> None:
    engine = engine_of(name, neighbors=3)
    engine.step(1, False)
    trained, found = alone(), neighbors_of(engine)
    for i, weights in enumerate(engine.shards[0].cohort.weights):
        expected = trained[[i, *sorted(found[i])]].mean(dim=0)
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def test_random_draws_anew_every_round_and_fixed_never_does() -> None:
    for name, same in (("random", False), ("fixed", True)):
        engine = engine_of(name, neighbors=3)
        engine.step(1, False)
        first = neighbors_of(engine)
        engine.step(2, False)
        assert (neighbors_of(engine) == first) is same
        assert all(len(peers) == 3 and i not in peers for i, peers in first.items())


def test_oracle_takes_kin_only_and_all_of_them_if_they_are_few() -> None:
    engine = engine_of("oracle", neighbors=3)
    engine.step(1, False)
    found = neighbors_of(engine)
    assert found[4] == {5, 6}
    assert found[7] == set()
    assert all(CLUSTERS[j] == CLUSTERS[i] for i, peers in found.items() for j in peers)


def test_oracle_without_clusters_says_so() -> None:
    with pytest.raises(kinfolk.UserError, match="true clusters"):
        kinfolk.run(tiny_experiment(method={"name": "oracle"}, data={"split": {"kind": "iid"}}))


def test_fedavg_weighs_by_samples_and_gives_everybody_the_mean() -> None:
    engine = engine_of("fedavg")
    engine.step(1, False)
    sizes = engine.shards[0].cohort.data.train.sizes.double()
    expected = (alone() * (sizes / sizes.sum())[:, None]).sum(dim=0)
    weights = engine.shards[0].cohort.weights
    torch.testing.assert_close(weights, expected.expand_as(weights), rtol=1e-12, atol=1e-12)


def test_partial_fedavg_uses_a_new_share_of_the_clients_each_round() -> None:
    engine = engine_of("fedavg", participation=0.4)
    shard = engine.shards[0]
    chosen = [shard.method.participants(t, shard.cohort, shard.peers) for t in range(1, 50)]
    assert {int(who.sum()) for who in chosen} == {3}  # 0.4 of 8
    assert len({tuple(who.tolist()) for who in chosen}) > 20
    assert np.abs(torch.stack(chosen).double().mean(dim=0).numpy() - 3 / 8).max() < 0.3
    engine.step(1, False)
    trained, sizes = alone(), shard.cohort.data.train.sizes.double()
    share = torch.where(chosen[0], sizes, 0.0)
    expected = (trained * (share / share.sum())[:, None]).sum(dim=0)
    torch.testing.assert_close(shard.cohort.weights[0], expected, rtol=1e-12, atol=1e-12)
    assert shard.peers.models_received.tolist() == (2 * chosen[0].int()).tolist()


def test_fedavg_keeps_the_global_model_when_nobody_reports() -> None:
    engine = engine_of("fedavg")
    engine.step(1, False)
    before = engine.shards[0].state.model
    engine.shards[0].peers.faults = Faults(absent=0.999999)
    engine.step(2, False)
    assert torch.equal(engine.shards[0].state.model, before)


def test_a_client_that_missed_a_round_starts_from_the_latest_global_model() -> None:
    engine = engine_of("fedavg")
    shard = engine.shards[0]
    engine.step(1, False)
    stale = shard.cohort.weights[0].clone()
    shard.cohort.begin(absent=torch.arange(8) == 0)
    shard.state = shard.method.step(2, shard.cohort, shard.state, shard.peers)
    assert torch.equal(shard.cohort.weights[0], stale)
    assert not torch.equal(shard.state.model, stale)
    shard.cohort.begin()
    shard.method.step(3, shard.cohort, shard.state, shard.peers)
    assert not torch.equal(shard.cohort.weights[0], stale)


def test_centralized_trains_one_model_on_all_the_data() -> None:
    engine = engine_of("centralized")
    cohort = engine.shards[0].cohort
    assert cohort.data.train.sizes.tolist() == [89, 0, 0, 0, 0, 0, 0, 0]
    engine.step(1, False)
    assert (cohort.weights == cohort.weights[0]).all()
    pooled = make_federation([12, 6, 9, 20, 8, 8, 16, 10]).pooled()
    steps = -(-pooled.train.y.numel() // 5)
    assert steps == 18
    assert engines.results(engine).accuracy.shape == (8,)
    assert last_edges(engine).client.size == 0  # nobody chose a neighbor
