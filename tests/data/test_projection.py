"""Directions that depend on nothing, samples of length one."""

from __future__ import annotations

import torch

from conftest import make_federation
from kinfolk.data.projection import directions, projected


def test_directions_are_always_the_same_and_keep_lengths() -> None:
    matrix = directions(300, 200)
    assert torch.equal(matrix, directions(300, 200))
    x = torch.randn(50, 300)
    ratio = (x @ matrix).norm(dim=1) / x.norm(dim=1)
    assert float(ratio.min()) > 0.8
    assert float(ratio.max()) < 1.2


def test_every_sample_is_projected_alone() -> None:
    data = make_federation([5, 7], (3, 4, 4))
    made = projected(data, 10)
    assert made.input_shape == (10,)
    assert torch.allclose(made.train.x.norm(dim=1), torch.ones(12))
    expected = data.test.x.flatten(1) @ directions(48, 10)
    assert torch.allclose(made.test.x, expected / expected.norm(dim=1, keepdim=True), atol=1e-6)
    other = make_federation([5, 7], (3, 4, 4))
    other.train.x[0] += 1
    assert torch.equal(projected(other, 10).train.x[1:], made.train.x[1:])


def test_fewer_numbers_than_directions_are_kept() -> None:
    data = make_federation([5], (6,))
    made = projected(data, 6)
    assert torch.allclose(made.train.x, data.train.x / data.train.x.norm(dim=1, keepdim=True))
    assert torch.isfinite(projected(make_federation([5], (6,)), 3).train.x).all()
