"""Standard streams that are closed, full, or that nobody reads: the command line says one line, or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def call(stdout: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line as another process, writing to a descriptor through Python's usual buffer."""
    program = [sys.executable, "-m", "kinfolk", *words]
    return subprocess.run(program, stdout=stdout, stderr=subprocess.PIPE, env=BUFFERED, text=True, timeout=60)


@pytest.mark.parametrize("words", [("data", "ls"), ("data", "ls", "--json"), ("--help",)])
def test_a_pipe_that_nobody_reads_ends_it_without_a_word(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = call(writer, *words)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [("data", "ls"), ("data", "ls", "--json"), ("--help",)])
def test_a_full_disk_behind_standard_output_is_one_line(words: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        ended = call(full.fileno(), *words)
    assert (ended.returncode, ended.stderr) == (2, "kinfolk: disk is full\n")


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_what_is_opened_never_stands_in_for_a_closed_stream(closed: tuple[int, ...]) -> None:
    program = f"""
import os
for number in {closed}:
    os.close(number)
from kinfolk.commands import terminal
terminal.accept_streams()
assert min(os.pipe()) > 2
open("done", "w").close()
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert Path("done").exists()
