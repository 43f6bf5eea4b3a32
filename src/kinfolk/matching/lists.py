"""Lists of peers for many clients at once: `[m, w]` ids, one row per client, -1 where a row has no more."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.kernels import dispatch

_LAST = 2**63 - 1  # a sort key behind every other


def choose(seed: int, purpose: str, t: int, clients: Tensor, lists: Tensor, count: int) -> Tensor:
    """`count` different ids of each client's list, uniformly at random, all of them if there are fewer: [m, count].

    clients: [m] ids of the clients that draw; lists: [m, w] without repetitions. An id's sort key depends on the client
    and the id alone, so the draw is the same in whatever order the list is, however it is padded, and on every shard.
    """
    if dispatch.fused(lists, lists.shape[1]):
        from kinfolk.kernels import lists as programs

        return programs.choose(randomness.key(seed, purpose, t), clients, lists, count)
    keys = randomness.bits(seed, purpose, t, clients[:, None], lists).masked_fill(lists < 0, _LAST)
    first = keys.topk(min(count, lists.shape[1]), dim=1, largest=False).indices
    return torch.nn.functional.pad(lists.gather(1, first), (0, count - first.shape[1]), value=-1)


def choose_more(
    seed: int, purposes: tuple[str, str], t: int, clients: Tensor, lists: Tensor, others: Tensor, count: int
) -> Tensor:
    """`count` ids of each client's list as `choose` draws them and, if there are fewer, then of the others: [m, count].

    lists: [m, w]; others: [m, v] of the same clients; purposes: what the two draws are for.
    """
    if dispatch.fused(lists, max(lists.shape[1], others.shape[1])) and lists.shape[1]:
        from kinfolk.kernels import lists as programs

        keys = [randomness.key(seed, purpose, t) for purpose in purposes]
        return programs.choose(keys[0], clients, lists, count, keys[1], others)
    chosen = [choose(seed, purpose, t, clients, some, count) for purpose, some in zip(purposes, (lists, others))]
    return packed(torch.cat(chosen, dim=1), count)


def best(lists: Tensor, scores: Tensor, count: int) -> Tensor:
    """The `count` ids of each list with the highest scores, best first: [m, count]; equal scores: lower id first.

    lists: [m, w]; scores: [m, w], NaN for what was not observed, which is never among the best.
    """
    if dispatch.fused(lists, lists.shape[1]):
        from kinfolk.kernels import lists as programs

        return programs.best(lists, scores, count)
    unseen = (lists < 0) | scores.isnan()
    order = torch.where(unseen, _LAST, lists).argsort(dim=1)  # by id, the unseen last
    scores = scores.masked_fill(unseen, -torch.inf).gather(1, order)
    order = order.gather(1, scores.argsort(dim=1, descending=True, stable=True))[:, :count]
    found = lists.masked_fill(unseen, -1).gather(1, order)
    return torch.nn.functional.pad(found, (0, count - found.shape[1]), value=-1)


def pack(mask: Tensor, ids: Tensor, room: int | None = None) -> Tensor:
    """Keep the ids [m, w] where the mask [m, w] holds, moved to the left in their order: [m, longest row].

    With `room` the result has just that many columns, and nothing waits for a GPU to tell how many there are.
    """
    if room is not None and dispatch.fused(ids, max(ids.shape[1], room)) and ids.shape[1]:
        from kinfolk.kernels import lists as programs

        return programs.pack(mask, ids, room)
    counts = mask.sum(dim=1)
    if room is not None:
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)[:, :room]
        place = torch.arange(order.shape[1], device=ids.device)
        packed = torch.where(place < counts[:, None], ids.gather(1, order), -1)
        return torch.nn.functional.pad(packed, (0, room - packed.shape[1]), value=-1)
    client, column = torch.nonzero(mask, as_tuple=True)
    place = torch.arange(client.numel(), device=ids.device) - (counts.cumsum(0) - counts)[client]
    width = int(counts.max()) if counts.numel() else 0
    packed = torch.full((ids.shape[0], width), -1, dtype=ids.dtype, device=ids.device)
    packed[client, place] = ids[client, column]
    return packed


def packed(ids: Tensor, room: int | None = None) -> Tensor:
    """ids [m, w] without the -1 between them, as `pack` does it."""
    if room is not None and dispatch.fused(ids, max(ids.shape[1], room)) and ids.shape[1]:
        from kinfolk.kernels import lists as programs

        return programs.pack(None, ids, room)
    return pack(ids >= 0, ids, room)


def contains(lists: Tensor, ids: Tensor) -> Tensor:
    """Which of ids [m, c] stand in the list [m, w] of the same row: [m, c] bool, False for -1."""
    if not lists.shape[1]:
        return torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    if dispatch.fused(ids, max(lists.shape[1], ids.shape[1])):
        from kinfolk.kernels import lists as programs

        return programs.contains(lists, ids)
    ordered = lists.sort(dim=1).values
    place = torch.searchsorted(ordered, ids.contiguous()).clamp(max=lists.shape[1] - 1)
    return (ordered.gather(1, place) == ids) & (ids >= 0)


def without(ids: Tensor, lists: Tensor) -> Tensor:
    """ids [m, c] with -1 for those that stand in the list [m, w] of the same row."""
    if dispatch.fused(ids, max(lists.shape[1], ids.shape[1])):
        from kinfolk.kernels import lists as programs

        return programs.contains(lists, ids, drop=True)
    return torch.where(contains(lists, ids), -1, ids)


@lru_cache(maxsize=64)
def columns(width: int, first: int, device: torch.device) -> Tensor:
    """[width] bool: True for the `first` columns. Made once, so never to be changed."""
    return torch.arange(width, device=device) < first


@lru_cache(maxsize=64)
def nobody(device: torch.device) -> Tensor:
    """The id -1, as a number on the device. Made once, so never to be changed."""
    return torch.tensor(-1, device=device)


@lru_cache(maxsize=64)
def ahead(width: int, first: int, device: torch.device) -> Tensor:
    """[width] float64: infinity for the `first` columns, 0 for the others. Made once, so never to be changed."""
    return torch.where(columns(width, first, device), torch.inf, torch.zeros((), dtype=torch.float64, device=device))


def look_up(wanted: Tensor, ids: Tensor, values: Tensor, otherwise: Tensor) -> Tensor:
    """The value of each wanted client [m], where ids [p] (ascending) have values [p]; `otherwise` [m] for the rest."""
    if not ids.numel():
        return otherwise
    place = torch.searchsorted(ids, wanted).clamp(max=ids.numel() - 1)
    return torch.where(ids[place] == wanted, values[place], otherwise)
