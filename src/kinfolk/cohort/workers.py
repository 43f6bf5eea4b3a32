"""Chunks of clients side by side on the cores of a CPU.

Splitting every operation between cores makes them wait for each other a hundred times per step, and on a busy machine
that is most of the time. Here each core has a chunk of clients to itself, from their first step to their last, and
works on it with operations of one thread. Operations let go of Python's lock, so threads are enough.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], workers: int) -> list[Result]:
    """work(item) for every item, in order, `workers` at a time; one worker: here, with the threads that are set.

    After a failure nothing more is begun, and the failure of the first such item is told when the others have ended.
    """
    if workers <= 1 or len(items) <= 1:
        return [work(item) for item in items]
    found: dict[int, Result] = {}
    failed: dict[int, BaseException] = {}
    left, lock = deque(range(len(items))), threading.Lock()

    def following() -> int | None:
        with lock:
            return left.popleft() if left else None

    def stop() -> None:
        with lock:
            left.clear()

    def take() -> None:
        torch.get_num_threads()  # asked for the first time, a thread takes the last number set anywhere: not later,
        torch.set_num_threads(1)  # then, when that may be another one
        while (number := following()) is not None:
            try:
                found[number] = work(items[number])
            except BaseException as error:
                failed[number] = error
                stop()

    before = torch.get_num_threads()
    others: list[Future[None]] = []
    try:
        _helpers.call(take, min(workers, len(items)) - 1, others)
        take()  # this thread is one of the workers: there is one less to wake, and its memory is at hand
    finally:
        stop()  # only an interrupt leaves anything
        try:  # what has begun must not go on unseen; what has not may wait for this very call, inside another
            wait([other for other in others if not other.cancel()])
        finally:
            torch.set_num_threads(before)  # a thread's number is its own, but threads to come inherit the last one set
    if failed:
        raise failed.pop(min(failed, key=lambda number: (isinstance(failed[number], Exception), number)))
    return [found[number] for number in range(len(items))]


class _Helpers:
    """Threads that stay: new ones at every call would have to ask for all their memory anew.

    There are as many as the call that wanted most of them did. Callers at the same time share them, and do themselves
    what no helper comes to.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, without a thread."""
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._count = 0

    def call(self, task: Callable[[], None], count: int, into: list[Future[None]]) -> None:
        """Have the task done `count` times; what becomes of it is put `into` the list one by one."""
        with self._lock:
            if self._pool is None or count > self._count:
                if self._pool is not None:
                    self._pool.shutdown(wait=False)  # its threads end when they have done what they were called for
                self._pool, self._count = ThreadPoolExecutor(count, "kinfolk"), count
            for _ in range(count):
                into.append(self._pool.submit(task))


_helpers = _Helpers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.forget)  # a forked process has none of the threads


def span_of(rows: Tensor) -> slice | None:
    """The rows as a slice, if they follow one another."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == rows.numel() and bool((rows[1:] > rows[:-1]).all()):
        return slice(first, last + 1)
    return None
