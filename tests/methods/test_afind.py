"""AFIND and AFIND+ against plain loops over clients, and whom they choose."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import last_edges, make_federation
from kinfolk import Training, engines
from kinfolk.cohort.cohort import Cohort, initial_model
from kinfolk.methods.afind import AFIND, AFINDPlus
from kinfolk.methods.backbone import Backbone
from kinfolk.peers.access import Access
from kinfolk.peers.faults import Faults

SIZES = [12, 6, 9, 20, 8, 8, 16]
N = len(SIZES)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


HEAD = slice(35, 53)  # of 6·5 + 5 + 5·3 + 3 numbers; the proxy is the first 30


def engine_of(
    method: Any,
    shards: int = 1,
    faults: Faults | None = None,
    sizes: list[int] = SIZES,
    peers: dict[str, Any] | None = None,
) -> engines.Engine:
    cohort = {"training": Training(epochs=1, batch_size=5, lr=0.1), "seed": 4, "device": "cpu", "precision": "float64"}
    network = None if peers is None else Access(**peers).network(len(sizes), seed=4)[0]
    parts = engines.Parts(
        make_federation(sizes), lambda: initial_model(net, 4), method, faults or Faults(), cohort, network=network
    )
    return engines.InProcessEngine(parts) if shards == 1 else engines.ShardedEngine(parts, shards)


def rows(lists: Tensor) -> list[list[int]]:
    return [[j for j in row if j >= 0] for row in lists.tolist()]


class Plain:
    """One client after the other, one module at a time, autograd and dictionaries."""

    def __init__(self, method: AFIND, cohort: Cohort) -> None:
        self.method, self.data, self.seed = method, cohort.data.train, cohort.seed
        others = 1 / (N - 1)
        self.p = [{j: others for j in range(N) if j != i} for i in range(N)]
        self.theta, self.fallbacks = [0.0] * N, [0] * N
        self.similarity: dict[tuple[int, int], float] = {}
        self.loss: dict[tuple[int, int], float] = {}

    def on(self, body: Tensor, head: Tensor, client: int) -> tuple[float, Tensor]:
        """Loss of a body with a head on a client's data, and the gradient of the first layer's weights."""
        row = body.clone()
        if self.method.backbone == "alt":
            row[HEAD] = head[HEAD]
        module = net().double()
        nn.utils.vector_to_parameters(row, module.parameters())
        start, size = int(self.data.starts[client]), int(self.data.sizes[client])
        loss = F.cross_entropy(module(self.data.x[start : start + size]), self.data.y[start : start + size])
        loss.backward()
        gradient = module[0].weight.grad.reshape(-1)  # type: ignore[index, union-attr]
        return loss.item(), gradient

    def round(self, before: Tensor, trained: Tensor) -> Tensor:
        return torch.stack([self.client(i, before, trained) for i in range(N)])

    def client(self, i: int, before: Tensor, trained: Tensor) -> Tensor:
        method = self.method
        friends = [j for j, p in self.p[i].items() if p >= self.theta[i]]
        if not friends:
            friends = [max(self.p[i], key=lambda j: self.p[i][j])]
            self.fallbacks[i] += 1
        own = self.on(before[i], before[i], i)[1]
        seen, losses = {}, {}
        for j in [*friends, i]:
            gradient = self.on(before[i], before[j], j)[1]
            now = {"grad": (own, gradient), "weight": (trained[i, :30], trained[j, :30])}
            now["delta"] = (trained[i, :30] - before[i, :30], trained[j, :30] - before[j, :30])
            a, b = now[method.proxy]
            if j != i:
                seen[j] = float(a @ b / (a.norm() * b.norm()))
            if isinstance(method, AFINDPlus):
                if method.loss_direction == "theirs":
                    early, late = self.on(before[i], before[j], j)[0], self.on(trained[i], trained[j], j)[0]
                else:
                    early, late = self.on(before[j], before[i], i)[0], self.on(trained[j], trained[i], i)[0]
                if method.loss_smoothing == "two-point":
                    losses[j] = (1 - method.gamma) * late + method.gamma * early
                else:
                    earlier = self.loss.get((i, j), late)
                    losses[j] = self.loss[i, j] = (1 - method.gamma) * late + method.gamma * earlier
        self.learn(i, seen)
        weights = {j: 1 / (len(friends) + 1) for j in [*friends, i]}
        if isinstance(method, AFINDPlus):
            each = {j: math.exp(-loss / method.temperature) for j, loss in losses.items()}
            weights = {j: value / sum(each.values()) for j, value in each.items()}
        if not method.self_in_agg:
            weights = {j: weights[j] / (1 - weights[i]) for j in friends}
        mixed = sum(weight * trained[j] for j, weight in weights.items())
        assert isinstance(mixed, Tensor)
        if method.backbone == "alt":
            mixed[HEAD] = trained[i, HEAD]
        return mixed

    def learn(self, i: int, seen: dict[int, float]) -> None:
        method, keep = self.method, self.method.sim_memory
        assert keep is not None
        changes = []
        for j, value in seen.items():
            known = (i, j) in self.similarity
            earlier = self.similarity.get((i, j), value)
            self.similarity[i, j] = keep * earlier + (1 - keep) * value
            changes += [self.similarity[i, j] - earlier] if known else []
        for j in self.p[i]:
            if keep and changes and j not in seen and (i, j) in self.similarity:
                self.similarity[i, j] += sum(changes) / len(changes)
        now = {j: self.similarity[i, j] for j in seen}
        mass = sum(self.p[i][j] for j in now)
        each = {j: math.exp(s / method.nu) for j, s in now.items()}
        self.p[i] |= {j: mass * value / sum(each.values()) for j, value in each.items()}
        e = [(s + 1) / 2 for s in now.values()]
        h = [-x * math.log(x) for x in e]
        if method.threshold == "literal":
            self.theta[i] = method.tau * (1 - 1 / (1 + math.exp(-sum(h))))
        else:
            u = [1 if x < math.exp(-1) and method.entropy == "monotone" else math.e * y for x, y in zip(e, h)]
            mean = sum(u) / len(u)
            if method.threshold == "remark":
                mean = 1 / (1 + math.exp(-mean / math.e))
            self.theta[i] = method.tau * mean / (N - 1)


PLUS: list[dict[str, Any]] = [
    {"preset": "paper"},
    {"preset": "robust", "explore": 0.0},
    {"preset": "paper", "backbone": "ft", "loss_smoothing": "ema", "gamma": 0.6, "temperature": 0.5},
    {"preset": "robust", "backbone": "full", "loss_smoothing": "ema", "tau": 1.1, "explore": 0.0},
    {"preset": "paper", "proxy": "weight", "self_in_agg": False},
    {"preset": "robust", "proxy": "delta", "tau": 1.2, "gamma": 0.0, "explore": 0.0},
    {"preset": "paper", "proxy": "delta", "tau": 1.2},
    {"preset": "paper", "threshold": "literal", "tau": 1.5, "nu": 0.3},
    {"preset": "paper", "threshold": "remark", "tau": 1.5},
    {"preset": "robust", "threshold": "remark", "tau": 1.6, "explore": 0.0},
]


@pytest.mark.parametrize(
    "method",
    [*(AFINDPlus(**settings) for settings in PLUS), AFIND(tau=1.2), AFIND(preset="paper", proxy="delta")],
    ids=lambda method: ",".join(f"{f.name}={getattr(method, f.name)}" for f in dataclasses.fields(method))[:60],
)
def test_rounds_are_those_of_a_plain_loop_over_clients(method: AFIND) -> None:
    engine, twin = engine_of(method), engine_of(method).shards[0].cohort
    shard = engine.shards[0]
    plain = Plain(method, shard.cohort)
    counts = []
    for t in (1, 2, 3, 4):
        before = shard.cohort.weights
        twin.begin(t=t)
        twin.weights = before.clone()
        Backbone(method.backbone).train(t, twin)
        expected = plain.round(before, twin.weights)
        engine.step(t, False)
        torch.testing.assert_close(shard.cohort.weights, expected, rtol=1e-9, atol=1e-10)
        for i in range(N):
            assert {j: float(shard.state.probability[i, j]) for j in plain.p[i]} == pytest.approx(plain.p[i], rel=1e-9)
            assert float(shard.state.threshold[i]) == pytest.approx(plain.theta[i], rel=1e-8)
        assert (shard.state.probability.sum(dim=1) - 1).abs().max() < 1e-12
        counts.append([len(row) for row in rows(shard.state.neighbors)])
    assert counts[0] == [N - 1] * N  # everybody is a friend in round 1
    if method.proxy != "weight":
        assert min(counts[-1]) < N - 1  # and then not
    assert shard.state.fallbacks.tolist() == plain.fallbacks


def test_presets_fill_in_what_is_not_named() -> None:
    names = ("sim_memory", "entropy", "loss_direction", "explore")
    paper, robust = AFINDPlus(preset="paper"), AFINDPlus()
    assert [getattr(paper, name) for name in names] == [0.0, "printed", "theirs", 0.0]
    assert [getattr(robust, name) for name in names] == [0.9, "monotone", "mine", 1.0]
    assert AFINDPlus(preset="paper", sim_memory=0.5).sim_memory == 0.5
    assert (AFIND(preset="paper").sim_memory, AFIND(preset="paper").entropy) == (0.0, "printed")
    assert (AFIND().sim_memory, AFIND().explore) == (0.9, 0.0)  # a stranger would count as much as a friend
    assert (robust.tau, robust.nu, robust.gamma, robust.temperature, robust.noise) == (0.5, 0.1, 0.9, 1.0, 0.0)


@pytest.mark.parametrize("backbone", ["alt", "ft"])
def test_tuning_takes_as_many_epochs_as_asked_for(backbone: Any) -> None:
    method = AFINDPlus(backbone=backbone, tune_epochs=3)
    engine, twin = engine_of(method), engine_of(method).shards[0].cohort
    cohort = engine.shards[0].cohort
    assert cohort.tuning == (3 if backbone == "ft" else 0)
    engine.step(1, False)
    if backbone == "alt":
        Backbone(backbone, 3).train(1, twin)
        assert torch.equal(cohort.weights[:, HEAD], twin.weights[:, HEAD])  # heads are never mixed


# -- choosing ----------------------------------------------------------------------------------------------------


def test_who_finds_nobody_good_enough_takes_the_most_probable_and_is_never_locked_out() -> None:
    engine = engine_of(AFINDPlus(tau=1e9, explore=0.0))
    state = None
    for t in range(1, 6):
        before, state = state, engine.step(t, False) or engine.shards[0].state
        friends = rows(state.neighbors)
        if before is not None:
            for i, row in enumerate(friends):
                assert len(row) == 1
                assert before.probability[i, row[0]] == before.probability[i].max()
            assert torch.equal(state.probability, before.probability)  # one friend alone changes nothing
        assert state.fallbacks.tolist() == [t - 1] * N
        assert len(last_edges(engine).client) == sum(len(row) for row in friends)


def test_a_probability_that_just_reaches_the_threshold_is_enough() -> None:
    method = AFIND()
    shard = engine_of(method).shards[0]
    others = ~torch.eye(N, dtype=torch.bool)
    p = others.double() / (N - 1)
    for threshold, wanted in ((1 / (N - 1), others), (math.nextafter(1 / (N - 1), 1), None)):
        found, fallback = method._friends._wanted(
            1, shard.cohort, p, torch.full((N,), threshold, dtype=torch.float64), shard.peers
        )
        if wanted is not None:
            assert torch.equal(found, wanted)
        assert fallback.all() == (wanted is None)


def test_equally_probable_peers_are_taken_at_random() -> None:
    engine = engine_of(AFIND(threshold="top", count=2, proxy="weight", nu=1e9))  # all stay alike
    seen = []
    for t in range(1, 7):
        engine.step(t, False)
        friends = rows(engine.shards[0].state.neighbors)
        assert all(len(row) == 2 and i not in row for i, row in enumerate(friends))
        seen.append(friends)
    taken = np.bincount(np.ravel(seen), minlength=N)
    assert len({str(friends) for friends in seen}) == 6
    assert taken.min() > 0


def test_a_fixed_count_takes_the_most_probable() -> None:
    engine = engine_of(AFIND(threshold="top", count=3))
    before = None
    for t in range(1, 6):
        engine.step(t, False)
        state = engine.shards[0].state
        for i, row in enumerate(rows(state.neighbors)):
            assert len(row) == 3
            if before is not None:
                least = before.probability[i, row].min()
                rest = [j for j in range(N) if j != i and j not in row]
                assert (before.probability[i, rest] <= least).all()
        before = state
        assert not state.threshold.any()


def test_exploring_adds_one_random_stranger() -> None:
    never, always, often = (engine_of(AFIND(tau=1e9, explore=share)) for share in (0.0, 1.0, 0.5))
    strangers, added = set(), 0
    for t in range(1, 9):
        counts = []
        for engine in (never, always, often):
            engine.step(t, False)
            counts.append([len(row) for row in rows(engine.shards[0].state.neighbors)])
        if t > 1:
            assert counts[0] == [1] * N
            assert counts[1] == [2] * N
            assert set(counts[2]) <= {1, 2}
            added += sum(counts[2]) - N
            strangers |= {(i, j) for i, row in enumerate(rows(always.shards[0].state.neighbors)) for j in row}
    assert 0.25 < added / (7 * N) < 0.75
    assert len(strangers) > 0.6 * N * (N - 1)


def test_the_printed_loss_and_the_reversed_one_weigh_differently() -> None:
    mixed = []
    for direction in ("theirs", "mine"):
        engine = engine_of(AFINDPlus(loss_direction=direction))  # type: ignore[arg-type]
        engine.step(1, False)
        mixed.append(last_edges(engine).weight)
    assert mixed[0].shape == mixed[1].shape
    assert np.abs(mixed[0] - mixed[1]).max() > 0.01
