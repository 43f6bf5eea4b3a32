"""What is freed in a round stays for the next one, and goes back when the run has ended.

Each in a process of its own: how much memory comes from the kernel hangs on what a process has done before.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from kinfolk.cohort.memory import _glibc

pytestmark = pytest.mark.skipif(_glibc() is None, reason="the C library is not glibc")

BEGIN = """
import resource, threading
import torch
from kinfolk.cohort import memory
from kinfolk.cohort.memory import kept
torch.set_num_threads(1)
MB = 2**20
cpu = torch.device("cpu")
def work(size=128): torch.full((size * MB // 4,), 1.0)  # 32,768 pages, written and freed
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work(120)  # somebody else may have taken a bit of what was freed
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def resident(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
"""


def ask(lines: str) -> list[int]:
    command = [sys.executable, "-c", BEGIN + lines]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return [int(number) for number in ended.stdout.split()]


def test_what_is_freed_is_at_hand_again_while_rounds_are_done_and_goes_back_afterwards() -> None:
    again, held, left = ask("""
start = resident()
with kept(cpu):
    work()
    print(pages())
    print((resident() - start) // MB)
print((resident() - start) // MB)
""")
    assert again < 1000
    assert held > 100
    assert left < 30


def test_of_runs_inside_or_beside_each_other_the_last_gives_it_back() -> None:
    inside, held, left, usual = ask("""
start = resident()
with kept(cpu):
    with kept(cpu):
        work()
    print(pages())
    print((resident() - start) // MB)
print((resident() - start) // MB)
work()
print((resident() - start) // MB)
""")
    assert inside < 1000
    assert held > 100
    assert left < 30
    assert usual < 30


def test_threads_have_memory_too_whatever_they_ask_for() -> None:
    (size,) = ask("""
found = []
def another():
    pieces = [torch.full((size * MB // 4,), 1.0) for size in (1, 40, 70, 200)]
    found.append(sum(piece.numel() for piece in pieces) * 4 // MB)
with kept(cpu):
    thread = threading.Thread(target=another)
    thread.start()
    thread.join()
print(*found)
""")
    assert size == 311


def test_what_cannot_be_had_is_an_error_and_no_crash() -> None:
    (failed,) = ask("""
with kept(cpu):
    try:
        torch.empty(2**50)
    except RuntimeError as error:
        print(int("memory" in str(error)))
""")
    assert failed == 1


def test_with_a_gpu_nothing_is_changed() -> None:
    assert ask("""
memory._glibc = None
with kept(torch.device("cuda")):
    print(1)
""") == [1]
