"""Drawing peers, and finding and counting the answers of a pull (Triton): one program for each client."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kinfolk.kernels.dispatch import aligned, tile
from kinfolk.kernels.hashing import floyd


@triton.jit(do_not_specialize=["key", "count", "more", "barred_step"])
def _draw(clients, sizes, own, barred, out, key, count, more, barred_step, PLACES: tl.constexpr, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    free = (place < tl.load(sizes + row).to(tl.int32)) & (place != tl.load(own + row).to(tl.int32))
    for column in range(more):
        free = free & (place != tl.load(barred + row * barred_step + column).to(tl.int32))
    number = tl.cumsum(free.to(tl.int32), 0) - 1  # of each free place
    left = tl.sum(free.to(tl.int32)).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    chosen = floyd(key.to(tl.int64), tl.load(clients + row).to(tl.int64), left, count, SLOTS).to(tl.int32)
    for column in range(count):
        wanted = tl.sum(tl.where(slot == column, chosen, 0))
        found = tl.sum(tl.where(free & (number == wanted), place, 0))
        tl.store(out + row * count + column, tl.where(wanted < 0, -1, found).to(tl.int64))


def draw(key: int, clients: Tensor, sizes: Tensor, own: Tensor, barred: Tensor, n: int, count: int) -> Tensor:
    """`peers.base.draw` for a key: own [m] and barred [m, e] are places not to be drawn."""
    out = torch.empty((clients.numel(), count), dtype=torch.int64, device=clients.device)
    barred = aligned(barred)
    _draw[(clients.numel(),)](
        clients.contiguous(), sizes.contiguous(), own.contiguous(), barred, out, key, count, barred.shape[1],
        barred.stride(0), PLACES=tile(n), SLOTS=triton.next_power_of_2(count),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["k", "ids_step", "models", "vectors", "size"])
def _rows_of(
    position, ids, lost, away, out, ledger, m, k, last, ids_step, lost_step, lost_one, models, vectors, size,
    COUNT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    here = column < k
    wanted = tl.load(ids + client * ids_step + column, mask=here, other=-1).to(tl.int64)
    gone = tl.load(lost + client * lost_step + column * lost_one, mask=here, other=1)
    here_not = (wanted < 0) | (gone != 0) | (tl.load(away + client) != 0)
    row = tl.load(position + tl.where(here_not, last, wanted))
    row = tl.where(here_not, -1, row)
    tl.store(out + client * k + column, row, mask=here)
    if COUNT:
        answers = tl.sum((row >= 0).to(tl.int64))
        at = ledger + client
        tl.store(at, tl.load(at) + answers * models)
        tl.store(at + m, tl.load(at + m) + answers * vectors)
        tl.store(at + 2 * m, tl.load(at + 2 * m) + answers * size)
        tl.store(at + 3 * m, tl.maximum(tl.load(at + 3 * m), answers * models))


def rows(
    position: Tensor, ids: Tensor, lost: Tensor, away: Tensor,
    ledger: Tensor | None = None, models: int = 0, vectors: int = 0, size: int = 0,
) -> Tensor:  # fmt: skip
    """position[ids], -1 where ids [m, k] are -1, an answer is lost [m, k] or its client away [m].

    position: [n + 1]. ledger: [4, m] contiguous; answers of each client times models, vectors and size are added to its
    first three rows, the fourth keeps the most models.
    """
    out = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    ids, lost = aligned(ids), lost.expand(ids.shape).view(torch.uint8)
    _rows_of[(ids.shape[0],)](
        position, ids, lost, away.contiguous().view(torch.uint8), out, position if ledger is None else ledger,
        ids.shape[0], ids.shape[1], position.numel() - 1, ids.stride(0), lost.stride(0), lost.stride(1),
        models, vectors, size, COUNT=ledger is not None, WIDTH=tile(ids.shape[1]),
    )  # fmt: skip
    return out


@triton.jit
def _place(ids, position, p, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    whose = tl.load(ids + row, mask=row < p, other=-1)
    tl.store(position + whose, row.to(tl.int64), mask=whose >= 0)


def place(ids: Tensor, n: int) -> Tensor:
    """[n + 1] the row in which each client's id stands in ids [p], -1 for those that do not and for the last."""
    position = torch.full((n + 1,), -1, dtype=torch.int64, device=ids.device)
    _place[(triton.cdiv(ids.numel(), 256),)](ids.contiguous(), position, ids.numel(), BLOCK=256)
    return position
