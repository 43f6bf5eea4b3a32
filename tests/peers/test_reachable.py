"""Who can be reached, as a table."""

import pytest
import torch
from torch import Tensor

from kinfolk.peers.availability import ChangingNetwork, Trace
from kinfolk.peers.base import Peers
from kinfolk.peers.inprocess import InProcess
from kinfolk.peers.reach import Network, PairNetwork


class Host:
    def __init__(self, ids: Tensor) -> None:
        self.ids, self.seed = ids, 0

    def silent(self) -> Tensor:
        return torch.zeros_like(self.ids, dtype=torch.bool)

    def away(self) -> Tensor:
        return self.silent()


def reachable(network: Network | None, ids: Tensor, t: int) -> list[set[int]]:
    peers = Peers(4, Host(ids), InProcess(), reach=None if network is None else network.reach(ids))
    table = peers.reachable(t)
    assert table.dtype == torch.bool
    assert table.shape == (ids.numel(), 4)
    return [set(torch.nonzero(row).flatten().tolist()) for row in table]


PAIRS = PairNetwork(4, torch.tensor([0, 0, 2, 3]), torch.tensor([1, 3, 0, 2]))
AWAY = Trace(4, torch.tensor([1]), torch.tensor([2]), torch.tensor([3]))


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [2, 3], [1]])
def test_everybody_but_oneself_or_only_those_linked_and_present(ids: list[int]) -> None:
    mine, everybody = torch.tensor(ids), {0, 1, 2, 3}
    assert reachable(None, mine, 1) == [everybody - {i} for i in ids]
    linked: list[set[int]] = [{1, 3}, set(), {0}, {2}]
    assert reachable(PAIRS, mine, 1) == reachable(PAIRS, mine, 0) == [linked[i] for i in ids]
    for t, away in ((0, False), (1, False), (2, True), (3, True), (4, False)):
        gone = {1} if away else set()
        expected = [set() if i in gone else linked[i] - gone for i in ids]
        assert reachable(ChangingNetwork(PAIRS, AWAY), mine, t) == expected
        free = [set() if i in gone else everybody - {i} - gone for i in ids]
        assert reachable(ChangingNetwork(None, AWAY), mine, t) == free
