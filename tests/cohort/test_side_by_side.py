"""Chunks side by side: on threads that stay, each with operations of one thread."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from kinfolk.cohort import workers
from kinfolk.cohort.room import Room
from kinfolk.cohort.workers import side_by_side


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "_helpers", workers._Helpers())
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def together(count: int) -> tuple[set[int], list[int]]:
    """Threads that worked on `count` items at the same time, and how many threads each gave an operation."""
    barrier = threading.Barrier(count, timeout=20)

    def work(item: int) -> tuple[int, int]:
        barrier.wait()  # nobody takes two
        return threading.get_ident(), torch.get_num_threads()

    found = side_by_side(work, range(count), count)
    return {thread for thread, _ in found}, [number for _, number in found]


def elsewhere(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_results_come_in_order_and_the_number_of_threads_is_left_alone() -> None:
    assert side_by_side(lambda item: item * item, range(20), 3) == [item * item for item in range(20)]
    assert torch.get_num_threads() == 3


def test_the_same_threads_work_every_time_and_give_an_operation_one_thread() -> None:
    first, numbers = together(3)
    assert numbers == [1, 1, 1]
    torch.set_num_threads(2)  # by the user, meanwhile
    torch.set_num_threads(3)
    again, numbers = together(3)
    assert numbers == [1, 1, 1]
    assert again == first
    assert threading.get_ident() in first


def test_a_thread_keeps_to_one_thread_whatever_is_set_elsewhere_and_threads_to_come_take_the_users_number() -> None:
    barrier = threading.Barrier(2, timeout=20)
    seen: list[int] = []

    def work(item: int) -> int:
        barrier.wait()  # both have begun
        if item == 0:
            elsewhere(lambda: torch.set_num_threads(2)).join()
        barrier.wait()
        return torch.get_num_threads()

    assert side_by_side(work, range(2), 2) == [1, 1]
    elsewhere(lambda: seen.append(torch.get_num_threads())).join()
    assert seen == [3]


def test_no_more_threads_are_kept_than_the_most_that_were_wanted_at_a_time() -> None:
    before = set(threading.enumerate())
    for count in (2, 4, 3, 2, 4):
        together(count)
        side_by_side(abs, range(2), 50)  # which wants but one beside the caller
    deadline = time.monotonic() + 20
    while len(set(threading.enumerate()) - before) > 3 and time.monotonic() < deadline:
        time.sleep(0.01)  # those of the first call end by themselves
    assert len(set(threading.enumerate()) - before) == 3


def test_calls_inside_a_call_do_not_wait_for_each_other() -> None:
    found: list[list[list[int]]] = []
    barrier = threading.Barrier(2, timeout=20)

    def outer(item: int) -> list[int]:
        if item < 2:
            barrier.wait()  # the only helper is busy with one of them, and calls too
        return side_by_side(lambda inner: 10 * item + inner, range(4), 2)

    thread = elsewhere(lambda: found.append(side_by_side(outer, range(4), 2)))
    thread.join(20)
    assert found == [[[10 * item + inner for inner in range(4)] for item in range(4)]]


def test_callers_at_the_same_time_do_not_wait_for_each_other() -> None:
    busy, go_on = threading.Event(), threading.Event()
    first = threading.Barrier(2, timeout=20)

    def long(item: int) -> None:
        first.wait()
        busy.set()
        assert go_on.wait(20)

    thread = elsewhere(lambda: side_by_side(long, range(2), 2))
    assert busy.wait(20)
    found: list[list[int]] = []
    other = elsewhere(lambda: found.append(side_by_side(abs, range(4), 2)))
    other.join(20)
    assert found == [[0, 1, 2, 3]]  # while the only helper was the first one's
    go_on.set()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("mine", [True, False], ids=["the caller's", "another's"])
def test_a_failure_stops_what_has_not_begun_and_is_told_when_the_rest_has_ended(mine: bool) -> None:
    caller, begun, ended = threading.get_ident(), [], []
    barrier, failed = threading.Barrier(2, timeout=20), threading.Event()

    def work(item: int) -> None:
        begun.append(item)
        if item < 2:
            barrier.wait()
        if (threading.get_ident() == caller) == mine:
            failed.set()
            raise IndexError(f"item {item}")
        failed.wait(20)
        torch.ones(1000, 1000).sum()
        ended.append(item)

    with pytest.raises(IndexError, match="item"):
        side_by_side(work, range(1000), 2)
    assert len(ended) == len(begun) - 1
    assert len(begun) < 1000
    assert torch.get_num_threads() == 3
    assert side_by_side(abs, range(4), 2) == [0, 1, 2, 3]


@pytest.mark.parametrize("late", [0, 1])
def test_of_several_failures_that_of_the_first_item_is_told(late: int) -> None:
    both, failed = threading.Barrier(2, timeout=20), threading.Event()

    def work(item: int) -> None:
        both.wait()
        if item == late:
            failed.wait(20)
        failed.set()
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        side_by_side(work, range(2), 2)


def test_an_interrupt_stops_everybody_and_is_told_whatever_else_failed() -> None:
    caller, ended = threading.get_ident(), []
    both, interrupted = threading.Barrier(2, timeout=20), threading.Event()

    def work(item: int) -> None:
        if item < 2:
            both.wait()
        if threading.get_ident() == caller:
            try:
                _thread.interrupt_main()
                for _ in range(10**6):
                    pass
            finally:
                interrupted.set()
        else:
            interrupted.wait(20)
            ended.append(item)
            raise ValueError(f"item {item}")

    with pytest.raises(KeyboardInterrupt):
        side_by_side(work, range(1000), 2)
    assert len(ended) == 1
    assert torch.get_num_threads() == 3
    assert side_by_side(abs, range(4), 2) == [0, 1, 2, 3]


def test_the_threads_do_not_keep_a_program_from_ending() -> None:
    lines = "from kinfolk.cohort.workers import side_by_side; print(side_by_side(abs, range(4), 3))"
    found = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "[0, 1, 2, 3]\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads: what is tested
def test_a_forked_process_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the threads that a fork has to forget
    together(2)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if len(together(2)[0]) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_chunk_on_a_gpu_is_no_wider_than_programs_can_be_launched() -> None:
    room = Room(torch.device("cpu"), concurrent=True, size=10, kept=1, width=4)
    room.bytes = 2**40
    assert room.fitting(1, 1, 150_000, 1) == 150_000
    room.device = torch.device("cuda")
    assert room.fitting(1, 1, 150_000, 1) == 65_535
    assert room.fitting(1, 1, 150, 1) == 150
