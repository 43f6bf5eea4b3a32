"""The company that clients keep, as in `kinfolk.matching.company` (Triton): one program for each client."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kinfolk.kernels.dispatch import tile
from kinfolk.kernels.evidence import _median

BLOCK = 64  # columns of companies at a time


@triton.jit(do_not_specialize=["t", "c"])
def _met(table, own, ids, after, t, c, w, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    whom = tl.load(ids + row * c + column, mask=column < c, other=-1)
    me = tl.load(own + row) % w
    there = tl.where(whom < 0, me, whom % w)
    for first in range(0, w, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < w
        before = tl.load(table + row * w + at, mask=inside, other=0)
        new = tl.max((at[:, None] == there[None, :]).to(tl.int32), 1) > 0
        tl.store(after + row * w + at, tl.where(new, t, before), mask=inside)


def met(table: Tensor, own: Tensor, ids: Tensor, t: int) -> Tensor:
    """As `kinfolk.matching.company.met`."""
    after = torch.empty_like(table)
    width = tile(ids.shape[1] + 1)  # one more, which stands for the client itself
    _met[(table.shape[0],)](table, own, ids.contiguous(), after, t, ids.shape[1], table.shape[1], width, BLOCK)
    return after


@triton.jit(do_not_specialize=["c"])
def _kept(
    mine, theirs, rows, listed, kept, c, w, SHARE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    here = column < c
    whom = tl.load(rows + row * c + column, mask=here, other=-1)
    seen = whom >= 0
    asked = seen & (tl.load(listed + row * c + column, mask=here, other=0) != 0)
    me = column == c
    common = tl.zeros([WIDTH, WIDTH], tl.float32)
    sizes = tl.zeros([WIDTH], tl.float32)
    for first in range(0, w, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < w
        others = tl.load(theirs + whom[:, None] * w + at[None, :], mask=seen[:, None] & inside[None, :], other=0)
        own = tl.load(mine + row * w + at, mask=inside, other=0)
        witness = tl.where(me[:, None], own[None, :], others).to(tl.float16)
        common += tl.dot(others.to(tl.float16), tl.trans(witness))  # whole numbers: exact
        sizes += tl.sum(witness.to(tl.float32), 1)
    both = sizes.to(tl.float64)[:, None] * sizes.to(tl.float64)[None, :]
    heard = (asked[None, :] & (column[:, None] != column[None, :])) | me[None, :]
    count = tl.sum(heard.to(tl.int32), 1).to(tl.float64)
    part = heard & (both > 0)
    share = tl.sum(tl.where(part, common.to(tl.float64) / tl.sqrt(tl.where(part, both, 1.0)), 0.0), 1) / count
    expected = tl.sum(tl.where(heard, both, 0.0), 1) / count / w
    usual = _median(share, asked, WIDTH)
    alone = tl.sum(asked.to(tl.int32)) == 0
    same = seen & ((share >= SHARE * usual) | (expected < 1) | alone)
    tl.store(kept + row * c + column, same.to(tl.uint8), mask=here)


def kept(mine: Tensor, theirs: Tensor, rows: Tensor, listed: Tensor, share: float) -> Tensor:
    """As `kinfolk.matching.company.kept`."""
    found = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
    width = tile(rows.shape[1] + 1)
    _kept[(rows.shape[0],)](
        mine, theirs, rows.contiguous(), listed.contiguous(), found, rows.shape[1], mine.shape[1], share, width, BLOCK
    )
    return found
