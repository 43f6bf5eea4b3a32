"""The company a client keeps."""

import math

import pytest
import torch
from torch import Tensor

from kinfolk.matching import company


def plain(mine: Tensor, theirs: Tensor, rows: Tensor, listed: Tensor) -> list[list[bool]]:
    """The same with sets, a client and a peer at a time."""
    width = mine.shape[1]
    sets = [set(row.nonzero().flatten().tolist()) for row in theirs]
    answer = []
    for client, own in enumerate(mine):
        me = set(own.nonzero().flatten().tolist())
        asked = [row for row, known in zip(rows[client].tolist(), listed[client].tolist()) if known and row >= 0]
        shares, expected = {}, {}
        for row in set(rows[client].tolist()) - {-1}:
            witnesses = [me, *(sets[other] for other in asked if other != row)]
            both = [len(w) * len(sets[row]) for w in witnesses]
            common = [len(w & sets[row]) / math.sqrt(b) if b else 0.0 for w, b in zip(witnesses, both)]
            shares[row] = sum(common) / len(common)
            expected[row] = sum(both) / len(both) / width
        ordered = sorted(shares[row] for row in asked)
        usual = ordered[(len(ordered) - 1) // 2] if ordered else None
        answer.append([
            usual is None or (row >= 0 and (shares[row] >= company.SHARE * usual or expected[row] < 1))
            for row in rows[client].tolist()
        ])  # fmt: skip
    return answer


@pytest.mark.parametrize("seed", range(20))
def test_as_with_sets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(seed)
    m, p, c, w = 7, 12, 6, 30
    dense = 0.1 + 0.7 * torch.rand(p, 1, generator=draw)
    theirs = (torch.rand(p, w, generator=draw) < dense).to(torch.uint8)
    mine = (torch.rand(m, w, generator=draw) < 0.4).to(torch.uint8)
    rows = torch.stack([torch.randperm(p, generator=draw)[:c] for _ in range(m)])
    rows[torch.rand(m, c, generator=draw) < 0.2] = -1
    listed = torch.rand(m, c, generator=draw) < 0.5
    found = company.kept(mine, theirs, rows, listed)
    wanted = torch.tensor(plain(mine, theirs, rows, listed))
    there = rows >= 0  # who was not seen is nobody's kin anyway
    assert found[there].tolist() == wanted[there].tolist()
    monkeypatch.setattr(company, "HELD", 1)  # a client at a time
    assert company.kept(mine, theirs, rows, listed).tolist() == found.tolist()


def groups(each: int) -> Tensor:
    """[2 * each, 2 * each] companies of two groups that keep to themselves."""
    block = torch.ones(each, each, dtype=torch.uint8)
    return torch.block_diag(block, block).to(torch.uint8)


def test_groups_that_keep_to_themselves_are_told_apart() -> None:
    theirs = groups(10)
    rows = torch.tensor([[1, 2, 3, 4, 12, 13]])
    listed = torch.tensor([[True, True, False, False, False, False]])
    assert company.kept(theirs[:1], theirs, rows, listed).tolist() == [[True, True, True, True, False, False]]
    strange = torch.tensor([[True, True, True, False, True, False]])  # one of the other group in the list: it leaves
    assert company.kept(theirs[:1], theirs, rows, strange).tolist() == [[True, True, True, True, False, False]]


def test_a_client_that_has_met_both_groups_hears_its_neighbors() -> None:
    theirs = groups(10)
    both = torch.ones(1, 20, dtype=torch.uint8)
    rows = torch.tensor([[1, 2, 3, 4, 12, 13]])
    listed = torch.tensor([[True, True, True, False, False, False]])
    assert company.kept(both, theirs, rows, listed).tolist() == [[True, True, True, True, False, False]]


def test_nothing_is_said_without_neighbors_or_of_those_who_have_met_few() -> None:
    theirs = groups(10)
    rows = torch.tensor([[1, 2, 12, -1]])
    nobody = torch.zeros(1, 4, dtype=torch.bool)
    assert company.kept(theirs[:1], theirs, rows, nobody)[0, :3].all()
    pairs = groups(2)[:, :4]  # two and two of a hundred: even kin need not have met anybody else
    wide = torch.zeros(4, 100, dtype=torch.uint8)
    wide[:, :4] = pairs
    rows = torch.tensor([[1, 2, 3]])
    assert company.kept(wide[:1], wide, rows, torch.tensor([[True, False, False]])).all()


def test_nobody_answered() -> None:
    rows = torch.full((3, 2), -1)
    mine = torch.ones(3, 8, dtype=torch.uint8)
    assert not company.kept(mine, mine[:0], rows, torch.ones(3, 2, dtype=torch.bool)).any()


def test_the_table_remembers_when_each_was_met_last() -> None:
    table = company.nothing(2, 5, torch.device("cpu"))
    own = torch.tensor([0, 3])
    table = company.met(table, own, torch.tensor([[1, -1], [4, 2]]), 3)
    table = company.met(table, own, torch.tensor([[2, -1], [-1, 2]]), 4)
    assert table.tolist() == [[4, 3, 4, 0, 0], [0, 0, 4, 4, 3]]
    assert company.since(table, 4).tolist() == [[1, 0, 1, 0, 0], [0, 0, 1, 1, 0]]
    assert company.since(table, 1).tolist() == [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]


def test_the_table_stays_narrow_however_many_peers_there_are() -> None:
    table = company.nothing(1, 10 * company.WIDEST, torch.device("cpu"))
    assert table.shape == (1, company.WIDEST)
    last = 10 * company.WIDEST - 1
    table = company.met(table, torch.tensor([7]), torch.tensor([[last]]), 2)
    assert table.nonzero()[:, 1].tolist() == [7, company.WIDEST - 1]
