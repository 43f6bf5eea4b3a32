"""FedSEM: k-means over the clients' models; each cluster's centre is a global model.

Xie, Long, Shen, Zhou, Wang, Jiang: Multi-Center Federated Learning. 2020.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.cohort.cohort import Cohort
from kinfolk.errors import UserError
from kinfolk.matching import cost
from kinfolk.matching.lists import look_up
from kinfolk.methods.registry import register, shared
from kinfolk.peers.base import Combine, Peers
from kinfolk.settings import setting

ITERATIONS = 10  # of assignment and mean in a round, if they do not settle before
RESTARTS = 10  # of the first k-means


@dataclass(frozen=True)
class State:
    clusters: Tensor  # [m] the centre each client belongs to; 0 until it was first heard
    centers: Tensor = shared()  # [c, d] the server's models; [0, d] before the first k-means


@register("fedsem")
@dataclass(frozen=True)
class FedSEM:
    """A server keeps c models; every round each client trains its own, joins the one nearest to what it trained to, and
    each model becomes the mean of its members, weighted by their numbers of samples.

    All train from w_0 once, and k-means on the results gives the first centres; should fewer than c clients be heard,
    that round is tried again. A centre that lost all its members moves to the client farthest from its own. A client
    that was not heard stays with its centre.
    """

    models: int = setting(2, "centres kept by the server (c); at most one for each client", ge=1)
    server = True

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost: each client's model up and one down, as in FedAvg."""
        return cost.fedavg(rounds)

    def start(self, cohort: Cohort) -> State:
        if self.models > cohort.n > 1:  # a client alone has one centre
            raise UserError(f"'method.models' = {self.models}, but there are only {cohort.n} clients")
        return State(torch.zeros_like(cohort.ids), cohort.initial.new_zeros(0, cohort.layout.size))

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        begun = bool(len(state.centers))
        cohort.adopt(state.centers[state.clusters] if begun else cohort.initial)
        before = cohort.weights
        cohort.train(t)
        sizes = cohort.data.train.sizes.to(cohort.device)
        ids, trained, facts = peers.gather(t, cohort.weights, before, sizes=sizes)  # [p], [p, d]: same on all shards
        count = min(self.models, peers.n)
        if begun:
            centers = state.centers
        elif ids.numel() >= count:
            groups = _first_groups(trained, count, cohort.seed)
            centers = _means(trained, facts["sizes"], groups, trained[:count], peers.combine)
        else:
            cohort.adopt(cohort.initial)
            return state
        groups, centers = settle(trained, facts["sizes"], centers, peers.combine)
        clusters = look_up(cohort.ids, ids, groups, state.clusters)
        cohort.adopt(centers[clusters])
        return State(clusters, centers)


def settle(models: Tensor, sizes: Tensor, centers: Tensor, combine: Combine | None = None) -> tuple[Tensor, Tensor]:
    """Join the nearest centre, move centres to the mean of their members, and again until nobody changes.

    models: [p, d], sizes: [p], centers: [c, d] -> (the centre of each [p], centers [c, d]); combine: not the mean.
    """
    groups = torch.full_like(sizes, -1)
    for _ in range(ITERATIONS):
        nearer = _nearest(models, centers)
        if torch.equal(nearer, groups):
            break
        groups = nearer
        centers = _means(models, sizes, groups, centers, combine)
    return groups, centers


def _nearest(models: Tensor, centers: Tensor) -> Tensor:
    """[p] The centre with the least Euclidean distance; an empty centre gets the model farthest from its own."""
    squares = torch.stack([(models - center).square().sum(dim=1, dtype=torch.float64) for center in centers], dim=1)
    groups = squares.argmin(dim=1)
    distance = squares.amin(dim=1)
    for number in range(len(centers)):
        if models.shape[0] and not bool((groups == number).any()):
            farthest = distance.argmax()
            if distance[farthest] > 0:  # otherwise all models lie on centres, and there is nothing to gain
                groups[farthest] = number
                distance[farthest] = 0.0
    return groups


def _means(models: Tensor, sizes: Tensor, groups: Tensor, before: Tensor, combine: Combine | None = None) -> Tensor:
    """[c, d] Means of the groups, weighted by sizes; a centre without members (or samples) stays as `before`."""
    centers = []
    for number, center in enumerate(before):
        shares = torch.where(groups == number, sizes, 0).to(torch.float64)
        if combine is not None:
            centers.append(combine(center, models, shares))
            continue
        total = shares.sum()
        mean = (shares / total.clamp(min=1)).to(models.dtype) @ models
        centers.append(torch.where(total > 0, mean, center))
    return torch.stack(centers)


def _first_groups(models: Tensor, count: int, seed: int) -> Tensor:
    """[p] k-means++ groups, numbered in the order of their first members so that no detail of the search shows."""
    from sklearn.cluster import KMeans  # slow to import, and few runs need it
    from sklearn.exceptions import ConvergenceWarning

    search = KMeans(count, n_init=RESTARTS, random_state=randomness.torch_seed(seed, "fedsem") % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different models than centres: some stay empty
        labels = search.fit(models.cpu().numpy()).labels_.tolist()
    order = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return torch.tensor([order[label] for label in labels], device=models.device)
