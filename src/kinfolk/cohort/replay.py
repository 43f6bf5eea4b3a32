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

import torch
from torch import Tensor

Work = Callable[..., Tensor]  # (tensors) -> tensor; changes its first argument in place


@dataclass(frozen=True)
class Recording:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor
    work: Work  # keeps alive what it reads beside its inputs


class Replay:
    """Recordings by key; whatever else the work reads must stay where it is between calls with one key."""

    def __init__(self, most: int = 8) -> None:
        self.most = most  # recordings kept: each holds its memory
        self.trouble: str | None = None  # why the work could not be recorded
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
        copies = [given.to(inputs[0].device, copy=True).contiguous() for given in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            with _uncollected(), torch.cuda.graph(graph):
                output = work(*copies)
        except RuntimeError as error:  # the work waits for the GPU, or needs something from the CPU
            self.trouble = str(error).partition("\n")[0]
            torch.cuda.synchronize()
            return None
        self._met[key] = Recording(graph, copies, output, work)
        return self._met[key]


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
