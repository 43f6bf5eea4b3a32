"""Heuristic neighbor matching (HNM): two Gaussians over the similarities, fitted by hard EM for all clients at once.

Component 0 holds the peers of the same cluster, component 1 the others. The papers print the initialisation the other
way round; hard EM does not mind, because in the end the component with the higher mean is the same cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.kernels import dispatch

ROUNDS = 100  # at most; a handful is usual
NO_SPREAD = 1e-24  # variance below which similarities carry no information
VARIANCE_SHARE, SMALLEST_VARIANCE = 1e-2, 1e-12  # floor of a component's variance: share of the whole, absolute
CASES = ("nobody_answered", "no_candidates", "no_information", "empty_list", "all_same", "none_same", "cycle")
BITS = 62  # peers up to which one program fits a client's mixture on a GPU


@dataclass(frozen=True)
class Match:
    """What the mixture says of each client's observed peers."""

    same: Tensor  # [m, c] bool: H, the peers of the same cluster
    skipped: Tensor  # [m] bool: nothing to learn from (no candidates, or nobody answered): keep the list as it is
    mean: Tensor  # [m, 2] of the two Gaussians, NaN where none were fitted
    variance: Tensor  # [m, 2]
    cases: Tensor  # [m] which degenerate cases came up: bit i for CASES[i]

    @property
    def events(self) -> dict[str, int]:
        """How often each degenerate case came up."""
        return {name: int((self.cases >> bit & 1).sum()) for bit, name in enumerate(CASES)}


def match(similarity: Tensor, observed: Tensor | None, listed: Tensor, seeds: int) -> Match:
    """Split each client's peers into same cluster and others.

    similarity: [m, c], NaN for not observed; observed: [m, c] bool, if fewer were; listed: [m, c] bool, peers that come
    from the neighbor list (S), the others are fresh candidates (C). A client with an empty list starts from its `seeds`
    most similar candidates.
    """
    if dispatch.fused(similarity, similarity.shape[1]) and similarity.shape[1] <= BITS:
        from kinfolk.kernels.mixture import match as fused

        if observed is not None:
            similarity = torch.where(observed, similarity, torch.nan)
        return Match(*fused(similarity, listed, seeds, ROUNDS, NO_SPREAD, VARIANCE_SHARE, SMALLEST_VARIANCE))
    finite = ~similarity.isnan()
    observed = finite if observed is None else observed & finite
    y = torch.where(observed, similarity, 0.0)
    count = observed.sum(dim=1)
    old, new = listed & observed, ~listed & observed
    spread = _variance(y, observed, _mean(y, observed))
    nobody, no_candidates = count == 0, (count > 0) & ~new.any(dim=1)
    unclear = ~nobody & ~no_candidates & ((spread < NO_SPREAD) | (count < 3))
    empty = ~nobody & ~no_candidates & ~unclear & ~old.any(dim=1)

    first = torch.where(empty[:, None], _top(y, new, seeds), old)
    fitted = ~(nobody | no_candidates | unclear)
    same, mean, variance, stops = _fit(y, observed, old, first, spread, fitted)
    swapped = fitted & (mean[:, 0] < mean[:, 1])
    same = torch.where(swapped[:, None], observed & ~same, same)
    mean = torch.where(swapped[:, None], mean.flip(1), mean)
    variance = torch.where(swapped[:, None], variance.flip(1), variance)

    everybody = fitted & ~(observed & ~same).any(dim=1)
    same = torch.where(unclear[:, None], old, same) & observed & ~(nobody | no_candidates)[:, None]
    nobody_same = fitted & ~same.any(dim=1)
    cases = torch.stack([nobody, no_candidates, unclear, empty, everybody, nobody_same, stops], dim=1)  # as in CASES
    bits = (cases << torch.arange(len(CASES), device=cases.device)).sum(dim=1)
    return Match(same, nobody | no_candidates, mean, variance, bits)


def _fit(
    y: Tensor, observed: Tensor, old: Tensor, first: Tensor, spread: Tensor, fitted: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hard EM until nothing changes: (component 0 [m, c], means [m, 2], variances [m, 2], who went in a cycle [m])."""
    floor = (VARIANCE_SHARE * spread).clamp(min=SMALLEST_VARIANCE)
    zero = first
    seen = [zero]
    likelihoods: list[Tensor] = []
    running = fitted.clone()
    cycled = torch.zeros_like(fitted)
    for _ in range(ROUNDS):
        mean, variance = _estimate(y, observed, zero, floor)
        scores = _scores(y, observed, zero, mean, variance)
        own = torch.where(zero, scores[..., 0], scores[..., 1])
        likelihoods.append(torch.where(observed, own, 0.0).sum(dim=1))
        better = torch.where(scores[..., 0] == scores[..., 1], old, scores[..., 0] > scores[..., 1]) & observed
        one_sided = ~(zero & observed).any(dim=1) | ~(~zero & observed).any(dim=1)
        running &= ~one_sided  # a component is empty: stop there
        following = torch.where(running[:, None], better, zero)
        running &= (following != zero).any(dim=1)
        before = torch.stack([(following == past).all(dim=1) for past in seen])  # [past states, m]
        back = running & before.any(dim=0)
        if bool(back.any()):
            zero = torch.where(back[:, None], _best_of_cycle(seen, likelihoods, before), zero)
            cycled |= back
            running &= ~back
            following = torch.where(back[:, None], zero, following)
        zero = following
        seen.append(zero)
        if not bool(running.any()):
            break
    mean, variance = _estimate(y, observed, zero, floor)
    return zero, mean, variance, cycled


def _best_of_cycle(seen: list[Tensor], likelihoods: list[Tensor], before: Tensor) -> Tensor:
    """For each client in a cycle, the state of the cycle with the larger classification log-likelihood."""
    states, values = torch.stack(seen), torch.stack(likelihoods)  # [s, m, c], [s, m]
    entered = before.to(torch.int8).argmax(dim=0)  # where the cycle begins
    inside = torch.arange(states.shape[0], device=states.device)[:, None] >= entered
    best = torch.where(inside, values, -torch.inf).argmax(dim=0)
    return states.gather(0, best[None, :, None].expand(1, *states.shape[1:]))[0]


def _estimate(y: Tensor, observed: Tensor, zero: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Means and floored variances of the two components: [m, 2] each; NaN mean for an empty one."""
    means, variances = [], []
    for part in (zero & observed, ~zero & observed):
        mean = _mean(y, part)
        means.append(mean)
        variances.append(torch.maximum(_variance(y, part, mean), floor))
    return torch.stack(means, dim=1), torch.stack(variances, dim=1)


def _scores(y: Tensor, observed: Tensor, zero: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log of share times density of each peer under each component: [m, c, 2]."""
    total = observed.sum(dim=1).clamp(min=1)
    sizes = torch.stack([(zero & observed).sum(dim=1), (~zero & observed).sum(dim=1)], dim=1)
    share = (sizes / total[:, None]).to(y.dtype).log()
    distance = (y[..., None] - mean[:, None, :]).square() / (2 * variance[:, None, :])
    return (share - 0.5 * variance.log())[:, None, :] - distance


def _mean(y: Tensor, part: Tensor) -> Tensor:
    return torch.where(part, y, 0.0).sum(dim=1) / part.sum(dim=1)


def _variance(y: Tensor, part: Tensor, mean: Tensor) -> Tensor:
    squares = torch.where(part, (y - mean[:, None]).square(), 0.0).sum(dim=1)
    return squares / part.sum(dim=1).clamp(min=1)


def _top(y: Tensor, part: Tensor, count: int) -> Tensor:
    """[m, c] bool: the `count` largest of `part`, the earlier column on ties."""
    order = torch.where(part, y, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(y.shape[1], device=y.device).expand_as(order))
    return part & (rank < count)
