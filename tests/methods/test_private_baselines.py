"""DP-FedAvg, DP-SCAFFOLD and DP-DSGT: what they compute, and when they are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.training import Training
from kinfolk.data.federation import Federation
from kinfolk.errors import UserError
from kinfolk.methods.dp_dsgt import DPDSGT
from kinfolk.methods.dp_fedavg import DPFedAvg
from kinfolk.methods.dp_scaffold import DPScaffold
from kinfolk.methods.fedavg import FedAvg
from kinfolk.methods.private import Releases, account
from kinfolk.peers.access import Access
from kinfolk.peers.faults import Faults

RATE = 0.2


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the noise off."""
    monkeypatch.setattr("kinfolk.privacy.source.add_noise", lambda *_: None)


def engine_of(
    method: Any,
    data: Federation,
    rounds: int = 4,
    faults: Faults | None = None,
    peers: dict[str, Any] | None = None,
    hidden: int = 0,
    shards: int = 0,
    training: Training | None = None,
) -> engines.Engine:
    settings = {
        "training": training or Training(), "seed": 0, "device": "cpu", "precision": "float64", "rounds": rounds,
    }  # fmt: skip

    def net() -> nn.Module:
        two = hidden and nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))
        return two or nn.Sequential(nn.Linear(6, 3))

    def build() -> nn.Module:
        return initial_model(net, 0)

    network = None if peers is None else Access(**peers).network(data.clients, 0)[0]
    parts = engines.Parts(data, build, method, faults or Faults(), settings, network=network)
    return engines.ShardedEngine(parts, shards) if shards else engines.InProcessEngine(parts)


def weights(engine: engines.Engine) -> Tensor:
    return torch.cat([shard.cohort.weights for shard in engine.shards])


def noisy(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int, int], Tensor]:
    """Noise as the method draws it: (round, step, client) -> [d], divided as a gradient is."""
    seen: dict[tuple[int, int, int], Tensor] = {}
    gradient = Releases.gradient

    def spy(self: Releases, t: int, step: int, models: Tensor, batches: Any, *rest: Any) -> Any:
        found, sums = gradient(self, t, step, models, batches, *rest)
        clean = sums.total / batches.divisor[:, None]
        for row, client in enumerate(self.cohort.ids.tolist()):
            seen[t, step, client] = found[row] - clean[row]
        return found, sums

    monkeypatch.setattr(Releases, "gradient", spy)
    return seen


def clipped(model: Tensor, x: Tensor, y: Tensor, clip: float = 1.0) -> Tensor:
    """The mean of a client's clipped gradients for a linear model [21], record by record."""
    total = torch.zeros_like(model)
    for record, label in zip(x, y):
        own = model.clone().requires_grad_()
        scores = own[:18].view(3, 6) @ record + own[18:]
        (gradient,) = torch.autograd.grad(torch.logsumexp(scores, 0) - scores[label], own)
        total += gradient / max(1.0, float(gradient.norm()) / clip)
    return total / len(y)


def records(data: Federation, client: int) -> tuple[Tensor, Tensor]:
    start = int(data.train.starts[client])
    mine = slice(start, start + int(data.train.sizes[client]))
    return data.train.x[mine].double(), data.train.y[mine]


def steps(engine: engines.Engine, rounds: int) -> None:
    for t in range(1, rounds + 1):
        engine.step(t, False)


# -- against plain loops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("local_steps", "server_lr"), [(1, 1.0), (3, 0.5)])
def test_dp_fedavg_is_what_a_plain_loop_over_clients_gives(
    local_steps: int, server_lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_federation([5, 8, 3, 6])
    noise = noisy(monkeypatch)
    engine = engine_of(DPFedAvg(lr=RATE, local_steps=local_steps, server_lr=server_lr), data)
    steps(engine, 3)
    rate, server = RATE / (local_steps * server_lr), torch.zeros(21, dtype=torch.float64)
    for t in (1, 2, 3):
        models = []
        for client in range(4):
            model = server.clone()
            for step in range(local_steps):
                model -= rate * (clipped(model, *records(data, client)) + noise[t, step, client])
            models.append(model)
        server += server_lr * (torch.stack(models).mean(dim=0) - server)
    assert torch.allclose(weights(engine), server.expand(4, -1), atol=1e-6)
    assert float(noise[1, 0, 0].norm()) > 0.01


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_dp_scaffold_is_what_a_plain_loop_over_clients_gives(
    participation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_federation([5, 8, 3, 6])
    noise = noisy(monkeypatch)
    method = DPScaffold(lr=RATE, local_steps=3, participation=participation)
    engine = engine_of(method, data)
    shard = engine.shards[0]
    server, common, rate = torch.zeros(21, dtype=torch.float64), torch.zeros(21, dtype=torch.float64), RATE / 3
    control = torch.zeros(4, 21, dtype=torch.float64)
    for t in (1, 2, 3):
        chosen = FedAvg(participation).participants(t, shard.cohort, shard.peers)
        engine.step(t, False)
        moves, changes = [], []
        for client in torch.nonzero(chosen).flatten().tolist():
            model, found = server.clone(), []
            for step in range(3):
                found.append(clipped(model, *records(data, client)) + noise[t, step, client])
                model -= rate * (found[-1] - control[client] + common)
            fresh = torch.stack(found).mean(dim=0)
            moves.append(model - server)
            changes.append(fresh - control[client])
            control[client] = fresh
        server = server + torch.stack(moves).mean(dim=0)
        common = common + torch.stack(changes).sum(dim=0) / 4
        assert torch.allclose(shard.state.control, control, atol=1e-5)
        assert torch.allclose(shard.state.common, common, atol=1e-5)
        assert torch.allclose(common, control.mean(dim=0))
        assert torch.allclose(weights(engine), server.expand(4, -1), atol=1e-6)


GRAPHS: list[dict[str, Any] | None] = [
    None, {"topology": "ring"}, {"topology": "random", "probability": 0.4}, {"topology": "star"},
]  # fmt: skip


def metropolis(peers: dict[str, Any] | None, n: int) -> Tensor:
    """[n, n] the weights of a graph, link by link."""
    linked = [[i != j for j in range(n)] for i in range(n)]
    if peers is not None:
        network = Access(**peers).network(n, 0)[0]
        assert network is not None
        lists = network.reach(torch.arange(n)).at(0)
        linked = lists.contains(torch.arange(n).expand(n, -1)).tolist()
    weights = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            if linked[i][j]:
                weights[i, j] = 1 / (1 + max(sum(linked[i]), sum(linked[j])))
        weights[i, i] = 1 - weights[i].sum()
    return weights


@pytest.mark.parametrize("peers", GRAPHS, ids=["complete", "ring", "random", "star"])
def test_dp_dsgt_is_what_a_plain_loop_over_clients_gives(
    peers: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the specification: the exchange first, with trackers of zero in the beginning."""
    n = 6
    data = make_federation([5, 8, 3, 6, 4, 7])
    noise = noisy(monkeypatch)
    engine = engine_of(DPDSGT(lr=RATE), data, peers=peers)
    steps(engine, 4)
    mixing = metropolis(peers, n)
    assert torch.allclose(mixing, mixing.T)
    assert torch.allclose(mixing.sum(dim=0), torch.ones(n, dtype=torch.float64))
    x, y, old = (torch.zeros(n, 21, dtype=torch.float64) for _ in range(3))
    for t in (1, 2, 3, 4, 5):
        moved = [sum(mixing[i, j] * (x[j] - RATE * y[j]) for j in range(n)) for i in range(n)]
        x = torch.stack(moved)  # type: ignore[arg-type]
        if t == 5:  # the exchange that ends round 4
            break
        new = torch.stack([clipped(x[i], *records(data, i)) + noise[t, 0, i] for i in range(n)])
        y = torch.stack([sum(mixing[i, j] * y[j] for j in range(n)) + new[i] - old[i] for i in range(n)])  # type: ignore[misc]
        old = new
        assert torch.allclose(y.mean(dim=0), new.mean(dim=0))
    assert torch.allclose(weights(engine), x, atol=1e-7)
    state = engine.shards[0].state
    assert torch.allclose(state.gradient, old, atol=1e-7)
    assert torch.allclose(state.tracker, mixing @ y, atol=1e-7)


# -- when they are the same --------------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_round_one_of_dp_scaffold_is_that_of_dp_fedavg(participation: float) -> None:
    data = make_federation([6] * 5)
    settings: dict[str, Any] = {"lr": RATE, "local_steps": 3, "participation": participation}
    one, other = (engine_of(method(**settings), data) for method in (DPFedAvg, DPScaffold))
    steps(one, 1)
    steps(other, 1)
    assert torch.equal(weights(one), weights(other))
    for t in (2, 3):
        one.step(t, False)
        other.step(t, False)
    assert not torch.allclose(weights(one), weights(other), atol=1e-4)


def test_with_one_step_and_everybody_all_three_are_the_same() -> None:
    data = make_federation([6] * 5)
    found = []
    for method in (DPFedAvg(lr=RATE), DPScaffold(lr=RATE), DPDSGT(lr=RATE)):
        engine = engine_of(method, data)
        steps(engine, 4)
        found.append(weights(engine))
    assert torch.allclose(found[0], found[1], atol=1e-12)
    assert torch.allclose(found[0], found[2], atol=1e-12)
    assert float(found[0].abs().max()) > 0.01


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_without_noise_and_cutting_dp_fedavg_is_fedavg(participation: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full batches and clients of one size, so that both take the same records and count everybody alike."""
    quiet(monkeypatch)
    data = make_federation([6] * 5)
    training = Training(epochs=3, batch_size=6, lr=RATE, momentum=0.0, lr_decay=1.0)
    private = DPFedAvg(lr=3 * RATE, local_steps=3, clip=1e6, participation=participation)
    one = engine_of(private, data, hidden=4)
    other = engine_of(FedAvg(participation), data, hidden=4, training=training)
    for t in range(1, 5):
        one.step(t, False)
        other.step(t, False)
        assert torch.allclose(weights(one), weights(other), atol=1e-10)


# -- invariants --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peers", GRAPHS, ids=["complete", "ring", "random", "star"])
def test_the_mean_tracker_is_the_mean_gradient(peers: dict[str, Any] | None) -> None:
    engine = engine_of(DPDSGT(lr=RATE), make_federation([6] * 7), rounds=8, peers=peers)
    for t in range(1, 9):
        engine.step(t, False)
        state = engine.shards[0].state
        assert torch.allclose(state.tracker.mean(dim=0), state.gradient.mean(dim=0), atol=1e-12)


def test_lost_messages_keep_weights_that_sum_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal models and no gradients: whatever is lost, nothing moves."""
    monkeypatch.setattr(
        Releases, "gradient", lambda self, t, step, models, batches: (torch.zeros_like(models), _sums(models))
    )
    engine = engine_of(DPDSGT(lr=RATE), make_federation([6] * 7), faults=Faults(loss=0.4, absent=0.3), hidden=3)
    start = weights(engine)
    steps(engine, 4)
    assert torch.allclose(weights(engine), start, atol=1e-14)


def _sums(models: Tensor) -> Any:
    class Nothing:
        loss = torch.zeros(models.shape[0], dtype=torch.float64)

    return Nothing


def test_controls_of_everybody_average_to_the_servers_though_clients_are_absent() -> None:
    engine = engine_of(DPScaffold(lr=RATE, participation=0.7), make_federation([6] * 9), faults=Faults(absent=0.3))
    steps(engine, 4)
    state = engine.shards[0].state
    assert torch.allclose(state.common, state.control.mean(dim=0), atol=1e-12)


@pytest.mark.parametrize("method", [DPFedAvg, DPScaffold, DPDSGT])
def test_a_client_without_records_is_neither_charged_nor_heard(method: Any) -> None:
    whole = make_federation([6] * 4)
    part = replace(whole.train, x=whole.train.x[:18], y=whole.train.y[:18], sizes=torch.tensor([6, 6, 6, 0]))
    with_nobody, data = replace(whole, train=part), whole.select(torch.arange(3))
    engine = engine_of(method(lr=RATE), with_nobody)
    steps(engine, 3)
    assert account(engine.shards[0].cohort).ledger.releases().tolist() == [3, 3, 3, 0]
    assert torch.isfinite(weights(engine)).all()
    if method is DPFedAvg:  # the mean of all controls counts everybody
        without = engine_of(method(lr=RATE), data)
        steps(without, 3)
        assert torch.allclose(weights(engine)[:3], weights(without), atol=1e-12)


# -- warm start --------------------------------------------------------------------------------------------------


def test_a_warm_start_finds_controls_at_the_initial_model_and_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = noisy(monkeypatch)
    data = make_federation([5, 8, 3])
    method = DPScaffold(lr=RATE, local_steps=2, warm_start=True)
    engine = engine_of(method, data, rounds=6)
    for t in range(1, 5):
        engine.step(t, False)
        assert not weights(engine).any()
    state = engine.shards[0].state
    zero = torch.zeros(21, dtype=torch.float64)
    for client in range(3):
        expected = clipped(zero, *records(data, client)) + (noise[4, 0, client] + noise[4, 1, client]) / 2
        assert torch.allclose(state.control[client], expected, atol=1e-7)
    assert torch.allclose(state.common, state.control.mean(dim=0), atol=1e-12)
    engine.step(5, False)
    assert weights(engine).abs().max() > 0
    assert account(engine.shards[0].cohort).ledger.releases().tolist() == [10] * 3
    assert DPScaffold(warm_start=True, participation=0.5).warm_rounds == 8
    received = engine.shards[0].peers.models_received.sum()
    assert int(received) == round(method.nominal(5, 3).total * 3) == 3 * (4 * 2 + 4)


def test_a_warm_start_longer_than_the_run_is_refused() -> None:
    settings = tiny_experiment(method={"name": "dp-scaffold", "warm_start": True, "participation": 0.5})
    with pytest.raises(UserError, match=r"takes 8 rounds \(4/participation\), but the run has only 4") as error:
        kinfolk.run(settings, out="a")
    assert "\n" not in str(error.value)
