"""Evidence of more peers than the table has columns."""

import math

import pytest
import torch

from kinfolk.matching import evidence


def test_each_peer_has_a_column_while_there_is_room() -> None:
    known, whose = evidence.nothing(2, 7, torch.device("cpu"))
    assert known.shape == (2, 7)
    assert known.isnan().all()
    assert whose.shape == (2, 0)
    ids = torch.tensor([[3, -1], [6, 0]])
    assert evidence.places(ids, known, whose)[0] is ids


def test_beyond_that_the_table_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "WIDEST", 5)
    known, whose = evidence.nothing(3, 1_000, torch.device("cpu"))
    assert known.shape == whose.shape == (3, 5)
    assert (whose == -1).all()


@pytest.mark.parametrize("seed", range(10))
def test_the_last_one_judged_in_a_column_is_known(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a dictionary for each client."""
    monkeypatch.setattr(evidence, "WIDEST", 6)
    draw = torch.Generator().manual_seed(seed)
    m, n, c = 3, 20, 7
    known, whose = evidence.nothing(m, n, torch.device("cpu"))
    unit = torch.zeros(m, dtype=torch.float64)
    books: list[dict[int, tuple[int, float]]] = [{} for _ in range(m)]
    for _ in range(30):
        ids = torch.stack([torch.randperm(n, generator=draw)[:c] for _ in range(m)])
        ids[torch.rand(m, c, generator=draw) < 0.2] = -1
        scores = torch.where(ids < 0, torch.nan, torch.randn(m, c, generator=draw).double())
        listed = torch.rand(m, c, generator=draw) < 0.5
        before = torch.full((m, c), torch.nan)
        for row, column, peer in ((r, k, int(ids[r, k])) for r in range(m) for k in range(c)):
            peer_there, value = books[row].get(peer % 6, (-1, math.nan))
            first = all(int(ids[row, other]) % 6 != peer % 6 or ids[row, other] < 0 for other in range(column))
            if peer >= 0 and peer == peer_there and first:
                before[row, column] = value
        wanted = evidence.judge(scores, listed, before, unit, 0.3, 3.0)
        at, table, whose = evidence.places(ids, known, whose)
        found = evidence.look(at, scores, listed, table, unit, 0.3, 3.0)
        known, unit = found.evidence, found.unit
        judged = wanted.judged
        assert found.kin[judged].tolist() == wanted.kin[judged].tolist()
        for row in range(m):
            for column in reversed(range(c)):  # so that the first of those who share a place has the last word
                peer = int(ids[row, column])
                if peer >= 0:
                    value = wanted.evidence[row, column] if judged[row, column] else before[row, column]
                    books[row][peer % 6] = (peer, float(value))
    for row in range(m):
        for place, (peer, value) in books[row].items():
            assert int(whose[row, place]) == peer
            assert known[row, place].item() == pytest.approx(value, abs=1e-5, nan_ok=True)
