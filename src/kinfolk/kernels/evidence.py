"""Matching with a memory, as in `kinfolk.matching.evidence` (Triton): one program judges all peers of a client."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 64  # peers looked at: a median compares each with each


@triton.jit
def _median(values, part, WIDTH: tl.constexpr):
    """The lower median of the values [WIDTH] in `part`; 0 if it is empty."""
    column = tl.arange(0, WIDTH)
    a, b = values[:, None], values[None, :]
    before = (b < a) | ((b == a) & (column[None, :] < column[:, None]))
    rank = tl.sum((before & part[None, :]).to(tl.int32), 1)
    middle = (tl.sum(part.to(tl.int32)) - 1) // 2
    return tl.sum(tl.where(part & (rank == middle), values, 0.0))


@triton.jit
def _mean(values, part):
    """NaN if the part is empty."""
    count = tl.sum(part.to(tl.int32))
    total = tl.sum(tl.where(part, values, 0.0))
    return tl.where(count > 0, total / tl.maximum(count, 1).to(tl.float64), float("nan"))


@triton.jit(do_not_specialize=["c"])
def _look(
    scores, listed, ids, table, unit, kin, unit_after, skipped, c, n,
    RATE: tl.constexpr, LIMIT: tl.constexpr, NORMAL: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    FARTHEST: tl.constexpr, FADING: tl.constexpr, SMALLEST: tl.constexpr, MEMORY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    here = column < c
    score = tl.load(scores + row * c + column, mask=here, other=0.0).to(tl.float64)
    seen = here & (score == score)
    score = tl.where(seen, score, 0.0)
    old = tl.load(listed + row * c + column, mask=here, other=0) != 0
    mine = seen & old
    neighbors = tl.sum(mine.to(tl.int32))
    center = _median(score, mine, WIDTH)
    spread = NORMAL * _median(tl.abs(score - center), mine, WIDTH)
    count = tl.maximum(tl.sum(seen.to(tl.int32)), 1).to(tl.float64)
    away = tl.where(seen, score - tl.sum(score) / count, 0.0)
    overall = tl.sqrt(tl.sum(away * away) / count)

    compared = neighbors >= 2
    measure = tl.full([], 0.0, tl.float64)
    if MEMORY:
        measure = tl.load(unit + row)
    fresh = tl.minimum(tl.maximum(spread, LEAST * overall), MOST * overall)
    measure = tl.maximum(tl.where(compared, tl.maximum(fresh, FADING * measure), measure), SMALLEST)
    distance = (score - center) / measure
    distance = tl.minimum(tl.maximum(distance, -FARTHEST), FARTHEST)
    judged = seen & (neighbors + 0 * column >= 2)
    if MEMORY:
        whom = tl.load(ids + row * c + column, mask=here, other=-1)
        before = tl.load(table + row * n + whom, mask=judged & (whom >= 0), other=float("nan"))
        known = before == before
        kept = ((1 - RATE) * tl.where(known, before, 0.0)).to(tl.float64)
        after = tl.where(known, kept + RATE * distance, distance)
        tl.debug_barrier()  # others of this program may still have to read what is overwritten
        tl.store(table + row * n + whom, after.to(table.dtype.element_ty), mask=judged & (whom >= 0))
        tl.store(unit_after + row, measure)
        tl.store(skipped + row, (tl.max(seen.to(tl.int32)) == 0).to(tl.uint8))
        nearer = score > (_mean(score, mine) + _mean(score, seen & ~old)) / 2
        else_kin = mine | (seen & nearer & (neighbors == 1))
        same = (judged & (after >= -LIMIT)) | (~judged & else_kin)
    else:
        same = judged & (distance >= -LIMIT)
    tl.store(kin + row * c + column, same.to(tl.uint8), mask=here)


def look(
    scores: Tensor, listed: Tensor, limit: float, constants: tuple[float, float, float, float, float, float],
    ids: Tensor | None = None, table: Tensor | None = None, unit: Tensor | None = None, rate: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Who is kin [m, c] bool, the unit afterwards [m], and who saw nobody [m] bool; the table [m, n] is changed.

    Without ids, table and unit nothing is remembered, and the last two mean nothing. constants: those of
    `matching.evidence`, in its order.
    """
    m, c = scores.shape
    scores, listed = scores.contiguous(), listed.contiguous().view(torch.uint8)
    kin = torch.empty((m, c), dtype=torch.uint8, device=scores.device)
    after = torch.empty(m, dtype=torch.float64, device=scores.device)
    skipped = torch.empty(m, dtype=torch.uint8, device=scores.device)
    normal, least, most, farthest, fading, smallest = constants
    _look[(m,)](
        scores, listed, scores if ids is None else ids.contiguous(), scores if table is None else table,
        scores if unit is None else unit, kin, after, skipped, c, 0 if table is None else table.shape[1],
        RATE=rate, LIMIT=limit, NORMAL=normal, LEAST=least, MOST=most, FARTHEST=farthest, FADING=fading,
        SMALLEST=smallest, MEMORY=table is not None, WIDTH=WIDEST if c > 16 else 16,
    )  # fmt: skip
    return kin.view(torch.bool), after, skipped.view(torch.bool)
