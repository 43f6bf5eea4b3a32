"""What is thought of peers that were never judged."""

import torch

from kinfolk.matching import evidence


def test_neighbors_begin_as_kin_and_strangers_a_little_below_the_limit() -> None:
    table = evidence.begun(torch.tensor([[2, 0], [1, -1]]), 4, limit=3.0)
    assert table.tolist() == [[0.0, -3.5, 0.0, -3.5], [-3.5, 0.0, -3.5, -3.5]]


def test_one_good_look_lets_a_stranger_in_and_a_fair_one_does_not() -> None:
    ids = torch.arange(6)[None]
    listed = torch.tensor([[True, True, True, True, False, False]])
    unit = torch.ones(1, dtype=torch.float64)
    scores = torch.tensor([[0.0, 0.1, -0.1, 0.0, -1.0, -2.5]], dtype=torch.float64)  # in units below the neighbors
    once = evidence.look(ids, scores, listed, evidence.begun(ids[:, :4], 6, 3.0), unit, rate=0.3, limit=3.0)
    assert once.kin.tolist() == [[True, True, True, True, True, False]]
    nothing = torch.full((1, 6), torch.nan)
    assert evidence.look(ids, scores, listed, nothing, unit, rate=0.3, limit=3.0).kin.all()  # a fair one would do
    again = once
    for _ in range(4):
        again = evidence.look(ids, scores, listed, again.evidence, again.unit, rate=0.3, limit=3.0)
    assert again.kin.all()  # fair looks that repeat themselves are evidence too
