"""AFIND and AFIND+ among clients and peers of all kinds: few samples, lost answers, few links, many shards."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_afind import N, engine_of, rows

import kinfolk
from conftest import last_edges, tiny_experiment
from kinfolk import engines
from kinfolk.matching import friendly
from kinfolk.methods.afind import AFIND, AFINDPlus
from kinfolk.methods.backbone import Backbone
from kinfolk.peers.faults import Faults
from kinfolk.runs.graph import read_graph


@pytest.mark.parametrize("preset", ["paper", "robust"])
@pytest.mark.parametrize("backbone", ["alt", "ft"])
def test_clients_with_one_sample_or_none_or_one_class_take_part(preset: Any, backbone: Any) -> None:
    engine = engine_of(AFINDPlus(preset=preset, backbone=backbone), sizes=[1, 1, 9, 20, 8])
    train = engine.shards[0].cohort.data.train
    train.sizes[1] = 0
    train.y[int(train.starts[2]) : int(train.starts[3])] = 1
    for t in range(1, 6):
        engine.step(t, False)
        state = engine.shards[0].state
        assert torch.isfinite(engine.shards[0].cohort.weights).all()
        assert (state.probability.sum(dim=1) - 1).abs().max() < 1e-12
    assert state.similarity[:, 1].isnan().all()  # without samples it cannot judge
    assert (state.probability[[0, 2, 3, 4], 1] == 1 / 4).all()
    assert (state.similarity[1, [0, 2, 3, 4]] == 0).all()  # and everybody is alike to it
    assert torch.equal(state.probability[1], torch.tensor([0.25, 0, 0.25, 0.25, 0.25], dtype=torch.float64))
    graph = last_edges(engine)
    if preset == "paper":
        assert 1 not in graph.neighbor  # whoever cannot judge has no weight


def test_peers_that_are_away_keep_the_probability_they_had() -> None:
    engine = engine_of(AFINDPlus(), peers={"away": 0.4})
    shard = engine.shards[0]
    before, stale = None, 0
    for t in range(1, 9):
        engine.step(t, False)
        state, here = shard.state, shard.peers.reachable(t)
        chosen = torch.zeros(N, N, dtype=torch.bool)
        for i, row in enumerate(rows(state.neighbors)):
            chosen[i, row] = True
        assert not (chosen & ~here).any()
        assert (here.any(dim=1) == chosen.any(dim=1)).all()  # whoever can have a friend has one
        assert (state.probability.sum(dim=1) - 1).abs().max() < 1e-12
        if before is not None:
            assert torch.equal(state.probability[~chosen], before.probability[~chosen])
            stale += int((~chosen & ~here).sum()) - N
        before = state
    assert stale > 10


def test_lost_answers_leave_a_peer_unobserved() -> None:
    faults = Faults(loss=0.5)
    engine = engine_of(AFINDPlus(preset="paper"), faults=faults)
    engine.step(1, False)
    everybody = torch.arange(N)
    arrives = ~faults.lost(4, 1, everybody[:, None], everybody[None])  # [to, sender]
    heard = arrives & arrives.T & ~torch.eye(N, dtype=torch.bool)  # the question and the answer
    state = engine.shards[0].state
    assert 0 < int(heard.sum()) < N * (N - 1)
    assert torch.equal(~state.similarity.isnan(), heard)
    assert (state.probability[~heard & ~torch.eye(N, dtype=torch.bool)] == 1 / (N - 1)).all()
    graph = last_edges(engine)
    assert set(zip(graph.client, graph.neighbor)) == {(int(i), int(j)) for i, j in torch.nonzero(heard)}


@pytest.mark.parametrize("smoothing", ["two-point", "ema"])
def test_whoever_gave_no_loss_in_this_round_has_no_weight_in_it(smoothing: Any) -> None:
    faults, everybody, earlier = Faults(loss=0.5), torch.arange(N), torch.zeros(N, N, dtype=torch.bool)
    engine = engine_of(AFINDPlus(preset="paper", loss_smoothing=smoothing, tau=1e-6), faults=faults)
    forgotten = 0
    for t in range(1, 5):
        engine.step(t, False)
        arrives = ~faults.lost(4, t, everybody[:, None], everybody[None])
        heard = arrives & arrives.T & ~torch.eye(N, dtype=torch.bool)
        graph = last_edges(engine)
        assert set(zip(graph.client, graph.neighbor)) == {(int(i), int(j)) for i, j in torch.nonzero(heard)}
        forgotten += int((arrives & ~heard & earlier).sum())  # its model came and its loss is known from before
        earlier |= heard
    assert forgotten > 5


@pytest.mark.parametrize("keep", [0.0, 0.6])
def test_a_loss_that_is_not_finite_is_not_remembered(keep: float) -> None:
    mine = torch.arange(N)
    ids = torch.tensor([[(i + 1) % N, (i + 2) % N, -1] for i in range(N)])
    table = torch.full((N, N), torch.nan, dtype=torch.float64)
    one = torch.ones(N, dtype=torch.float64)
    bad = torch.tensor([[math.inf, 2.0, math.nan]] * N, dtype=torch.float64)
    table, loss, own = friendly.smoothed(table, mine, ids, bad, one * math.inf, keep)
    assert loss.isfinite().tolist() == [[False, True, False]] * N
    assert not own.isfinite().any()
    good = torch.tensor([[3.0, 4.0, math.nan]] * N, dtype=torch.float64)
    table, loss, own = friendly.smoothed(table, mine, ids, good, one, keep)
    second = keep * 2.0 + (1 - keep) * 4.0
    assert loss[0, :2].tolist() == pytest.approx([3.0, second])  # as if seen for the first time
    assert torch.equal(own, one)
    _, loss, own = friendly.smoothed(table, mine, ids, bad, one * math.nan, keep)
    assert loss.isfinite().tolist() == [[False, True, False]] * N  # nor does an earlier one stand in for it
    assert not own.isfinite().any()


def test_without_its_own_model_a_client_that_nobody_answers_keeps_it() -> None:
    method = AFINDPlus(self_in_agg=False)
    engine, twin = engine_of(method, faults=Faults(loss=0.999999)), engine_of(method).shards[0].cohort
    engine.step(1, False)
    Backbone("alt").train(1, twin)
    assert torch.equal(engine.shards[0].cohort.weights, twin.weights)


@pytest.mark.parametrize("away", [None, 0.4])
def test_the_threshold_counts_in_units_of_how_many_a_client_can_ever_reach(away: float | None) -> None:
    engine = engine_of(AFIND(preset="paper"), peers={"topology": "star", "away": away})
    engine.step(1, False)
    state = engine.shards[0].state
    for i in range(N):
        e = (state.similarity[i][~state.similarity[i].isnan()] + 1) / 2
        others = N - 1 if i == 0 else 1
        expected = float(0.5 * (-math.e * e * e.log()).mean() / others) if e.numel() else 0.0
        assert float(state.threshold[i]) == pytest.approx(expected, rel=1e-9)
    assert state.threshold[0] > 0


def test_a_peer_that_cannot_reach_back_gives_no_answer() -> None:
    engine = engine_of(AFINDPlus(), peers={"reachable": 3})
    for t in (1, 2, 3):
        engine.step(t, False)
    shard = engine.shards[0]
    reach = shard.peers.reachable(1)
    mutual = reach & reach.T
    assert 0 < int(mutual.sum()) < int(reach.sum())
    assert not (~shard.state.similarity.isnan() & ~mutual).any()
    assert (shard.state.probability[reach & ~mutual] == 1 / 3).all()


def test_nobody_in_reach_leaves_the_memory_empty() -> None:
    engine = engine_of(AFINDPlus(), peers={"reachable": 0})
    engine.step(1, False)
    state = engine.shards[0].state
    assert state.neighbors.shape == (N, 0)
    assert not state.probability.any()
    assert not state.threshold.any()
    assert not state.fallbacks.any()


SETTINGS: list[dict[str, Any]] = [
    {"preset": "paper", "noise": 2.0, "explore": 0.5},
    {"preset": "robust", "backbone": "ft", "loss_smoothing": "ema"},
    {"preset": "paper", "proxy": "weight", "noise": 0.5, "backbone": "full"},
    {"preset": "robust", "proxy": "delta", "threshold": "remark", "self_in_agg": False},
    {"preset": "robust", "threshold": "top", "count": 2, "gamma": 1.0},
    {"preset": "robust", "noise": 2.0, "noise_on": "training"},
    {"preset": "paper", "noise": 2.0, "noise_on": "training", "backbone": "ft"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_settings_are_the_same_over_shards(settings: dict[str, Any]) -> None:
    found = []
    for shards in (1, 3):
        engine = engine_of(AFINDPlus(**settings), shards, Faults(loss=0.15, absent=0.15), peers={"away": 0.1})
        for t in range(1, 6):
            engine.step(t, False)
        found.append(engines.snapshot(engine))
    one, many = found
    assert torch.isfinite(one["weights"]).all()
    assert (one["weights"] - many["weights"]).abs().max() <= 1e-10
    assert rows(one["state/neighbors"]) == rows(many["state/neighbors"])
    torch.testing.assert_close(
        one["state/probability"], many["state/probability"], rtol=1e-9, atol=1e-12, equal_nan=True
    )
    for name in ("models_received", "state/fallbacks"):
        assert torch.equal(one[name], many[name])


class Listen(kinfolk.Observer):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def notice(self, text: str) -> None:
        self.heard.append(text)


METHODS: list[dict[str, Any]] = [
    *({"name": name} for name in ("afind", "gossip", "federico", "ditto", "fomo", "dispfl")),
    *({"name": "afind+", "preset": preset} for preset in ("paper", "robust")),
    {"name": "afind+", "preset": "paper", "threshold": "literal"},
    {"name": "federico", "form": "em"},
    {"name": "pens", "discover_rounds": 2},
    *({"name": name, "choice": "afind"} for name in ("gossip", "ditto", "fomo", "dispfl")),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method.values())))
def test_links_from_a_file_may_fall_apart_and_break_by_a_trace(method: dict[str, Any]) -> None:
    triangle, pair = [(0, 1), (1, 2), (0, 2)], [(3, 4)]
    links = {*triangle, *pair, *((b, a) for a, b in triangle + pair), (5, 6)}  # 5 reaches 6 and 6 nobody; 7 is alone
    away = {0: (2, 3), 4: (1, 4)}
    for name, heading, lines in (
        ("links.csv", "client,peer", links),
        ("trace.csv", "client,first,last", {(client, *rounds) for client, rounds in away.items()}),
    ):
        text = "\n".join([heading, *(",".join(map(str, line)) for line in sorted(lines))])
        Path(name).write_text(text + "\n", encoding="utf-8")
    settings = tiny_experiment(
        method=method,
        peers={"reachable_from": "links.csv", "away_from": "trace.csv"},
        run={"precision": "float64", "rounds": 4, "evaluate_every": 4},
    )
    observer = Listen()
    one = kinfolk.run(settings, out="one", observer=observer)
    settings["run"] |= {"engine": "sharded", "shards": 3}
    many = kinfolk.run(settings, out="many")
    assert observer.heard[-1] == "links.csv: 4 components, the largest has 3 of 8 clients; 2 clients reach nobody"
    assert torch.isfinite(one.weights()).all()
    assert (one.weights() - many.weights()).abs().max() <= 1e-10
    graphs = [read_graph(result.folder) for result in (one, many)]
    met = [set(zip(graph.round.tolist(), graph.client.tolist(), graph.neighbor.tolist())) for graph in graphs]
    assert met[0] == met[1]
    assert met[0]
    for t, client, neighbor in met[0]:
        assert (client, neighbor) in links
        assert not any(first <= t <= last for first, last in (away.get(c, (9, 9)) for c in (client, neighbor)))
