"""The command line: every command and option, what goes to which stream, and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from rich.console import Console

import kinfolk
from conftest import Command, Outcome, tiny_experiment
from kinfolk import cli, methods, worker
from kinfolk.experiment import read_result
from kinfolk.progress import Reporter
from kinfolk.runs.folder import RunFolder
from kinfolk.runs.graph import read_graph
from processes import ended, start


@pytest.fixture(autouse=True)
def _a_tiny_experiment_file() -> None:
    text = tomli_w.dumps(
        tiny_experiment(data={"clients": 6, "train": 10, "test": 10}, run={"rounds": 2, "evaluate_every": 1})
    )
    Path("tiny.toml").write_text(text, encoding="utf-8")


def config(folder: str) -> dict[str, Any]:
    return RunFolder.open(Path(folder)).config()


# -- run ---------------------------------------------------------------------------------------------------------


def test_run_ends_with_a_table_and_the_folder(command: Command) -> None:
    ended = command("run", "tiny.toml")
    assert ended.code == 0
    for words in ("tiny, random, seed 0", "accuracy", "worst", "precision", "models", "seconds"):
        assert words in ended.out
    assert ended.out.splitlines()[-1] == "run folder: runs/tiny-random-seed0"
    assert "random seed 0: round 2/2" in ended.err
    assert RunFolder.open(Path("runs/tiny-random-seed0")).status().state == "finished"


def test_a_second_run_gets_a_folder_of_its_own(command: Command) -> None:
    assert command("run", "tiny.toml", "--json").json["folder"] == "runs/tiny-random-seed0"
    assert command("run", "tiny.toml", "--json").json["folder"] == "runs/tiny-random-seed0-2"


def test_json_is_one_object_on_standard_output_and_progress_is_on_standard_error(command: Command) -> None:
    ended = command("run", "tiny.toml", "--json", "--out", "here")
    assert ended.json["folder"] == "here"
    assert ended.json["round"] == 2
    assert ended.json["accuracy"] == read_result(Path("here")).accuracy
    assert "round 2/2" in ended.err


def test_a_shipped_experiment_is_run_by_its_name(command: Command) -> None:
    ended = command("run", "digits", "run.rounds=1", "data.clients=4", "data.train=8", "--json")
    assert ended.json["folder"] == "runs/digits-random-seed0"


def test_seed_device_and_out_are_options(command: Command) -> None:
    ended = command("run", "tiny.toml", "--seed", "3", "--device", "cpu", "--out", "here", "run.device=auto")
    assert ended.code == 0
    assert config("here")["run"]["seed"] == 3
    assert config("here")["run"]["device"] == "cpu"
    assert "made by: kinfolk run tiny.toml --seed 3" in command("show", "here").out


def test_overrides_change_settings_method_and_split(command: Command) -> None:
    words = ("method.name=fedavg", "method.participation=0.5", "data.split.kind=dirichlet", "training.lr=0.01")
    assert command("run", "tiny.toml", "--out", "here", *words).code == 0
    found = config("here")
    assert found["method"] == {"name": "fedavg", "participation": 0.5}
    assert found["data"]["split"]["kind"] == "dirichlet"
    assert found["training"]["lr"] == 0.01


def test_a_long_run_is_shown_by_some_twenty_rows_with_the_last(command: Command) -> None:
    shown = command("run", "tiny.toml", "run.rounds=50", "data.clients=2", "training.steps=1", "method.name=local").out
    rounds = re.findall(r"^ *(\d+) ", shown, flags=re.MULTILINE)
    assert rounds[0] == "1"
    assert rounds[-1] == "50"
    assert len(rounds) <= 21


def test_precision_and_recall_are_left_out_where_there_are_none(command: Command) -> None:
    assert "precision" not in command("run", "tiny.toml", "data.split.kind=iid").out


# -- compare -----------------------------------------------------------------------------------------------------


def test_compare_runs_local_and_oracle_beside_the_methods(command: Command) -> None:
    ended = command("compare", "tiny.toml", "--methods", "random, fedavg", "--seeds", "2", "--out", "both")
    assert ended.code == 0
    first_words = [line.split()[0] for line in ended.out.splitlines() if line.strip()]
    assert [word for word in first_words if word in methods.names()] == ["local", "random", "fedavg", "oracle"]
    assert "tiny: 6 clients, 2 rounds, 2 seeds" in ended.out
    assert "±" in ended.out
    assert ended.out.splitlines()[-1] == "run folders: both"
    assert config("both/random-seed1")["run"]["seed"] == 1


def test_compare_without_references_runs_what_was_asked_for(command: Command) -> None:
    ended = command("compare", "tiny.toml", "--methods", "fixed", "--no-references", "--seed", "5", "--json")
    assert list(ended.json["runs"]) == ["fixed"]
    assert ended.json["runs"]["fixed"] == ["runs/tiny/fixed-seed5"]
    assert ended.json["rows"][0]["helped"] is None


def test_compare_takes_the_method_of_the_file_by_default(command: Command) -> None:
    assert list(command("compare", "tiny.toml", "--json").json["runs"]) == ["local", "random", "oracle"]


def test_a_comparison_that_is_there_is_not_run_again(command: Command) -> None:
    words = ("compare", "tiny.toml", "--methods", "fixed", "--out", "both", "--json")
    first = command(*words)
    second = command(*words)
    assert second.json == first.json
    assert "round" not in second.err


def test_show_tells_a_comparison_too(command: Command) -> None:
    made = command("compare", "tiny.toml", "--methods", "fixed", "--out", "both", "--json").json
    assert command("show", "both", "--json").json == made
    assert "helped" in command("show", "both").out


# -- resume and show ---------------------------------------------------------------------------------------------


def test_a_run_made_longer_is_the_run_that_was_long_from_the_start(command: Command) -> None:
    command("run", "tiny.toml", "--out", "long", "run.rounds=4")
    command("run", "tiny.toml", "--out", "grown")
    ended = command("resume", "grown", "--rounds", "4", "--device", "cpu", "--json")
    assert ended.json["round"] == 4
    assert "going on after round 2" in ended.err
    assert_same_run("long", "grown")


def test_a_finished_run_is_not_run_again(command: Command) -> None:
    command("run", "tiny.toml", "--out", "here")
    ended = command("resume", "here")
    assert ended.code == 0
    assert "here is finished; `--rounds N` makes it longer" in ended.err
    assert "tiny, random, seed 0 (finished)" in ended.out


def test_show_tells_what_a_run_came_to_and_what_made_it(command: Command) -> None:
    command("run", "tiny.toml", "--out", "here")
    shown = command("show", "here")
    assert shown.err == ""
    assert "made by: kinfolk run tiny.toml --out here" in shown.out
    facts = command("show", "here", "--json").json
    assert (facts["status"], facts["round"], facts["rounds"]) == ("finished", 2, 2)
    assert [row["round"] for row in facts["metrics"]] == [1, 2]
    assert len(facts["clients"]) == 6
    assert facts["config"]["method"]["name"] == "random"
    assert facts["made_by"]["version"] == kinfolk.__version__
    assert facts["summary"]["accuracy"] == facts["metrics"][-1]["accuracy"]


def test_show_tells_how_to_go_on_with_an_unfinished_run(command: Command) -> None:
    command("run", "tiny.toml", "--out", "here")
    Path("here/summary.json").unlink()
    shown = command("show", "here").out
    assert "unfinished, 2 of 2 rounds" in shown
    assert "go on with: kinfolk resume here" in shown
    assert command("show", "here", "--json").json["summary"] is None


def test_names_with_brackets_are_shown_as_they_are(command: Command) -> None:
    ended = command("run", "tiny.toml", "name=a[b]c")
    assert "a[b]c, random, seed 0" in ended.out
    assert "runs/a[b]c-random-seed0" in ended.err
    assert "a[b]c, random" in command("show", "runs/a[b]c-random-seed0").out


# -- what a terminal sees ----------------------------------------------------------------------------------------


def test_version_and_help_need_nothing_else(command: Command) -> None:
    assert command("--version").out == f"kinfolk {kinfolk.__version__}\n"
    shown = command("run", "--help")
    assert (shown.code, shown.err) == (0, "")
    assert "Usage: kinfolk run" in shown.out
    for option in ("--out", "--seed", "--device", "--json"):
        assert option in shown.out


def test_without_a_command_the_help_is_shown(command: Command) -> None:
    ended = command()
    assert ended.err == ""
    for name in ("run", "compare", "resume", "show", "list", "data"):
        assert f"│ {name} " in ended.out


def test_tables_fit_eighty_columns(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command("compare", "tiny.toml", "--methods", "random,centralized", "--seeds", "2", "--out", "both")
    for words in (["show", "both"], ["show", "both/random-seed0"], ["data", "ls"]):
        wide = command(*words).out
        with monkeypatch.context() as terminal:
            terminal.setattr("kinfolk.commands.terminal.console", lambda: Console(highlight=False, width=80))
            narrow = command(*words).out
        assert "…" not in narrow
        for line in narrow.splitlines():
            assert len(line) <= 80 or not line.startswith(" "), line
        if words[0] == "show":
            assert narrow == wide


def test_a_terminal_sees_live_progress() -> None:
    ours, theirs = pty.openpty()
    words = ["run", "tiny.toml", "--json", "run.rounds=3"]
    with open("out", "w", encoding="utf-8") as out:
        process = start("kinfolk", *words, out=out.fileno(), err=theirs, TERM="xterm", COLUMNS="100")
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while part := os.read(ours, 65536):
            seen += part
    os.close(ours)
    assert ended(process) == 0
    assert json.loads(Path("out").read_text(encoding="utf-8"))["round"] == 3
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    assert "\x1b[" in seen.decode()
    assert re.search(r"random seed 0 .*round 3/3 accuracy +[\d.]+ % in \d+ s", text)


# -- Ctrl-C ------------------------------------------------------------------------------------------------------


class Running:
    """A process whose standard error is read line by line."""

    def __init__(self, *words: str) -> None:
        ours, theirs = os.pipe()
        with open("out", "w", encoding="utf-8") as out:
            self.process = start("kinfolk", *words, out=out.fileno(), err=theirs)
        os.close(theirs)
        self.said = open(ours, encoding="utf-8")  # noqa: SIM115  closed at the end

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.said.close()
        with contextlib.suppress(ValueError):  # it has ended, and is closed
            self.process.kill()

    def wait_for(self, words: str) -> None:
        for line in self.said:
            if words in line:
                return
        raise AssertionError(f"it ended without saying '{words}'")

    def interrupt(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)

    def end(self) -> Outcome:
        err = self.said.read()
        return Outcome(ended(self.process), Path("out").read_text(encoding="utf-8"), err)


def assert_same_run(a: str, b: str) -> None:
    """Metrics (but for the seconds), clients, graph and weights are bit-equal."""
    one, two = read_result(Path(a)), read_result(Path(b))
    for rows in zip(one.metrics, two.metrics, strict=True):
        first, second = ({key: value for key, value in row.items() if key != "seconds"} for row in rows)
        assert first == second
    assert one.clients == two.clients
    assert torch.equal(one.weights(), two.weights())
    graphs = [read_graph(Path(folder)) for folder in (a, b)]
    for column in ("round", "client", "neighbor", "weight"):
        assert np.array_equal(getattr(graphs[0], column), getattr(graphs[1], column))


def test_ctrl_c_finishes_the_round_saves_and_says_how_to_resume(command: Command) -> None:
    words = ("tiny.toml", "run.rounds=40", "training.epochs=5", "--device", "cpu")
    with Running("run", *words, "--out", "stopped") as running:
        running.wait_for("round 1/40")
        running.interrupt()
        ended = running.end()
    assert ended.code == 130
    assert ended.out == ""
    said = re.fullmatch(r"kinfolk: stopped after round (\d+); go on with: (.*)", ended.err.splitlines()[-1])
    assert said
    assert "Traceback" not in ended.err
    facts = command("show", "stopped", "--json").json
    assert facts["status"] == "unfinished"
    assert facts["round"] == int(said[1])
    assert 1 <= facts["round"] < 40
    advice = said[2].split()
    assert advice == ["kinfolk", "resume", "stopped"]
    assert command(*advice[1:]).code == 0
    command("run", *words, "--out", "straight")
    assert_same_run("straight", "stopped")


def test_a_second_ctrl_c_stops_at_once_and_the_run_can_still_be_resumed(command: Command) -> None:
    with Running("run", "tiny.toml", "--out", "stopped", "training.epochs=100000") as running:  # a round of minutes
        running.wait_for("2 rounds on cpu")
        time.sleep(0.3)
        running.interrupt()
        running.wait_for("press Ctrl-C again to stop at once")
        began = time.monotonic()
        running.interrupt()
        ended = running.end()
    assert time.monotonic() - began < 20
    assert ended.code == 130
    assert ended.err.splitlines()[-1] == "kinfolk: stopped at once; go on with: kinfolk resume stopped"
    assert "Traceback" not in ended.err
    text = Path("stopped/config.toml").read_text(encoding="utf-8")
    Path("stopped/config.toml").write_text(text.replace("epochs = 100000", "epochs = 1"), encoding="utf-8")
    assert command("resume", "stopped").code == 0
    command("run", "tiny.toml", "--out", "straight")
    assert_same_run("straight", "stopped")


def test_an_interrupted_comparison_says_how_to_go_on_with_all_of_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_ctrl_c(self: Reporter, t: int, row: dict[str, Any] | None) -> None:
        if self.label == "random seed 0":
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as keyboard:
        keyboard.setattr(Reporter, "round", press_ctrl_c)
        ended = command("compare", "tiny.toml", "--methods", "random", "--device", "cpu")
    assert ended.code == 130
    advice = "kinfolk compare tiny.toml --methods random --device cpu --out runs/tiny"
    assert ended.err.splitlines()[-1] == f"kinfolk: stopped after round 1; go on with: {advice}"
    ended = command(*advice.split()[1:], "--json")
    assert set(ended.json["runs"]) == {"local", "random", "oracle"}
    assert "local seed 0" not in ended.err  # finished before
    assert "random seed 0: 2 rounds on cpu, runs/tiny/random-seed0, going on after round 1" in ended.err


def test_ctrl_c_in_the_last_round_of_a_run_ends_a_comparison_too(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_ctrl_c(self: Reporter, t: int, row: dict[str, Any] | None) -> None:
        if (self.label, t) == ("local seed 0", 2):
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as keyboard:
        keyboard.setattr(Reporter, "round", press_ctrl_c)
        ended = command("compare", "tiny.toml", "--methods", "random", "--device", "cpu")
    assert ended.code == 130
    assert "stopped after round 2; go on with: kinfolk compare tiny.toml" in ended.err.splitlines()[-1]
    assert sorted(path.name for path in Path("runs/tiny").iterdir()) == ["local-seed0"]


def test_a_tensor_that_no_machine_holds_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**50, dtype=torch.uint8)
    with pytest.raises(SystemExit):
        cli._known_failure(failure.value)
    told = capsys.readouterr().err
    assert "out of memory: 1,048,576 GiB for one tensor" in told
    assert worker._reason(failure.value) == told.removeprefix("kinfolk: ").rstrip() + "; or use fewer --workers"
