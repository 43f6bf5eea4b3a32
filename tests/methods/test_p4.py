"""P4: what it computes, what travels, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import engines
from kinfolk.assembly import clip
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.training import Training
from kinfolk.data.federation import Federation
from kinfolk.errors import UserError
from kinfolk.experiment import resume
from kinfolk.methods.dp_fedavg import RATE
from kinfolk.methods.p4 import DISTILLING_RATE, P4, State
from kinfolk.methods.private import RATES, account
from kinfolk.models.nets import linear
from kinfolk.peers.faults import Faults
from kinfolk.runs import checkpoint
from kinfolk.studies import read_study

PAPER = {"preset": "paper", "noise": "calibrated", "lr": 0.2, "private_lr": 0.1}


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the noise off."""
    monkeypatch.setattr("kinfolk.privacy.source.add_noise", lambda *_: None)


def engine_of(
    method: P4, data: Federation, rounds: int = 4, faults: Faults | None = None, shards: int = 0, seed: int = 0
) -> engines.Engine:
    data = method.arrange(data)
    settings = {"training": Training(), "seed": seed, "device": "cpu", "precision": "float64", "rounds": rounds}

    def build() -> nn.Module:
        return initial_model(lambda: linear(data.input_shape, data.classes), seed)

    parts = engines.Parts(data, build, method, faults or Faults(), settings)
    return engines.ShardedEngine(parts, shards) if shards else engines.InProcessEngine(parts)


def state_of(engine: engines.Engine) -> State:
    state = engine.shards[0].state
    assert isinstance(state, State)
    return state


def run(out: str, run: dict[str, Any] | None = None, faults: dict[str, Any] | None = None, **method: Any) -> Any:
    sections: dict[str, Any] = {"run": run or {}, "faults": faults or {}}
    return kinfolk.run(tiny_experiment(method={"name": "p4", **method}, **sections), out=out)


def plain_round(
    proxy: Tensor, private: Tensor, x: Tensor, y: Tensor, steps: int, alpha: float, beta: float, reverse: bool
) -> tuple[Tensor, Tensor]:
    """What one client computes in a round without noise, record by record; models [C, d + 1]."""

    def scores(model: Tensor, record: Tensor) -> Tensor:
        return F.log_softmax(model[:, :-1] @ record + model[:, -1], dim=0)

    def divergence(own: Tensor, other: Tensor) -> Tensor:
        p, q = (own, other) if reverse else (other, own)
        return (p.exp() * (p - q)).sum()

    for _ in range(steps):
        both = []
        for model, other, weight, limit in ((proxy, private, alpha, 1.0), (private, proxy, beta, float("inf"))):
            total = torch.zeros_like(model)
            for record, label in zip(x, y):
                own = model.clone().requires_grad_()
                said = scores(own, record)
                loss = -(1 - weight) * said[label] + weight * divergence(said, scores(other, record).detach())
                (gradient,) = torch.autograd.grad(loss, own)
                total += gradient / max(1.0, float(gradient.norm()) / limit)
            both.append(total / len(y))
        proxy, private = proxy - 0.2 / steps * both[0], private - 0.1 * both[1]
    return proxy, private


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("alpha", "beta", "steps"), [(0.0, 0.0, 1), (0.5, 0.3, 1), (0.4, 0.6, 3)])
def test_a_round_is_what_a_plain_loop_over_records_gives(
    alpha: float, beta: float, steps: int, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(monkeypatch)
    data = make_federation([5, 8, 3], classes=3)
    method = P4(cap=1, alpha=alpha, beta=beta, reverse_kl=reverse, local_steps=steps, **PAPER)  # type: ignore[arg-type]
    engine = engine_of(method, data, rounds=2)
    for t in (1, 2):
        engine.step(t, False)
    cohort = engine.shards[0].cohort
    for row in range(3):
        mine = slice(int(data.train.starts[row]), int(data.train.starts[row] + data.train.sizes[row]))
        x, y = data.train.x[mine].double(), data.train.y[mine]
        proxy = private = torch.zeros(3, 7, dtype=torch.float64)
        for _ in range(2):
            proxy, private = plain_round(proxy, private, x, y, steps, alpha, beta, reverse)
        for found, expected in ((cohort.weights[row], proxy), (state_of(engine).personal[row], private)):
            flat = torch.cat([expected[:, :-1].reshape(-1), expected[:, -1]])
            assert torch.allclose(found, flat, atol=1e-5)


def test_linear_models_begin_at_zero_and_others_at_the_common_model() -> None:
    engine = engine_of(P4(), make_federation([5, 5]))
    assert not engine.shards[0].cohort.weights.any()
    result = run("a", run={"rounds": 1}, preset="paper", private_lr=1e-12, beta=0.0)
    assert (result.weights() - result.weights()[0]).abs().max() < 1e-6
    assert result.weights().abs().max() > 0.01


@pytest.mark.parametrize("rotate", [0, 1, 2])
def test_it_does_not_matter_who_averages(rotate: int) -> None:
    data = make_federation([6] * 9)
    engines_ = [engine_of(P4(cap=4, rotate_every=every, **PAPER), data) for every in (5, rotate)]  # type: ignore[arg-type]
    for t in range(1, 5):
        for engine in engines_:
            engine.step(t, False)
    one, other = (engine.shards[0].cohort for engine in engines_)
    assert (one.weights - other.weights).abs().max() < 1e-12
    assert torch.equal(state_of(engines_[0]).neighbors, state_of(engines_[1]).neighbors)


def test_everybody_in_a_group_has_its_mean() -> None:
    data = make_federation([6] * 8)
    engine = engine_of(P4(groups="random", cap=4, group_lr=0.5, **PAPER), data)  # type: ignore[arg-type]
    before = engine.shards[0].cohort.weights
    seen: dict[str, Tensor] = {}
    publish = engine.exchange.publish  # type: ignore[union-attr]

    def spy(t: int, ids: Tensor, tensors: dict[str, Tensor]) -> None:
        seen.update(tensors)
        publish(t, ids, tensors)

    engine.exchange.publish = spy  # type: ignore[union-attr, method-assign]
    engine.step(1, False)
    groups = state_of(engine).clusters
    assert len(groups.unique()) == 2
    for row in range(8):
        mean = seen["weights"][groups == groups[row]].mean(dim=0)
        expected = before[row] + 0.5 * (mean - before[row])
        assert torch.allclose(engine.shards[0].cohort.weights[row], expected, atol=1e-12)


def published(engine: engines.Engine, rounds: int) -> list[dict[str, Tensor]]:
    """Everything that leaves clients."""
    seen: list[dict[str, Tensor]] = []
    publish = engine.exchange.publish  # type: ignore[union-attr]

    def spy(t: int, ids: Tensor, tensors: dict[str, Tensor]) -> None:
        seen.append({name: tensor.clone() for name, tensor in tensors.items()})
        publish(t, ids, tensors)

    engine.exchange.publish = spy  # type: ignore[union-attr, method-assign]
    for t in range(1, rounds + 1):
        engine.step(t, True)
    return seen


def test_the_proxy_is_tested_beside_the_private_model() -> None:
    result = run("a", preset="paper")
    assert all(0 <= row["proxy_accuracy"] <= 1 for row in [*result.metrics, *result.clients])
    assert result.summary["group_purity_chance"] == pytest.approx(result.metrics[0]["group_purity_chance"])
    without = run("b", proxy=False)
    assert "proxy_accuracy" not in without.summary
    saved = checkpoint.load(without.folder / "checkpoint").tensors
    assert torch.equal(saved["weights"], saved["state/personal"])


def test_bytes_of_both_phases_are_counted() -> None:
    """Eight linear models of 650 numbers, H = 5, two groups of four: what is sent, message by message."""
    sections: dict[str, Any] = {"model": {"name": "linear"}, "run": {"rounds": 2, "evaluate_every": 1}}
    settings = tiny_experiment(method={"name": "p4", "preset": "paper", "cap": 4, "sampled": 5})
    settings["model"], settings["run"] = sections["model"], {**settings["run"], **sections["run"]}
    result = kinfolk.run(settings, out="a")
    model, lists = 4 * 650, 8 * 7 * (4 + 4) * 5  # everybody tells everybody H ids and H distances
    down = model + 8 * 3 + 8  # the mean, with who is in the group and whose turn it is
    averaging = 2 * (3 * model + 3 * down)
    assert result.metrics[0]["bytes_received"] == 8 * 5 * model + lists + averaging
    assert result.metrics[1]["bytes_received"] - result.metrics[0]["bytes_received"] == averaging
    assert result.metrics[1]["models_received"] == 8 * 5 + 2 * (2 * 6)


def test_the_papers_model_has_the_papers_size() -> None:
    net = linear((243, 8, 8), 10)
    size = sum(p.numel() for p in net.parameters())
    assert size == 155_530
    assert 4 * size == 622_120  # 622.82 kB printed, with what a serialiser adds
    assert 2 * 4 * size == 1_244_240  # up and down in a round: 1,246.57 kB printed
    method = P4(preset="paper")
    assert method.nominal(100, 260).total == 35 + 2 * 100


def test_a_uniform_teacher_is_a_control_and_without_beta_nobody_is_needed() -> None:
    data = make_federation([6] * 6)
    personal = {}
    for name, settings in {
        "proxy": {}, "uniform": {"teacher": "uniform"}, "none": {"beta": 0.0}, "alone": {"beta": 0.0, "cap": 1},
    }.items():  # fmt: skip
        engine = engine_of(P4(**{"cap": 3, **PAPER, "alpha": 0.0, **settings}), data)  # type: ignore[arg-type]
        for t in (1, 2, 3):
            engine.step(t, False)
        personal[name] = state_of(engine).personal
    assert torch.equal(personal["none"], personal["alone"])
    assert not torch.equal(personal["proxy"], personal["uniform"])
    assert not torch.equal(personal["proxy"], personal["none"])


def test_a_tuned_model_is_the_proxy_after_plain_steps_on_own_records() -> None:
    data = make_federation([5, 8])
    method = P4(groups="random", tune_steps=3, private_lr=0.5)
    engine = engine_of(method, data)
    engine.step(1, True)
    part, cohort = method.arrange(data).train, engine.shards[0].cohort
    for row in range(2):
        mine = slice(int(part.starts[row]), int(part.starts[row] + part.sizes[row]))
        x, y = part.x[mine].double(), part.y[mine]
        weights, bias = cohort.weights[row, :18].view(3, 6).clone(), cohort.weights[row, 18:].clone()
        for _ in range(3):
            wrong = (x @ weights.T + bias).softmax(1) - F.one_hot(y, 3)
            weights, bias = weights - 0.5 * wrong.T @ x / len(y), bias - 0.5 * wrong.mean(0)
        assert torch.allclose(state_of(engine).personal[row], torch.cat([weights.flatten(), bias]), atol=1e-6)


def test_a_run_with_fewer_directions_than_inputs_has_smaller_models() -> None:
    settings = tiny_experiment(method={"name": "p4", "projection": 20})
    settings["model"] = {"name": "linear"}
    assert kinfolk.run(settings, out="a").weights().shape == (8, 21 * 10)


def test_the_running_average_is_of_the_groups_proxies() -> None:
    engine = engine_of(P4(groups="random", averaging=0.75), make_federation([6] * 4))
    expected: Tensor | None = None
    for t in range(1, 4):
        engine.step(t, False)
        now = engine.shards[0].cohort.weights
        expected = now if expected is None else 0.75 * expected + 0.25 * now
        assert torch.allclose(state_of(engine).average, expected, atol=1e-12)


SETTINGS: list[dict[str, Any]] = [
    {"preset": "paper", "cap": 4},
    {"preset": "paper", "cap": 3, "rotate_every": 0, "local_steps": 2, "sample_rate": 0.5, "reverse_kl": True},
    {"groups": "histogram", "cap": 4, "averaging": 0.5, "releases": 3},
    {"preset": "paper", "proxy": False, "groups": "oracle", "group_lr": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["paper", "direct", "histogram", "no-proxy"])
def test_every_variant_is_independent_of_shards_and_resumes_bit_exactly(settings: dict[str, Any]) -> None:
    sections: dict[str, Any] = {"faults": {"loss": 0.2, "absent": 0.2}}
    whole = run("whole", {"rounds": 5, "checkpoint_every": 1}, **sections, **settings)
    many = run("many", {"rounds": 5, "engine": "sharded", "shards": 3}, **sections, **settings)
    assert (whole.weights() - many.weights()).abs().max() < 1e-5
    assert whole.summary["models_received"] == many.summary["models_received"]
    assert whole.summary["privacy"] == many.summary["privacy"]

    class Stop(kinfolk.Observer):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if t == 4:
                raise KeyboardInterrupt

    cut = {"rounds": 5, "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(tiny_experiment(method={"name": "p4", **settings}, run=cut, **sections), out="cut", observer=Stop())
    resumed = resume("cut")
    assert torch.equal(whole.weights(), resumed.weights())
    assert whole.clients == resumed.clients


def settings_of(**method: Any) -> Any:
    return kinfolk.config.read(tiny_experiment(method={"name": "p4", **method}))  # type: ignore[attr-defined]


def test_without_a_number_a_client_compares_with_35_or_with_all_there_are() -> None:
    clipped, notices = clip(settings_of(preset="paper"), 8)
    assert clipped.method.sampled == 7
    assert notices == ["method.sampled = 35, but a client has only 7 peers: using 7"]
    assert clip(settings_of(preset="paper"), 36)[0].method.sampled == 35
    assert clip(settings_of(), 8)[0].method.sampled == 35  # random groups: nobody compares, and nothing is lowered


@pytest.mark.parametrize("shards", [0, 3])
def test_who_names_more_peers_to_compare_with_than_there_are_is_told(shards: int) -> None:
    engine = {"engine": "sharded", "shards": shards} if shards else {}
    with pytest.raises(UserError) as error:
        run("a", engine, preset="paper", sampled=8)
    assert str(error.value) == (
        "'method.sampled' = 8: among 8 clients each has 7 to compare with; lower it, or leave it out for 35 or as many "
        "as there are"
    )
    assert not Path("a").exists()
    result = run("b", engine, {"absent": 0.5, "loss": 0.3}, preset="paper", sampled=7)  # fewer answer: no mistake
    assert result.config.method.sampled == 7
    assert resume("b", rounds=4).summary["round"] == 4
    assert run("c", sampled=8).config.method.sampled == 8  # random groups compare with nobody


def test_peers_out_of_reach_lower_the_number_and_are_no_mistake() -> None:
    config = kinfolk.config.read(  # type: ignore[attr-defined]
        tiny_experiment(method={"name": "p4", "preset": "paper", "sampled": 7}, peers={"topology": "ring"})
    )
    clipped, notices = clip(config, 8)
    assert clipped.method.sampled == 2
    assert notices == ["method.sampled = 7, but a client has only 2 peers: using 2"]


def test_alone_there_is_nobody_to_compare_with() -> None:
    assert clip(settings_of(preset="paper"), 1)[0].method.sampled == 1
    assert clip(settings_of(preset="paper", sampled=1), 1)[0].method.sampled == 1  # what the run of one keeps
    with pytest.raises(UserError, match="among 1 clients each has 0"):
        clip(settings_of(preset="paper", sampled=2), 1)


def test_a_cap_below_one_and_groups_that_cannot_be_formed_are_refused() -> None:
    with pytest.raises(UserError, match=r"'method.cap' = 0: must be at least 1"):
        run("a", cap=0)
    with pytest.raises(UserError, match="needs true clusters"):
        engine_of(P4(groups="oracle"), make_federation([6] * 4)).step(1, False)
    with pytest.raises(UserError, match="needs noise = 'calibrated' and sample_rate = 1"):
        run("b", groups="histogram", noise="noble")


def test_the_step_on_inputs_of_length_one_follows_the_noise() -> None:
    """After all steps a score carries the same noise, whatever budget, rounds, records and members there are."""
    for settings, sizes, rounds in (({}, [40] * 6, 50), ({"epsilon": 2.0, "cap": 3}, [90] * 6, 20)):
        method = P4(**settings)  # type: ignore[arg-type]
        engine = engine_of(method, make_federation(sizes), rounds=rounds)
        cohort = engine.shards[0].cohort
        rate = method._rate(cohort)
        assert isinstance(rate, Tensor)
        deviation = float(account(cohort).plan.deviation(1.0)[0])
        noise = float(rate[0, 0]) * deviation / sizes[0] * (rounds / min(method.most, 6)) ** 0.5
        assert noise == pytest.approx(0.7)
    calm = engine_of(P4(epsilon=1e6), make_federation([40] * 6), rounds=2)
    rate = P4(epsilon=1e6)._rate(calm.shards[0].cohort)
    assert isinstance(rate, Tensor)
    assert float(rate.max()) == 30.0
    assert P4(lr=3.0)._rate(calm.shards[0].cohort) == 3.0


def test_what_the_tables_use_is_among_what_was_tried_on_the_tuning_clients() -> None:
    tried = [cell.config for cell in read_study("p4/tuning").cells([], [0])]
    assert {(config.data.clients, config.split.part) for config in tried} == {(52, "tuning")}

    def settings(config: Any) -> Any:
        method = config.method
        known = {"lr": RATE} if config.method_name in ("dp-fedavg", "dp-scaffold", "dp-dsgt") else {}
        known |= {"lr": RATES["calibrated"]} if config.method_name == "proxyfl" else {}
        if config.method_name == "p4" and method.preset == "paper":
            known = {"lr": RATES["noble"], "private_lr": DISTILLING_RATE}
        known = {name: value for name, value in known.items() if getattr(method, name) is None}
        return config.training, replace(method, **known), config.peers, config.data.features

    known = [settings(config) for config in tried]
    for cell in read_study("p4/partitions").cells([], [0]):
        same = "DP-FedAvg with 5 steps", "DP-DSGT"  # the rule of DP-FedAvg, and where all reach all its very numbers
        assert cell.row in same or settings(cell.config) in known, cell.row


def test_at_a_budget_of_fifteen_digits_are_learnt_better_than_alone() -> None:
    """Paired per client and beyond two standard errors; the accounted epsilon is what was asked for."""
    alone = kinfolk.run("p4/digits", ["method.name=local"], out="alone")
    together = kinfolk.run("p4/digits", out="together")
    gain = np.array([a["accuracy"] - b["accuracy"] for a, b in zip(together.clients, alone.clients)])
    assert gain.mean() > 2 * gain.std(ddof=1) / len(gain) ** 0.5
    assert gain.mean() > 0.03
    assert together.summary["privacy"]["epsilon"] <= 15.0
    assert together.summary["privacy"]["gaps"] == []
