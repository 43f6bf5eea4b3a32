"""Several cohorts in one process, each on its own thread: the stand-in for a cluster.

The threads take turns: a cohort runs until it pulls something that another has not published yet. Draws are
stateless, so who runs first makes no difference to the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Stuck(RuntimeError):
    """Every cohort waits for something that none will publish: a method published on some shards only."""


class Board:
    """Where all shards pin what they publish. The lock is the baton: whoever computes holds it."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self._turn = threading.Condition()
        self._offers: dict[tuple[int, str], dict[int, tuple[Tensor, Tensor]]] = {}
        self._running = 0
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._broken = False

    def exchange(self, shard: int) -> ShardExchange:
        """The board as one shard sees it."""
        return ShardExchange(self, shard)

    def expect(self, running: int) -> None:
        """`running` shards are about to take part in a round."""
        self._running, self._broken = running, False
        self._waiting.clear()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the baton; a failure wakes the others so that nobody waits for a shard that is gone."""
        with self._turn:
            try:
                yield
            except BaseException:
                self._broken = True
                raise
            finally:
                self._running -= 1
                self._turn.notify_all()

    def pin(self, shard: int, t: int, ids: Tensor, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._offers.setdefault((t, name), {})[shard] = (ids, tensor)
        self._turn.notify_all()

    def wait_for(self, shard: int, t: int, names: Sequence[str]) -> None:
        """Give the baton away until every shard has published `names` in round t."""

        def ready() -> bool:
            return all(len(self._offers.get((t, name), {})) == self.shards for name in names)

        self._waiting[shard] = ready
        while not ready():
            stuck = len(self._waiting) >= self._running and not any(r() for r in self._waiting.values())
            if self._broken or stuck:
                self._broken = True
                self._turn.notify_all()
                raise Stuck(f"shard {shard} waits for {', '.join(names)} of round {t}, which not every shard published")
            self._turn.wait()
        del self._waiting[shard]

    def offers(self, t: int, name: str) -> list[tuple[Tensor, Tensor]]:
        found = self._offers[(t, name)]
        return [found[shard] for shard in range(self.shards)]

    def forget(self, t: int, name: str) -> None:
        """Take down what is there under this name and `name-…`, unless another shard has done so."""
        for known in [known for known in self._offers if known[1] == name or known[1].startswith(f"{name}-")]:
            del self._offers[known]

    def clear(self) -> None:
        """The round is over: take everything down."""
        self._offers.clear()


class ShardExchange:
    """One shard's way to the board."""

    def __init__(self, board: Board, shard: int) -> None:
        self.board = board
        self.shard = shard

    def publish(self, t: int, ids: Tensor, tensors: dict[str, Tensor]) -> None:
        offered = ids >= 0
        if not bool(offered.all()):
            ids, tensors = ids[offered], {name: tensor[offered] for name, tensor in tensors.items()}
        self.board.pin(self.shard, t, ids, tensors)

    def fetch(self, t: int, ids: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Only the wanted rows travel, copied out of each shard's tensors, in the order of the ids."""
        self.board.wait_for(self.shard, t, names)
        ids = torch.unique(ids)
        tensors = {}
        order = here = torch.empty(0, dtype=torch.int64)
        for name in names:
            offers = self.board.offers(t, name)
            wanted = [torch.isin(theirs, ids) for theirs, _ in offers]
            here = torch.cat([theirs[want] for (theirs, _), want in zip(offers, wanted)])
            order = here.argsort()
            tensors[name] = torch.cat([tensor[want] for (_, tensor), want in zip(offers, wanted)])[order]
        return here[order], tensors

    def forget(self, t: int, name: str) -> None:
        self.board.forget(t, name)
