"""The board: cohorts on threads that take turns, and what happens when a method does it wrong."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from conftest import make_federation
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.peers.faults import Faults
from kinfolk.peers.sharded import Stuck


def engine_of(method: Any, shards: int, clients: int = 10) -> engines.ShardedEngine:
    federation = make_federation([10] * clients)
    settings = {"training": Training(epochs=1, batch_size=5), "seed": 0, "device": "cpu", "precision": "float64"}
    parts = engines.Parts(federation, lambda: initial_model(lambda: nn.Linear(6, 3), 0), method, Faults(), settings)
    return engines.ShardedEngine(parts, shards)


@dataclasses.dataclass(frozen=True)
class Base:
    def start(self, cohort: Any) -> None:
        return None


class Talks(Base):
    """Publishes twice and pulls across shards in between."""

    seen: dict[int, list[float]] = {}  # noqa: RUF012

    def step(self, t: int, cohort: Any, state: None, peers: Any) -> None:
        mine = cohort.ids.double()[:, None]
        peers.publish(t, first=mine)
        ids = (cohort.ids[:, None] + 3) % peers.n
        pool = peers.pull(t, ids, ["first"])
        theirs = pool["first"][pool.rows(ids)[:, 0]]
        peers.publish(t, second=mine * 100 + theirs)
        pool = peers.pull(t, ids, ["second"])
        for client, value in zip(cohort.ids.tolist(), pool["second"][pool.rows(ids)[:, 0], 0].tolist()):
            self.seen[client] = [value]


@pytest.mark.parametrize("shards", [1, 2, 3, 10, 50])
def test_rows_come_from_the_right_client_whatever_the_shards(shards: int) -> None:
    Talks.seen.clear()
    engine = engine_of(Talks(), shards)
    engine.step(1, False)
    assert len(engine.shards) == min(shards, 10)
    assert Talks.seen == {i: [((i + 3) % 10) * 100.0 + (i + 6) % 10] for i in range(10)}


def test_a_shard_receives_only_the_rows_it_asked_for() -> None:
    sizes = []

    class Asks(Base):
        def step(self, t: int, cohort: Any, state: None, peers: Any) -> None:
            peers.publish(t, weights=cohort.weights)
            sizes.append(peers.pull(t, torch.full((len(cohort), 1), 4))["weights"].shape[0])

    engine_of(Asks(), 4).step(1, False)
    assert sizes == [1, 1, 1, 1]


def test_an_error_in_one_shard_ends_the_round_with_that_error() -> None:
    class Fails(Base):
        def step(self, t: int, cohort: Any, state: None, peers: Any) -> None:
            if 9 in cohort.ids:
                raise ZeroDivisionError("the cause")
            peers.publish(t, weights=cohort.weights)
            peers.pull(t, torch.zeros(len(cohort), 1, dtype=torch.int64))

    with pytest.raises(ZeroDivisionError, match="the cause"):
        engine_of(Fails(), 3).step(1, False)


@pytest.mark.timeout(20)
def test_publishing_on_some_shards_only_is_reported_and_does_not_hang() -> None:
    class Forgets(Base):
        def step(self, t: int, cohort: Any, state: None, peers: Any) -> None:
            if 0 in cohort.ids:
                peers.publish(t, weights=cohort.weights)
            peers.pull(t, torch.zeros(len(cohort), 1, dtype=torch.int64))

    with pytest.raises(Stuck, match="not every shard published"):
        engine_of(Forgets(), 3).step(1, False)


def test_the_board_is_empty_after_a_round() -> None:
    engine = engine_of(Talks(), 2)
    engine.step(1, False)
    assert not engine.board._offers
