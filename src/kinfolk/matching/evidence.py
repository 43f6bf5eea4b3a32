"""Matching with a memory: a peer is kin while it is about as similar to me as my neighbors are.

One look can deceive; so every client keeps, for each peer it has judged, a running average of how far that peer's
similarity lay from those of the neighbors at the time, in units of the neighbors' own spread. Kin scatter around zero
whatever the stage of training, strangers lie far below, and the average forgets slowly enough to outlast a bad round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.kernels import dispatch

NORMAL = 1.4826  # median absolute deviation -> standard deviation, for normal scores
# The neighbors' spread is taken to lie within these shares of the spread of all who were looked at: below, a few
# neighbors that happen to agree would make kin look like strangers; above, one stranger in the list would make room
# for the next.
LEAST, MOST = 0.2, 0.4
FARTHEST = 30.0  # one look counts at most this much
FADING = 0.98  # a round that shows kin only says nothing about how far strangers are: the unit shrinks slowly
SMALLEST = 1e-12  # unit
WIDEST = 2_000  # columns of the table of evidence: of more peers several share one, and the last one judged has it
COMPARED = 64  # peers up to which one program judges all of a client's on a GPU


@dataclass(frozen=True)
class Verdict:
    """What is known after a look."""

    evidence: Tensor  # [m, c] running averages of the peers judged, NaN for those never judged
    unit: Tensor  # [m] what distances are measured in
    judged: Tensor  # [m, c] bool: looked at just now, with neighbors to compare with
    kin: Tensor  # [m, c] bool, meaningful where judged


def judge(scores: Tensor, listed: Tensor, evidence: Tensor, unit: Tensor, rate: float, limit: float) -> Verdict:
    """Compare each peer's score with those of the listed neighbors and update the evidence.

    scores: [m, c] higher is more alike, NaN for not looked at; listed: [m, c] bool, current neighbors; evidence: [m, c]
    and unit: [m] so far.
    """
    seen = ~scores.isnan()
    mine = seen & listed
    center = _median(scores, mine)
    spread = NORMAL * _median((scores - center[:, None]).abs(), mine)
    known = torch.where(seen, scores, 0.0)
    count = seen.sum(dim=1).clamp(min=1)
    mean = known.sum(dim=1) / count
    overall = (torch.where(seen, (known - mean[:, None]).square(), 0.0).sum(dim=1) / count).sqrt()
    compared = mine.sum(dim=1) >= 2
    fresh = torch.clamp(spread, LEAST * overall, MOST * overall)
    unit = torch.where(compared, torch.maximum(fresh, FADING * unit), unit).clamp(min=SMALLEST)
    distance = ((scores - center[:, None]) / unit[:, None]).clamp(-FARTHEST, FARTHEST)
    judged = seen & compared[:, None]
    updated = torch.where(evidence.isnan(), distance, (1 - rate) * evidence + rate * distance)
    updated = torch.where(judged, updated, evidence)
    return Verdict(updated, unit, judged, judged & (updated >= -limit))


@dataclass(frozen=True)
class Look:
    """What a client makes of those it looked at."""

    kin: Tensor  # [m, c] bool
    evidence: Tensor  # [m, n] what is known of each peer afterwards
    unit: Tensor  # [m]
    skipped: Tensor  # [m] bool: nobody was seen


def look(
    ids: Tensor, scores: Tensor, listed: Tensor, evidence: Tensor, unit: Tensor, rate: float, limit: float
) -> Look:
    """Judge the peers ids [m, c] by their scores [m, c] (NaN: not seen) and by what is known of them, evidence [m, n].

    Nothing is known, and nothing will be, of somebody whose id is -1 (`places` in a table that is too narrow).
    Those who cannot be judged, because there are fewer than two neighbors to compare with: neighbors stay kin, and with
    one neighbor, which has no spread, whoever is nearer to it than to the strangers' mean joins it.
    """
    if dispatch.fused(scores, scores.shape[1]) and scores.shape[1] <= COMPARED:
        from kinfolk.kernels.evidence import look as fused

        table = evidence.contiguous().clone()
        kin, unit, skipped = fused(scores, listed, limit, _CONSTANTS, ids, table, unit, rate)
        return Look(kin, table, unit, skipped)
    n = evidence.shape[1]
    before = torch.where(ids < 0, torch.nan, evidence.gather(1, ids.clamp(min=0)))
    verdict = judge(scores, listed, before, unit, rate, limit)
    there = torch.where(
        verdict.judged & (ids >= 0), ids, n
    )  # what was not judged is written to a column that is cut off
    table = torch.nn.functional.pad(evidence, (0, 1))
    table = table.scatter(1, there, verdict.evidence.to(table.dtype))[:, :n]
    unseen = scores.isnan()
    mine, theirs = (torch.where(part, scores, torch.nan) for part in (listed, ~listed))
    nearer = scores > (mine.nanmean(dim=1) + theirs.nanmean(dim=1))[:, None] / 2
    single = ((~mine.isnan()).sum(dim=1) == 1)[:, None]
    kin = torch.where(verdict.judged, verdict.kin, (listed & ~unseen) | (single & nearer))
    return Look(kin, table, verdict.unit, unseen.all(dim=1))


def nothing(m: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What m clients know of n peers to begin with: evidence [m, w], and whose [m, w] it is; [m, 0] if each peer has a
    column of its own."""
    width = min(n, WIDEST)
    whose = torch.full((m, width if n > width else 0), -1, dtype=torch.int32, device=device)
    return torch.full((m, width), torch.nan, device=device), whose


def places(ids: Tensor, evidence: Tensor, whose: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns [m, c] for the peers ids [m, c], the evidence [m, w] without that of others who had them, and whose it is
    now.

    Two who are looked at together and share a column: the first has it, the other is judged by this look alone (-1).
    """
    if not whose.shape[1]:
        return ids, evidence, whose
    width = evidence.shape[1]
    column = torch.where(ids < 0, -1, ids % width)
    same = column[:, :, None] == column[:, None, :]
    taken = same.tril(-1).any(dim=2)
    column = torch.where(taken, -1, column)
    into = torch.where(column < 0, width, column)  # nobody's: a column that is cut off
    wide_whose, wide = torch.nn.functional.pad(whose, (0, 1)), torch.nn.functional.pad(evidence, (0, 1))
    known = torch.where(wide_whose.gather(1, into) == ids, wide.gather(1, into), torch.nan)
    wide, wide_whose = wide.scatter(1, into, known), wide_whose.scatter(1, into, ids.to(whose.dtype))
    return column, wide[:, :width], wide_whose[:, :width]


def alike(scores: Tensor, listed: Tensor, limit: float) -> Tensor:
    """[m, c] bool: who is as the listed are, by this look alone; scores: [m, c], NaN for not seen; listed: [m, c]."""
    if dispatch.fused(scores, scores.shape[1]) and scores.shape[1] <= COMPARED:
        from kinfolk.kernels.evidence import look as fused

        return fused(scores, listed, limit, _CONSTANTS)[0]
    nothing = torch.full_like(scores, torch.nan), torch.zeros_like(scores[:, 0])
    return judge(scores, listed, *nothing, rate=1.0, limit=limit).kin


_CONSTANTS = NORMAL, LEAST, MOST, FARTHEST, FADING, SMALLEST


def _median(values: Tensor, part: Tensor) -> Tensor:
    """Median of each row [m] over `part`; NaN where it is empty."""
    return torch.where(part, values, torch.nan).nanmedian(dim=1).values
