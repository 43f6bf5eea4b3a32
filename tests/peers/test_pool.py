"""Two pulls of one round as one pool."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import make_federation
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.peers.base import Pool, placed
from kinfolk.peers.faults import Faults

FIRST, SECOND = torch.tensor([7, 2, 9, -1]), torch.tensor([4, 2, 0])


@dataclasses.dataclass
class PullsTwice:
    """Keeps both pulls and their union of every shard, by its first client."""

    pools: dict[int, tuple[Pool, Pool, Pool]] = dataclasses.field(default_factory=dict)

    def start(self, cohort: Any) -> None:
        return None

    def step(self, t: int, cohort: Any, state: None, peers: Any) -> None:
        weights = cohort.ids.double()[:, None] * torch.tensor([1.0, 10.0], dtype=torch.float64)  # a row names its owner
        peers.publish(t, weights=weights, update=-weights)
        first = peers.pull(t, FIRST.expand(len(cohort), -1), ("weights", "update"))
        second = peers.pull(t, SECOND.expand(len(cohort), -1))
        self.pools[int(cohort.ids[0])] = (first, second, first | second)


def pulled(shards: int, faults: Faults | None = None) -> tuple[list[tuple[Pool, Pool, Pool]], engines.Engine]:
    method = PullsTwice()
    settings = {"training": Training(epochs=1), "seed": 0, "device": "cpu", "precision": "float64"}
    model = initial_model(lambda: nn.Linear(6, 3), 0)
    parts = engines.Parts(make_federation([5] * 10), lambda: model, method, faults or Faults(), settings)
    engine = engines.InProcessEngine(parts) if shards == 1 else engines.ShardedEngine(parts, shards)
    engine.step(1, False)
    return [pools for _, pools in sorted(method.pools.items())], engine


def owners(pool: Pool, ids: Tensor, m: int) -> list[list[float]]:
    """The id written in the row that stands for each of the ids, -1 if there is none."""
    rows = pool.rows(ids.expand(m, -1))
    written = pool["weights"][rows.clamp(min=0)]
    assert (written[..., 1] == 10 * written[..., 0]).all()
    return torch.where(rows >= 0, written[..., 0], -1.0).tolist()


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_every_id_of_either_pull_has_its_own_row(shards: int) -> None:
    asked = torch.tensor([9, 4, 2, -1, 0, 7])
    pools, engine = pulled(shards)
    assert len(pools) == len(engine.shards) == shards
    for _, _, both in pools:
        assert owners(both, asked, 10 // shards) == [[9.0, 4.0, 2.0, -1.0, 0.0, 7.0]] * (10 // shards)


def test_who_is_in_both_is_there_once_and_who_is_in_neither_is_not() -> None:
    for first, second, both in pulled(2)[0]:
        everybody = torch.arange(10).expand(5, -1)
        rows = both.rows(everybody)[0]
        assert torch.nonzero(rows >= 0).flatten().tolist() == [0, 2, 4, 7, 9]
        assert rows[rows >= 0].unique().numel() == 5  # no two share a row
        assert torch.equal(both.rows(everybody)[:, [2, 7, 9]], first.rows(everybody)[:, [2, 7, 9]])
        assert (second.rows(everybody)[0] >= 0).sum() == 3


def test_the_pulls_themselves_stay_as_they_were() -> None:
    for first, second, _ in pulled(2)[0]:
        assert owners(first, torch.tensor([2, 7, 9, 4]), 5) == [[2.0, 7.0, 9.0, -1.0]] * 5
        assert owners(second, torch.tensor([0, 2, 4, 7]), 5) == [[0.0, 2.0, 4.0, -1.0]] * 5
        assert torch.equal(first["update"], -first["weights"])


def test_in_one_process_nothing_is_copied() -> None:
    ((first, _, both),) = pulled(1)[0]
    assert both is first


def test_what_was_lost_stays_lost() -> None:
    faults = Faults(loss=0.5)
    asked = torch.tensor([0, 2, 4, 7, 9])
    for hosts, (_, _, both) in zip(([0, 1, 2, 3, 4], [5, 6, 7, 8, 9]), pulled(2, faults)[0]):
        lost = faults.lost(0, 1, torch.tensor(hosts)[:, None], asked[None, :])
        assert 0 < int(lost.sum()) < lost.numel()
        assert torch.equal(both.rows(asked.expand(5, -1)) < 0, lost)


def test_what_was_found_about_the_same_ids_is_not_worked_out_again() -> None:
    pool = Pool(placed(torch.arange(4), 4), {})
    calls: list[int] = []

    def work() -> Tensor:
        calls.append(1)
        return torch.tensor(len(calls))

    ids = torch.tensor([[1, 2]])
    assert [int(pool.once("a", ids, work)) for _ in range(2)] == [1, 1]
    assert int(pool.once("b", ids, work)) == 2  # another finding
    assert int(pool.once("a", ids.clone(), work)) == 3  # other ids
    ids[0, 0] = 3
    pool.once("a", ids, work)
    ids[0, 0] = 0
    assert int(pool.once("a", ids, work)) == 5  # changed in between


def test_the_place_of_nobody_is_nowhere() -> None:
    assert placed(torch.tensor([2, -1, 0]), 4).tolist() == [2, -1, 0, -1, -1]
    assert placed(torch.tensor([2, 0]), 3).tolist() == [1, -1, 0, -1]
    assert placed(torch.zeros(0, dtype=torch.int64), 2).tolist() == [-1, -1, -1]
