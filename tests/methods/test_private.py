"""Noisy steps in runs: charged before they happen, counted over a resume, stopped at the budget."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import Command, make_cohort, make_federation, tiny_experiment
from kinfolk.cohort.cohort import Cohort
from kinfolk.errors import UserError
from kinfolk.experiment import resume
from kinfolk.methods import registry
from kinfolk.methods.private import Budget, account, found
from kinfolk.peers.base import Peers
from kinfolk.privacy import epsilon
from kinfolk.privacy.losses import cross_entropy, distilled
from processes import finished


@dataclass(frozen=True)
class Gossip(Budget):
    """Noisy steps, then an average with two peers: a private method as small as can be, for these tests."""

    method_name = "private-gossip"

    def start(self, cohort: Cohort) -> None:
        self.open_account(cohort)

    def step(self, t: int, cohort: Cohort, state: None, peers: Peers) -> None:
        cohort.weights = account(cohort).trained(t, cohort.weights, self.step_size())
        peers.publish(t, weights=cohort.weights)
        neighbors = peers.sample(t, 2)
        cohort.mix(peers.pull(t, neighbors), neighbors)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._METHODS, "private-gossip", Gossip)


def run(out: str, run: dict[str, Any] | None = None, faults: dict[str, Any] | None = None, **method: Any) -> Any:
    settings = tiny_experiment(method={"name": "private-gossip", **method}, run=run or {}, faults=faults or {})
    return kinfolk.run(settings, out=out)


def lines(folder: str) -> list[dict[str, Any]]:
    """The charges in a run folder."""
    rows = [json.loads(line.split("\t")[0]) for line in Path(folder, "privacy.jsonl").read_text().splitlines()]
    return [row for row in rows if "mechanism" in row]


def tiny_cohort(sizes: list[int], rounds: int = 4, shape: tuple[int, ...] = (6,), **options: Any) -> Cohort:
    return make_cohort(make_federation(sizes, shape), lambda: nn.Sequential(nn.Linear(6, 3)), rounds=rounds, **options)


def plain_gradient(weights: Tensor, x: Tensor, y: Tensor, clip: float) -> Tensor:
    """Sum of a client's clipped gradients, one record after the other."""
    total = torch.zeros_like(weights)
    for record, label in zip(x, y):
        own = weights.clone().requires_grad_()
        scores = own[:18].view(3, 6) @ record + own[18:]
        loss = torch.logsumexp(scores, 0) - scores[label]
        (gradient,) = torch.autograd.grad(loss, own)
        total += gradient / max(1.0, float(gradient.norm()) / clip)
    return total


def test_without_noise_a_step_is_that_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = tiny_cohort([5, 9, 1 + 1])
    monkeypatch.setattr("kinfolk.privacy.source.add_noise", lambda *_: None)
    releases = Budget(clip=0.5, local_steps=3).open_account(cohort)
    after = releases.trained(1, cohort.weights, 0.2)
    data = cohort.data.train
    for row in range(3):
        mine = slice(int(data.starts[row]), int(data.starts[row] + data.sizes[row]))
        weights = cohort.weights[row].clone()
        for _ in range(3):
            weights = weights - 0.2 * plain_gradient(weights, data.x[mine], data.y[mine], 0.5) / data.sizes[row]
        assert torch.allclose(after[row], weights, atol=1e-6)


def test_the_noise_has_the_planned_deviation() -> None:
    data = make_federation([40] * 4, (500,), classes=10)
    cohort = make_cohort(data, lambda: nn.Sequential(nn.Linear(500, 10)), rounds=7)
    releases = Budget(epsilon=3.0, clip=2.0).open_account(cohort)
    may = releases.charge(1)
    batches = releases.batches(1, 0, may)
    noisy, sums = releases.gradient(1, 0, cohort.weights, batches)
    noise = noisy * 40 - sums.total
    planned = releases.plan.mechanisms[0]
    assert float(noise.std()) == pytest.approx(2 * 2.0 * planned.noise_multiplier, rel=0.02)
    assert epsilon([replace(planned, releases=7)], 1 / 40) <= 3.0


def test_paper_noise_is_the_papers_number_and_does_not_depend_on_the_rate() -> None:
    cohort = tiny_cohort([160] * 2, rounds=100)
    for rate in (0.1, 0.25, 0.5, 1.0):
        releases = Budget(noise="noble", sample_rate=rate).open_account(cohort)
        size = max(1, math.floor(rate * 160))
        assert float(releases.plan.deviation(1.0)[0]) / size == pytest.approx(0.0645, abs=1e-4)


def test_step_sizes_follow_the_rule() -> None:
    assert Budget(lr=0.6, local_steps=10, sample_rate=0.3).step_size() == pytest.approx(0.2)
    assert Budget(lr=0.6, local_steps=1, sample_rate=0.3).step_size(group_lr=2.0) == pytest.approx(0.3)
    assert Budget(noise="noble").step_size() == 0.03
    assert Budget().step_size() == 0.05
    assert Budget().step_size(otherwise=0.1) == 0.1


def test_every_round_is_charged_before_it_happens_and_the_result_says_so() -> None:
    result = run("a", epsilon=2.0, delta=0.01)
    charged = lines("a")
    assert [line["release"] for line in charged] == [f"seed 0, round {t}" for t in range(1, 5)]
    privacy = result.summary["privacy"]
    assert privacy["epsilon"] <= 2.0
    assert privacy["epsilon"] == pytest.approx(2.0, abs=1e-3)
    assert (privacy["delta"], privacy["adjacency"], privacy["sampling"]) == (0.01, "replace-one", "none")
    assert (privacy["unit"], privacy["releases"]) == ("one record of one client", 4)
    assert privacy["accountant"] == "gaussian"
    assert privacy["version"].startswith("dp-accounting")
    assert privacy["statement"].startswith("simulated, not private")
    assert all(row["privacy"].startswith("simulated, not private: epsilon") for row in result.metrics)
    spent = [row["epsilon"] for row in result.metrics]
    assert spent == sorted(spent)
    assert all(row["epsilon"] == privacy["epsilon"] and row["releases"] == 4 for row in result.clients)


def test_show_prints_the_promise(command: Command) -> None:
    run("a", epsilon=2.0)
    assert "simulated, not private: epsilon" in command("show", "a").out.replace("\n", " ")


def test_who_is_absent_pays_nothing_and_lost_messages_are_paid_for() -> None:
    result = run("a", faults={"absent": 0.5, "loss": 0.5})
    releases = [row["releases"] for row in result.clients]
    assert min(releases) < 4
    assert max(releases) > 0
    spent = {row["releases"]: row["epsilon"] for row in result.clients}
    assert [spent[count] for count in sorted(spent)] == sorted(spent.values())


def test_with_nominal_noise_rounds_are_counted_and_the_accounted_epsilon_stands_beside() -> None:
    result = run("a", noise="noble", sample_rate=0.5, epsilon=15.0)
    privacy = result.summary["privacy"]
    assert privacy["nominal"] == 15.0
    assert privacy["epsilon"] != 15.0
    assert "nominal 15, which is no guarantee" in privacy["statement"]
    assert [row["releases"] for row in result.clients] == [4] * 8
    with pytest.raises(UserError, match="cannot be made longer"):
        resume("a", rounds=6)


def test_a_spent_budget_cannot_be_spent_again_by_a_longer_run() -> None:
    run("a")
    with pytest.raises(UserError, match="the privacy budget is spent"):
        resume("a", rounds=6)


def test_after_an_interrupted_release_nothing_is_forgotten() -> None:
    whole = run("whole", run={"checkpoint_every": 2})

    class Stop(kinfolk.Observer):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if t == 3:
                raise KeyboardInterrupt

    settings = tiny_experiment(method={"name": "private-gossip"}, run={"checkpoint_every": 2})
    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(settings, out="cut", observer=Stop())
    assert len(lines("cut")) == 3  # round 3 was released, and no checkpoint knows of it
    resumed = resume("cut")
    assert torch.equal(whole.weights(), resumed.weights())
    assert len(lines("cut")) == 4  # the same bits of round 3 again: charged once
    assert resumed.summary["privacy"] == whole.summary["privacy"]


KILLED = """
import os, sys
import kinfolk
from kinfolk.peers.inprocess import InProcess
publish, left = InProcess.publish, int(sys.argv[1])

def dying(self, t, ids, tensors):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    with open("released", "a") as file:
        file.write(f"{t}\\n")
    publish(self, t, ids, tensors)

InProcess.publish = dying
kinfolk.run(__SETTINGS__, out="a")
"""


@pytest.mark.parametrize("messages", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_has_charged_at_least_what_it_has_released(messages: int) -> None:
    settings = tiny_experiment(method={"name": "p4", "groups": "random"}, run={"checkpoint_every": 100})
    Path("killed.py").write_text(KILLED.replace("__SETTINGS__", repr(settings)), encoding="utf-8")
    done = finished("killed.py", str(messages))
    assert done.code == 9, done.err
    released = set(Path("released").read_text().split()) if Path("released").exists() else set()
    charged = {line["release"].rpartition(" ")[2] for line in lines("a")}
    assert released <= charged
    assert len(charged) == messages // 2 + 1  # each round sends two messages; the one that was cut off is charged
    resumed = resume("a")
    assert torch.equal(resumed.weights(), kinfolk.run(settings, out="b").weights())
    assert len(lines("a")) == 4


def test_a_lost_ledger_file_is_made_good_by_the_checkpoint() -> None:
    run("a", run={"rounds": 3}, epsilon=5.0)
    Path("a", "privacy.jsonl").unlink()
    with pytest.raises(UserError, match="the privacy budget is spent"):
        resume("a", rounds=4)


def test_a_damaged_ledger_file_stops_the_run() -> None:
    run("a")
    path = Path("a", "privacy.jsonl")
    path.write_text(path.read_text().replace("round 2", "round 9"))
    with pytest.raises(UserError, match="damaged"):
        resume("a", rounds=5)


def test_shards_share_one_file_and_resume_with_another_number_of_them() -> None:
    sharded = {"engine": "sharded", "shards": 3}
    many = run("many", run=sharded)
    one = run("one")
    assert torch.allclose(many.weights(), one.weights(), atol=1e-5)
    assert many.summary["privacy"] == one.summary["privacy"]
    assert [row["epsilon"] for row in many.clients] == [row["epsilon"] for row in one.clients]
    assert sum(line["release"] == "seed 0, round 2" for line in lines("many")) == 3
    with pytest.raises(UserError, match="the privacy budget is spent"):
        resume("many", rounds=5)


def test_whoever_has_spent_its_budget_is_silent_and_keeps_its_model() -> None:
    cohort = tiny_cohort([10, 10, 20], rounds=2)
    releases = Budget(epsilon=1.0).open_account(cohort)
    for t in (1, 2):
        cohort.begin(t=t)
        assert releases.charge(t).all()
    cohort.begin(t=3)
    after = releases.trained(3, cohort.weights, 0.1)
    assert cohort.silent().all()
    assert torch.equal(after, cohort.weights)
    assert float(releases.ledger.spent().max()) <= 1.0
    cohort.begin(t=4)
    assert not cohort.silent().any()  # of this round only, until it asks again


def test_only_those_who_take_part_are_charged() -> None:
    cohort = tiny_cohort([10] * 3)
    releases = Budget().open_account(cohort)
    active = torch.tensor([True, False, True])
    after = releases.trained(1, cohort.weights, 0.1, active)
    assert releases.ledger.releases().tolist() == [1, 0, 1]
    assert torch.equal(after[1], cohort.weights[1])
    assert not torch.equal(after[0], cohort.weights[0])
    assert not cohort.silent().any()


def test_empty_poisson_batches_are_legal() -> None:
    cohort = tiny_cohort([10] * 6)
    releases = Budget(sample_rate=0.05, sampling="poisson", noise="noble").open_account(cohort)
    after = releases.trained(1, cohort.weights, 0.1)
    assert torch.isfinite(after).all()
    assert not cohort.round.quarantined.any()


def test_both_directions_of_distillation_are_gradients_of_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    others = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64).softmax(dim=2)
    labels = torch.randint(4, (2, 3), generator=generator)
    own = scores.softmax(dim=2)
    towards = (others * (others / own).log()).sum(dim=2)
    back = (own * (own / others).log()).sum(dim=2)
    for reverse, divergence in ((False, towards), (True, back)):
        expected = 0.7 * cross_entropy(scores, labels) + 0.3 * divergence
        loss = distilled(0.3, reverse)(scores, labels, others)
        mine, plain = (torch.autograd.grad(f.sum(), scores, retain_graph=True)[0] for f in (loss, expected))
        assert torch.allclose(mine, plain)
    assert torch.allclose(loss, expected)  # the last was the reverse, which leaves no constant out


def test_scores_are_the_models_probabilities() -> None:
    cohort = tiny_cohort([5, 8])
    releases = Budget().open_account(cohort)
    batches = releases.batches(1, 0, torch.ones(2, dtype=torch.bool))
    got = releases.scores(cohort.weights, batches)
    data, weights = cohort.data.train, cohort.weights
    for row in range(2):
        x = data.x[int(data.starts[row]) : int(data.starts[row] + data.sizes[row])]
        expected = (x @ weights[row, :18].view(3, 6).T + weights[row, 18:]).softmax(dim=1)
        assert torch.allclose(got[row, : len(x)], expected)


def test_a_loss_that_is_not_finite_puts_a_client_into_quarantine() -> None:
    cohort = tiny_cohort([5, 8])
    cohort.data.train.x[:5] = torch.inf
    releases = Budget().open_account(cohort)
    batches = releases.batches(1, 0, torch.ones(2, dtype=torch.bool))
    _, sums = releases.gradient(1, 0, cohort.weights, batches)
    assert torch.isfinite(sums.total).all()
    assert not torch.isfinite(found(sums, batches)[0])
    after = releases.trained(1, cohort.weights, 0.1)
    assert cohort.round.quarantined.tolist() == [True, False]
    assert torch.equal(after[0], cohort.weights[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": 0.0}, "'method.epsilon' = 0.0: must be greater than 0"),
        ({"epsilon": -1.0}, "'method.epsilon' = -1.0: must be greater than 0"),
        ({"clip": 0.0}, "'method.clip' = 0.0: must be greater than 0"),
        ({"delta": 0.2}, "delta = 0.2 is more than 1/20 for a client with 20 records"),
        ({"delta": 0.05001}, "delta = 0.05001 is more than 1/20 for a client with 20 records"),
        ({"delta": 1.0}, "'method.delta' = 1.0: must be less than 1"),
        ({"sample_rate": 0.5, "sampling": "none"}, "sample_rate = 0.5 needs a way of sampling"),
        ({"sample_rate": 0.5, "sampling": "poisson", "noise": "rdp"}, "take noise = 'calibrated'"),
        ({"local_steps": 0}, "'method.local_steps' = 0: must be at least 1"),
    ],
)
def test_a_budget_that_promises_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        run("a", **settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_delta_of_one_over_the_records_is_allowed_and_what_is_taken_if_none_is_given() -> None:
    named, by_default = (run(out, **settings) for out, settings in (("a", {"delta": 0.05}), ("b", {})))
    assert named.summary["privacy"]["delta"] == by_default.summary["privacy"]["delta"] == 0.05
    assert torch.equal(named.weights(), by_default.weights())


def test_batch_norm_is_refused() -> None:
    def factory(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.BatchNorm1d(8), nn.Linear(8, classes))

    with pytest.raises(UserError, match="BatchNorm1d"):
        kinfolk.run(tiny_experiment(method={"name": "private-gossip"}), model=factory, out="a")


def test_images_too_small_for_the_scattering_are_refused() -> None:
    from kinfolk.data.scattering import feature_shape

    with pytest.raises(UserError, match="needs images of at least 5×5 pixels"):
        feature_shape((1, 4, 4))


def test_scales_from_own_records_are_said_not_to_be_covered() -> None:
    from kinfolk.data.normalization import per_client

    data = per_client(make_federation([8] * 3, (2, 4, 4)))
    cohort = make_cohort(data, lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), rounds=2)
    assert "not covered: the scale of inputs" in str(Budget().open_account(cohort).guarantee())


def test_a_rule_that_judges_models_on_own_records_is_refused() -> None:
    method = {"name": "private-gossip"}
    with pytest.raises(UserError, match="own records without noise"):
        kinfolk.run(tiny_experiment(method=method, aggregation={"rule": "ubar"}), out="a")
    result = kinfolk.run(tiny_experiment(method=method, aggregation={"rule": "median"}), out="b")
    assert result.summary["privacy"]["epsilon"] <= 15
