"""Confident neighbor initialisation (CNI): of the candidates and the old neighbors, keep the most similar."""

from __future__ import annotations

from torch import Tensor

from kinfolk.matching.lists import best


def confident(peers: Tensor, similarity: Tensor, count: int) -> Tensor:
    """The new neighbors: the `count` most similar of each client's peers, ties to the smaller id.

    peers: [m, c] candidates and old neighbors together, -1 for none; similarity: [m, c] with this round's models, NaN
    for who was not observed -> [m, count], -1 where there are not enough.
    """
    return best(peers, similarity, count)
