"""Memory that is freed in one round and asked for again in the next.

glibc gets every large piece anew from the kernel, which fills it with zeros page by page, and gives it back when it is
freed. Models, updates and means of all clients are such pieces, several of them in every round, and with small nets on
a CPU that takes up to a third of a round's time. So while rounds are done, freed memory stays with the process.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # what mallopt calls them
KEPT = {MMAP_MAX: 0, TRIM_THRESHOLD: -1}  # nothing comes from the kernel by itself, and nothing goes back
# What glibc has at first, but for the sizes from which on a piece comes from the kernel by itself and free memory goes
# back: these grow as a program asks for more and stop growing when they are set, so these are the largest it takes.
USUAL = {MMAP_MAX: 65_536, MMAP_THRESHOLD: 32 * 2**20, TRIM_THRESHOLD: 64 * 2**20}

_lock = threading.Lock()
_runs = 0


@contextmanager
def kept(device: torch.device, spare: bool = False) -> Iterator[None]:
    """Freed memory stays with the process, where rounds are done on a CPU and its C library is glibc; not if it is to
    be spared: few large pieces of many sizes leave gaps (a third more memory, measured with FedCG)."""
    library = _glibc() if device.type == "cpu" and not spare else None
    if library is None:
        yield
        return
    _count(library, 1)
    try:
        yield
    finally:
        _count(library, -1)


def _count(library: ctypes.CDLL, more: int) -> None:
    """One run more, or less; the first one sets how memory is had, and the last one gives back what is free."""
    global _runs
    with _lock:
        before, _runs = _runs, _runs + more
        if before and _runs:
            return
        for name, value in (KEPT if _runs else USUAL).items():
            library.mallopt(name, value)
        if not _runs:
            library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if library is not None and hasattr(library, "gnu_get_libc_version") else None
