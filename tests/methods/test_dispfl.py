"""Dis-PFL against its definition."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import kinfolk
from conftest import last_edges, make_federation, tiny_experiment
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.judging import Look
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.steer import Masked
from kinfolk.methods.dispfl import DisPFL, layers
from kinfolk.models import NETS
from kinfolk.peers.faults import Faults

SIZES = [12, 6, 9, 20, 8, 8, 16, 1]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3))


def engine_of(faults: Faults | None = None, rounds: int | None = 6, **settings: Any) -> engines.InProcessEngine:
    training = Training(epochs=2, batch_size=5, lr=0.1)
    cohort = {"training": training, "seed": 4, "device": "cpu", "precision": "float64", "rounds": rounds}
    return engines.InProcessEngine(
        engines.Parts(
            make_federation(SIZES), lambda: initial_model(net, 4), DisPFL(**settings), faults or Faults(), cohort
        )
    )


def test_layers_are_thinned_in_proportion_to_their_dimensions() -> None:
    layout = Layout.of(NETS["mlp"]((64,), 10, hidden=64))  # 64·64, 64·64, 10·64: half of 8,832 is 4,416
    # density ∝ (64+64)/4096 and 74/640; the last would hold 990 of its 640, so it is whole and the others share 3,776
    assert [(layer.first, layer.size, layer.held) for layer in layers(layout, 0.5)] == [
        (0, 4096, 1888),
        (4096 + 64, 4096, 1888),
    ]
    sparse = layers(layout, 0.1)  # none is whole: 883.2 weights in proportion to 128, 128, 74
    assert [layer.held for layer in sparse] == [round(883.2 * part / 330) for part in (128, 128, 74)]
    assert layers(layout, 1.0) == []


def test_kernels_count_with_all_their_dimensions() -> None:
    layout = Layout.of(NETS["cnn4"]((3, 32, 32), 10))  # 32·3·5·5, 64·32·5·5, 512·1600, 10·512
    # the first and the last layer are whole, and 106 and 2,112 share what they leave
    unit = (0.5 * (2400 + 51_200 + 819_200 + 5120) - 2400 - 5120) / (106 + 2112)
    assert [(layer.size, layer.held) for layer in layers(layout, 0.5)] == [
        (51_200, round(unit * (64 + 32 + 5 + 5))),
        (819_200, round(unit * (512 + 1600))),
    ]


def test_every_client_holds_other_weights_and_all_biases() -> None:
    engine = engine_of()
    cohort, mask = engine.shards[0].cohort, engine.shards[0].state.mask
    sparse = layers(cohort.layout, 0.5)
    assert sparse
    thin = torch.zeros(cohort.layout.size, dtype=torch.bool)
    for layer in sparse:
        thin[layer.columns] = True
        assert (mask[:, layer.columns].sum(dim=1) == layer.held).all()
        assert len({tuple(row) for row in mask[:, layer.columns].tolist()}) == 8
    assert mask[:, ~thin].all()
    assert torch.equal(cohort.weights, cohort.initial * mask)
    biases = sum(p.numel() for p in net().parameters() if p.dim() == 1)
    assert abs(int(mask[0].sum()) - biases - 0.5 * (cohort.layout.size - biases)) <= len(sparse)


@pytest.mark.parametrize("regrow", ["gradient", "random"])
def test_each_weight_is_averaged_among_those_who_hold_it(regrow: str) -> None:
    engine = engine_of(neighbors=3, regrow=regrow)
    shard = engine.shards[0]
    cohort = shard.cohort
    for t in (1, 2, 3):
        before, mask = cohort.weights, shard.state.mask
        engine.step(t, False)
        edges = last_edges(engine)
        trained = cohort.trained(before, t, steer=Masked(mask.double(), 10.0))[0]
        assert torch.equal(shard.state.personal, trained)
        assert cohort.personal is shard.state.personal
        assert (trained[~mask] == 0).all()
        for i in range(8):
            group = [i, *edges.neighbor[edges.client == i].tolist()]
            assert len(group) == 4
            for column in range(cohort.layout.size):
                holders = [j for j in group if mask[j, column]]
                mean = sum(float(trained[j, column]) for j in holders) / max(1, len(holders))
                expected = mean if shard.state.mask[i, column] else 0.0
                assert float(cohort.weights[i, column]) == pytest.approx(expected, abs=1e-12)


def test_the_smallest_weights_give_way_to_those_of_steepest_loss() -> None:
    engine = engine_of(neighbors=3)
    shard = engine.shards[0]
    cohort = shard.cohort
    for t in (1, 2, 3, 6):
        mask = shard.state.mask
        engine.step(t, False)
        trained, after = shard.state.personal, shard.state.mask
        rate = 0.25 * (1 + math.cos(math.pi * t / 6))
        rows = torch.arange(8)
        slope = Look.of(cohort, t).slopes(trained, rows, rows, slice(0, cohort.layout.size))[1].abs()
        changed = 0
        for layer in layers(cohort.layout, 0.5):
            count, columns = int(rate * layer.held), range(layer.first, layer.first + layer.size)
            for i in range(8):
                held = sorted((c for c in columns if mask[i, c]), key=lambda c: abs(float(trained[i, c])))
                kept, now = set(held[count:]), {c for c in columns if after[i, c]}
                steep = sorted((float(slope[i, c]) for c in columns if c not in kept), reverse=True)
                assert kept <= now
                assert sorted((float(slope[i, c]) for c in now - kept), reverse=True) == steep[:count]
                changed += len(now - set(held))
        assert (changed == 0) == (t == 6)


def test_fewer_and_fewer_weights_are_exchanged() -> None:
    method = DisPFL(prune=0.5)
    assert method.rate(0, 500) == 0.5
    assert method.rate(250, 500) == pytest.approx(0.25)
    assert method.rate(500, 500) == method.rate(700, 500) == 0
    assert DisPFL(prune_rounds=100).rate(50, 500) == pytest.approx(0.25)
    assert method.rate(7, None) == 0  # nobody knows how long it goes on
    assert method.rate(100, 500) > method.rate(200, 500) > method.rate(300, 500)


def test_random_weights_are_taken_up_where_none_were_kept() -> None:
    engine = engine_of(neighbors=3, regrow="random", prune=1.0)
    shard = engine.shards[0]
    mask = shard.state.mask
    engine.step(1, False)
    after = shard.state.mask
    for layer in layers(shard.cohort.layout, 0.5):
        assert (after[:, layer.columns].sum(dim=1) == layer.held).all()
    assert (after != mask).any(dim=1).all()
    drawn = shard.method._moved(2, shard.cohort, after), shard.method._moved(3, shard.cohort, after)
    assert not torch.equal(*drawn)


def test_masks_stay_with_who_is_absent_and_so_does_the_tested_model() -> None:
    engine = engine_of(Faults(absent=0.5), neighbors=3)
    engine.step(1, False)
    engine.step(2, False)
    shard = engine.shards[0]
    mask, personal, weights = shard.state.mask, shard.state.personal, shard.cohort.weights
    engine.step(3, False)
    away = shard.cohort.round.absent
    assert 0 < int(away.sum()) < 8
    assert torch.equal(shard.state.mask[away], mask[away])
    assert torch.equal(shard.state.personal[away], personal[away])
    assert torch.equal(shard.cohort.weights[away], weights[away])


def test_alone_a_client_trains_its_own_weights() -> None:
    engine = engine_of(Faults(loss=0.999999), neighbors=3, prune=0.0)
    cohort = engine.shards[0].cohort
    weights, mask = cohort.weights, engine.shards[0].state.mask
    for t in (1, 2):
        engine.step(t, False)
        weights = cohort.trained(weights, t, steer=Masked(mask.double(), 10.0))[0]
        assert torch.equal(cohort.weights, weights)


def test_with_everything_held_and_no_limit_it_is_gossip_tested_before_mixing() -> None:
    settings = {"neighbors": 3}
    method = {"name": "dispfl", "density": 1.0, "longest": 1e9, **settings}
    ours = kinfolk.run(tiny_experiment(method=method, run={"precision": "float64"}), out="ours")
    gossip = tiny_experiment(method={"name": "gossip", "backbone": "full", **settings}, run={"precision": "float64"})
    theirs = kinfolk.run(gossip, out="theirs")
    assert [row["accuracy"] for row in ours.metrics] == pytest.approx([row["before_mixing"] for row in theirs.metrics])


def test_with_afinds_choice_friends_and_their_weights_count() -> None:
    settings = tiny_experiment(method={"name": "dispfl", "choice": "afind"}, run={"rounds": 3, "precision": "float64"})
    one = kinfolk.run(settings, out="one")
    settings["run"] |= {"engine": "sharded", "shards": 3}
    many = kinfolk.run(settings, out="many")
    assert torch.isfinite(one.weights()).all()
    assert (one.weights() - many.weights()).abs().max() <= 1e-10
