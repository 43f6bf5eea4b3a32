"""kill -9 at any moment: a real process is killed twenty times and the run still ends as if nothing had happened.

Importing torch takes seconds, so this file is also a program: it has kinfolk already and forks a process for every
life of the run. Some are killed from outside at random instants, some kill themselves at a chosen system call.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from conftest import tiny_experiment
from kinfolk import cli
from kinfolk.data import catalog
from kinfolk.experiment import read_result
from kinfolk.runs import checkpoint
from kinfolk.runs.graph import read_graph
from processes import finished

ROUNDS, EVERY, KILLS = 125, 2, 20  # a life is killed within six rounds
HOW = ["fsync", "outside", "fsync", "manifest", "outside", "rename", "fsync", "remove"]  # over and over
RUN = Path("killed")


def test_a_run_that_is_killed_twenty_times_ends_as_if_nothing_had_happened() -> None:
    sections = tiny_experiment(
        data={"clients": 6, "train": 10, "test": 10},
        run={"rounds": ROUNDS, "evaluate_every": 1, "checkpoint_every": EVERY},
    )
    Path("tiny.toml").write_text(tomli_w.dumps(sections), encoding="utf-8")
    ended = finished(__file__)
    assert ended.code == 0, ended.err
    lives = json.loads(ended.out)
    assert len(lives) == KILLS
    assert lives[-1]["saved"] > 0
    for before, after in itertools.pairwise(lives):
        assert after["saved"] >= before["saved"], "a checkpoint was lost"
    for life in lives:
        assert life["measured"] - life["saved"] <= EVERY, "more was lost than the rounds since the last checkpoint"
    assert sum(life["half_written"] for life in lives) >= 3, "too few were killed inside the write of a checkpoint"
    assert_same_run(Path("straight"), RUN)
    assert not [path for path in Path().rglob("*") if ".tmp-" in path.name], "something half written stayed behind"


def assert_same_run(a: Path, b: Path) -> None:
    one, two = read_result(a), read_result(b)
    for rows in zip(one.metrics, two.metrics, strict=True):
        first, second = ({key: value for key, value in row.items() if key != "seconds"} for row in rows)
        assert first == second
    assert one.clients == two.clients
    assert torch.equal(one.weights(), two.weights())
    first_graph, second_graph = read_graph(a), read_graph(b)
    assert len(first_graph.round) > 0
    for column in ("round", "client", "neighbor", "weight"):
        assert np.array_equal(getattr(first_graph, column), getattr(second_graph, column))


# -- the program -------------------------------------------------------------------------------------------------


def live_and_die_twenty_times() -> None:
    """Print one JSON line: after every kill, the last round saved, the last measured, and what was half written."""
    torch.set_num_threads(1)  # before any parallel work: a fork does not take threads along
    catalog.load("digits")  # imports scikit-learn, once
    draws = random.Random(7)
    lives: list[dict[str, Any]] = []
    while len(lives) < KILLS:
        how = HOW[len(lives) % len(HOW)]
        child = born(["resume", str(RUN)] if RUN.exists() else ["run", "tiny.toml", "--out", str(RUN)], how, draws)
        if how == "outside":
            wait_for_rounds(draws.randint(0, 3))
            time.sleep(draws.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise SystemExit(f"life {len(lives)} ({how}) was not killed: status {status}")
        lives.append(state())
    for words in (["resume", str(RUN)], ["run", "tiny.toml", "--out", "straight"]):
        _, status = os.waitpid(born(words, "old age", draws), 0)
        if status:
            raise SystemExit(f"{words} ended with status {status}")
    print(json.dumps(lives))


def born(words: list[str], how: str, draws: random.Random) -> int:
    """Start a process that runs the command line, and that kills itself in the way `how`."""
    number = draws.randint(1, 25 if how == "fsync" and RUN.exists() else 3)  # the first dies making the folder
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        arm(how, number)
        sys.argv = ["kinfolk", *words]
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            sys.stderr = open("log.txt", "a", encoding="utf-8")  # noqa: SIM115  read when a test fails
            cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def arm(how: str, number: int) -> None:
    """At the `number`-th time, die: at any write to the disk; or in the write of a checkpoint, with its tensors
    written and its manifest not; or when it has just got its name; or when the one before last has lost its own."""
    if how == "fsync":
        os.fsync = dying(os.fsync, number, before=lambda _: True)
    elif how == "manifest":
        checkpoint.write_synced = dying(
            checkpoint.write_synced, number, before=lambda path, *_: path.name == checkpoint.MANIFEST
        )
    elif how == "rename":
        os.rename = dying(os.rename, number, after=lambda _, new: new.name.startswith("round-"))
    elif how == "remove":
        os.rename = dying(os.rename, number, after=lambda old, _: old.name.startswith("round-"))


def dying(
    real: Callable[..., Any],
    number: int,
    before: Callable[..., bool] = lambda *_: False,
    after: Callable[..., bool] = lambda *_: False,
) -> Callable[..., Any]:
    left = number

    def call(*arguments: Any) -> Any:
        nonlocal left
        left -= before(*arguments)
        if left > 0:
            result = real(*arguments)
            left -= after(*arguments)
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


def measured() -> int:
    metrics = RUN / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for_rounds(count: int) -> None:
    """Until a life has done `count` rounds, or has had enough time to."""
    first, end = measured(), time.monotonic() + 20
    while measured() < first + count and time.monotonic() < end:
        time.sleep(0.001)


def state() -> dict[str, Any]:
    """What a reader finds after a kill. A folder that cannot be read ends this program."""
    if not RUN.exists():
        return {"saved": 0, "measured": 0, "half_written": 0}
    half_written = len(list((RUN / "checkpoint").glob(".round-*.tmp-*")))
    sys.argv = ["kinfolk", "show", str(RUN), "--json"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main()
    facts = json.loads(printed.getvalue())
    rounds = [row["round"] for row in facts["metrics"]]
    assert rounds == list(range(1, len(rounds) + 1))
    return {"saved": facts["round"], "measured": len(rounds), "half_written": half_written}


if __name__ == "__main__":
    live_and_die_twenty_times()
