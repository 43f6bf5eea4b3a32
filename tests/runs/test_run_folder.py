import json
import math
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_disk import FAULTS, FaultyDisk, strike_everywhere, temporaries
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfolk.errors import UserError
from kinfolk.runs import checkpoint, files
from kinfolk.runs.folder import RunFolder, free_path
from kinfolk.runs.graph import read_graph
from kinfolk.runs.tables import from_csv, to_csv
from kinfolk.version import __version__
from processes import ended, finished, start

CONFIG = {
    "data": {"name": "digits", "clients": 10, "split": {"kind": "rotation", "clusters": 2}},
    "run": {"rounds": 30, "seed": 0, "note": None},
}


def make(path: Path) -> RunFolder:
    return RunFolder.create(path, CONFIG, {"device": "cpu"})


def test_config_and_facts_come_back(tmp_path: Path) -> None:
    with make(tmp_path / "deep" / "run") as run:
        assert run.config() == {**CONFIG, "run": {"rounds": 30, "seed": 0}}
        facts = run.facts()
    assert sorted(facts) == ["command", "created", "device", "python", "torch", "version"]
    assert facts["version"] == __version__
    assert facts["device"] == "cpu"
    assert facts["created"].endswith("+00:00")
    assert temporaries(tmp_path) == []


def test_existing_content_is_never_touched(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    with pytest.raises(UserError, match=r"already holds a run; `kinfolk resume .*run` goes on with it"):
        make(tmp_path / "run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        make(tmp_path / "notes")
    assert os.listdir(tmp_path / "notes") == ["a.txt"]
    with pytest.raises(UserError, match="is a file"):
        make(tmp_path / "notes" / "a.txt")


def test_an_empty_folder_can_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    make(tmp_path / "run").close()
    assert RunFolder.open(tmp_path / "run").status().rounds == 30
    (tmp_path / "linked").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    make(tmp_path / "link").close()
    assert (tmp_path / "linked" / "config.toml").exists()


def test_what_is_not_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        RunFolder.open(tmp_path / "missing")
    with pytest.raises(UserError, match=r"not a run folder: it has no config\.toml"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.toml").write_text("[run]\nrounds = 3\n")
    with pytest.raises(UserError, match=r"no table \[kinfolk\]"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.toml").write_text("[run\n")
    with pytest.raises(UserError, match=r"config\.toml is not TOML"):
        RunFolder.open(tmp_path, write=True)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("exists", [False, True])
def test_fault_while_creating_leaves_nothing_or_a_run(
    tmp_path: Path, fault: str, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(at: int) -> Path:
        monkeypatch.undo()
        path = tmp_path / str(at) / "run"
        path.parent.mkdir()
        if exists:
            path.mkdir()
        return path

    def create(path: Path) -> None:
        make(path).close()

    outcomes = set()
    for path, _ in strike_everywhere(fault, prepare, create):
        monkeypatch.setattr(files, "_TOKEN", "0badcafe")  # as if started again
        begun = (path / "config.toml").exists()
        assert begun or exists or not path.exists()
        outcomes.add(begun)
        if fault in ("full", "broken"):
            assert temporaries(path.parent) == []
        if not begun:
            create(path)
            assert temporaries(path.parent) == []
        assert RunFolder.open(path).config()["run"]["rounds"] == 30
    assert False in outcomes


def test_metrics_come_back_as_strict_json(tmp_path: Path) -> None:
    with make(tmp_path / "run") as run:
        assert run.metrics() == []
        run.append_metrics({"round": 10, "accuracy": 0.5, "ari": math.nan, "epsilon": math.inf})
        run.append_metrics({"round": np.int64(20), "accuracy": np.float32(0.25), "name": "zwölf\n"})
        assert run.metrics() == [
            {"round": 10, "accuracy": 0.5, "ari": None, "epsilon": None},
            {"round": 20, "accuracy": 0.25, "name": "zwölf\n"},
        ]
        with pytest.raises(ValueError, match="needs its round"):
            run.append_metrics({"accuracy": 1.0})


def test_torn_last_line_is_ignored_by_readers_and_cut_on_resume(tmp_path: Path) -> None:
    with make(tmp_path / "run") as run:
        run.append_metrics({"round": 10, "accuracy": 0.5})
    path = tmp_path / "run" / "metrics.jsonl"
    whole = path.read_bytes()
    line = b'{"round": 20, "accuracy": 0.75}\n'
    for length in range(1, len(line)):
        path.write_bytes(whole + line[:length])
        assert [row["round"] for row in RunFolder.open(tmp_path / "run").metrics()] == [10]
        assert path.read_bytes() == whole + line[:length], "a reader must not write"
        with RunFolder.open(tmp_path / "run", write=True) as run:
            run.append_metrics({"round": 20, "accuracy": 0.75})
            assert [row["round"] for row in run.metrics()] == [10, 20]


def test_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with make(tmp_path / "run") as run:
        path = tmp_path / "run" / "metrics.jsonl"
        for text in ('{"round": 1}\n{"rou\n{"round": 3}\n', '{"round": 1}\n[2]\n'):
            path.write_text(text)
            with pytest.raises(UserError, match=r"metrics\.jsonl is damaged in line 2"):
                run.metrics()


def test_rewind_brings_metrics_and_graph_back_to_the_checkpoint(tmp_path: Path) -> None:
    with make(tmp_path / "run") as run:
        for round in range(1, 7):
            run.append_metrics({"round": round})
            run.graph.add(round, np.array([0]), np.array([1]), np.array([0.5]))
        run.graph.flush()
        run.rewind(4)
        assert [row["round"] for row in run.metrics()] == [1, 2, 3, 4]
        assert read_graph(run.path).round.tolist() == [1, 2, 3, 4]
        run.rewind(4)
        assert len(run.metrics()) == 4


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_while_metrics_are_cut_keeps_the_lines_that_stay(tmp_path: Path, fault: str) -> None:
    def prepare(at: int) -> RunFolder:
        run = make(tmp_path / str(at))
        for round in (1, 2, 3):
            run.append_metrics({"round": round})
        return run

    for run, _ in strike_everywhere(fault, prepare, lambda run: run.truncate_metrics(2)):
        run.close()
        assert [row["round"] for row in RunFolder.open(run.path).metrics()] in ([1, 2], [1, 2, 3])


def test_crash_while_appending_loses_at_most_that_line(tmp_path: Path) -> None:
    def prepare(at: int) -> RunFolder:
        run = make(tmp_path / str(at))
        run.append_metrics({"round": 1})
        return run

    def append(run: RunFolder) -> None:
        for round in (2, 3, 4):
            run.append_metrics({"round": round})

    for run, _ in strike_everywhere("crash", prepare, append):
        run.close()
        with RunFolder.open(run.path, write=True) as again:
            rounds = [row["round"] for row in again.metrics()]
            assert rounds == [1, 2, 3, 4][: len(rounds)]
            again.append_metrics({"round": 9})
            assert [row["round"] for row in again.metrics()] == [*rounds, 9]


def test_clients_come_back_with_their_types(tmp_path: Path) -> None:
    rows = [
        {"client": 0, "cluster": 1, "accuracy": 0.1 + 0.2, "site": 'Ward "A", north', "helped": True},
        {"client": 1, "cluster": None, "accuracy": math.nan, "site": "ü", "extra": np.float32(0.5)},
    ]
    with make(tmp_path / "run") as run:
        assert run.clients() == []
        run.write_clients(rows)
        assert run.clients() == [
            {**rows[0], "extra": None},
            {"client": 1, "cluster": None, "accuracy": None, "site": "ü", "helped": None, "extra": 0.5},
        ]
        run.write_clients([])
        assert run.clients() == []


cells = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
words = st.text("abcxyzäß ,;\"'\n", min_size=1)


@given(st.lists(words, min_size=1, max_size=4, unique=True), st.data())
def test_any_table_comes_back(columns: list[str], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.fixed_dictionaries(dict.fromkeys(columns, cells | words)), max_size=4))
    assert from_csv(to_csv(rows)) == rows


def test_status_goes_from_unfinished_to_finished_and_back(tmp_path: Path) -> None:
    with make(tmp_path / "run") as run:
        assert run.status() == ("unfinished", 0, 30)
        checkpoint.save(run.checkpoints, 20, {}, {})
        assert str(run.status()) == "unfinished, 20 of 30 rounds"
        with pytest.raises(UserError, match="unfinished, 20 of 30 rounds: no summary yet"):
            run.summary()
        run.graph.add(30, np.array([0]), np.array([1]), np.array([0.5]))
        run.finish({"accuracy": 0.5, "ari": math.nan})
        assert run.status() == ("finished", 30, 30)
        assert run.summary() == {"accuracy": 0.5, "ari": None}
        assert (run.path / "graph.npz").exists()
        run.extend(50)
        assert run.status() == ("unfinished", 20, 50)
        assert run.config()["data"] == CONFIG["data"]
        assert run.facts()["device"] == "cpu"


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path, program = tmp_path / "run", tmp_path / "writer.py"
    program.write_text("""
import sys
import time
from pathlib import Path
from kinfolk.runs.folder import RunFolder
run = RunFolder.open(Path(sys.argv[1]), write=True)
print("locked", flush=True)
time.sleep(30)
""")
    with make(path):
        refused = finished(program, str(path))
        assert f"is being written by another process (id {os.getpid()})" in refused.err
        assert RunFolder.open(path).status().state == "unfinished", "reading needs no lock"
    ours, theirs = os.pipe()
    other = start(program, str(path), out=theirs, err=theirs)
    os.close(theirs)
    with open(ours) as said:
        assert said.readline() == "locked\n"
    with pytest.raises(UserError, match=f"another process \\(id {other.pid}\\)"):
        RunFolder.open(path, write=True)
    other.kill()
    assert ended(other) == -signal.SIGKILL
    RunFolder.open(path, write=True).close()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    run = RunFolder.open(tmp_path / "run")
    for write in (
        lambda: run.append_metrics({"round": 1}),
        lambda: run.write_clients([]),
        lambda: run.finish({}),
        lambda: run.extend(40),
        lambda: run.rewind(1),
    ):
        with pytest.raises(RuntimeError, match="opened for reading"):
            write()
    assert sorted(os.listdir(run.path)) == [".lock", "config.toml"]


def test_opening_to_write_sweeps_what_the_dead_left(tmp_path: Path) -> None:
    with make(tmp_path / "run") as run:
        checkpoint.save(run.checkpoints, 1, {}, {})
    name = f".round-00000002.tmp-{os.getpid()}-00000000-0"  # our process id, of an earlier life
    (tmp_path / "run" / "checkpoint" / name).mkdir()
    (tmp_path / "run" / ".summary.json.tmp-99999999999-00000000-0").write_text("{")
    RunFolder.open(tmp_path / "run")
    assert len(temporaries(tmp_path)) == 2
    RunFolder.open(tmp_path / "run", write=True).close()
    assert temporaries(tmp_path) == []


def test_full_disk_is_said_with_the_safe_round(tmp_path: Path) -> None:
    with make(tmp_path / "run") as run:
        checkpoint.save(run.checkpoints, 10, {}, {})
        message = f"disk is full while writing .*%s; the run is safe up to round 10; .*resume {run.path}`"
        with FaultyDisk(1, "full"):
            with pytest.raises(UserError, match=message % "metrics.jsonl"):
                run.append_metrics({"round": 11})
            with pytest.raises(UserError, match=message % "clients.csv"):
                run.write_clients([{"client": 0}])
            run.graph.add(11, np.array([0]), np.array([1]), np.array([0.5]))
            with pytest.raises(UserError, match=message % "rounds-00000011-00000011.npz"):
                run.graph.flush()
        run.append_metrics({"round": 11})
        assert run.metrics() == [{"round": 11}]


def test_free_path_counts_up(tmp_path: Path) -> None:
    base = tmp_path / "panm.v1"
    assert free_path(base) == base
    base.mkdir()
    assert free_path(base) == tmp_path / "panm.v1-2"
    (tmp_path / "panm.v1-2").write_text("")
    assert free_path(base) == tmp_path / "panm.v1-3"


toml_values: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.text(), st.dictionaries(st.text(), toml_values, max_size=3), max_size=3))
def test_any_config_comes_back(config: dict[str, Any]) -> None:
    config.pop("kinfolk", None)
    with tempfile.TemporaryDirectory() as place, RunFolder.create(Path(place) / "run", config, {}) as run:
        assert json.dumps(run.config(), sort_keys=True) == json.dumps(config, sort_keys=True)


def test_cells_that_look_like_numbers_in_json_are_numbers_and_others_are_not() -> None:
    numbers = {
        "0": 0,
        "-12": -12,
        "1.5": 1.5,
        "-0.25": -0.25,
        "1e5": 1e5,
        "2E-3": 2e-3,
        "1.0": 1.0,
        "9" * 30: 10**30 - 1,
    }
    words = [
        "01",
        "+1",
        ".5",
        "1.",
        "1_000",
        "0x10",
        "NaN",
        "Infinity",
        "nan",
        "inf",
        "-",
        "1e",
        "[1]",
        '"x"',
        "none",
        "١",
    ]
    flags = {"true": True, "false": False}
    row = from_csv(to_csv([{cell: cell for cell in [*numbers, *words, *flags]}]))[0]
    assert {cell: row[cell] for cell in numbers} == numbers
    assert all(type(row[cell]) is type(value) for cell, value in numbers.items())
    assert {cell: row[cell] for cell in words} == {cell: cell for cell in words}
    assert all(row[cell] is value for cell, value in flags.items())
    assert to_csv([{"a": 0.1, "b": float("nan"), "c": True, "d": None, "e": np.float64(2.5), "f": 3}]) == (
        "a,b,c,d,e,f\n0.1,,true,,2.5,3\n"
    )
