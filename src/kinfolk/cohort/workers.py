"""Chunks of clients side by side on the cores of a CPU.

Splitting every operation between cores makes them wait for each other a hundred times per step, and on a busy machine
that is most of the time. Here each core has a chunk of clients to itself, from their first step to their last, and
works on it with operations of one thread. Operations let go of Python's lock, so threads are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], workers: int) -> list[Result]:
    """work(item) for every item, in order, `workers` at a time; one worker: here, with the threads that are set."""
    if workers <= 1 or len(items) <= 1:
        return [work(item) for item in items]
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "kinfolk", torch.set_num_threads, (1,))
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # a thread's number is its own, but threads to come inherit the last one set


def span_of(rows: Tensor) -> slice | None:
    """The rows as a slice, if they follow one another."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == rows.numel() and bool((rows[1:] > rows[:-1]).all()):
        return slice(first, last + 1)
    return None
