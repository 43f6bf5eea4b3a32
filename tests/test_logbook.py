"""Rounds that are put down while later ones are computed, as on a GPU: nobody can tell from what they leave behind."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kinfolk
from conftest import tiny_experiment
from kinfolk import assembly, engines, experiment
from kinfolk.config import read
from kinfolk.engines import InProcessEngine
from kinfolk.logbook import Logbook
from kinfolk.parcel import Parcel
from kinfolk.runs import checkpoint
from kinfolk.runs.folder import RunFolder
from kinfolk.runs.graph import read_graph

PANM = {"name": "panm", "neighbors": 2, "candidates": 3, "discover_rounds": 9}
TIMES = {"seconds", "warm_up_seconds"}
AT_ONCE, LATE, SLOW = "at once", "late", "slow"  # slow: nothing comes until somebody waits for it


def put_down(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on rounds are put down like this."""
    monkeypatch.setattr(experiment, "Logbook", partial(Logbook, late=how != AT_ONCE))
    monkeypatch.setattr(Parcel, "arrived", property(lambda parcel: how != SLOW or not parcel._tensors))


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in TIMES}


def kept(path: Path) -> dict[str, Any]:
    """Everything in a run folder but for when it was written."""
    folder, graph = RunFolder.open(path), read_graph(path)
    saved = checkpoint.load(path / "checkpoint")
    found: dict[str, Any] = {
        "names": sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()),
        "metrics": [json.dumps(timeless(row)) for row in folder.metrics()],  # text: the order of the keys counts too
        "graph": {name: getattr(graph, name).tobytes() for name in ("round", "client", "neighbor", "weight")},
        "checkpoint": (saved.round, {name: tensor.numpy().tobytes() for name, tensor in saved.tensors.items()}),
        "config": folder.config(),
    }
    if folder.status().state == "finished":
        found["summary"] = json.dumps(timeless(folder.summary()))
    for each in path.glob("*.csv"):
        found[each.name] = each.read_bytes()
    for name in ("privacy.jsonl", "domains.json"):
        found[name] = (path / name).read_bytes() if (path / name).exists() else None
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "panm": {"method": PANM},
    "sharded": {"method": PANM, "run": {"engine": "sharded", "shards": 3}},
    "watched": {"method": PANM, "run": {"watch": [1, 5], "watch_all": True}},
    "seldom": {"method": PANM, "run": {"evaluate_every": 100, "rounds": 40}},
    "faults": {
        "method": {"name": "random"},
        "faults": {"absent": 0.3, "loss": 0.2, "attackers": 0.25, "attack": "nan"},
    },
    "ifca": {"method": {"name": "ifca", "models": 2}},
    "visits": {
        "method": {"name": "fedavg", "participation": 0.4},
        "data": {"new_clients": 2},
        "run": {"resident": "round"},
    },
    "common": {"method": {"name": "ditto"}, "data": {"global_test": 20, "split": {"kind": "iid"}}},
    "private": {"method": {"name": "p4", "tune_steps": 2, "releases": 8}},
    "domains": {"method": {"name": "fedcg", "domains": 2}},
}


MORE = {"watched": "similarity.csv", "visits": "new_clients.csv", "private": "privacy.jsonl", "domains": "rounds.csv"}


def settings_of(name: str) -> dict[str, Any]:
    """Twenty rounds or more on a CPU, evaluated every third and saved every seventh."""
    sections = dict(SETTINGS[name])
    run = {"rounds": 20, "evaluate_every": 3, "checkpoint_every": 7, **sections.pop("run", {})}
    return tiny_experiment(run=run, **sections)


@pytest.mark.parametrize("how", [LATE, SLOW])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_leaves_the_same_folder_late_or_at_once(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinfolk.run(settings_of(name), out="once")
    put_down(how, monkeypatch)
    kinfolk.run(settings_of(name), out="late")
    assert kept(Path("late")) == kept(Path("once"))
    assert name not in MORE or (Path("late") / MORE[name]).exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["panm", "sharded", "watched", "ifca"])
def test_on_a_gpu_a_run_leaves_the_same_folder_as_when_it_waits_for_each_round(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "Logbook", partial(Logbook, late=False))
        kinfolk.run(settings_of(name), ["run.device=cuda"], out="once")
    told = Told(monkeypatch)
    kinfolk.run(settings_of(name), ["run.device=cuda"], out="late", observer=told)
    assert kept(Path("late")) == kept(Path("once"))
    assert told.rounds("told") == list(range(1, 21))
    if name == "panm":  # whose rounds are noted when they are launched
        assert told.heard.index(("launched", 4)) < told.heard.index(("told", 3))


class Told(kinfolk.Observer):
    """Notes what it hears, and when rounds were launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[tuple[str, int]] = []
        self.rows: list[dict[str, Any]] = []
        step = InProcessEngine.step

        def noted(engine: InProcessEngine, t: int, evaluate: bool) -> None:
            self.launch(t)
            step(engine, t, evaluate)

        monkeypatch.setattr(InProcessEngine, "step", noted)

    def launch(self, t: int) -> None:
        self.heard.append(("launched", t))

    def round(self, t: int, row: dict[str, Any] | None) -> None:
        self.heard.append(("told", t))
        if row is not None:
            assert row["round"] == t
            self.rows.append(row)

    def rounds(self, what: str) -> list[int]:
        return [t for heard, t in self.heard if heard == what]

    def first(self, t: int) -> bool:
        """Whether this round is being launched, and not again after the run has ended once."""
        return self.heard[-1] == ("launched", t) and self.heard.count(("launched", t)) == 1


@pytest.mark.parametrize("how", [AT_ONCE, LATE, SLOW])
def test_every_round_is_told_in_order_with_its_row(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_down(how, monkeypatch)
    told = Told(monkeypatch)
    result = kinfolk.run(tiny_experiment(run={"rounds": 9, "evaluate_every": 3}), out="a", observer=told)
    assert told.rounds("told") == list(range(1, 10))
    assert [row["round"] for row in told.rows] == [1, 3, 6, 9]
    assert told.rows == result.metrics
    seconds = [row["seconds"] for row in told.rows]
    assert seconds == sorted(seconds)
    place = {each: number for number, each in enumerate(told.heard)}
    for t in range(1, 9):
        assert (place["told", t] > place["launched", t + 1]) == (how != AT_ONCE)
    if how == LATE:  # no longer than until the next round has been launched
        assert all(place["told", t] < place["launched", t + 2] for t in range(1, 8))
    if how == SLOW:  # the third round is held back until the sixth is evaluated, and holds back those behind it
        assert place["launched", 6] < place["told", 3] < place["told", 4] < place["told", 5] < place["launched", 7]


@pytest.mark.parametrize("how", [AT_ONCE, LATE, SLOW])
def test_before_a_checkpoint_everything_is_put_down(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_down(how, monkeypatch)
    told, save = Told(monkeypatch), checkpoint.save
    found = []

    def looked(folder: Path, round: int, *rest: Any) -> Path:
        rows = [row["round"] for row in RunFolder.open(Path("a")).metrics()]
        found.append((round, told.rounds("told")[-1], rows[-1], int(read_graph(Path("a")).round.max())))
        return save(folder, round, *rest)

    monkeypatch.setattr(checkpoint, "save", looked)
    kinfolk.run(tiny_experiment(run={"rounds": 4, "evaluate_every": 2, "checkpoint_every": 1}), out="a", observer=told)
    assert found == [(1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 2, 3), (4, 4, 4, 4)]


def sections() -> dict[str, Any]:
    return tiny_experiment(method=PANM, run={"rounds": 12, "evaluate_every": 2, "checkpoint_every": 5})


def assert_goes_on_as_if_nothing_had_been(monkeypatch: pytest.MonkeyPatch) -> None:
    kinfolk.resume("a")
    put_down(AT_ONCE, monkeypatch)
    kinfolk.run(sections(), out="whole")
    ours, whole = kept(Path("a")), kept(Path("whole"))
    assert {name: ours[name] for name in ("metrics", "graph", "summary", "clients.csv")} == {
        name: whole[name] for name in ("metrics", "graph", "summary", "clients.csv")
    }
    assert ours["checkpoint"] == whole["checkpoint"]


@pytest.mark.parametrize("how", [AT_ONCE, LATE, SLOW])
@pytest.mark.parametrize("when", ["while it is told", "while the next is launched"])
def test_ctrl_c_puts_down_all_rounds_that_were_done(how: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Told):
        def launch(self, t: int) -> None:
            super().launch(t)
            if self.first(7) and when == "while the next is launched":
                os.kill(os.getpid(), signal.SIGINT)

        def round(self, t: int, row: dict[str, Any] | None) -> None:
            super().round(t, row)
            if t == 6 and when == "while it is told":
                os.kill(os.getpid(), signal.SIGINT)

    put_down(how, monkeypatch)
    told = Stop(monkeypatch)
    with pytest.raises(kinfolk.Interrupted) as stopped:
        kinfolk.run(sections(), out="a", observer=told)
    last = stopped.value.round
    assert last == told.rounds("launched")[-1] == checkpoint.load(Path("a/checkpoint")).round
    assert told.rounds("told") == list(range(1, last + 1))
    assert [row["round"] for row in RunFolder.open(Path("a")).metrics()] == [t for t in (1, 2, 4, 6, 8) if t <= last]
    assert read_graph(Path("a")).round.max() == last
    assert_goes_on_as_if_nothing_had_been(monkeypatch)


class Broken(Exception):
    """What a round may die of."""


@pytest.mark.parametrize("how", [AT_ONCE, LATE, SLOW])
@pytest.mark.parametrize("error", [Broken("out of memory"), KeyboardInterrupt()], ids=["error", "second Ctrl-C"])
def test_what_was_found_is_put_down_before_a_failure_ends_the_run(
    how: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fail(Told):
        def launch(self, t: int) -> None:
            super().launch(t)
            if self.first(9):
                raise error

    put_down(how, monkeypatch)
    told = Fail(monkeypatch)
    with pytest.raises(type(error)) as raised:
        kinfolk.run(sections(), out="a", observer=told)
    assert raised.value is error
    assert told.rounds("told") == list(range(1, 9))
    assert told.rows == RunFolder.open(Path("a")).metrics()
    assert told.rows[-1]["round"] == 8
    assert_goes_on_as_if_nothing_had_been(monkeypatch)


@pytest.mark.parametrize("how", [LATE, SLOW])
def test_why_a_run_ends_is_not_hidden_by_a_full_disk(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fail(Told):
        def launch(self, t: int) -> None:
            super().launch(t)
            if t == 5:
                monkeypatch.setattr(RunFolder, "append_metrics", full)
                raise Broken

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    put_down(how, monkeypatch)
    with pytest.raises(Broken) as raised:
        kinfolk.run(sections(), out="a", observer=Fail(monkeypatch))
    (note,) = raised.value.__notes__
    assert "no space left on device" in note


def test_nobody_hears_of_rounds_after_one_that_could_not_be_put_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: RunFolder, row: dict[str, Any]) -> None:
        if row["round"] == 4:
            raise OSError("no space left on device")

    put_down(SLOW, monkeypatch)
    monkeypatch.setattr(RunFolder, "append_metrics", full)
    told = Told(monkeypatch)
    with pytest.raises(OSError, match="no space left"):
        kinfolk.run(tiny_experiment(run={"rounds": 9, "evaluate_every": 4}), out="a", observer=told)
    assert told.rounds("launched")[-1] == 8  # where somebody waited for the fourth
    assert told.rounds("told") == [1, 2, 3]


def test_ctrl_c_while_a_parcel_is_waited_for_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = Parcel.wait
    met: list[Parcel] = []

    def wait(parcel: Parcel) -> None:
        if parcel._tensors and not any(parcel is each for each in met):
            met.append(parcel)
            if len(met) == 3:
                raise KeyboardInterrupt
        waited(parcel)

    put_down(SLOW, monkeypatch)
    monkeypatch.setattr(Parcel, "wait", wait)
    told = Told(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(sections(), out="a", observer=told)
    assert told.rounds("told") == [1, 2, 3, 4, 5]  # all that were done when the fourth was waited for
    assert told.rows == RunFolder.open(Path("a")).metrics()
    assert [row["round"] for row in told.rows] == [1, 2, 4]
    assert_goes_on_as_if_nothing_had_been(monkeypatch)


def test_results_are_of_their_own_round_however_late_they_are_looked_at() -> None:
    """What is counted up in place, round by round, is copied when its round is taken."""
    parts, config = assembly.prepare(read(tiny_experiment(method=PANM)), torch.device("cpu"), None, None, print)
    found: dict[bool, list[dict[str, np.ndarray]]] = {}
    for packed in (False, True):
        engine, taken = assembly.engine_of(parts, config), []
        for t in range(1, 7):
            engine.step(t, True)
            engine.shards[0].quarantined += 1
            parcel = Parcel(packed)
            later = engines.evaluated(engine, parcel)
            parcel.send()
            taken.append(later if packed else partial(dict, copy_of(later())))
        found[packed] = [copy_of(each()) if packed else each() for each in taken]
    for late, right in zip(found[True], found[False], strict=True):
        assert late.keys() == right.keys()
        for name in right:
            assert np.array_equal(late[name], right[name], equal_nan=True), name


def copy_of(results: engines.Results) -> dict[str, np.ndarray]:
    return {name: column.copy() for name, column in vars(results).items() if isinstance(column, np.ndarray)}
