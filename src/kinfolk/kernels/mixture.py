"""The hard EM of `kinfolk.matching.mixture` (Triton): one program fits the two Gaussians of a client to the end.

Which peers are in component 0 is a number, a bit for each: states are compared, remembered and found again as numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STATES = 128  # at least one more than rounds


@triton.jit
def _moments(y, part, floor):
    """Size, mean (NaN if empty) and floored variance of a part."""
    size = tl.sum(part.to(tl.int32))
    count = tl.maximum(size, 1).to(tl.float64)
    mean = tl.sum(tl.where(part, y, 0.0)) / count
    away = tl.where(part, y - mean, 0.0)
    variance = tl.maximum(tl.sum(away * away) / count, floor)
    return size, tl.where(size > 0, mean, float("nan")), variance


@triton.jit
def _density(y, size, count, mean, variance):
    """Log of share times density of each peer, without the constant; the part is not empty."""
    away = y - mean
    share = tl.log(size.to(tl.float64) / count.to(tl.float64))
    return share - 0.5 * tl.log(variance) - away * away / (2 * variance)


@triton.jit(do_not_specialize=["c", "seeds"])
def _match(
    similarity, listed, same_out, skipped_out, mean_out, variance_out, cases_out, c, seeds,
    ROUNDS: tl.constexpr, NO_SPREAD: tl.constexpr, SHARE: tl.constexpr, SMALLEST: tl.constexpr,
    WIDTH: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    here = column < c
    y = tl.load(similarity + row * c + column, mask=here, other=0.0).to(tl.float64)
    observed = here & (y == y)
    y = tl.where(observed, y, 0.0)
    old = (tl.load(listed + row * c + column, mask=here, other=0) != 0) & observed
    new = observed & ~old
    count, _, spread = _moments(y, observed, 0.0)
    olds, news = tl.sum(old.to(tl.int32)), tl.sum(new.to(tl.int32))
    nobody = count == 0
    no_candidates = (count > 0) & (news == 0)
    unclear = (news > 0) & ((spread < NO_SPREAD) | (count < 3))
    fitted = (news > 0) & ~unclear
    empty = fitted & (olds == 0)

    a, b = y[:, None], y[None, :]
    ahead = new[None, :] & ((b > a) | ((b == a) & (column[None, :] < column[:, None])))
    top = new & (tl.sum(ahead.to(tl.int32), 1) < seeds)
    bit = tl.full([WIDTH], 1, tl.int64) << column.to(tl.int64)
    state = tl.sum(tl.where((top & empty) | (old & ~empty), bit, 0))
    floor = tl.maximum(SHARE * spread, SMALLEST)

    number = tl.arange(0, STATES)
    past = tl.where(number == 0, state, -1)
    likelihoods = tl.full([STATES], float("-inf"), tl.float64)
    going = fitted.to(tl.int32)
    cycled = going * 0
    turn = going * 0
    while (going > 0) & (turn < ROUNDS):
        zero = (state & bit) != 0
        one = observed & ~zero
        size_0, mean_0, variance_0 = _moments(y, zero, floor)
        size_1, mean_1, variance_1 = _moments(y, one, floor)
        if (size_0 > 0) & (size_1 > 0):
            score_0 = _density(y, size_0, count, mean_0, variance_0)
            score_1 = _density(y, size_1, count, mean_1, variance_1)
            likelihood = tl.sum(tl.where(zero, score_0, tl.where(one, score_1, 0.0)))
            likelihoods = tl.where(number == turn, likelihood, likelihoods)
            better = observed & ((score_0 > score_1) | ((score_0 == score_1) & old))
            following = tl.sum(tl.where(better, bit, 0))
            entered = tl.min(tl.where((number <= turn) & (past == following), number, STATES))
            inside = (number <= turn) & (number >= entered)
            highest = tl.max(tl.where(inside, likelihoods, float("-inf")))
            best = tl.min(tl.where(inside & (likelihoods == highest), number, STATES))
            back = (following != state) & (entered < STATES)
            going = tl.where((following == state) | back, 0, 1)
            cycled = tl.where(back, 1, cycled)
            state = tl.where(back, tl.sum(tl.where(number == best, past, 0)), following)
            past = tl.where(number == turn + 1, state, past)
        else:  # a component is empty: stop there
            going = going * 0
        turn += 1

    zero = (state & bit) != 0
    _, mean_0, variance_0 = _moments(y, zero, floor)
    _, mean_1, variance_1 = _moments(y, observed & ~zero, floor)
    swapped = fitted & (mean_0 < mean_1)
    tl.store(mean_out + 2 * row, tl.where(swapped, mean_1, mean_0))
    tl.store(mean_out + 2 * row + 1, tl.where(swapped, mean_0, mean_1))
    tl.store(variance_out + 2 * row, tl.where(swapped, variance_1, variance_0))
    tl.store(variance_out + 2 * row + 1, tl.where(swapped, variance_0, variance_1))
    same = (zero & ~swapped) | (observed & ~zero & swapped)
    members = tl.sum(same.to(tl.int32))
    same = (fitted & same) | (unclear & old)
    tl.store(same_out + row * c + column, same.to(tl.uint8), mask=here)
    tl.store(skipped_out + row, (nobody | no_candidates).to(tl.uint8))
    cases = nobody.to(tl.int32) + 2 * no_candidates.to(tl.int32) + 4 * unclear.to(tl.int32) + 8 * empty.to(tl.int32)
    cases += 16 * (fitted & (members == count)).to(tl.int32) + 32 * (fitted & (members == 0)).to(tl.int32)
    tl.store(cases_out + row, cases + 64 * cycled)


def match(
    similarity: Tensor, listed: Tensor, seeds: int, rounds: int, no_spread: float, share: float, smallest: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """same [m, c], skipped [m], means and variances [m, 2] of `mixture.match`, and its degenerate cases as bits [m]."""
    m, c = similarity.shape
    device = similarity.device
    same = torch.empty((m, c), dtype=torch.uint8, device=device)
    skipped = torch.empty(m, dtype=torch.uint8, device=device)
    mean, variance = torch.empty((2, m, 2), dtype=torch.float64, device=device)
    cases = torch.empty(m, dtype=torch.int32, device=device)
    _match[(m,)](
        similarity.contiguous(), listed.contiguous().view(torch.uint8), same, skipped, mean, variance, cases, c, seeds,
        ROUNDS=rounds, NO_SPREAD=no_spread, SHARE=share, SMALLEST=smallest,
        WIDTH=16 if c <= 16 else 64, STATES=STATES,
    )  # fmt: skip
    return same.view(torch.bool), skipped.view(torch.bool), mean, variance, cases
