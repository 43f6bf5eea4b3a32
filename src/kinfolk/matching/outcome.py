"""What a matching leaves of a client's list: those judged kin, and those it did not look at."""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.kernels import dispatch
from kinfolk.matching.lists import best, columns, without
from kinfolk.matching.mixture import CASES

COUNTED = (*CASES, "list_emptied")


def uncounted(m: int, device: torch.device) -> Tensor:
    """How often each of `COUNTED` has come up for m clients before the first matching: [m, q]."""
    return torch.zeros(m, len(COUNTED), dtype=torch.int32, device=device)


def outcome(
    looked_at: Tensor,
    similarity: Tensor,
    kin: Tensor,
    skipped: Tensor,
    listed: Tensor,
    known: int,
    count: int,
    cases: Tensor | None,
    counts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(same [m, c], rest [m, w], counts [m, q]): who was judged kin, and the listed who were not looked at, -1
    elsewhere; and how often each of `COUNTED` has come up.

    looked_at: [m, c], the first `known` columns from the list; similarity: [m, c], NaN for who did not answer; kin:
    [m, c] bool; skipped: [m] bool, clients whose matching is void, so that their list stays; listed: [m, w]; cases: [m]
    bits as a mixture has them, None for just `skipped`; counts: [m, q] so far. A client that would be left with nobody
    keeps the `count` most similar of its list, or of all that answered.
    """
    if dispatch.fused(looked_at, max(looked_at.shape[1], listed.shape[1])) and listed.shape[1]:
        from kinfolk.kernels import lists as programs

        return programs.outcome(looked_at, similarity, kin, skipped, listed, known, count, cases, counts)
    same = torch.where(kin, looked_at, -1)
    rest = torch.where(skipped[:, None], listed, without(listed, looked_at[:, :known]))
    nobody = ~((same >= 0).any(dim=1) | (rest >= 0).any(dim=1))
    bits = (skipped.to(torch.int64) if cases is None else cases)[:, None] >> torch.arange(len(CASES), device=kin.device)
    now = torch.cat([bits & 1, (nobody & ~skipped)[:, None]], dim=1)
    same = torch.where(nobody[:, None], _closest(looked_at, similarity, known, count), same)
    return same, rest, counts + now.to(counts.dtype)


def _closest(looked_at: Tensor, similarity: Tensor, known: int, count: int) -> Tensor:
    """[m, c] the `count` most similar of the list, or of all that answered."""
    width = looked_at.shape[1]
    mine = torch.where(columns(width, known, looked_at.device), similarity, torch.nan)
    mine = torch.where(mine.isnan().all(dim=1)[:, None], similarity, mine)
    chosen = best(looked_at, mine, min(count, width))
    return torch.nn.functional.pad(chosen, (0, width - chosen.shape[1]), value=-1)
