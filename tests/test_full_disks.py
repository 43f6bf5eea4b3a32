"""Full disks: one line, and nothing that was saved is lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from conftest import Command
from kinfolk.experiment import read_result
from processes import ended, start
from test_bad_input import write


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KINFOLK_DATA", str(tmp_path / "data"))
    write("tiny.toml")


@pytest.mark.parametrize("calls", range(1, 30, 4))
def test_a_full_disk_is_one_line_and_loses_nothing_that_was_saved(
    command: Command, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    real, left = os.fsync, [calls]

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fsync)
        ended = command("run", "tiny.toml", "run.rounds=4", "--out", "here")
    assert (ended.code, ended.out) == (2, "")
    assert "disk is full while writing here" in ended.message
    if "no round is saved yet" in ended.message:
        shutil.rmtree("here", ignore_errors=True)
        command("run", "tiny.toml", "run.rounds=4", "--out", "here")
    else:
        saved = json.loads(command("show", "here", "--json").out)["round"]
        assert f"the run is safe up to round {saved}; free space and `kinfolk resume here`" in ended.message
        assert command("resume", "here").code == 0
    command("run", "tiny.toml", "run.rounds=4", "--out", "straight")
    assert torch.equal(read_result(Path("here")).weights(), read_result(Path("straight")).weights())


def test_a_file_that_the_system_refuses_to_make_larger_is_one_line(command: Command) -> None:
    """A real error of the operating system, which needs no disk of its own to be full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        ended = command("run", "tiny.toml", "model.hidden=64", "--out", "here")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ended.code == 2
    assert "file too large while writing here/checkpoint/round-00000001" in ended.message
    assert "no round is saved yet" in ended.message
    assert command("show", "here", "--json").code == 0
    assert command("resume", "here").code == 0


def test_a_disk_that_is_really_full_is_one_line(command: Command) -> None:
    Path("small").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", "small"], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    try:
        ended = command("run", "tiny.toml", "model.hidden=32", "run.rounds=40", "--out", "small/run")
        shown = command("show", "small/run", "--json")
    finally:
        subprocess.run(["umount", "small"], check=True)
    assert ended.code == 2
    assert "disk is full while writing small/run" in ended.message
    assert json.loads(shown.out)["status"] == "unfinished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_full_disk_under_standard_output_is_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full, open("err", "w", encoding="utf-8") as err:
        process = start("kinfolk", "list", "--json", out=full.fileno(), err=err.fileno())
        assert ended(process) == 2
    assert Path("err").read_text(encoding="utf-8") == "kinfolk: disk is full\n"
