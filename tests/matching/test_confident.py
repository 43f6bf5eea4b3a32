"""The most similar of candidates and old neighbors."""

import math

import torch

from kinfolk.matching.confident import confident


def one(peers: list[int], similarity: list[float], count: int) -> list[int]:
    found = confident(torch.tensor([peers]), torch.tensor([similarity], dtype=torch.float64), count)
    assert found.shape == (1, count)
    return [int(j) for j in found[0]]


def test_the_most_similar_stay_best_first() -> None:
    assert one([4, 9, 2, 7], [0.1, 0.8, 0.5, 0.3], 2) == [9, 2]


def test_equal_similarities_go_to_the_smaller_id() -> None:
    assert one([9, 4, 7, 2], [0.5, 0.5, 0.5, 0.5], 3) == [2, 4, 7]
    assert one([9, 4, 7, 2], [0.5, 0.5, 0.6, 0.4], 2) == [7, 4]


def test_who_was_not_observed_is_never_kept() -> None:
    assert one([4, 9, 2, 7], [math.nan, -0.9, math.nan, -math.inf], 4) == [9, 7, -1, -1]
    assert one([4, 9], [math.nan, math.nan], 2) == [-1, -1]


def test_a_gap_in_the_list_is_nobody_whatever_its_similarity() -> None:
    assert one([-1, 5, -1], [0.9, 0.1, math.nan], 2) == [5, -1]


def test_fewer_than_wanted_are_all_kept() -> None:
    assert one([3, 1], [0.2, 0.4], 2) == [1, 3]
    assert one([3, 1], [0.2, 0.4], 5) == [1, 3, -1, -1, -1]
    assert confident(torch.empty(2, 0, dtype=torch.int64), torch.empty(2, 0), 3).tolist() == [[-1] * 3] * 2


def test_every_client_has_a_row_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    peers = torch.stack([torch.randperm(30, generator=generator)[:12] for _ in range(50)])
    similarity = (torch.randn(50, 12, generator=generator) * 3).round()  # many ties
    similarity[torch.rand(50, 12, generator=generator) < 0.3] = torch.nan
    found = confident(peers, similarity, 5)
    for row, ids, values in zip(found.tolist(), peers.tolist(), similarity.tolist()):
        ranked = sorted((-s, j) for j, s in zip(ids, values) if not math.isnan(s))
        assert [j for j in row if j >= 0] == [j for _, j in ranked[:5]]
