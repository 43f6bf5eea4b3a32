"""FedProx and SCAFFOLD against plain loops over clients, and against FedAvg, which both contain."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import Federation, Training, UserError, engines
from kinfolk.cohort.cohort import Cohort, initial_model
from kinfolk.cohort.training import local_steps, plan
from kinfolk.config import read
from kinfolk.methods import find
from kinfolk.methods.scaffold import path_length
from kinfolk.peers.faults import Faults
from kinfolk.records import nominal
from kinfolk.runs import checkpoint

SIZES = [12, 6, 9, 20, 8, 8, 16, 1]


def engine_of(
    name: str,
    momentum: float = 0.0,
    faults: Faults | None = None,
    shards: int | None = None,
    data: Federation | None = None,
    training: Training | None = None,
    **settings: Any,
) -> engines.Engine:
    training = training or Training(epochs=2, batch_size=5, lr=0.1, momentum=momentum)
    cohort = {"training": training, "seed": 4, "device": "cpu", "precision": "float64"}
    parts = engines.Parts(
        data or make_federation(SIZES),
        lambda: initial_model(lambda: nn.Linear(6, 3), 4),
        find(name)(**settings),
        faults or Faults(),
        cohort,
    )
    return engines.InProcessEngine(parts) if shards is None else engines.ShardedEngine(parts, shards)


def run(engine: engines.Engine, rounds: int) -> Tensor:
    for t in range(1, rounds + 1):
        engine.step(t, False)
    model: Tensor = engine.shards[0].state.model
    return model


def plain_client(cohort: Cohort, start: Tensor, i: int, t: int, bend: Any) -> tuple[Tensor, list[Tensor]]:
    """One client's SGD, written out: where it ends, and its raw gradients. bend(gradient, w) -> gradient."""
    settings, part = cohort.training, cohort.data.train
    ids, first, size = cohort.ids[i : i + 1], part.starts[i : i + 1], part.sizes[i : i + 1]
    batches = plan(cohort.seed, t, ids, first, size, settings)
    w, speed, seen = start.clone(), torch.zeros_like(start), []
    for step in range(int(local_steps(size, settings)[0])):
        index = batches.index[0, step, : int(batches.counts[0, step])]
        leaf = w.clone().requires_grad_()
        scores = part.x[index] @ leaf[:18].view(3, 6).T + leaf[18:]
        gradient = torch.autograd.grad(F.cross_entropy(scores, part.y[index]), leaf)[0]
        seen.append(gradient)
        speed = settings.momentum * speed + bend(gradient, w)
        w = w - settings.rate(t) * speed
    return w, seen


def weighted(models: list[Tensor], clients: list[int]) -> Tensor:
    sizes = torch.tensor([SIZES[i] for i in clients], dtype=torch.float64)
    return (torch.stack(models) * sizes[:, None]).sum(dim=0) / sizes.sum()


def drawn(method: Any, t: int, shard: engines.Shard) -> list[int]:
    method = find("fedavg")(method.participation)
    return torch.nonzero(method.participants(t, shard.cohort, shard.peers)).flatten().tolist()


# -- FedProx -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_fedprox_is_a_loop_over_clients_with_a_penalty(share: float) -> None:
    engine = engine_of("fedprox", momentum=0.5, participation=share, penalty=0.7)
    shard = engine.shards[0]
    for t in (1, 2, 3):
        before = shard.state.model
        clients = drawn(shard.method, t, shard)
        assert len(clients) == round(8 * share)
        engine.step(t, False)

        def bend(gradient: Tensor, w: Tensor, anchor: Tensor = before) -> Tensor:
            return gradient + 0.7 * (w - anchor)

        ends = [plain_client(shard.cohort, before, i, t, bend)[0] for i in clients]
        torch.testing.assert_close(shard.state.model, weighted(ends, clients), rtol=1e-12, atol=1e-12)
        assert torch.equal(shard.cohort.weights, shard.state.model.expand(8, -1))


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_fedprox_without_penalty_is_fedavg_bit_for_bit(share: float) -> None:
    faults = Faults(loss=0.2, absent=0.2)
    plain = run(engine_of("fedavg", momentum=0.9, faults=faults, participation=share), 4)
    assert torch.equal(
        run(engine_of("fedprox", momentum=0.9, faults=faults, participation=share, penalty=0.0), 4), plain
    )
    assert not torch.equal(
        run(engine_of("fedprox", momentum=0.9, faults=faults, participation=share, penalty=1e-6), 4), plain
    )


def test_a_stronger_penalty_holds_clients_nearer() -> None:
    moved = []
    for penalty in (0.0, 1.0, 8.0):
        engine = engine_of("fedprox", penalty=penalty)
        start = engine.shards[0].state.model
        moved.append(float((run(engine, 1) - start).norm()))
    assert moved[0] > moved[1] > moved[2] > 0


# -- SCAFFOLD ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize(("share", "server_lr"), [(1.0, 1.0), (0.4, 0.5)])
def test_scaffold_is_a_loop_over_clients_with_controls(momentum: float, share: float, server_lr: float) -> None:
    engine = engine_of("scaffold", momentum=momentum, participation=share, server_lr=server_lr)
    shard = engine.shards[0]
    model = shard.state.model
    controls, common = torch.zeros(8, 21, dtype=torch.float64), torch.zeros(21, dtype=torch.float64)
    for t in (1, 2, 3, 4):
        clients = drawn(shard.method, t, shard)
        engine.step(t, False)
        ends, new = [], controls.clone()
        for i in clients:
            shift = common - controls[i]
            end, seen = plain_client(shard.cohort, model, i, t, lambda g, w, shift=shift: g + shift)
            steps = len(seen)
            # how often each gradient was followed: once, and on through the momentum of the steps behind it
            follow = [sum(momentum**k for k in range(steps - step)) for step in range(steps)]
            length = sum(follow) * shard.cohort.training.rate(t)
            new[i] = controls[i] - common + (model - end) / length
            mean_gradient = sum(f * g for f, g in zip(follow, seen)) / sum(follow)
            torch.testing.assert_close(new[i], mean_gradient, rtol=1e-9, atol=1e-12)
            ends.append(end)
        common = common + (new - controls).sum(dim=0) / 8
        controls = new
        model = model + server_lr * (weighted(ends, clients) - model)
        torch.testing.assert_close(shard.state.model, model, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(shard.state.control, controls, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(shard.state.common, common, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_scaffolds_first_round_is_fedavgs(momentum: float, share: float) -> None:
    ours, plain = (engine_of(name, momentum, participation=share) for name in ("scaffold", "fedavg"))
    assert torch.equal(run(ours, 1), run(plain, 1))
    ours.step(2, False)
    plain.step(2, False)
    assert not torch.equal(ours.shards[0].state.model, plain.shards[0].state.model)


def test_without_losses_the_common_control_is_the_mean_of_the_clients() -> None:
    engine = engine_of("scaffold", participation=0.4, faults=Faults(absent=0.3))
    run(engine, 9)
    state = engine.shards[0].state
    assert float(state.control.norm()) > 0
    torch.testing.assert_close(state.common, state.control.mean(dim=0), rtol=1e-9, atol=1e-12)


def test_a_quarantined_client_keeps_its_control() -> None:
    data = make_federation(SIZES)
    data.train.x[data.train.starts[3] : data.train.starts[4]] = torch.inf
    engine = engine_of("scaffold", data=data)
    model = run(engine, 3)
    assert torch.isfinite(model).all()
    assert not engine.shards[0].state.control[3].any()
    assert engine.shards[0].state.control[2].any()
    assert int(engine.shards[0].quarantined[3]) == 3


def test_controls_help_where_clients_differ() -> None:
    """Clients that pull apart: with many local steps FedAvg stops off the common optimum, SCAFFOLD at it."""
    training = Training(epochs=20, batch_size=24, lr=0.2, lr_decay=1.0, momentum=0.0)
    generator = torch.Generator().manual_seed(0)
    sets = []
    for client in range(4):  # each knows two of three classes, in other proportions
        y = torch.tensor([client % 3] * 18 + [(client + 1) % 3] * 6)
        x = torch.randn(24, 6, generator=generator) + 1.5 * F.one_hot(y, 6)
        sets.append((x, y))
    data = Federation.from_arrays(sets, sets, classes=3)
    gradients = {}
    for name in ("fedavg", "scaffold"):
        engine = engine_of(name, data=data, training=training)
        w = run(engine, 60).clone().requires_grad_()
        scores = data.train.x.double() @ w[:18].view(3, 6).T + w[18:]
        gradients[name] = float(torch.autograd.grad(F.cross_entropy(scores, data.train.y), w)[0].norm())
    assert gradients["scaffold"] < 0.5 * gradients["fedavg"]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99])
def test_path_length_is_what_unit_gradients_move(momentum: float) -> None:
    training = Training(steps=None, epochs=3, batch_size=4, lr=0.2, lr_decay=0.5, momentum=momentum)
    sizes = torch.tensor([9, 1, 0])
    found = path_length(sizes, training, 2)
    for i, steps in enumerate((9, 3)):
        moved = speed = 0.0
        for _ in range(steps):
            speed = momentum * speed + 1
            moved += 0.1 * speed
        assert float(found[i]) == pytest.approx(moved)
    assert float(found[2]) == 1  # nothing to divide by


def test_scaffold_sends_two_vectors_each_way() -> None:
    engine = engine_of("scaffold", participation=0.5)
    run(engine, 3)
    assert int(engine.shards[0].peers.models_received.sum()) == 3 * 4 * 4
    assert nominal(find("scaffold")(participation=0.5), 3, 8)["nominal_models"] == 3 * 4 * 4


@pytest.mark.parametrize("name", ["fedprox", "scaffold"])
def test_shards_agree_with_partial_participation_and_faults(name: str) -> None:
    faults = Faults(loss=0.2, absent=0.2)
    one = run(engine_of(name, faults=faults, participation=0.4), 5)
    three = run(engine_of(name, faults=faults, participation=0.4, shards=3), 5)
    torch.testing.assert_close(one, three, rtol=1e-12, atol=1e-12)


def test_a_run_keeps_the_controls_in_its_checkpoint() -> None:
    result = kinfolk.run(tiny_experiment(method={"name": "scaffold", "participation": 0.5}), out="a")
    saved = checkpoint.load(result.folder / "checkpoint").tensors
    assert saved["state/control"].shape == saved["weights"].shape
    assert saved["shared/common"].any()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("method.penalty=-1", "method.penalty"),
        ("method.participation=0", "method.participation"),
        ("method.mu=1", "unknown key 'method.mu'"),
    ],
)
def test_wrong_settings_are_one_line(override: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read(tiny_experiment(method={"name": "fedprox"}), [override])
    assert "\n" not in str(caught.value)
