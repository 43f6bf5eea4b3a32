import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from faulty_disk import FAULTS, REMOVALS, strike_everywhere, temporaries
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfolk.errors import UserError
from kinfolk.runs.graph import Graph, GraphLog, read_graph

Rows = list[tuple[int, int, int, float]]


def rows_of(round: int, count: int = 3) -> Rows:
    return [(round, client, (client + round) % 7, 0.5 / (client + 1)) for client in range(count)]


def add(log: GraphLog, round: int, count: int = 3) -> Rows:
    rows = rows_of(round, count)
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4)
    log.add(round, columns[:, 1].astype(np.int64), columns[:, 2].astype(np.int64), columns[:, 3])
    return rows


def as_rows(graph: Graph) -> Rows:
    assert (graph.round.dtype, graph.client.dtype, graph.neighbor.dtype) == (np.int32, np.int32, np.int32)
    assert graph.weight.dtype == np.float32
    columns = (graph.round, graph.client, graph.neighbor, graph.weight)
    return list(zip(*(column.tolist() for column in columns)))


def same(found: Graph, expected: Rows) -> bool:
    return as_rows(found) == [(a, b, c, float(np.float32(d))) for a, b, c, d in expected]


def flushed(folder: Path, *parts: range) -> Rows:
    """A run whose rounds lie in these parts."""
    folder.mkdir(parents=True, exist_ok=True)
    log, rows = GraphLog(folder), []
    for part in parts:
        for round in part:
            rows += add(log, round)
        log.flush()
    return rows


def parts_of(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "graph")) if (folder / "graph").exists() else []


def test_rows_come_back_from_parts_and_from_the_merged_file(tmp_path: Path) -> None:
    rows = flushed(tmp_path, range(1, 11), range(11, 13))
    assert parts_of(tmp_path) == ["rounds-00000001-00000010.npz", "rounds-00000011-00000012.npz"]
    assert same(read_graph(tmp_path), rows)
    GraphLog(tmp_path).finish()
    assert os.listdir(tmp_path) == ["graph.npz"]
    assert same(read_graph(tmp_path), rows)
    with np.load(tmp_path / "graph.npz", allow_pickle=False) as plain:  # as a user reads it
        assert sorted(plain.files) == ["client", "neighbor", "round", "weight"]
        assert plain["round"].tolist() == [row[0] for row in rows]


def test_nothing_logged_is_an_empty_graph(tmp_path: Path) -> None:
    assert same(read_graph(tmp_path), [])
    log = GraphLog(tmp_path)
    add(log, 1, count=0)
    log.flush()
    log.truncate(5)
    log.finish()
    assert os.listdir(tmp_path) == ["graph.npz"]
    assert same(read_graph(tmp_path), [])


def test_flushed_rows_leave_memory_and_pending_ones_are_copies(tmp_path: Path) -> None:
    log = GraphLog(tmp_path)
    weight = np.ones(2)
    log.add(1, np.array([0, 1]), np.array([1, 0]), weight)
    weight[:] = 9
    log.flush()
    assert log._pending == []
    assert read_graph(tmp_path).weight.tolist() == [1, 1]


def test_a_round_on_the_disk_is_closed(tmp_path: Path) -> None:
    flushed(tmp_path, range(1, 4))
    log = GraphLog(tmp_path)
    with pytest.raises(ValueError, match="round 3 of the graph is already on the disk"):
        add(log, 3)
    add(log, 5)
    add(log, 5)  # a second shard of the same round
    with pytest.raises(ValueError, match="comes after"):
        add(log, 4)
    with pytest.raises(ValueError, match="one entry per edge"):
        log.add(6, np.arange(2), np.arange(3), np.ones(2))


def test_a_finished_run_can_go_on(tmp_path: Path) -> None:
    rows = flushed(tmp_path, range(1, 6))
    GraphLog(tmp_path).finish()
    rows += flushed(tmp_path, range(6, 9))
    assert same(read_graph(tmp_path), rows)
    GraphLog(tmp_path).finish()
    assert same(read_graph(tmp_path), rows)
    GraphLog(tmp_path).truncate(4)
    assert same(read_graph(tmp_path), [row for row in rows if row[0] <= 4])


def test_parts_that_were_merged_but_not_removed_add_nothing(tmp_path: Path) -> None:
    rows = flushed(tmp_path, range(1, 6), range(6, 9))
    flushed(tmp_path / "copy", range(1, 6), range(6, 9))
    GraphLog(tmp_path / "copy").finish()
    (tmp_path / "copy" / "graph.npz").rename(tmp_path / "graph.npz")
    assert len(parts_of(tmp_path)) == 2
    assert same(read_graph(tmp_path), rows)
    rows += flushed(tmp_path, range(9, 11))  # and the run goes on
    assert same(read_graph(tmp_path), rows)
    GraphLog(tmp_path).finish()
    assert same(read_graph(tmp_path), rows)
    assert parts_of(tmp_path) == []


def test_truncate_rewrites_the_part_that_straddles(tmp_path: Path) -> None:
    rows = flushed(tmp_path, range(1, 6), range(6, 11), range(11, 16))
    log = GraphLog(tmp_path)
    add(log, 16)
    log.truncate(8)
    assert parts_of(tmp_path) == ["rounds-00000001-00000005.npz", "rounds-00000006-00000008.npz"]
    rows = [row for row in rows if row[0] <= 8] + add(log, 9)
    log.flush()
    assert same(read_graph(tmp_path), rows)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("aaaftnr"), st.integers(0, 4)), max_size=16))
def test_any_order_of_operations_keeps_exactly_the_rows_it_should(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        log, rows, pending, round = GraphLog(folder), [], [], 0
        for step, number in steps:
            if step == "a":
                round += 1 + number // 4
                pending += add(log, round, count=number)
            elif step == "f":
                log.flush()
            elif step == "t":
                round = max(0, round - number)
                log.truncate(round)
                pending = [row for row in pending if row[0] <= round]
                rows = [row for row in rows if row[0] <= round]
            elif step == "n":
                log.finish()
            else:  # the process ends and another one resumes
                log, pending = GraphLog(folder), []
            if step in "fn":
                rows, pending = rows + pending, []
            assert same(read_graph(folder), rows)
        log.finish()
        assert same(read_graph(folder), rows + pending)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_flush_keeps_what_was_flushed(tmp_path: Path, fault: str) -> None:
    def prepare(at: int) -> tuple[GraphLog, Rows, Rows]:
        folder = tmp_path / str(at)
        rows = flushed(folder, range(1, 4))
        log = GraphLog(folder)
        return log, rows, add(log, 4) + add(log, 5)

    for (log, old, new), _ in strike_everywhere(fault, prepare, lambda subject: subject[0].flush()):
        found = read_graph(log.folder)
        assert same(found, old) or same(found, old + new)
        if fault in ("full", "broken"):
            assert temporaries(log.folder) == []
            log.flush()  # the disk is well again
            assert same(read_graph(log.folder), old + new)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("finished_before", [False, True])
def test_fault_in_finish_loses_no_row(tmp_path: Path, fault: str, finished_before: bool) -> None:
    rows = flushed(tmp_path / "begin", range(1, 4))
    if finished_before:
        GraphLog(tmp_path / "begin").finish()
    rows += flushed(tmp_path / "begin", range(4, 6), range(6, 8))

    def prepare(at: int) -> Path:
        return Path(shutil.copytree(tmp_path / "begin", tmp_path / str(at)))

    for folder, struck in strike_everywhere(fault, prepare, lambda folder: GraphLog(folder).finish()):
        assert same(read_graph(folder), rows)
        if fault in ("full", "broken"):
            assert temporaries(folder) == [] or struck in REMOVALS
        GraphLog(folder).finish()
        assert same(read_graph(folder), rows)
        assert parts_of(folder) == [] or fault in ("crash", "power")  # a temporary of the dead may be there


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("last", [3, 7])
def test_fault_in_truncate_keeps_the_rounds_that_stay(tmp_path: Path, fault: str, last: int) -> None:
    """Round 3 lies in the merged file, round 7 in a part."""

    rows = flushed(tmp_path / "begin", range(1, 6))
    GraphLog(tmp_path / "begin").finish()
    rows += flushed(tmp_path / "begin", range(6, 10), range(10, 12))
    kept = [row for row in rows if row[0] <= last]

    def prepare(at: int) -> Path:
        return Path(shutil.copytree(tmp_path / "begin", tmp_path / str(at)))

    for folder, _ in strike_everywhere(fault, prepare, lambda folder: GraphLog(folder).truncate(last)):
        found = as_rows(read_graph(folder))
        assert len(found) == len(set(found)), "a straddling part was counted twice"
        assert [row[:3] for row in found][: len(kept)] == [row[:3] for row in kept]
        GraphLog(folder).truncate(last)
        assert same(read_graph(folder), kept)


def test_damage_is_said_with_the_file(tmp_path: Path) -> None:
    flushed(tmp_path, range(1, 4))
    part = tmp_path / "graph" / "rounds-00000001-00000003.npz"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"rounds-00000001-00000003\.npz is damaged"):
        read_graph(tmp_path)
    part.write_bytes(whole)
    part.rename(part.with_name("rounds-some.npz"))
    with pytest.raises(UserError, match="not a part of a graph"):
        read_graph(tmp_path)


def test_a_reader_survives_a_run_that_finishes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kinfolk.runs import graph

    rows = flushed(tmp_path, range(1, 4), range(4, 6))
    real = graph._sources

    def listed_just_before(folder: Path) -> list[graph._Source]:
        sources = real(folder)
        monkeypatch.undo()
        GraphLog(folder).finish()
        return sources

    monkeypatch.setattr(graph, "_sources", listed_just_before)
    assert same(read_graph(tmp_path), rows)
