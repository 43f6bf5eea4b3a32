"""P4: what is charged, what is sent, and what is said of it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from rich.console import Console
from test_p4 import PAPER, engine_of, published, quiet, run, state_of

import kinfolk
from conftest import Command, make_federation, tiny_experiment
from kinfolk.experiment import resume
from kinfolk.methods.p4 import P4
from kinfolk.methods.private import account
from kinfolk.report.tables import comparison_table


def charges(folder: str) -> list[str]:
    rows = [json.loads(line.split("\t")[0]) for line in Path(folder, "privacy.jsonl").read_text().splitlines()]
    return [row["release"] for row in rows if "mechanism" in row]


def test_forming_groups_costs_nothing_beside_round_one() -> None:
    run("a", preset="paper", noise="calibrated")
    assert charges("a") == [f"seed 0, round {t}" for t in range(1, 5)]
    run("b", groups="histogram")
    assert sorted(charges("b")) == sorted(["seed 0, histogram", *(f"seed 0, round {t}" for t in range(1, 5))])


def test_with_few_releases_nothing_is_sent_after_them_and_each_has_less_noise() -> None:
    result = run("a", releases=2, groups="random", cap=4)
    assert charges("a") == ["seed 0, round 1", "seed 0, round 2"]
    received = {row["round"]: row["models_received"] for row in result.metrics}
    assert received[4] == received[2] > 0
    data = make_federation([6] * 4)
    few, many = (engine_of(P4(releases=count), data, rounds=10) for count in (2, None))
    assert account(few.shards[0].cohort).plan.deviation(1.0)[0] < account(many.shards[0].cohort).plan.deviation(1.0)[0]


def test_a_run_can_be_resumed_after_its_last_release() -> None:
    class Stop(kinfolk.Observer):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if t == 3:
                raise KeyboardInterrupt

    settings = tiny_experiment(method={"name": "p4", "releases": 1}, run={"checkpoint_every": 1})
    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(settings, out="cut", observer=Stop())
    resumed = resume("cut")
    assert torch.equal(resumed.weights(), kinfolk.run(settings, out="whole").weights())
    assert charges("cut") == ["seed 0, round 1"]


def test_who_has_spent_its_budget_goes_on_with_its_private_model_and_is_not_heard() -> None:
    data = make_federation([6] * 6)
    engine = engine_of(P4(groups="random", cap=6, rotate_every=0, **PAPER), data, rounds=2)  # type: ignore[arg-type]
    shard = engine.shards[0]
    for t in (1, 2):
        engine.step(t, False)
    proxies, private, received = shard.cohort.weights, state_of(engine).personal, shard.peers.models_received.clone()
    engine.step(3, False)
    assert shard.cohort.silent().all()
    assert torch.equal(shard.cohort.weights, proxies)
    assert not torch.equal(state_of(engine).personal, private)
    assert torch.equal(shard.peers.models_received, received)
    assert float(account(shard.cohort).ledger.spent().max()) <= 15.0


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_in_strict_mode_no_message_depends_on_private_models(preset: Any) -> None:
    data = make_federation([6] * 8)
    settings: dict[str, Any] = {"preset": preset, "alpha": 0.0, "noise": "calibrated", "cap": 4}
    one, other = (engine_of(P4(private_lr=rate, **settings), data) for rate in (0.1, 0.3))
    messages = published(one, 3), published(other, 3)
    assert not torch.equal(state_of(one).personal, state_of(other).personal)
    for first, second in zip(*messages, strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name].nan_to_num(), second[name].nan_to_num()) for name in first)


def test_nobody_sends_its_private_model_or_its_data() -> None:
    data = make_federation([6] * 8)
    engine = engine_of(P4(cap=4, **PAPER), data)  # type: ignore[arg-type]
    messages = published(engine, 3)
    assert {name for message in messages for name in message} == {
        *("weights", "group", "listed", "turn", "sampled", "distances")
    }
    private = state_of(engine).personal
    for message in messages:
        for name in ("weights", "group"):
            if name in message:
                assert (message[name] - private).abs().amin() > 0


def test_a_message_is_a_proxy_with_noise_of_the_planned_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_federation([40] * 3, (200,), classes=10)
    settings: dict[str, Any] = {"preset": "paper", "alpha": 0.0, "noise": "calibrated", "cap": 1, "lr": 0.2}
    noisy = published(engine_of(P4(**settings), data, rounds=9), 1)[0]["weights"]
    deviation = account(engine_of(P4(**settings), data, rounds=9).shards[0].cohort).plan.deviation(1.0)
    quiet(monkeypatch)
    clean = published(engine_of(P4(**settings), data, rounds=9), 1)[0]["weights"]
    spread = (noisy - clean).std(dim=1) / 0.2 * 40
    assert torch.allclose(spread, deviation, rtol=0.05)


def test_what_epsilon_does_not_cover_is_said() -> None:
    told: list[str] = []

    class Ear(kinfolk.Observer):
        def notice(self, text: str) -> None:
            told.append(text)

    settings = tiny_experiment(method={"name": "p4", "preset": "paper"})
    result = kinfolk.run(settings, out="a", observer=Ear())
    assert any(text.startswith("not covered by epsilon: what proxies learn from private models") for text in told)
    assert "not covered: what proxies learn" in result.summary["privacy"]["statement"]
    assert "nominal 15, which is no guarantee" in result.summary["privacy"]["statement"]
    strict = run("b")
    assert strict.summary["privacy"]["gaps"] == []
    assert strict.summary["privacy"]["epsilon"] <= 15.0


def test_a_comparison_shows_what_was_spent() -> None:
    settings = tiny_experiment(method={"name": "p4", "groups": "random"}, run={"rounds": 2})
    comparison = kinfolk.compare(settings, ["p4"], out="c")
    promises = {row.method: row.privacy for row in comparison.rows}
    assert promises.pop("p4") == comparison.runs["p4"][0].summary["privacy"]["statement"]
    assert set(promises.values()) == {None}
    spent = comparison.row("p4").epsilon
    assert spent is not None
    assert 14.9 < spent <= 15
    assert comparison.row("local").epsilon is None
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_table(comparison.as_dict()["rows"], "c"))
    assert "simulated, not private" in console.export_text()


def test_every_output_says_that_the_noise_was_seeded(command: Command) -> None:
    settings = tiny_experiment(method={"name": "p4", "groups": "random"}, run={"rounds": 2})
    Path("tiny.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    study: dict[str, Any] = {"study": "Private", "experiment": "tiny.toml", "seeds": 1, "columns": {"tiny": []}}
    study["rows"] = {"P4": [], "Local": ["method.name=local"]}
    Path("study.toml").write_text(tomli_w.dumps(study), encoding="utf-8")
    words = "simulated, not private"
    ran = command("run", "tiny.toml", "--out", "here")
    assert words in ran.err
    assert words in json.dumps(command("run", "tiny.toml", "--out", "there", "--json").json)
    assert words in command("show", "here").out.replace("\n", " ")
    assert words in json.dumps(command("show", "here", "--json").json)
    assert words in command("compare", "tiny.toml", "--methods", "p4", "--out", "both").out.replace("\n", " ")
    assert words in json.dumps(command("show", "both", "--json").json)
    assert words in Path("both/comparison.csv").read_text(encoding="utf-8")
    for name in ("metrics.jsonl", "summary.json"):
        assert words in Path("here", name).read_text(encoding="utf-8")
    assert words in command("reproduce", "study.toml", "--out", "out").out.lower()
    assert words in Path("out/study.md").read_text(encoding="utf-8").lower()
    assert words in json.dumps(command("reproduce", "study.toml", "--out", "out", "--json").json).lower()


def test_tables_of_runs_that_are_not_private_do_not_speak_of_it(command: Command) -> None:
    Path("tiny.toml").write_text(tomli_w.dumps(tiny_experiment(run={"rounds": 1})), encoding="utf-8")
    study = {"study": "Plain", "experiment": "tiny.toml", "seeds": 1, "columns": {"x": []}, "rows": {"Random": []}}
    Path("study.toml").write_text(tomli_w.dumps(study), encoding="utf-8")
    said = command("reproduce", "study.toml", "--out", "out", "--json")
    assert said.json["privacy"] == []
    assert "rivate" not in Path("out/study.md").read_text(encoding="utf-8")


BAD = {
    "no budget": ("method.epsilon=0", "'method.epsilon' = 0.0: must be greater than 0"),
    "budget below zero": ("method.epsilon=-3.0", "'method.epsilon' = -3.0: must be greater than 0"),
    "delta above one over the records": ("method.delta=0.06", "delta = 0.06 is more than 1/20 for a client with 20"),
    "no clipping norm": ("method.clip=0", "'method.clip' = 0.0: must be greater than 0"),
    "cap below one": ("method.cap=0", "'method.cap' = 0: must be at least 1"),
    "more to compare with than there are": ("method.sampled=8", "among 8 clients each has 7 to compare with"),
    "BatchNorm": ("model.name=nets:mixing", "layer '2' is BatchNorm1d"),
}
MIXING = """
from torch import nn

def mixing(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))
"""


@pytest.mark.parametrize(("setting", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_nothing_is_released(
    setting: str, words: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Path("nets.py").write_text(MIXING, encoding="utf-8")
    settings = tiny_experiment(method={"name": "p4", "preset": "paper"})
    Path("tiny.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    ended = command("run", "tiny.toml", setting, "--out", "here")
    assert ended.code == 2
    assert words in ended.message
    assert not Path("here", "privacy.jsonl").exists()


def test_a_run_whose_budget_is_spent_cannot_be_made_longer(command: Command) -> None:
    Path("tiny.toml").write_text(tomli_w.dumps(tiny_experiment(method={"name": "p4"})), encoding="utf-8")
    assert command("run", "tiny.toml", "--out", "here").code == 0
    before = charges("here")
    ended = command("resume", "here", "--rounds", "6")
    assert ended.code == 2
    assert "the privacy budget is spent" in ended.message
    assert charges("here") == before
