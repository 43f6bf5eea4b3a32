"""Runs from the outside: what they write, how they learn, how they are compared."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import engines, experiment
from kinfolk.config import Config, read
from kinfolk.errors import UserError
from kinfolk.runs import checkpoint
from kinfolk.runs.folder import RunFolder
from kinfolk.runs.graph import read_graph


def test_a_run_leaves_everything_in_its_folder() -> None:
    result = kinfolk.run(tiny_experiment(), out="here")
    folder = RunFolder.open(Path("here"))
    assert folder.status().state == "finished"
    assert folder.config()["method"] == {"name": "random", "neighbors": 2}
    assert folder.config()["training"]["momentum"] == 0.9  # a default, resolved
    assert folder.facts()["version"] == kinfolk.__version__
    assert [row["round"] for row in folder.metrics()] == [1, 2, 4]
    assert len(folder.clients()) == 8
    assert np.mean([row["accuracy"] for row in folder.clients()]) == pytest.approx(result.accuracy)
    graph = read_graph(Path("here"))
    assert graph.round.size == 4 * 8 * 2
    assert graph.weight == pytest.approx(1 / 3)
    assert result.weights().shape == (8, 64 * 16 + 16 + 16 * 10 + 10)


def test_checkpoints_take_a_small_share_of_the_time_however_long_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which a round takes a second and saving three: every five seconds, but for no more than a tenth of the
    time, unless that were too seldom."""
    now, saved = [0.0], []
    monkeypatch.setattr(experiment, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(experiment, "CHECKPOINT_SECONDS", 5.0)
    monkeypatch.setattr(experiment, "CHECKPOINT_SHARE", 0.1)
    save, step = experiment._save, engines.InProcessEngine.step

    def stepped(self: engines.InProcessEngine, t: int, evaluate: bool) -> None:
        now[0] += 1
        step(self, t, evaluate)

    def kept(folder: RunFolder, t: int, *more: Any) -> None:
        now[0] += 3
        saved.append(t)
        save(folder, t, *more)

    monkeypatch.setattr(engines.InProcessEngine, "step", stepped)
    monkeypatch.setattr(experiment, "_save", kept)
    kinfolk.run(tiny_experiment(run={"rounds": 80}), out="here")
    assert saved == [6, 37, 68, 80]  # after more than 5 seconds, then, as saving takes 3, more than 30; and the last
    saved.clear()
    monkeypatch.setattr(experiment, "CHECKPOINT_LONGEST", 20.0)
    kinfolk.run(tiny_experiment(run={"rounds": 40}), out="there")
    assert saved == [6, 27, 40]


def test_default_folders_never_collide() -> None:
    first, second = kinfolk.run(tiny_experiment()), kinfolk.run(tiny_experiment())
    assert [str(r.folder) for r in (first, second)] == ["runs/tiny-random-seed0", "runs/tiny-random-seed0-2"]


def test_a_trained_model_can_be_taken_out() -> None:
    result = kinfolk.run(tiny_experiment(), out="a")
    data = kinfolk.load_federation(result.config)
    module = result.load_into(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)), client=5)
    start, size = int(data.test.starts[5]), int(data.test.sizes[5])
    rows = slice(start, start + size)
    accuracy = (module(data.test.x[rows]).argmax(1) == data.test.y[rows]).double().mean()
    assert accuracy.item() == pytest.approx(result.clients[5]["accuracy"])


def test_a_finished_run_can_be_made_longer_and_equals_a_long_one() -> None:
    kinfolk.run(tiny_experiment(run={"rounds": 2}), out="short")
    longer = kinfolk.resume("short", rounds=4)
    whole = kinfolk.run(tiny_experiment(), out="whole")
    assert torch.equal(longer.weights(), whole.weights())
    assert RunFolder.open(Path("short")).status().state == "finished"
    with pytest.raises(kinfolk.UserError, match="shorten"):
        kinfolk.resume("short", rounds=3)


def test_a_run_can_be_resumed_on_other_shards() -> None:
    class Stop(kinfolk.Observer):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if t == 3:
                raise KeyboardInterrupt

    settings = tiny_experiment(run={"checkpoint_every": 1, "precision": "float64", "engine": "sharded", "shards": 3})
    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(settings, out="cut", observer=Stop())
    text = Path("cut/config.toml").read_text().replace('engine = "sharded"', 'engine = "inprocess"')
    Path("cut/config.toml").write_text(text)
    whole = kinfolk.run(tiny_experiment(run={"precision": "float64"}), out="whole")
    assert (kinfolk.resume("cut").weights() - whole.weights()).abs().max() < 1e-10


def test_a_run_killed_before_its_first_checkpoint_starts_again_in_its_folder() -> None:
    class Stop(kinfolk.Observer):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(tiny_experiment(), out="cut", observer=Stop())
    whole = kinfolk.run(tiny_experiment(), out="whole")
    assert torch.equal(kinfolk.resume("cut").weights(), whole.weights())


@pytest.mark.parametrize("settings", [{}, {"engine": "sharded", "shards": 2}])
@pytest.mark.parametrize("name", ["random", "fedavg", "ditto"])
def test_a_run_cut_off_after_its_last_checkpoint_has_the_same_clients(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = tiny_experiment(method={"name": name}, run={"rounds": 3, **settings})
    whole = kinfolk.run(sections, out="whole")
    mixed = any(client["before_mixing"] != client["accuracy"] for client in whole.clients)
    assert mixed or name == "ditto"  # whose personal models nobody mixes

    def gone(*_: Any) -> None:
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_clients", gone)
        with pytest.raises(OSError, match="gone"):
            kinfolk.run(sections, out="cut")
    assert kinfolk.resume("cut").clients == whole.clients


def without(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """As if this version did not know a setting of the method yet."""
    plain = Config.sections

    def sections(self: Config) -> dict[str, Any]:
        found = plain(self)
        del found["method"][setting]
        return found

    monkeypatch.setattr(Config, "sections", sections)


def test_a_run_of_a_version_with_fewer_settings_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = tiny_experiment(method={"name": "panm", "neighbors": 2, "candidates": 3, "discover_rounds": 2})
    whole = kinfolk.run(sections, ["run.rounds=5"], out="whole")
    with monkeypatch.context() as patch:
        without(patch, "partners")
        kinfolk.run(sections, ["run.rounds=3"], out="cut")
    assert "partners" not in RunFolder.open(Path("cut")).config()["method"]
    assert torch.equal(kinfolk.resume("cut", rounds=5).weights(), whole.weights())
    assert kinfolk.resume("cut", rounds=6).summary["round"] == 6  # and once more


def test_a_run_from_before_what_its_preset_turns_on_now_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = tiny_experiment(method={"name": "panm", "neighbors": 2, "candidates": 3, "discover_rounds": 2})
    with monkeypatch.context() as patch:
        without(patch, "company")
        kinfolk.run(sections, ["run.rounds=3"], out="cut")
    with pytest.raises(UserError, match=r"cut is from before 'method.company'"):
        kinfolk.resume("cut", rounds=5)
    assert kinfolk.resume("cut").summary["round"] == 3  # it is as finished as it was


def test_a_checkpoint_of_a_method_that_has_other_state_is_refused_and_the_run_stays_finished() -> None:
    kinfolk.run(tiny_experiment(method={"name": "fedavg"}, run={"rounds": 2}), out="a")
    saved = checkpoint.load(Path("a/checkpoint"))
    tensors = {**saved.tensors, "state/more": torch.zeros(8)}
    checkpoint.save(Path("a/checkpoint"), saved.round, tensors, saved.facts)
    with pytest.raises(UserError, match="another version of the method"):
        kinfolk.resume("a", rounds=3)
    assert kinfolk.resume("a").summary["round"] == 2


def test_custom_data_and_models_must_be_given_again_to_resume() -> None:
    data = make_federation([10] * 4, clusters=[0, 0, 1, 1])

    def factory(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Linear(*shape, classes)

    kinfolk.run(tiny_experiment(run={"rounds": 2}), data=data, model=factory, out="own")
    with pytest.raises(kinfolk.UserError, match="data of your own"):
        kinfolk.resume("own", rounds=3)
    assert kinfolk.resume("own", rounds=3, data=data, model=factory).metrics[-1]["round"] == 3


def test_neighbors_beyond_n_minus_one_are_clipped_with_a_notice() -> None:
    heard: list[str] = []

    class Listen(kinfolk.Observer):
        def notice(self, text: str) -> None:
            heard.append(text)

    result = kinfolk.run(tiny_experiment(method={"name": "random", "neighbors": 99}), out="a", observer=Listen())
    assert heard == ["method.neighbors = 99, but a client has only 7 peers: using 7"]
    assert result.config.method.neighbors == 7
    assert result.summary["peak_received"] == 7


def test_a_comparison_runs_the_references_beside_and_keeps_its_table() -> None:
    comparison = kinfolk.compare(tiny_experiment(), ["random", "fedavg"], seeds=2, out="c")
    assert [row.method for row in comparison.rows] == ["local", "random", "fedavg", "oracle"]
    assert comparison.row("oracle").neighbor_precision == 1.0
    assert comparison.row("local").helped is None
    assert comparison.row("fedavg").neighbor_precision is None
    assert comparison.row("random").models_received == 4 * 8 * 2
    assert comparison.row("fedavg").models_received == 4 * 8 * 2  # one up and one down
    accuracies = [result.accuracy for result in comparison.runs["random"]]
    assert comparison.row("random").accuracy == pytest.approx(np.mean(accuracies))
    assert comparison.row("random").accuracy_std == pytest.approx(np.std(accuracies, ddof=1))
    kept = json.loads(Path("c/comparison.json").read_text())
    assert [row["method"] for row in kept["rows"]] == ["local", "random", "fedavg", "oracle"]


def test_every_method_of_a_comparison_starts_from_the_same_split_and_model() -> None:
    comparison = kinfolk.compare(tiny_experiment(run={"rounds": 1}), ["random"], out="c")
    before = {name: [client["before_mixing"] for client in runs[0].clients] for name, runs in comparison.runs.items()}
    assert before["local"] == before["random"] == before["oracle"]


def test_a_comparison_goes_on_where_it_stopped_and_refuses_another_experiment() -> None:
    first = kinfolk.compare(tiny_experiment(), ["random"], out="c")
    stamp = (Path("c/local-seed0/summary.json")).stat().st_mtime_ns
    again = kinfolk.compare(tiny_experiment(), ["random", "fixed"], out="c")
    assert Path("c/local-seed0/summary.json").stat().st_mtime_ns == stamp  # not run again
    assert again.row("random") == first.row("random")
    with pytest.raises(kinfolk.UserError, match="another experiment"):
        kinfolk.compare(tiny_experiment(training={"lr": 0.2}), ["random"], out="c")


def test_learning_happens_and_kin_help_most() -> None:
    """The truth behind the demo, with wide margins: alone < random gossip < gossip among kin on rotated digits."""
    comparison = kinfolk.compare("digits", ["random"], overrides=["run.evaluate_every=60"], out="c")
    local, random, oracle = (comparison.row(name).accuracy for name in ("local", "random", "oracle"))
    assert local > 0.75
    assert random > local + 0.02
    assert oracle > random + 0.02
    assert comparison.row("oracle").hurt <= 0.05  # type: ignore[operator]


def test_the_split_is_the_same_for_every_method_and_differs_by_seed() -> None:
    base = read(tiny_experiment())
    one = kinfolk.load_federation(base)
    same = kinfolk.load_federation(base.with_method("fedavg"))
    other = kinfolk.load_federation(base.with_run(seed=1))
    assert torch.equal(one.train.x, same.train.x)
    assert not torch.equal(one.train.x, other.train.x)
