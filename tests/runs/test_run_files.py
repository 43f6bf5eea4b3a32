import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from faulty_disk import FAULTS, strike_everywhere, temporaries

from kinfolk.errors import UserError
from kinfolk.runs import files


def test_bytes_and_writers_replace_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_atomically(path, b"one")
    assert path.read_bytes() == b"one"
    files.write_atomically(path, lambda file: file.write(b"two"))
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_writer_that_raises_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def writer(file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(path, writer)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_anywhere_leaves_the_old_or_the_new_file(tmp_path: Path, fault: str) -> None:
    old, new = b"old" * 1000, b"new" * 2000

    def prepare(at: int) -> Path:
        path = tmp_path / str(at) / "a.bin"
        path.parent.mkdir()
        path.write_bytes(old)
        return path

    seen = set()
    for path, _ in strike_everywhere(fault, prepare, lambda path: files.write_atomically(path, new)):
        assert path.read_bytes() in (old, new)
        seen.add(path.read_bytes())
        if fault in ("full", "broken"):
            assert temporaries(path.parent) == []
    assert old in seen


def test_append_adds_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    files.append_line(path, "one")
    files.append_line(path, "zwei ü", sync=True)
    assert path.read_text() == "one\nzwei ü\n"
    with pytest.raises(ValueError):
        files.append_line(path, "three\nfour")


@pytest.mark.parametrize("fault", ["full", "broken"])
def test_failed_append_leaves_no_half_line(tmp_path: Path, fault: str) -> None:
    def prepare(at: int) -> Path:
        path = tmp_path / str(at)
        path.write_text("one\n")
        return path

    def append(path: Path) -> None:
        for number in range(3):
            files.append_line(path, f"line {number}", sync=True)

    whole = "one\nline 0\nline 1\nline 2\n"
    for path, _ in strike_everywhere(fault, prepare, append):
        text = path.read_text()
        assert text.endswith("\n")
        assert whole.startswith(text)


def test_sweep_removes_what_dead_processes_left_and_nothing_else(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    living = os.getppid()
    mine = files.temporary_for(tmp_path / "a").name
    stay = [".a.tmp-notes", "a.tmp-1", f".a.tmp-{living}-00000000-0", mine]
    go = [
        f".a.tmp-{process.pid}-00000000-0",
        f".b.tmp-{os.getpid()}-00000000-7",  # our process id, of an earlier life
        ".c.tmp-99999999999-00000000-1",
    ]
    for name in stay + go[:2]:
        (tmp_path / name).write_text("x")
    (tmp_path / go[2]).mkdir()
    (tmp_path / go[2] / "inner").write_text("x")
    files.sweep(tmp_path, "b")
    assert sorted(os.listdir(tmp_path)) == sorted([*stay, go[0], go[2]])
    files.sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(stay)
    files.sweep(tmp_path / "missing")


def test_temporary_names_never_repeat_and_are_recognised(tmp_path: Path) -> None:
    names = {files.temporary_for(tmp_path / "a.b") for _ in range(100)}
    assert len(names) == 100
    assert all(files.is_temporary(name) and name.parent == tmp_path for name in names)


def test_strict_json_has_no_nan_and_takes_array_scalars() -> None:
    numbers = [np.float32(0.5), np.int64(3), np.float64("inf")]
    text = files.strict_json({"a": float("nan"), "b": numbers, "c": torch.tensor(2.5), 4: None})
    plain = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert plain == {"a": None, "b": [0.5, 3, None], "c": 2.5, "4": None}


def test_lock_names_its_owner_and_goes_with_its_descriptor(tmp_path: Path) -> None:
    descriptor = files.lock(tmp_path)
    with pytest.raises(UserError, match=f"is being written by another process \\(id {os.getpid()}\\)"):
        files.lock(tmp_path)
    os.close(descriptor)
    os.close(files.lock(tmp_path))
