"""CFL: start with one federation, and split a cluster in two when its members pull in different directions.

Sattler, Müller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy
Constraints. IEEE Transactions on Neural Networks and Learning Systems, 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.errors import UserError
from kinfolk.matching import cost
from kinfolk.matching.lists import look_up
from kinfolk.methods.registry import register, shared
from kinfolk.peers.base import Peers
from kinfolk.settings import setting

AUTO = (0.4, 0.6)  # eps1 and eps2 in units of the longest update of the first round


@dataclass(frozen=True)
class State:
    clusters: Tensor  # [m]
    models: Tensor = shared()  # [clusters so far, d]
    scale: Tensor = shared()  # [1] the longest update of the first round, NaN before it


@register("cfl")
@dataclass(frozen=True)
class CFL:
    """FedAvg within clusters; a cluster whose mean update has become short while some member's is still long is split
    in two, by the cosines between its members' updates.

    A split keeps together who is most alike (single linkage makes the largest similarity across the cut as small as it
    can be). The larger half keeps the number, and the members that were not heard in the round of the split. After
    it each half moves by its own mean, weighted by numbers of samples.
    """

    eps1: float | Literal["auto"] = setting(
        "auto", "split when the mean update is shorter than this; auto: 0.4 of the longest update of round 1"
    )
    eps2: float | Literal["auto"] = setting(
        "auto", "and a member's update is longer than this; auto: 0.6 of the longest update of round 1"
    )
    min_round: int = setting(20, "no split up to this round", ge=0)
    linkage: Literal["single", "complete"] = setting("single", "how groups of updates are compared when splitting")
    accept: bool = setting(False, "split only if the halves are farther apart than each is wide")
    server = True

    def __post_init__(self) -> None:
        for name, value in (("eps1", self.eps1), ("eps2", self.eps2)):
            if value != "auto" and value < 0:
                raise UserError(f"'{name}' = {value}: must be 'auto' or at least 0")

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost: each client's model up and one down, as in FedAvg."""
        return cost.fedavg(rounds)

    def start(self, cohort: Cohort) -> State:
        unknown = torch.full((1,), torch.nan, dtype=torch.float64, device=cohort.device)
        return State(torch.zeros_like(cohort.ids), cohort.initial[None], unknown)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        before = state.models[state.clusters]
        cohort.adopt(before)
        cohort.train(t)
        sizes = cohort.data.train.sizes.to(cohort.device)
        change = cohort.weights - before
        nothing = torch.zeros_like(change)
        ids, updates, facts = peers.gather(t, change, nothing, sizes=sizes, clusters=state.clusters)
        updates, groups = updates.to(torch.float64), facts["clusters"].clone()  # [p, d], [p]: the same on every shard
        scale = state.scale
        if bool(scale.isnan()) and ids.numel():
            scale = updates.norm(dim=1).max()[None]

        models = list(state.models)
        if t > self.min_round:
            for number in range(len(state.models)):
                members = torch.nonzero(groups == number).flatten()
                leaving = self.split(updates[members], facts["sizes"][members], float(scale))
                if leaving is not None:
                    groups[members[leaving]] = len(models)
                    models.append(models[number])
        for number, model in enumerate(models):
            members = groups == number
            models[number] = model + self._moved(updates[members], facts["sizes"][members], peers).to(model.dtype)

        state = State(look_up(cohort.ids, ids, groups, state.clusters), torch.stack(models), scale)
        cohort.adopt(state.models[state.clusters])
        return state

    def _moved(self, updates: Tensor, sizes: Tensor, peers: Peers) -> Tensor:
        """[d] by how much a cluster with these updates [p, d] moves."""
        if peers.combine is None:
            return _mean(updates, sizes)
        return peers.combine(updates.new_zeros(updates.shape[1]), updates, sizes)

    def split(self, updates: Tensor, sizes: Tensor, scale: float) -> Tensor | None:
        """[p] bool: who leaves the cluster with these updates [p, d]; None if it stays together."""
        if updates.shape[0] <= 2:
            return None
        eps1 = AUTO[0] * scale if self.eps1 == "auto" else self.eps1
        eps2 = AUTO[1] * scale if self.eps2 == "auto" else self.eps2
        mean, lengths = _mean(updates, sizes), updates.norm(dim=1)
        if not (float(mean.norm()) < eps1 and float(lengths.max()) > eps2):
            return None
        cosines = updates @ updates.T / (lengths[:, None] * lengths + 1e-12)
        leaving = _bipartition(cosines, self.linkage)
        if self.accept:
            across = float(cosines[leaving][:, ~leaving].max())
            width = max(_width(updates[half], sizes[half]) for half in (leaving, ~leaving))
            if not width < math.sqrt(max(0.0, 1 - across) / 2):
                return None
        return leaving


def _mean(updates: Tensor, sizes: Tensor) -> Tensor:
    """[d] The mean of updates [p, d] weighted by sizes [p]; zero where there are no samples."""
    shares = sizes.to(torch.float64)
    return shares / shares.sum().clamp(min=1) @ updates


def _width(updates: Tensor, sizes: Tensor) -> float:
    """How far the farthest of the updates [p, d] is from their mean, in units of the mean's length."""
    mean = _mean(updates, sizes)
    return float((updates - mean).norm(dim=1).max() / mean.norm().clamp(min=1e-12))


def _bipartition(cosines: Tensor, linkage: str) -> Tensor:
    """[p] bool: the smaller of the two groups left when the most similar are merged first; the later one of equals."""
    from sklearn.cluster import AgglomerativeClustering  # slow to import, and few runs need it

    distance = (1 - cosines).clamp(min=0).cpu().numpy()
    labels = AgglomerativeClustering(2, metric="precomputed", linkage=linkage).fit(distance).labels_
    group = torch.from_numpy(labels).to(cosines.device) == 1
    ones, half = int(group.sum()), group.numel() / 2
    return group if ones < half or (ones == half and not bool(group[0])) else ~group
