"""AFIND's arithmetic: who is a friend, how sure one is of it, and how much each friend's model counts.

Tables are [m, n] float64, a row per client and a column per peer; NaN means not observed. Equations are numbered as in
Wang et al.; where the printed ones cannot work, ours stand beside them.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from kinfolk import randomness

Threshold = Literal["calibrated", "literal", "remark", "top"]
Entropy = Literal["monotone", "printed"]
LEAST = 1e-7  # a similarity between 0 and 1 keeps this distance from both
SMALLEST_MASS = 1e-12


def uniform(reachable: Tensor) -> Tensor:
    """Probabilities before anybody is known: the same for all reachable [m, n] bool."""
    return reachable.to(torch.float64) / reachable.sum(dim=1, keepdim=True).clamp(min=1)


def remembered(before: Tensor, seen: Tensor, keep: float) -> Tensor:
    """Running average of similarities [m, n]: the first sight counts whole, later ones 1 - keep."""
    average = torch.where(before.isnan(), seen, keep * before + (1 - keep) * seen)
    return torch.where(seen.isnan(), before, average)


def shifted(before: Tensor, after: Tensor, seen: Tensor) -> Tensor:
    """Remembered similarities [m, n] in which those not seen have changed as much as the others have on average.

    In the course of training all gradients come to agree less: what is remembered of a peer not seen for long would
    otherwise look better than what is known of friends.
    """
    again = ~(seen.isnan() | before.isnan())
    count = again.sum(dim=1, keepdim=True).clamp(min=1)
    change = torch.where(again, after - before, 0.0).sum(dim=1, keepdim=True) / count
    return torch.where(seen.isnan(), after + change, after)


def probabilities(before: Tensor, similarity: Tensor, nu: float) -> Tensor:
    """Eq. 9: the observed share anew what they held together, by the softmax of similarity / nu; others keep theirs.

    before, similarity: [m, n].
    """
    observed = ~similarity.isnan()
    held = torch.where(observed, before, 0.0).sum(dim=1, keepdim=True)
    score = torch.where(observed, similarity / nu, -torch.inf)
    highest = score.amax(dim=1, keepdim=True)
    share = torch.exp(score - torch.where(highest.isinf(), 0.0, highest))
    share = share / share.sum(dim=1, keepdim=True).clamp(min=1.0)  # at least one of them is exp(0)
    after = torch.where(observed, held.clamp(min=SMALLEST_MASS) * share, before)
    lost = observed.any(dim=1, keepdim=True) & (held < SMALLEST_MASS)  # to rounding
    return torch.where(lost, after / after.sum(dim=1, keepdim=True), after)


def uncertainty(similarity: Tensor, entropy: Entropy = "monotone") -> Tensor:
    """How little each similarity [m, n] says: exp(1)·(-e ln e) in [0, 1] for e = (similarity + 1) / 2; NaN unobserved.

    As printed it falls again below e = exp(-1): a peer that points the other way would count as a safe friend. Made
    monotone, it stays at 1 there.
    """
    e = ((similarity + 1) / 2).clamp(LEAST, 1 - LEAST)
    u = -math.e * e * e.log()
    return u if entropy == "printed" else torch.where(e < math.exp(-1), 1.0, u)


def thresholds(
    before: Tensor, similarity: Tensor, others: Tensor, tau: float, kind: Threshold, entropy: Entropy = "monotone"
) -> Tensor:
    """The probability [m] that a peer must have in the next round to be a friend; as before where nobody was observed.

    similarity: [m, n] of those observed in this round; others: [m] how many peers each client has in all.

    literal: eqs. 10 to 13. calibrated: tau times the mean uncertainty, in units of the uniform probability: 0 where all
    are alike, which lets everybody in, and tau / others where all are strange. remark: the sigmoid of the mean entropy
    in that unit.
    """
    observed = ~similarity.isnan()
    count = observed.sum(dim=1)
    each = torch.where(observed, uncertainty(similarity, "printed" if kind == "literal" else entropy), 0.0)
    mean = each.sum(dim=1) / count.clamp(min=1)
    if kind == "literal":
        after = tau * torch.sigmoid(-each.sum(dim=1) / math.e)
    elif kind == "remark":
        after = tau * torch.sigmoid(mean / math.e) / others.clamp(min=1)
    else:
        after = tau * mean / others.clamp(min=1)
    return torch.where(count > 0, after, before)


def top(probability: Tensor, here: Tensor, count: int, keys: Tensor) -> Tensor:
    """[m, n] bool: the `count` most probable of those who are here [m, n]; of equals those with the lowest keys."""
    order = keys.argsort(dim=1)
    score = torch.where(here, probability, -torch.inf).gather(1, order)
    first = order.gather(1, score.argsort(dim=1, descending=True, stable=True))[:, :count]
    return torch.zeros_like(here).scatter(1, first, True) & here


def boltzmann(losses: Tensor, own: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Eq. 16: weights [m, k] of the friends and [m] of oneself, which sum to one, from losses [m, k] and own [m].

    A loss that is not finite has weight 0; if none is, one is alone.
    """
    both = torch.cat([losses, own[:, None]], dim=1)
    valid = torch.isfinite(both)
    least = torch.where(valid, both, torch.inf).amin(dim=1, keepdim=True)
    weights = torch.where(valid, torch.exp((least - both) / temperature), 0.0)
    weights[:, -1] = torch.where(valid.any(dim=1), weights[:, -1], 1.0)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return weights[:, :-1], weights[:, -1]


def noisy(vectors: Tensor, longest: float, deviation: float, seed: int, t: int, sender: Tensor) -> Tensor:
    """Vectors [p, c] cut to a length of `longest`, with noise on every number; sender: [p] who or which pair sends."""
    length = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    cut: Tensor = vectors * (longest / length.clamp(min=longest))
    return cut + deviation * randomness.normal(seed, "proxy noise", t, sender, vectors.shape[1]).to(vectors.dtype)


def smoothed(
    before: Tensor, mine: Tensor, ids: Tensor, losses: Tensor, own: Tensor, keep: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Running averages [m, n] of losses, and of them those of the peers ids [m, k] and one's own [m] (mine: whose).

    One that is not finite is NaN, does not count, and is not remembered: an average would never get rid of it.
    """
    ids = torch.cat([ids, mine[:, None]], dim=1)
    seen = torch.cat([losses, own[:, None]], dim=1)
    seen = torch.where(torch.isfinite(seen), seen, torch.nan)
    after = remembered(before, spread(ids, seen, before.shape[1]), keep)
    smooth = torch.where(seen.isnan(), torch.nan, after.gather(1, ids.clamp(min=0)))
    return after, smooth[:, :-1], smooth[:, -1]


def spread(ids: Tensor, values: Tensor, n: int) -> Tensor:
    """values [m, k] of the peers ids [m, k] (-1: none) as a table [m, n], NaN for everybody else."""
    table = torch.full((ids.shape[0], n + 1), torch.nan, dtype=torch.float64, device=ids.device)
    return table.scatter(1, torch.where(ids < 0, n, ids), values.to(torch.float64))[:, :n]
