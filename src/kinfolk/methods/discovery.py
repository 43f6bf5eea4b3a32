"""Domains found by a server that is told sums only.

A sample of class y and domain d is taken to look like mu_y + nu_d with a covariance S that is the same everywhere: what
a domain does to the samples of one class it does to those of others. That is what ties a domain together over classes;
without it every class would have clusters of its own, in any order.

All samples are split in two, the larger part again, and so on until there are D parts. A split looks for a direction
in which what is left of the looks (z less the mean of its class, whitened: e) lies in two heaps: w <- E[e sign(w e)]
increases E|w e| with every step. From there expectation maximisation (EM) fits mu, nu and S. Each client has domains of
its own in some proportions, which stay with it; where it has but one this gathers all its samples there.

What leaves a client are sums over its samples: of looks by class and domain, of their products, of directions. Nothing
is said of a single sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.peers.base import Peers

STAGES = ((128, 8), (32, 16), (8, 32))  # of a split: so many directions, the best of those before, and steps
EVEN_STEPS = 12  # of EM with domains kept equally large
OWN_STEPS = 6  # of EM with every client's own proportions
LOCAL_STEPS = 5  # in which a client settles its proportions
OWN = 0.5  # pseudo-samples that a client has in each domain
SURE = 0.9  # how much of a sample a split puts on its own side
EQUAL = 2**30  # heaps whose distances agree to one part in so many are equally far apart
FLOOR = 1e-3  # share of the largest variance below which a direction is left out, and ridge


@dataclass(frozen=True)
class Sight:
    """What k clients of a cohort of m see of their own samples, at most w each, and how they tell a server."""

    features: Tensor  # [k, w, F] float64, 0 outside
    classes: Tensor  # [k, w, C] one in the sample's class, 0 outside
    rows: Tensor  # [k] of the cohort
    clients: int  # m
    peers: Peers
    t: int

    @property
    def inside(self) -> Tensor:
        """[k, w] 1 for a sample, 0 for padding."""
        return self.classes.sum(dim=2)

    def total(self, *values: Tensor) -> list[Tensor]:
        """Sums over all clients everywhere of what each has summed up, values [k, ...] -> [...]."""
        sizes = [value.shape[1:].numel() for value in values]
        flat = torch.cat([value.reshape(-1, size) for value, size in zip(values, sizes)], dim=1)
        asked = flat.new_zeros(self.clients)
        asked[self.rows] = 1.0
        if len(flat) < self.clients:
            everybody = flat.new_zeros(self.clients, flat.shape[1])
            everybody[self.rows], flat = flat, everybody
        found = self.peers.total(self.t, flat, asked, transfers=0)
        return [piece.view(value.shape[1:]) for piece, value in zip(torch.split(found, sizes), values)]


@dataclass(frozen=True)
class Moments:
    """Of looks z: how many there are of each class, their sums, and the sum of their products."""

    count: Tensor  # [C]
    sums: Tensor  # [C, F]
    products: Tensor  # [F, F]

    @classmethod
    def of(cls, sight: Sight, share: Tensor) -> Moments:
        """share [k, w]: how much each sample counts."""
        shared = sight.features * share[..., None]
        return cls(
            *sight.total(
                torch.einsum("kwc,kw->kc", sight.classes, share),
                torch.einsum("kwc,kwf->kcf", sight.classes, shared),
                torch.einsum("kwf,kwg->kfg", shared, sight.features),
            )
        )


@dataclass(frozen=True)
class Domains:
    """What is found: a teacher, who knows classes, and a student, who does not; both linear in a look z."""

    weight: Tensor  # [D, F] the teacher's scores of a sample are weight z + offset_y
    offset: Tensor  # [C, D]
    student_weight: Tensor  # [D, F]
    student_bias: Tensor  # [D]


def find(sight: Sight, domains: int, seed: int) -> Domains:
    """D domains of the samples of all clients that are asked."""
    moments = Moments.of(sight, sight.inside)
    leaf = _split(sight, domains, seed)
    own = (torch.arange(domains, device=leaf.device) == leaf[..., None]).to(moments.sums)
    share = (SURE * own + (1 - SURE) / domains) * sight.inside[..., None]
    sums, counts = _domain_sums(sight, share)
    even = torch.zeros_like(counts[0])  # [D] what makes domains equally large
    for step in range(EVEN_STEPS + OWN_STEPS):
        weight, offset = _fitted(moments, sums, counts)
        scores = sight.features @ weight.T + sight.classes @ offset
        if step < EVEN_STEPS:
            share = (scores + even).softmax(dim=2) * sight.inside[..., None]
        else:
            share = settled(scores, sight.inside)
        sums, counts = _domain_sums(sight, share)
        even = even - 0.5 * (counts.sum(dim=0) / counts.sum().clamp(min=1) * domains).clamp(min=FLOOR).log()
    return Domains(*_fitted(moments, sums, counts), *_student(moments, sums, counts))


# -- splits ------------------------------------------------------------------------------------------------------


def _split(sight: Sight, domains: int, seed: int) -> Tensor:
    """[k, w] in which of D parts each sample is."""
    leaf = torch.zeros(sight.features.shape[:2], dtype=torch.int64, device=sight.features.device)
    places = torch.arange(domains, device=leaf.device)
    for new in range(1, domains):
        (counts,) = sight.total(((leaf[..., None] == places) * sight.inside[..., None]).sum(dim=1))
        here = (leaf == counts.argmax()) & (sight.inside > 0)
        leaf = torch.where(here & _side(sight, here, seed, f"domains/{new}"), new, leaf)
    return leaf


def _side(sight: Sight, here: Tensor, seed: int, purpose: str) -> Tensor:
    """[k, w] bool: on which side of the best split of the samples `here` [k, w] each lies."""
    rest = _whitened(sight, here.to(sight.features))
    size = torch.arange(rest.shape[2], device=rest.device)
    ways = randomness.normal(seed, purpose, 0, size, STAGES[0][0]).to(rest)  # [F, r]
    for count, steps in STAGES:
        (apart,) = sight.total((rest @ ways).abs().sum(dim=1))
        ways = ways[:, _farthest(apart, count)]
        for _ in range(steps):
            (ways,) = sight.total(rest.transpose(1, 2) @ (rest @ ways).sign())
            ways = ways / torch.linalg.vector_norm(ways, dim=0).clamp(min=1e-30)
    along = rest @ ways
    (apart,) = sight.total(along.abs().sum(dim=1))
    return along[..., _farthest(apart, 1)[0]] > 0


def _farthest(apart: Tensor, count: int) -> Tensor:
    """[count] places of the largest of apart [r]; of those that only rounding tells apart the first come first.

    Many directions end at the same split, some from the other side: which of them is taken gives the parts their
    numbers, and must not depend on the order of sums.
    """
    coarse = (apart / apart.max().clamp(min=1e-30) * EQUAL).round()
    return coarse.sort(descending=True, stable=True).indices[:count]


def _whitened(sight: Sight, share: Tensor) -> Tensor:
    """[k, w, F] looks less the means of their classes, whitened; 0 where share [k, w] is."""
    moments = Moments.of(sight, share)
    means = moments.sums / moments.count.clamp(min=1)[:, None]
    covariance = (moments.products - moments.sums.T @ means) / moments.count.sum().clamp(min=1)
    variance, axes = torch.linalg.eigh(covariance)
    whiten = axes * torch.where(variance > FLOOR * variance[-1], variance.clamp(min=1e-30).rsqrt(), 0.0)
    rest: Tensor = (sight.features - sight.classes @ means) @ whiten * share[..., None]
    return rest


# -- expectation maximisation ------------------------------------------------------------------------------------


def _domain_sums(sight: Sight, share: Tensor) -> tuple[Tensor, Tensor]:
    """Of samples that belong to domains by share [k, w, D]: sums of looks [D, F] and numbers by class [C, D]."""
    sums, counts = sight.total(
        torch.einsum("kwd,kwf->kdf", share, sight.features), torch.einsum("kwc,kwd->kcd", sight.classes, share)
    )
    return sums, counts


def _fitted(moments: Moments, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's discriminants [D, F], [C, D] by mu, nu and S, given sums [D, F] and numbers [C, D] in domains."""
    of_class, of_domain = (counts.sum(dim=dim).clamp(min=1e-6)[:, None] for dim in (1, 0))
    mu = moments.sums / of_class
    nu = torch.zeros_like(sums)
    for _ in range(LOCAL_STEPS):
        nu = (sums - counts.T @ mu) / of_domain
        mu = (moments.sums - counts @ nu) / of_class
    cross = moments.sums.T @ mu + sums.T @ nu
    means = mu[:, None] + nu  # [C, D, F]
    scatter = moments.products - cross - cross.T + torch.einsum("cd,cdf,cdg->fg", counts, means, means)
    inverse = torch.linalg.inv(_ridged(scatter / moments.count.sum().clamp(min=1)))
    return nu @ inverse, -0.5 * ((means @ inverse) * means).sum(dim=2)


def _ridged(covariance: Tensor) -> Tensor:
    size = covariance.shape[0]
    ridge = FLOOR * covariance.diagonal().mean().clamp(min=1e-12)
    return covariance + ridge * torch.eye(size, dtype=covariance.dtype, device=covariance.device)


def settled(scores: Tensor, inside: Tensor) -> Tensor:
    """Shares [k, w, D] of samples in domains by scores [k, w, D], given each client's own proportions of domains.

    These are not known: they follow from the shares, and the shares from them. inside: [k, w] 1 for a sample, else 0.
    """
    share = scores.softmax(dim=2) * inside[..., None]
    for _ in range(LOCAL_STEPS):
        usual = torch.digamma(share.sum(dim=1, keepdim=True) + OWN)
        share = (scores + usual).softmax(dim=2) * inside[..., None]
    return share


def _student(moments: Moments, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The linear discriminants [D, F], [D] of domains whatever the class: one covariance within all domains."""
    number = counts.sum(dim=0).clamp(min=1e-6)
    means = sums / number[:, None]
    covariance = _ridged((moments.products - sums.T @ means) / number.sum())
    weight = means @ torch.linalg.inv(covariance)
    return weight, (number / number.sum()).log() - 0.5 * (weight * means).sum(dim=1)
