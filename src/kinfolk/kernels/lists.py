"""Lists of peers, as in `kinfolk.matching.lists` (Triton): one program for each client, which holds its whole list."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kinfolk.kernels.dispatch import aligned, tile
from kinfolk.kernels.hashing import LARGEST, hashed

# Columns held of a list that grows from round to round. A program is compiled for each number of them, and none for
# particular widths or strides: that would happen in the middle of a run.
LONG = 1024


@triton.jit
def _keys(key, client, ids):
    """Sort keys of a draw, the largest for whoever is not there."""
    return tl.where(ids >= 0, hashed(key.to(tl.int64), client, ids), LARGEST)


@triton.jit(do_not_specialize=["key", "later", "w", "v", "count", "step", "others_step"])
def _choose(
    clients, lists, others, out, key, later, w, v, count, step, others_step,
    WIDTH: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    client = tl.load(clients + row).to(tl.int64)
    column = tl.arange(0, WIDTH)
    ids = tl.load(lists + row * step + column, mask=column < w, other=-1).to(tl.int64)
    keys = _keys(key, client, ids)
    first = tl.minimum(tl.sum((ids >= 0).to(tl.int32)), count)
    for place in range(first):
        at = tl.min(tl.where(keys == tl.min(keys), column, WIDTH))
        tl.store(out + row * count + place, tl.sum(tl.where(column == at, ids, 0)))
        keys = tl.where(column == at, LARGEST, keys)
    if MORE:
        column = tl.arange(0, MORE)
        ids = tl.load(others + row * others_step + column, mask=column < v, other=-1).to(tl.int64)
        keys = _keys(later, client, ids)
        for place in range(first, count):
            lowest = tl.min(keys)
            at = tl.min(tl.where(keys == lowest, column, MORE))
            found = tl.sum(tl.where(column == at, ids, 0))
            tl.store(out + row * count + place, tl.where(lowest == LARGEST, -1, found))
            keys = tl.where(column == at, LARGEST, keys)
    else:
        for place in range(first, count):
            tl.store(out + row * count + place, -1)


def choose(
    key: int, clients: Tensor, lists: Tensor, count: int, later: int = 0, others: Tensor | None = None
) -> Tensor:
    """`lists.choose` for a key; where there are fewer, ids of `others` [m, v] are chosen by the key `later`."""
    out = torch.empty((lists.shape[0], count), dtype=torch.int64, device=lists.device)
    more = None if others is None or not others.shape[1] else aligned(others)
    lists = aligned(lists)
    _choose[(lists.shape[0],)](
        clients.contiguous(), lists, lists if more is None else more, out, key, later, lists.shape[1],
        0 if more is None else more.shape[1], count, lists.stride(0), 0 if more is None else more.stride(0),
        WIDTH=tile(lists.shape[1], LONG), MORE=0 if more is None else tile(more.shape[1], LONG),
    )  # fmt: skip
    return out


@triton.jit
def _take_best(ids, scores, left, WIDTH: tl.constexpr):
    """(the lowest id of those left with the highest score, who is left then); -1 if nobody is left."""
    column = tl.arange(0, WIDTH)
    highest = tl.max(tl.where(left, scores, float("-inf")))
    best = left & (scores == highest)
    found = tl.min(tl.where(best, ids, LARGEST))
    at = tl.min(tl.where(best & (ids == found), column, WIDTH))
    return tl.where(found == LARGEST, -1, found), left & (column != at)


@triton.jit(do_not_specialize=["w", "count", "step", "scores_step"])
def _best(lists, scores, out, w, count, step, scores_step, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    ids = tl.load(lists + row * step + column, mask=column < w, other=-1).to(tl.int64)
    values = tl.load(scores + row * scores_step + column, mask=column < w, other=0.0).to(tl.float64)
    left = (ids >= 0) & (values == values)
    for place in range(count):
        found, left = _take_best(ids, values, left, WIDTH)
        tl.store(out + row * count + place, found)


def best(lists: Tensor, scores: Tensor, count: int) -> Tensor:
    """`lists.best`."""
    out = torch.empty((lists.shape[0], count), dtype=torch.int64, device=lists.device)
    lists, scores = aligned(lists), aligned(scores)
    _best[(lists.shape[0],)](
        lists, scores, out, lists.shape[1], count, lists.stride(0), scores.stride(0), WIDTH=tile(lists.shape[1])
    )
    return out


@triton.jit(do_not_specialize=["w", "room", "step", "mask_step"])
def _pack(mask, ids, out, w, room, step, mask_step, MASKED: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    here = column < w
    found = tl.load(ids + row * step + column, mask=here, other=-1).to(tl.int64)
    if MASKED:
        kept = tl.load(mask + row * mask_step + column, mask=here, other=0) != 0
    else:
        kept = found >= 0
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(out + row * room + place, found, mask=kept & (place < room))
    empty = tl.arange(0, ROOM)
    nobody = tl.full([ROOM], -1, tl.int64)
    tl.store(out + row * room + empty, nobody, mask=(empty < room) & (empty >= tl.sum(kept.to(tl.int32))))


def pack(mask: Tensor | None, ids: Tensor, room: int) -> Tensor:
    """`lists.pack` into `room` columns; without a mask whoever is not -1 is kept."""
    out = torch.empty((ids.shape[0], room), dtype=torch.int64, device=ids.device)
    ids = aligned(ids)
    chosen = ids if mask is None else aligned(mask).view(torch.uint8)
    _pack[(ids.shape[0],)](
        chosen, ids, out, ids.shape[1], room, ids.stride(0), chosen.stride(0),
        MASKED=mask is not None, WIDTH=tile(ids.shape[1], LONG), ROOM=tile(room, LONG),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["w", "c", "step", "ids_step"])
def _contains(lists, ids, out, w, c, step, ids_step, DROP: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    here = column < c
    wanted = tl.load(ids + row * ids_step + column, mask=here, other=-1).to(tl.int64)
    there = wanted < -1
    for place in range(w):
        there = there | (wanted == tl.load(lists + row * step + place))
    there = there & (wanted >= 0)
    if DROP:
        tl.store(out + row * c + column, tl.where(there, -1, wanted), mask=here)
    else:
        tl.store(out + row * c + column, there.to(tl.uint8), mask=here)


def contains(lists: Tensor, ids: Tensor, drop: bool = False) -> Tensor:
    """`lists.contains`; with `drop` `lists.without`."""
    out = torch.empty(ids.shape, dtype=torch.int64 if drop else torch.uint8, device=ids.device)
    lists, ids = aligned(lists), aligned(ids)
    _contains[(ids.shape[0],)](
        lists, ids, out, lists.shape[1], ids.shape[1], lists.stride(0), ids.stride(0),
        DROP=drop, WIDTH=tile(ids.shape[1]),
    )  # fmt: skip
    return out if drop else out.view(torch.bool)


@triton.jit(do_not_specialize=["c", "w", "split", "count", "step", "listed_step"])
def _outcome(
    looked_at, scores, kin, skipped, listed, cases, counts, same, rest, counted, c, w, split, count, step, listed_step,
    WIDTH: tl.constexpr, LISTED: tl.constexpr, KINDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    here = column < c
    ids = tl.load(looked_at + row * step + column, mask=here, other=-1).to(tl.int64)
    alike = (tl.load(kin + row * c + column, mask=here, other=0) != 0) & (ids >= 0)
    place = tl.arange(0, LISTED)
    before = tl.load(listed + row * listed_step + place, mask=place < w, other=-1).to(tl.int64)
    again = before < -1
    for known in range(split):
        again = again | (before == tl.load(looked_at + row * step + known))
    void = tl.load(skipped + row) != 0
    others = tl.where(again & ~void, -1, before)
    tl.store(rest + row * w + place, others, mask=place < w)
    somebody = (tl.max(alike.to(tl.int32)) > 0) | (tl.max(others) >= 0)
    kind = tl.arange(0, KINDS)
    emptied = (~somebody & ~void).to(tl.int32)
    now = tl.where(kind == KINDS - 1, emptied, (tl.load(cases + row).to(tl.int32) >> kind) & 1)
    tl.store(counted + row * KINDS + kind, tl.load(counts + row * KINDS + kind) + now)
    if somebody:
        tl.store(same + row * c + column, tl.where(alike, ids, -1), mask=here)
    else:
        values = tl.load(scores + row * c + column, mask=here, other=0.0)
        left = (ids >= 0) & (values == values)
        mine = left & (column < split)
        left = left & (mine | (tl.max(mine.to(tl.int32)) == 0))
        for number in range(tl.minimum(count, c)):
            found, left = _take_best(ids, values, left, WIDTH)
            tl.store(same + row * c + number, found)
        tl.store(same + row * c + column, tl.full([WIDTH], -1, tl.int64), mask=here & (column >= count))


def outcome(
    looked_at: Tensor, scores: Tensor, kin: Tensor, skipped: Tensor, listed: Tensor, split: int, count: int,
    cases: Tensor | None, counts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`outcome.outcome`; counts have a power of two of columns."""
    looked_at, listed, void = aligned(looked_at), aligned(listed), skipped.contiguous().view(torch.uint8)
    same, rest = (torch.empty(ids.shape, dtype=torch.int64, device=ids.device) for ids in (looked_at, listed))
    counted = torch.empty_like(counts)
    _outcome[(looked_at.shape[0],)](
        looked_at, scores.contiguous(), kin.contiguous().view(torch.uint8), void, listed,
        void if cases is None else cases.contiguous(), counts.contiguous(), same, rest, counted,
        looked_at.shape[1], listed.shape[1], split, count, looked_at.stride(0), listed.stride(0),
        WIDTH=tile(looked_at.shape[1]), LISTED=tile(listed.shape[1], LONG), KINDS=counts.shape[1],
    )  # fmt: skip
    return same, rest, counted
