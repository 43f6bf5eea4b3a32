"""What is recorded for a GPU and what is not, with a GPU that only keeps accounts: it runs what it should record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.cohort import replay
from kinfolk.cohort.replay import Replay

MIB = 2**20
CPU = torch.device("cpu")


class Accounts:
    """In the place of `torch.cuda`."""

    def __init__(self, total: int, each: int) -> None:
        self.total, self.each = total, each  # bytes: of the GPU, and that a recording takes
        self.taken, self.cached = 0, 0
        self.stream: Any = "the usual one"
        self.recorded: list[Any] = []
        self.replayed = 0
        self.fails: str | None = None

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    def CUDAGraph(self) -> Any:
        accounts = self

        class Graph:
            def replay(self) -> None:
                accounts.replayed += 1

        return Graph()

    @contextmanager
    def graph(self, graph: Any, stream: Any) -> Iterator[None]:
        self.stream = stream
        self.recorded.append(stream)
        yield
        if self.fails is not None:  # as a recording that is not valid any more: the stream stays
            raise RuntimeError(self.fails + "\nmore about it")
        self.taken += self.each
        self.stream = "the usual one"

    def Stream(self, device: torch.device) -> str:
        return f"for recordings on {device}"

    def current_stream(self, device: torch.device) -> Any:
        return self.stream

    def set_stream(self, stream: Any) -> None:
        self.stream = stream

    def synchronize(self, device: torch.device) -> None:
        pass

    def empty_cache(self) -> None:
        self.cached = 0

    def memory_reserved(self, device: torch.device) -> int:
        return self.taken + self.cached

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.total - self.taken - self.cached, self.total


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Accounts:
    found = Accounts(1000 * MIB, 100 * MIB)
    monkeypatch.setattr(replay, "cuda", found)
    replay._stream.cache_clear()
    return found


def double(values: Tensor) -> Tensor:
    values *= 2
    return values.sum()


def test_work_runs_then_is_recorded_then_replayed(gpu: Accounts) -> None:
    some = Replay()
    for times in (1, 2, 3):
        given = torch.tensor([1.0, 2.0])
        some("key", double, given)
        assert given.tolist() == [1.0, 2.0]  # a copy is changed
        assert (len(gpu.recorded), gpu.replayed) == (times > 1, max(0, times - 1))
    assert gpu.recorded == ["for recordings on cpu"]  # and not torch's own stream, which is of one GPU only
    assert gpu.stream == "the usual one"
    assert (some.trouble, some.crowded) == (None, None)


def test_recordings_leave_room_for_what_is_not_recorded(gpu: Accounts) -> None:
    """Ragged chunks have a key each. Of 1,000 MiB nine recordings of 100 would leave no 200 for the tenth chunk."""
    gpu.cached = 300 * MIB  # what chunks before have left: it can be given back, and is no recording's
    some = Replay(most=100)
    for _ in range(3):
        for key in range(12):
            some(key, double, torch.ones(2))
    assert len(gpu.recorded) == 9
    assert some.largest == 100 * MIB
    assert some.crowded == "9 recordings and one more, of 100 MiB, would fill its memory"
    assert gpu.replayed == 9 * 2  # what is recorded goes on being replayed
    assert some.trouble is None
    changed, total = some(11, double, torch.ones(2))
    assert (changed.tolist(), float(total)) == ([2.0, 2.0], 4.0)


def test_a_recording_that_fails_gives_back_stream_and_memory(gpu: Accounts) -> None:
    some = Replay()
    for _ in range(2):
        some("one", double, torch.ones(2))
    assert sum(recording is not None for recording in some._met.values()) == 1
    gpu.fails = "operation not permitted when stream is capturing"
    for _ in range(3):
        changed, _ = some("two", double, torch.ones(2))
        assert changed.tolist() == [2.0, 2.0]
    assert gpu.stream == "the usual one"
    assert some.trouble == gpu.fails
    assert len(gpu.recorded) == 2  # it is not tried again
    assert not any(some._met.values())
    some("one", double, torch.ones(2))
    assert gpu.replayed == 1
