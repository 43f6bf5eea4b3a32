"""Two groups of scores: compared with trying every cut in plain Python, and the cases without two groups."""

import math

import pytest
import torch

from kinfolk.matching.halves import upper


def plain(scores: list[float]) -> list[bool]:
    """The upper group by the least sum of squares around two means."""
    known = sorted((s for s in scores if not math.isnan(s)), reverse=True)

    def squares(part: list[float]) -> float:
        mean = sum(part) / len(part)
        return sum((s - mean) ** 2 for s in part)

    if len(set(known)) < 2:
        return [not math.isnan(s) for s in scores]
    size = min(range(1, len(known)), key=lambda size: squares(known[:size]) + squares(known[size:]))
    return [s >= known[size - 1] for s in scores]


@pytest.mark.parametrize("seed", range(4))
def test_the_cut_is_the_best_of_all(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(50, 13, generator=generator, dtype=torch.float64)
    scores[:, ::3] -= 4 * torch.rand(50, 1, generator=generator, dtype=torch.float64)
    scores[torch.rand(50, 13, generator=generator) < 0.2] = math.nan
    scores = scores * 10.0 ** (4 * seed - 6) + 3.0
    assert upper(scores).tolist() == [plain(row) for row in scores.tolist()]


def test_two_groups_far_apart_are_found_whatever_their_sizes() -> None:
    for size in range(1, 10):
        scores = torch.cat([torch.linspace(0.9, 1.0, size), torch.linspace(0.0, 0.1, 10 - size)]).double()[None]
        assert upper(scores).tolist() == [[True] * size + [False] * (10 - size)]


def test_one_group_is_the_upper() -> None:
    nan = math.nan
    scores = torch.tensor([[0.7, 0.7, 0.7], [0.7, nan, nan], [nan, nan, nan], [0.1 + 0.2, 0.3, nan]]).double()
    scores[3, :2] = torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64)
    assert upper(scores).tolist() == [[True] * 3, [True, False, False], [False] * 3, [True, True, False]]
    assert upper(torch.zeros(2, 1)).all()
