"""How much to do at a time: clients in a chunk, chunks side by side, threads in each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kinfolk.kernels.dispatch import TOGETHER

# Bytes a chunk of clients may use on a CPU: the parameters, gradients and activations of a chunk are touched at every
# local step, so they should stay in the last-level cache of an ordinary machine (measured in benchmarks/training.py).
CACHE = 48 * 2**20
SMALL = 10_000_000  # multiplications of a step below which one CPU thread is enough


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Meanwhile this GPU is the current one of the thread, on which programs are launched."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


class Room:
    """What the machine has for a cohort's models."""

    among = 1  # processes that share the GPU: see `kinfolk.parallel`

    def __init__(self, device: torch.device, concurrent: bool, size: int, kept: int, width: int) -> None:
        """concurrent: whether several threads may compute at a time; size: numbers of a model; kept: numbers that each
        sample in flight takes; width: bytes of a number."""
        self.device = device
        self.concurrent = concurrent
        self.size, self.kept, self.width = size, kept, width
        self.bytes = CACHE if device.type == "cpu" else self._share(*torch.cuda.mem_get_info(device)) // 2

    def _share(self, free: int, total: int) -> int:
        """Bytes of a GPU that are for this process: what is free, but no more than its part where others are at work,
        who may not have taken theirs yet."""
        return min(free, total // self.among)

    def fitting(self, numbers: int, samples: int, clients: int, workers: int) -> int:
        """How many of the clients (or models) go into a chunk, when each needs `numbers` and keeps `samples` in flight.

        Workers share the room, and each should have something to do.
        """
        each = (numbers + samples * self.kept) * self.width
        most = clients if self.device.type == "cpu" else TOGETHER
        return max(1, min(self.bytes // (workers * each), -(-clients // workers), most))

    def workers(self, clients: int, samples: int) -> int:
        """How many chunks to work on at a time: as many as torch has threads, unless a step is small."""
        threads = torch.get_num_threads() if self.device.type == "cpu" and self.concurrent else 1
        return 1 if clients * samples * self.size < SMALL else min(threads, clients)

    @contextmanager
    def threads(self, samples: int) -> Iterator[None]:
        """One thread for our own passes, whether chunks go side by side or there is but one: how many threads share a
        product changes its last bits, and results must not depend on who else is in the cohort. One thread for others
        on few samples: waking a second one costs more than it brings, and on a busy machine the two wait for each other
        (measured: three times slower)."""
        before = torch.get_num_threads()
        small = self.concurrent or samples * self.size < SMALL
        single = self.device.type == "cpu" and before > 1 and small
        if single:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if single:
                torch.set_num_threads(before)
