"""The company a client keeps: with whom it has averaged of late, and whether another keeps the same.

Models that have been averaged with each other stay alike for long: groups that could not be told apart in the first
rounds are hard to tell apart by their models later, even when nobody averages across them any more. Their company has
parted at once: kin have averaged with the same peers, strangers with others, however alike their models are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.kernels import dispatch
from kinfolk.matching.evidence import WIDEST  # columns of a table of peers; of more peers several share one

HELD = 2**26  # numbers of peers' companies that may lie in memory at a time
COMPARED = 63  # peers up to which one program compares all of a client's on a GPU
NEARLY = 1 - 1e-9  # however sums are rounded, exactly the share is enough
SHARE = 0.5  # whoever has less than this share of what neighbors have in common with a client is none of them


def nothing(m: int, n: int, device: torch.device) -> Tensor:
    """[m, w] the round in which each client last averaged with each of n peers: never."""
    return torch.zeros(m, min(n, WIDEST), dtype=torch.int32, device=device)


def met(table: Tensor, own: Tensor, ids: Tensor, t: int) -> Tensor:
    """The table [m, w] after the clients own [m] have averaged with the peers ids [m, c] (-1: none) in round t."""
    if dispatch.fused(table, ids.shape[1]):
        from kinfolk.kernels.company import met as fused

        return fused(table, own, ids, t)
    width = table.shape[1]
    whom = torch.cat([own[:, None], torch.where(ids < 0, own[:, None], ids)], dim=1) % width
    return table.scatter(1, whom, t)


def since(table: Tensor, first: int) -> Tensor:
    """[m, w] 1 for whom a client has averaged with since the round `first`, 0 for others."""
    return (table >= first).view(torch.uint8)


def kept(mine: Tensor, theirs: Tensor, rows: Tensor, listed: Tensor) -> Tensor:
    """[m, c] bool: who keeps the company that a client and its neighbors keep, at least by half as much as these do.

    mine: [m, w] and theirs: [p, w], as `since` finds them; rows: [m, c] into theirs, -1 for not seen; listed: [m, c]
    bool, the neighbors. Neighbors are asked too, because a client that has itself met peers of two groups could not
    tell them apart. Nothing can be said without a neighbor in sight, nor of those who have met so few that even at
    random they need not have anybody in common: they get the benefit of the doubt.
    """
    if not theirs.shape[0]:  # nobody answered anybody of this cohort
        return torch.zeros_like(listed)
    if dispatch.fused(mine, rows.shape[1]) and rows.shape[1] <= COMPARED:
        from kinfolk.kernels.company import kept as fused

        return fused(mine, theirs, rows, listed, SHARE * NEARLY)
    seen = rows >= 0
    shared, expected = _shared(mine, theirs, rows.clamp(min=0), listed & seen)
    usual = torch.where(listed & seen, shared, torch.nan).nanmedian(dim=1, keepdim=True).values
    return seen & ((shared >= SHARE * NEARLY * usual) | usual.isnan() | (expected < 1))


def _shared(mine: Tensor, theirs: Tensor, rows: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """How much company each of the peers rows [m, c] has in common with those asked [m, c] and with the client itself,
    without itself; and how many peers they would have in common at random: [m, c] both, means.

    Two have in common the number of common peers, divided by the geometric mean of their numbers.
    """
    m, c = rows.shape
    chunk = max(1, HELD // max(1, c * theirs.shape[1]))
    found = []
    for first in range(0, m, chunk):
        part = slice(first, first + chunk)
        others = theirs[rows[part]].float()  # [*, c, w]
        witnesses = torch.cat([others, mine[part, None].float()], dim=1)
        common = torch.bmm(others, witnesses.mT).double()  # whole numbers, exact in whichever order they are added
        sizes, my_sizes = others.sum(dim=2).double(), witnesses.sum(dim=2).double()
        both = sizes[:, :, None] * my_sizes[:, None, :]
        heard = torch.nn.functional.pad(asked[part], (0, 1), value=True)[:, None, :].expand(-1, c, -1).clone()
        heard[:, :, :c] &= ~torch.eye(c, dtype=torch.bool, device=rows.device)
        count = heard.sum(dim=2)
        shares = torch.where(heard & (both > 0), common / both.sqrt(), 0.0).sum(dim=2) / count
        found.append((shares, torch.where(heard, both, 0.0).sum(dim=2) / count / theirs.shape[1]))
    return torch.cat([each for each, _ in found]), torch.cat([each for _, each in found])
