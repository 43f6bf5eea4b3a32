"""Matching with a memory: who is let in, who is let go, and who is given another chance."""

import math

import pytest
import torch
from torch import Tensor

from kinfolk.matching import evidence
from kinfolk.matching.evidence import FADING, FARTHEST, LEAST, MOST, Verdict, judge

RATE, LIMIT = 0.3, 3.0


def look(scores: list[float], listed: list[int], evidence: Tensor | None = None, unit: float | Tensor = 0.0) -> Verdict:
    values = torch.tensor([scores], dtype=torch.float64)
    so_far = torch.full_like(values, torch.nan) if evidence is None else evidence
    return judge(values, torch.tensor([listed]).bool(), so_far, torch.as_tensor(unit).double().view(1), RATE, LIMIT)


def kin(verdict: Verdict) -> list[int]:
    return torch.nonzero(verdict.kin[0]).flatten().tolist()


NEIGHBORS = [1.0, 1.1, 0.9, 1.05]
LISTED = [1, 1, 1, 1, 0, 0, 0, 0]


def test_kin_like_the_neighbors_are_taken_and_strangers_are_not() -> None:
    verdict = look([*NEIGHBORS, 0.95, 1.4, -2.0, -2.2], LISTED)
    assert kin(verdict) == [0, 1, 2, 3, 4, 5]  # who does better than the neighbors is no stranger
    assert verdict.judged.all()
    assert (verdict.evidence[0, 6:] < -LIMIT).all()


def test_every_client_is_judged_by_its_own_neighbors() -> None:
    scores = torch.tensor([[1.0, 1.1, 0.0, 1.0], [0.0, 0.1, 0.0, 1.0]], dtype=torch.float64)
    listed = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]]).bool()
    found = judge(scores, listed, torch.full_like(scores, torch.nan), torch.zeros(2).double(), RATE, LIMIT)
    assert found.kin.tolist() == [[True, True, False, True], [True, True, True, True]]


def test_distances_are_in_units_of_the_neighbors_spread_within_bounds() -> None:
    scores = [*NEIGHBORS, 0.95, 1.4, -2.0, -2.2]
    overall = float(torch.tensor(scores, dtype=torch.float64).std(correction=0))
    tight, loose = look(scores, LISTED), look([3.0, 1.0, -1.0, *scores[3:]], LISTED)
    assert float(tight.unit) == pytest.approx(LEAST * overall)
    assert float(tight.evidence[0, 6]) == pytest.approx((-2.0 - 1.0) / (LEAST * overall))  # 1.0: the lower median
    wide = float(torch.tensor([3.0, 1.0, -1.0, *scores[3:]], dtype=torch.float64).std(correction=0))
    assert float(loose.unit) <= MOST * wide + 1e-12


def test_a_stranger_in_the_list_is_dropped_after_a_few_looks() -> None:
    scores = [*NEIGHBORS, -2.0, -2.1, -1.9, -2.0]
    listed = [1, 1, 1, 1, 1, 0, 0, 0]
    evidence = torch.full((1, 8), torch.nan, dtype=torch.float64)
    evidence[0, 4] = 0.5  # once it looked like one of us
    unit: float | Tensor = 0.0
    looks = 0
    while listed[4] and looks < 10:
        verdict = look(scores, listed, evidence, unit)
        evidence, unit = verdict.evidence, verdict.unit
        assert kin(verdict)[:4] == [0, 1, 2, 3]
        listed[4] = int(verdict.kin[0, 4])
        looks += 1
    assert 1 < looks <= 6
    assert not listed[4]


def test_one_bad_look_does_not_drop_a_kin_with_a_history() -> None:
    steady = [*NEIGHBORS, -2.0, -2.1, -1.9, -2.0]
    evidence: Tensor | None = None
    unit: float | Tensor = 0.0
    for _ in range(3):
        verdict = look(steady, LISTED, evidence, unit)
        evidence, unit = verdict.evidence, verdict.unit
    bad = [1.0, 1.1, -1.0, 1.05, *steady[4:]]
    assert kin(look(bad, LISTED, evidence, unit)) == [0, 1, 2, 3]
    assert kin(look(bad, LISTED)) == [0, 1, 3]  # at first sight it would have been


def test_evidence_is_a_running_average_and_one_look_counts_only_so_much() -> None:
    scores = [*NEIGHBORS, 0.95, 1.4, -2.0, -2.2]
    first = look(scores, LISTED)
    so_far = torch.full((1, 8), 2.0, dtype=torch.float64)
    second = look(scores, LISTED, so_far)
    torch.testing.assert_close(second.evidence, 0.7 * so_far + 0.3 * first.evidence)
    far = look([*NEIGHBORS, -1e6, math.nan, math.nan, math.nan], LISTED, unit=1e-3)
    assert (far.evidence[0, :5].abs() <= FARTHEST).all()
    tiny = look([1.0, 1.0, 1.0, -5.0] + [1.0] * 100, [1, 1, 1, 0] + [0] * 100)
    assert float(tiny.evidence[0, 3]) == -FARTHEST


def test_who_was_not_looked_at_keeps_its_evidence_and_is_not_judged() -> None:
    evidence = torch.tensor([[0.0, 0.0, -9.0, 1.0, math.nan]], dtype=torch.float64)
    verdict = look([1.0, 1.1, math.nan, math.nan, -3.0], [1, 1, 1, 0, 0], evidence)
    assert verdict.judged.tolist() == [[True, True, False, False, True]]
    assert verdict.evidence[0, 2:4].tolist() == [-9.0, 1.0]
    assert kin(verdict) == [0, 1]


@pytest.mark.parametrize("listed", [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]])
def test_with_fewer_than_two_neighbors_to_compare_nobody_is_judged(listed: list[int]) -> None:
    evidence = torch.tensor([[0.5, math.nan, -4.0, 0.0]], dtype=torch.float64)
    verdict = look([1.0, 1.0, -3.0, math.nan], listed, evidence, 0.25)  # the fourth did not answer
    assert not verdict.judged.any()
    assert not verdict.kin.any()
    assert float(verdict.unit) == 0.25
    assert torch.equal(verdict.evidence.nan_to_num(nan=7.0), evidence.nan_to_num(nan=7.0))


def test_nobody_seen_changes_nothing() -> None:
    verdict = look([math.nan] * 4, [1, 1, 0, 0], unit=0.5)
    assert not verdict.judged.any()
    assert float(verdict.unit) == 0.5


def test_the_unit_shrinks_slowly_and_grows_at_once() -> None:
    only_kin = look([*NEIGHBORS, math.nan, math.nan, math.nan, math.nan], LISTED, unit=1.0)
    assert float(only_kin.unit) == pytest.approx(FADING)
    assert kin(only_kin) == [0, 1, 2, 3]
    strangers = look([*NEIGHBORS, -20.0, -21.0, -19.0, -20.0], LISTED, unit=1.0)
    assert float(strangers.unit) > 1.5


def test_equal_scores_have_no_distance() -> None:
    verdict = look([0.5] * 6, [1, 1, 0, 0, 0, 0])
    assert kin(verdict) == list(range(6))
    assert torch.isfinite(verdict.evidence).all()
    assert torch.isfinite(verdict.unit).all()


def test_a_look_reads_and_writes_what_is_known_of_those_looked_at() -> None:
    ids = torch.tensor([[5, 2, 0, -1], [1, 4, 3, 6]])
    scores = torch.tensor([[1.0, 1.1, -3.0, math.nan], [0.5, 0.6, 0.55, math.nan]], dtype=torch.float64)
    listed = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]]).bool()
    table = torch.full((2, 7), torch.nan)
    table[0, 0], table[1, 6] = 2.0, -1.0
    unit = torch.tensor([0.1, 0.2], dtype=torch.float64)
    found = evidence.look(ids, scores, listed, table, unit, RATE, LIMIT)
    known = torch.stack([table[i, ids[i].clamp(min=0)] for i in range(2)])
    verdict = judge(scores, listed, known, unit, RATE, LIMIT)
    assert torch.equal(found.kin, verdict.kin)
    assert torch.equal(found.unit, verdict.unit)
    assert found.skipped.tolist() == [False, False]
    for i in range(2):
        for j in range(7):
            if j in ids[i, :3].tolist():
                right = verdict.evidence[i, ids[i].tolist().index(j)]
            else:
                right = table[i, j]
            torch.testing.assert_close(found.evidence[i, j], right.float(), equal_nan=True)
    assert math.isnan(table[0, 5])  # what was known before is left alone


def test_with_one_neighbor_whoever_is_nearer_to_it_than_the_strangers_are_joins_it() -> None:
    ids, unit = torch.tensor([[0, 1, 2, 3]]), torch.zeros(1, dtype=torch.float64)
    scores = torch.tensor([[1.0, 0.9, 0.1, math.nan]], dtype=torch.float64)
    listed = torch.tensor([[True, False, False, False]])
    table = torch.full((1, 4), torch.nan)
    assert evidence.look(ids, scores, listed, table, unit, RATE, LIMIT).kin.tolist() == [[True, True, False, False]]
    nobody = evidence.look(ids, torch.full_like(scores, math.nan), listed, table, unit, RATE, LIMIT)
    assert not nobody.kin.any()
    assert nobody.skipped.tolist() == [True]


def test_who_is_alike_is_judged_by_this_look_alone() -> None:
    scores = torch.tensor([[*NEIGHBORS, 0.95, 1.4, -2.0, -2.2]], dtype=torch.float64)
    listed = torch.tensor([LISTED]).bool()
    assert torch.equal(evidence.alike(scores, listed, LIMIT), look(scores[0].tolist(), LISTED).kin)
