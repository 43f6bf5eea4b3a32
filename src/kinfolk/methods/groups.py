"""How clients find a group to learn with: by messages between peers alone, and with the same outcome for all.

Every client tells its reachable peers what it knows (its distances to some of them, or a noisy statistic), collects
what they tell, and works out the groups for itself: `matching/grouping.py` is a function of what is known, so whoever
has heard the same finds the same. A client that has not heard everything, because messages were lost or peers are out
of reach, works with what it has; its group is then a list of its own. One that was absent joins later whoever counts it
among its members.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.errors import UserError
from kinfolk.matching.grouping import Pairs, at_random, form, members, within
from kinfolk.peers.base import Peers, Pool

MANY = 2000  # clients above which tables of all pairs would be too large
Kind = Literal["l1", "histogram", "random", "oracle"]


@dataclass(frozen=True)
class Groups:
    """Of each client of a cohort."""

    neighbors: Tensor  # [m, width] the others of its group, ascending, -1 for none
    name: Tensor  # [m] the smallest id of the group, -1 if it does not know its group yet
    apart: Tensor  # [m] float64: sum of the known distances to its others, NaN if none is known

    @classmethod
    def none(cls, cohort: Cohort, cap: int) -> Groups:
        """Before anything is known."""
        width = max(1, min(cap, cohort.n) - 1)
        return cls(
            torch.full((len(cohort), width), -1, device=cohort.device), torch.full_like(cohort.ids, -1),
            torch.full((len(cohort),), torch.nan, dtype=torch.float64, device=cohort.device),
        )  # fmt: skip


def drawn(cohort: Cohort, peers: Peers, cap: int, kin: bool) -> Groups:
    """Groups by the common seed, without a message; kin: of clients of one true cluster each."""
    if kin and cohort.clusters is None:
        raise UserError("method.groups = 'oracle' needs true clusters, which this split of the data does not have")
    within = cohort.clusters.cpu().numpy() if kin and cohort.clusters is not None else None
    ids, everybody = cohort.ids.cpu().numpy(), np.arange(cohort.n)
    group = at_random(cohort.n, cap, cohort.seed, within)
    lists = torch.from_numpy(members(everybody, group, max(1, min(cap, cohort.n) - 1))[ids]).to(cohort.device)
    nobody = Groups.none(cohort, cap)
    return replace(nobody, neighbors=_reachable(peers, lists), name=torch.from_numpy(group[ids]).to(cohort.device))


def by_distance(t: int, cohort: Cohort, peers: Peers, pool: Pool, sampled: Tensor, cap: int) -> Groups:
    """Groups by the L1 distances of models to the peers sampled [m, H], whose models are in the pool.

    A client tells H ids and H distances, 8·H bytes to each of its peers.
    """
    distance = l1_distances(cohort.weights, pool["weights"], pool.rows(sampled))
    own = {"sampled": sampled.to(torch.int32), "distances": distance.to(torch.float32)}
    known, tables = _exchanged(t, cohort, peers, own)

    def pairs(heard: np.ndarray) -> Pairs:
        return Pairs.of_lists(heard, tables["sampled"][heard].astype(np.int64), tables["distances"][heard])

    return _viewed(cohort, peers, known, pairs, cap)


def by_statistic(t: int, cohort: Cohort, peers: Peers, statistic: Tensor, cap: int) -> Groups:
    """Groups by the L1 distances of numbers [m, c] about the clients (NaN: not told), 4·c bytes to each peer."""
    known, tables = _exchanged(t, cohort, peers, {"statistic": statistic.to(torch.float32)})

    def pairs(heard: np.ndarray) -> Pairs:
        first, second = (heard[part] for part in np.triu_indices(len(heard), 1))
        told = tables["statistic"]
        return Pairs(first, second, np.abs(told[first] - told[second]).sum(axis=1))

    return _viewed(cohort, peers, known, pairs, cap)


def l1_distances(own: Tensor, theirs: Tensor, rows: Tensor) -> Tensor:
    """Of each client's model [m, d] and theirs[rows[i, k]]: [m, k] float64, NaN where the row is -1."""
    found = torch.full(rows.shape, torch.nan, dtype=torch.float64, device=own.device)
    for column in range(rows.shape[1] if theirs.shape[0] else 0):
        here = rows[:, column]
        apart = (own - theirs[here.clamp(min=0)]).abs_().sum(dim=1, dtype=torch.float64)
        found[:, column] = torch.where(here >= 0, apart, torch.nan)
    return found


def _exchanged(
    t: int, cohort: Cohort, peers: Peers, own: dict[str, Tensor]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Everybody tells everybody it can reach its row of `own` [m, ...].

    known [m, n]: whose rows each client has, and tables name -> [n, ...] of the rows that anybody here has.
    """
    if cohort.n > MANY:
        raise UserError(f"groups among more than {MANY} clients need method.groups = 'random': there are {cohort.n}")
    peers.publish(t, **own)
    everybody = torch.arange(cohort.n, device=cohort.device).expand(len(cohort), -1)
    ids = torch.where(peers.reachable(0), everybody, -1)
    pool = peers.pull(t, ids, tuple(own), facts=True)
    rows = pool.rows(ids)
    known = rows >= 0
    known[torch.arange(len(cohort), device=cohort.device), cohort.ids] = ~cohort.silent()
    row, tables = rows.amax(dim=0), {}
    for name, mine in own.items():
        told = torch.zeros(cohort.n, *mine.shape[1:], dtype=mine.dtype, device=cohort.device)
        if pool[name].shape[0]:
            told = torch.where((row >= 0)[:, None], pool[name][row.clamp(min=0)], told)
        told[cohort.ids] = mine
        tables[name] = told.cpu().numpy()
    return known.cpu().numpy(), tables


def _viewed(cohort: Cohort, peers: Peers, known: np.ndarray, pairs: Callable[[np.ndarray], Pairs], cap: int) -> Groups:
    """Each client's group by what it knows [m, n]; clients that know the same are one case.

    pairs(heard [h]): the distances that those tell of.
    """
    ids, nobody = cohort.ids.cpu().numpy(), Groups.none(cohort, cap)
    around = peers.reachable(0).cpu().numpy().copy()
    around[np.arange(len(ids)), ids] = True
    lists, names, apart = (part.cpu().numpy() for part in (nobody.neighbors, nobody.name, nobody.apart))
    views, which = np.unique(np.concatenate([known, around], axis=1), axis=0, return_inverse=True)
    there = ~cohort.away().cpu().numpy()
    for number, view in enumerate(views):
        heard, seen = np.flatnonzero(view[: cohort.n]), np.flatnonzero(view[cohort.n :])
        known_pairs = pairs(heard)
        group = form(seen, known_pairs, cap, cohort.seed)
        rows = np.flatnonzero((which.reshape(-1) == number) & there)
        places = np.searchsorted(seen, ids[rows])
        lists[rows] = members(seen, group, lists.shape[1])[places]
        names[rows] = group[places]
        apart[rows] = within(group, seen, known_pairs)[places]
    return Groups(*(torch.from_numpy(part).to(cohort.device) for part in (lists, names, apart)))


def joined(t: int, cohort: Cohort, peers: Peers, groups: Groups) -> Groups:
    """Who does not know its group asks around, and joins the first peer that counts it among its members."""
    if not peers.faults.absent and peers.reach is None:
        return groups
    peers.publish(t, members=groups.neighbors)
    everybody = torch.arange(cohort.n, device=cohort.device).expand(len(cohort), -1)
    lost = (groups.name < 0) & ~cohort.away()
    ids = torch.where(peers.reachable(t) & lost[:, None], everybody, -1)
    pool = peers.pull(t, ids, ("members",), facts=True)
    theirs = pool["members"]
    if not theirs.shape[0]:
        return groups
    rows = pool.rows(ids)
    lists = theirs[rows.clamp(min=0)]  # [m, n, width]
    listed = (lists == cohort.ids[:, None, None]).any(dim=2) & (rows >= 0)
    found, host = listed.any(dim=1), listed.to(torch.int8).argmax(dim=1)
    others = lists[torch.arange(len(cohort), device=cohort.device), host]
    others = torch.where(others == cohort.ids[:, None], host[:, None], others)
    others = _reachable(peers, _sorted(others))
    name = torch.minimum(cohort.ids, torch.where(others >= 0, others, cohort.n).amin(dim=1))
    lists = torch.where(found[:, None], others, groups.neighbors)
    return replace(groups, neighbors=lists, name=torch.where(found, name, groups.name))


def _sorted(ids: Tensor) -> Tensor:
    """Lists [m, *] in ascending order, -1 last."""
    large = torch.iinfo(torch.int64).max
    ordered = torch.where(ids < 0, large, ids).sort(dim=1).values
    return torch.where(ordered == large, -1, ordered)


def _reachable(peers: Peers, ids: Tensor) -> Tensor:
    """Lists [m, *] without those who can never be reached."""
    if peers.reach is None:
        return ids
    there = peers.reachable(0).gather(1, ids.clamp(min=0)) & (ids >= 0)
    return _sorted(torch.where(there, ids, -1))


def aggregator(cohort: Cohort, groups: Groups, turn: int) -> Tensor:
    """[m] whose turn it is in each client's group: the members, in the order of their ids, one after another."""
    everybody = _sorted(torch.cat([cohort.ids[:, None], groups.neighbors], dim=1))
    size = (everybody >= 0).sum(dim=1)
    return everybody.gather(1, (turn % size)[:, None])[:, 0]
