"""Scores in two groups: where the upper one ends, without knowing how large either is."""

from __future__ import annotations

import torch
from torch import Tensor


def upper(scores: Tensor) -> Tensor:
    """[m, c] bool: whose score belongs to the upper of two groups of each client's; scores: [m, c], NaN for not seen.

    The groups are those with the least squares around their two means, found by trying every place to cut. Scores that
    are all the same are one group, the upper.
    """
    seen = ~scores.isnan()
    ordered = scores.masked_fill(~seen, -torch.inf).sort(dim=1, descending=True).values
    count = seen.sum(dim=1, keepdim=True)
    middle = torch.where(seen, scores, 0.0).sum(dim=1, keepdim=True) / count.clamp(min=1)
    above = torch.where(ordered > -torch.inf, ordered - middle, 0.0).cumsum(dim=1)  # and below it as much is missing
    size = torch.arange(1, scores.shape[1] + 1, device=scores.device)
    apart = torch.where(size < count, above.square() / size + above.square() / (count - size).clamp(min=1), -1.0)
    best, cut = apart.max(dim=1, keepdim=True)
    one_group = best <= TINY * torch.where(seen, scores - middle, 0.0).abs().amax(dim=1, keepdim=True).square()
    return seen & (one_group | (scores >= ordered.gather(1, cut)))


TINY = 1e-12  # of the largest square: what rounding alone may leave between equal scores
