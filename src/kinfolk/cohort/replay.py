"""Work of fixed shapes on a GPU, recorded once and replayed: one launch in place of hundreds (CUDA graphs).

A step on small models is over before the next can be launched from Python, so a GPU mostly waits. The first time some
work is met it just runs, which is also its warm-up; the second time it is recorded; from then on it is replayed.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, cuda

Work = Callable[..., Tensor]  # (tensors) -> tensor; changes its first argument in place


@dataclass(frozen=True)
class Recording:
    graph: cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor
    work: Work  # keeps alive what it reads beside its inputs


class Replay:
    """Recordings by key; whatever else the work reads must stay where it is between calls with one key."""

    def __init__(self, most: int = 8) -> None:
        self.most = most  # recordings kept: each holds its memory
        self.trouble: str | None = None  # why the work could not be recorded
        self.crowded: str | None = None  # why no more than what is recorded already will be
        self.largest = 0  # bytes that one recording took
        self._met: OrderedDict[Hashable, Recording | None] = OrderedDict()

    def __call__(self, key: Hashable, work: Work, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What becomes of a copy of inputs[0], which the work changes in place, and work(copy, *inputs[1:]).

        Both may lie in a recording's own memory, where the next call with the same key puts its own.
        """
        if key not in self._met or self.trouble:
            self._met[key] = None
            while len(self._met) > self.most:
                self._met.popitem(last=False)
            return _once(work, inputs)
        self._met.move_to_end(key)
        recording = self._met[key] or self._record(key, work, inputs)
        if recording is None:
            return _once(work, inputs)
        for mine, given in zip(recording.inputs, inputs):
            mine.copy_(given, non_blocking=True)
        recording.graph.replay()
        return recording.inputs[0], recording.output

    def _record(self, key: Hashable, work: Work, inputs: tuple[Tensor, ...]) -> Recording | None:
        if self.crowded is not None:
            return None
        device = inputs[0].device
        with cuda.device(device):
            cuda.empty_cache()  # as whatever is recorded begins: it takes memory of its own
            if cuda.mem_get_info(device)[0] < 2 * self.largest:  # as much again for what is not recorded
                kept = sum(recording is not None for recording in self._met.values())
                size = f"{self.largest / 2**20:,.0f} MiB"
                self.crowded = f"{kept} recordings and one more, of {size}, would fill its memory"
                return None
            before, taken = cuda.current_stream(device), cuda.memory_reserved(device)
            try:
                copies = [given.to(device, copy=True).contiguous() for given in inputs]
                graph = cuda.CUDAGraph()
                with _uncollected(), cuda.graph(graph, stream=_stream(device)):
                    output = work(*copies)
            except RuntimeError as error:  # it waits for the GPU, or needs something from the CPU, or too much memory
                cuda.set_stream(before)  # which a recording that fails does not put back
                self.trouble = str(error).partition("\n")[0]
                self._met.clear()  # nothing is replayed any more, and what is to be done now may need their memory
                cuda.synchronize(device)
                cuda.empty_cache()
                return None
            self.largest = max(self.largest, cuda.memory_reserved(device) - taken)
        self._met[key] = Recording(graph, copies, output, work)
        return self._met[key]


@cache
def _stream(device: torch.device) -> cuda.Stream:
    """Where work is recorded: torch's own is of the GPU on which anything was recorded first."""
    return cuda.Stream(device)  # type: ignore[no-untyped-call]


def _once(work: Work, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    first = inputs[0].clone(memory_format=torch.contiguous_format)
    return first, work(first, *inputs[1:])


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected in here: a recording of an earlier run would be taken apart in the midst of this one."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
