"""Nominal communication, in units of one model for every client: Table 6 of the PANM paper."""

import pytest

from kinfolk.matching import cost
from kinfolk.matching.cost import Cost


@pytest.mark.parametrize(
    ("found", "total", "peak"),
    [
        (cost.fedavg(300), 600, 1),
        (cost.ifca(2, 300), 900, 2),
        (cost.ifca(3, 300), 1200, 3),
        (cost.ifca(4, 300), 1500, 4),
        (cost.panm(100, 4, 2, 10, 100, 200), 1118, 0.06),
        (cost.panm(100, 4, 3, 10, 100, 200), 1397, 0.07),
    ],
)
def test_published_totals_and_peaks(found: Cost, total: float, peak: float) -> None:
    assert (found.total, found.peak) == (total, peak)


def test_one_model_for_all_is_the_same_by_either_name() -> None:
    assert cost.ifca(1, 300) == cost.fedavg(300)


def test_gossip_receives_its_neighbors_every_round() -> None:
    assert cost.gossip(100, 5, 300) == Cost(1500, 0.05)


def test_pens_receives_candidates_first_and_then_its_neighbors() -> None:
    assert cost.pens(100, 10, 5, 100, 300) == Cost(100 * 10 + 200 * 5, 0.10)
    assert cost.pens(100, 10, 5, 100, 60) == Cost(600, 0.10)
    assert cost.pens(100, 10, 5, 0, 60) == Cost(300, 0.05)


def test_panm_counts_the_rounds_that_really_match() -> None:
    # T1 = 5, T2 = 7, tau = 4: of rounds 6..12 only 8 and 12 match
    assert cost.panm(50, 6, 2, 4, 5, 7).total == (5 * 8 - 2) + 5 * 2 + 2 * 12
    assert cost.panm(50, 6, 2, 1, 0, 7).total == 7 * 12  # without stage one nothing is taken off
    assert cost.panm(50, 6, 2, 4, 5, 7, averaged=4).total == (5 * 8 - 2) + 5 * 4 + 2 * 12
    whole = cost.panm(50, 6, 2, 4, 5, 7, averaged=49)
    assert (whole.total, whole.peak) == ((5 * 8 - 2) + 5 * 49 + 2 * (6 + 49), 55 / 50)
