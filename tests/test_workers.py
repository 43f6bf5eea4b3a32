"""Cells of a study side by side: the same numbers, and what becomes of the others when one process ends badly."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from conftest import Command
from kinfolk import parallel
from kinfolk.cohort.room import Room
from kinfolk.errors import UserError
from kinfolk.parallel import Lane, Overview, Stopped
from kinfolk.progress import Reporter
from kinfolk.reproduce import CellsFailed, Reproduction, look, reproduce
from kinfolk.runs.files import LOCK
from kinfolk.runs.folder import RunFolder
from kinfolk.stopping import interruptible
from tiny_study import Ran, write_files, write_study

# A net of the user's own that talks, and that can make trouble of two kinds while there is a file `trouble`.
NET = r"""
import math, os
from pathlib import Path
import torch
from torch import nn

def make(input_shape, classes, trouble="none"):
    print("half a line", end="", flush=True)
    os.write(1, b'\n{"event": "finished"}\n')
    Path(f"seen-{os.getpid()}").write_text(f"{torch.get_num_threads()} {os.environ.get('OMP_NUM_THREADS')}")
    if Path("trouble").exists() and trouble == "user":
        raise ValueError("no such shape")
    if Path("trouble").exists() and trouble == "bug":
        raise KeyError("a bug")
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))
"""
LONG = ["run.rounds=80", "run.evaluate_every=2", "training.epochs=5"]  # a second or two
ENDLESS = ["training.epochs=300000"]  # a round of minutes


@pytest.fixture(autouse=True)
def _files() -> None:
    write_files()
    Path("talking_net.py").write_text(NET, encoding="utf-8")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[parallel._Worker]]:
    """The workers, in the order they were started; none of them may outlive the test."""
    known: list[parallel._Worker] = []

    class Known(parallel._Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            known.append(self)

    monkeypatch.setattr(parallel, "_Worker", Known)
    yield known
    assert known
    assert all(worker.process.poll() is not None for worker in known)


class Watching(Overview):
    """Does something once, when the first worker is in the middle of its cell."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.acted = False

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def working(self, done: int, of: int, lanes: Mapping[int, Lane]) -> None:
        if not self.acted and 0 in lanes and lanes[0].round > 1:  # the first round is saved
            self.acted = True
            self.act()

    def act(self) -> None: ...


def comparable(out: str) -> dict[str, bytes]:
    """Every file of the cells but for locks and checkpoints' notes, without times and the command."""
    told = re.compile(rb'("(?:warm_up_)?seconds": [0-9.e-]+|^(?:command|created) = .*$)', re.MULTILINE)
    files = (
        path for path in Path(out, "cells").rglob("*") if path.is_file() and path.name not in (LOCK, "manifest.json")
    )
    return {str(path.relative_to(out)): told.sub(b"", path.read_bytes()) for path in files}


def numbers(found: Reproduction) -> dict[str, float]:
    return {path.name: result.accuracy for path, result in sorted(found.results.items())}


# -- the same ----------------------------------------------------------------------------------------------------


def test_two_workers_make_the_files_and_tables_of_one(started: list[parallel._Worker]) -> None:
    ran = Ran()
    two = reproduce("mine.toml", out="two", workers=2, observer=ran)
    one = reproduce("mine.toml", out="one")
    assert numbers(two) == numbers(one)
    assert len(ran.cells) == len(numbers(two)) == 8  # equal cells are one run, which one worker gets
    assert ran.cells[0] == "1/8 Alone, two, seed 0"
    assert len(started) == 2
    files = comparable("one")
    assert comparable("two") == files
    assert {Path(name).name for name in files} >= {"config.toml", "metrics.jsonl", "clients.csv", "summary.json"}
    assert len({RunFolder.open(path).facts()["command"] for path in (*one.results, *two.results)}) == 1
    for kind in ("md", "csv"):
        assert Path(f"two/mine.{kind}").read_bytes() == Path(f"one/mine.{kind}").read_bytes()


# -- trouble -----------------------------------------------------------------------------------------------------


def test_cells_that_fail_are_told_of_and_do_not_hold_up_the_others(command: Command, threads: None) -> None:
    rows = {name: ["model.name=talking_net:make", f"model.trouble={name}"] for name in ("user", "bug", "none")}
    write_study(rows=rows, columns={"two": []}, seeds=1, published={})
    Path("trouble").touch()
    words = ["reproduce", "mine.toml", "--workers", "2", "--json"]
    ended = command(*words)
    assert ended.code == 2
    assert [row["row"] for row in ended.json["rows"] if row["seeds"] == 1] == ["none"]
    said = [line for line in ended.err.splitlines() if line.startswith("failed: ")]
    reasons = dict(line.removeprefix("failed: ").split(": ", 1) for line in said)
    assert set(reasons) == {"user, two, seed 0", "bug, two, seed 0"}
    assert re.search(r"could not be made from .* no such shape", reasons["user, two, seed 0"])
    assert reasons["bug, two, seed 0"] == "KeyError: 'a bug' (the traceback was printed above)"
    assert 'raise KeyError("a bug")' in ended.err
    last = "2 cells failed, what is there is in the tables; try again with: kinfolk reproduce mine.toml --workers 2"
    assert ended.err.splitlines()[-1] == f"kinfolk: {last} --json"
    # What the net printed is not among the events, nor among the results.
    assert ended.err.count('{"event": "finished"}') == ended.err.count("half a line") == 3
    assert {path.read_text(encoding="utf-8") for path in Path().glob("seen-*")} == {"3 3"}
    Path("trouble").unlink()
    assert len(reproduce("mine.toml", observer=(ran := Ran())).results) == 3
    assert len(ran.cells) == 2


@pytest.fixture
def threads() -> Iterator[None]:
    """Six threads of torch, for two workers to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


def test_a_worker_killed_in_the_middle_of_a_cell_is_replaced_and_the_cell_gone_on_with(
    started: list[parallel._Worker],
) -> None:
    asked: dict[str, Any] = {"rows": ["Gossip"], "columns": ["two"], "seeds": 3}

    class Kill(Watching):
        def act(self) -> None:
            started[0].process.kill()

    with pytest.raises(CellsFailed, match=r"1 of 3 cells failed: Gossip, two, seed \d: .* by SIGKILL") as raised:
        reproduce("mine.toml", LONG, **asked, workers=2, observer=(watching := Kill()))
    assert len(started) == 3
    assert len(raised.value.found.results) == 2
    assert len(watching.notices) == 1
    (path,) = (path for path in raised.value.found.paths.values() if path.exists() and not _finished(path))
    assert RunFolder.open(path).status().round > 0
    ran = Ran()
    resumed = reproduce("mine.toml", LONG, **asked, observer=ran)
    assert len(ran.cells) == 1
    assert ran.started_at[0] > 0
    assert numbers(resumed) == numbers(reproduce("mine.toml", LONG, **asked, out="straight"))
    assert comparable("runs/reproduce") == comparable("straight")


def _finished(path: Path) -> bool:
    return RunFolder.open(path).status().state == "finished"


def test_a_worker_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("broken").write_text("#!/bin/sh\necho no such thing\nexit 3\n", encoding="utf-8")
    Path("broken").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(Path("broken").resolve()))
    with pytest.raises(UserError, match=r"a worker could not start: its process ended with status 3: no such thing"):
        reproduce("mine.toml", workers=2, observer=Watching())


# -- stopped -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kinfolk(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "kinfolk", "reproduce", "mine.toml", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def wait_for(process: subprocess.Popen[str], pattern: str) -> None:
    for line in process.stderr or ():
        if re.search(pattern, line):
            return
    raise AssertionError(f"it ended without saying '{pattern}'")


def test_ctrl_c_stops_all_workers_and_the_next_call_finishes() -> None:
    words = [*LONG, "--rows", "Gossip", "--columns", "two", "--workers", "2"]
    with kinfolk(*words) as process:
        wait_for(process, r"round [1-9]\d*/80")
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1].splitlines()
    assert process.returncode == 130
    assert sum("press Ctrl-C again to stop at once" in line for line in said) == 1
    advice = re.fullmatch(r"kinfolk: stopped after .*, with 0 of 2 cells done; go on with: kinfolk (.*)", said[-1])
    assert advice, said
    states = [state for _, state in look("mine.toml", LONG).states() if state != "missing"]
    assert all(re.fullmatch(r"unfinished, \d+ of 80 rounds", state) for state in states)  # one may just have begun
    assert any(re.fullmatch(r"unfinished, [1-9]\d* of 80 rounds", state) for state in states)
    assert advice[1].split() == ["reproduce", "mine.toml", *words]
    again = reproduce("mine.toml", LONG, rows=["Gossip"], columns=["two"], observer=(ran := Ran()))
    assert max(ran.started_at) > 0
    assert numbers(again) == numbers(reproduce("mine.toml", LONG, rows=["Gossip"], columns=["two"], out="straight"))
    assert comparable("runs/reproduce") == comparable("straight")


def test_other_signals_can_stop_as_ctrl_c_does() -> None:
    said: list[str] = []
    with interruptible(said.append, [signal.SIGTERM]) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert len(said) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.slow
def test_sigterm_stops_all_workers_too(started: list[parallel._Worker]) -> None:
    class Terminate(Watching):
        def act(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=r"stopped after the rounds .* with 0 of 1 cells done") as stopped:
        reproduce("mine.toml", LONG, rows=["Oracle"], seeds=1, workers=2, observer=(watching := Terminate()))
    assert stopped.value.round > 0
    assert watching.notices == ["stopping after this round (press Ctrl-C again to stop at once)"]


def test_a_second_ctrl_c_stops_at_once(started: list[parallel._Worker]) -> None:
    class Twice(Watching):
        def working(self, done: int, of: int, lanes: Mapping[int, Lane]) -> None:
            if lanes:
                os.kill(os.getpid(), signal.SIGINT)

        def notice(self, text: str) -> None:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        reproduce("mine.toml", ENDLESS, rows=["Oracle"], seeds=1, workers=2, observer=Twice())
    assert [str(state) for _, state in look("mine.toml", ENDLESS).states() if state != "missing"] == [
        "unfinished, 0 of 2 rounds"
    ]
    assert [worker.process.returncode for worker in started] == [-signal.SIGKILL]


def test_workers_end_when_the_process_that_started_them_is_killed() -> None:
    with kinfolk(*ENDLESS, "--rows", "Oracle", "--seeds", "1", "--workers", "2") as process:
        while not (cells := list(Path("runs/reproduce/cells").glob("digits-*"))):
            assert process.poll() is None
            time.sleep(0.1)
        with pytest.raises(UserError, match="is being written by another process"):
            RunFolder.open(cells[0], write=True)
        process.kill()
        began = time.monotonic()
        while not _let_go(cells[0]):
            assert time.monotonic() - began < 10
            time.sleep(0.1)


def _let_go(path: Path) -> bool:
    """Whether nobody writes a run: a process that has ended holds no lock."""
    try:
        RunFolder.open(path, write=True).close()
    except UserError:
        return False
    return True


# -- asked for, shown, shared ------------------------------------------------------------------------------------


def test_a_wrong_number_of_workers_is_one_line(command: Command) -> None:
    ended = command("reproduce", "mine.toml", "--workers", "0")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "'--workers'" in ended.message
    with pytest.raises(UserError, match=r"workers = 0: at least 1 is needed"):
        reproduce("mine.toml", workers=0)
    assert not Path("runs").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_cells_done_and_where_each_worker_is(terminal: bool) -> None:
    text = io.StringIO()
    reporter = Reporter(Console(file=text, force_terminal=terminal, width=120, highlight=False))
    found = look("mine.toml")
    lanes = {number: Lane(cell, found.paths[cell.name]) for number, cell in enumerate(found.cells[:2])}
    reporter.working(3, 8, lanes)
    lanes[0].round, lanes[1].round, lanes[1].accuracy = 1, 2, 0.5
    reporter.working(3, 8, lanes)
    reporter.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue())
    assert "3/8" in shown
    assert re.search(r"Alone, two, seed 0\W+(round )?.*1/2", shown)
    assert re.search(r"Alone, two, seed 1\W+(round )?.*2/2 +accuracy +50\.0 %", shown)
    assert reporter.folder == lanes[1].folder


def test_a_worker_plans_with_its_part_of_the_gpu_or_with_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(free: int, among: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
        monkeypatch.setattr(Room, "among", among)
        return Room(torch.device("cuda"), False, 1, 1, 4).bytes

    assert planned(free=900, among=1) == 450
    assert planned(free=900, among=5) == 100
    assert planned(free=150, among=5) == 75
