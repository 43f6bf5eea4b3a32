"""Dis-PFL: every client keeps a sparse model of its own, and averages where others hold the same weights.

Dai, Shen, He, Tian, Tao: DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized
Sparse Training. ICML 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.judging import Look
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.mixing import blend
from kinfolk.cohort.steer import Masked
from kinfolk.matching import cost
from kinfolk.methods import companions
from kinfolk.methods.choice import Choice, Memory
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers, Pool
from kinfolk.settings import setting

PIECE = 2**24  # random numbers drawn at a time


@dataclass(frozen=True)
class State(Memory):
    mask: Tensor  # [m, d] bool: the weights that a client holds
    personal: Tensor  # [m, d] the trained model, before it is averaged: what is tested


@dataclass(frozen=True)
class Sparse:
    """A layer that is thinned out: columns first .. first + size of a row, `held` of them in use."""

    first: int
    size: int
    held: int

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + self.size)


@register("dispfl")
@dataclass(frozen=True)
class DisPFL:
    """Every client trains half the weights of its model, other ones than its peers, and averages each with those of 10
    random peers that hold it too; after training it drops its smallest weights and takes up as many others.

    Layers are thinned by the Erdős-Rényi kernel rule; biases and whatever else has one dimension are whole. The number
    dropped falls to zero along a cosine. What is sent and tested is the model as it was trained; weights taken up begin
    with the mean of the peers that hold them. A weight that nobody else holds stays as it is.
    """

    neighbors: int = setting(10, "peers averaged with each round (choice random)", ge=1, peers={"choice": "random"})
    choice: companions.Kind = setting("random", "random: any peers; afind: peers and weights as AFIND+ finds them")
    density: float = setting(0.5, "share of the weights that a client holds", gt=0, le=1)
    prune: float = setting(0.5, "share of a layer's weights that is exchanged for others at first", ge=0, le=1)
    prune_rounds: int | None = setting(
        None, "rounds over which that share falls to zero (T); none: those of the run", ge=1
    )
    regrow: Literal["gradient", "random"] = setting("gradient", "which weights to take up: of steepest loss, or any")
    longest: float = setting(10.0, "length to which gradients are cut", gt=0)
    only_mean = "averages each weight with those who hold it"

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula; a model counts whole."""
        return companions.nominal(self.choice, self.neighbors, rounds, n)

    def start(self, cohort: Cohort) -> State:
        mask = self._first_mask(cohort)
        cohort.weights = cohort.weights * mask
        return State(**self._choice.start(cohort), mask=mask, personal=cohort.weights)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        chosen = self._choice.before(t, cohort, state, peers)
        steer = Masked(state.mask.to(cohort.dtype), self.longest)
        cohort.weights, _ = cohort.trained(cohort.weights, t, steer=steer)
        cohort.personal = torch.where(cohort.round.absent[:, None], state.personal, cohort.weights)
        mask = self._moved(t, cohort, state.mask)
        peers.publish(t, weights=cohort.weights, mask=state.mask)
        pool = peers.pull(t, chosen.ids, ("weights", "mask"))
        weighed = self._choice.after(t, cohort, state, peers, chosen, pool)
        cohort.mix(pool, chosen.ids, weighed.coefficients, weighed.own)
        held = _held(cohort, pool, chosen.ids, state.mask)  # of the mean over all, just mixed
        cohort.weights = torch.where(mask & (held > 0), cohort.weights / held, 0.0)
        return State(**weighed.memory, mask=mask, personal=cohort.personal)

    def rate(self, t: int, rounds: int | None) -> float:
        """Share of a layer's weights exchanged in round t of a run of so many; none where that is not known."""
        last = self.prune_rounds or rounds or t
        return self.prune / 2 * (1 + math.cos(math.pi * min(1.0, t / last)))

    def _first_mask(self, cohort: Cohort) -> Tensor:
        """[m, d] Other weights for every client."""
        mask = torch.ones(cohort.weights.shape, dtype=torch.bool, device=cohort.device)
        for layer in layers(cohort.layout, self.density):
            keys = _keys(cohort, "mask", 0, layer, torch.ones_like(mask[:, layer.columns]))
            mask[:, layer.columns] = _most(keys, layer.held)
        return mask

    def _moved(self, t: int, cohort: Cohort, mask: Tensor) -> Tensor:
        """The mask [m, d] without the smallest of its weights, and with as many others."""
        share = self.rate(t, cohort.rounds)
        sparse = [(layer, int(share * layer.held)) for layer in layers(cohort.layout, self.density)]
        if not any(count for _, count in sparse):
            return mask
        models = slope = cohort.weights
        if self.regrow == "gradient":
            mine = torch.arange(len(cohort), device=cohort.device)
            slope = Look.of(cohort, t).slopes(models, mine, mine, slice(0, cohort.layout.size))[1].abs().nan_to_num(0.0)
        after = mask.clone()
        for layer, count in sparse:
            if not count:
                continue
            here = mask[:, layer.columns]
            kept = _most(models[:, layer.columns].abs().masked_fill(~here, -1.0), layer.held - count)
            if self.regrow == "gradient":
                wish = slope[:, layer.columns].masked_fill(kept, -1.0)
            else:
                wish = _keys(cohort, "regrow", t, layer, ~kept)
            after[:, layer.columns] = kept | _most(wish, count)
        return torch.where(cohort.silent()[:, None], mask, after)

    @property
    def _choice(self) -> Choice:
        return companions.choice(self.choice, self.neighbors)


def layers(layout: Layout, density: float) -> list[Sparse]:
    """The layers that are thinned out, by the Erdős-Rényi kernel rule: density proportional to Σ dims / Π dims.

    A layer that would have more than all of its weights is whole, and the others share what it leaves.
    """
    places = [(start, shape) for start, shape in zip(layout.offsets, layout.shapes) if len(shape) > 1]
    thin = dict(places)
    wanted = density * sum(math.prod(shape) for shape in thin.values())
    while thin:
        unit = wanted / sum(sum(shape) for shape in thin.values())  # a layer holds unit · Σ dims weights
        whole = [start for start, shape in thin.items() if unit * sum(shape) >= math.prod(shape)]
        if not whole:
            break
        for start in whole:
            wanted -= math.prod(thin.pop(start))
    return [Sparse(start, math.prod(shape), max(1, round(unit * sum(shape)))) for start, shape in thin.items()]


def _most(scores: Tensor, count: int) -> Tensor:
    """[m, s] bool: the `count` highest of each row; which of equals is left to the device."""
    highest = scores.topk(count, dim=1, sorted=False).indices
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(1, highest, True)


def _keys(cohort: Cohort, purpose: str, t: int, layer: Sparse, allowed: Tensor) -> Tensor:
    """Random numbers [m, s] for the weights of a layer, -1 where they are not allowed [m, s]."""
    columns = torch.arange(layer.first, layer.first + layer.size, device=cohort.device)
    keys = torch.empty(allowed.shape, dtype=torch.int64, device=cohort.device)
    size = max(1, PIECE // layer.size)
    for first in range(0, len(cohort), size):
        clients = cohort.ids[first : first + size, None]
        keys[first : first + size] = randomness.bits(cohort.seed, purpose, t, clients, columns)
    return keys.masked_fill_(~allowed, -1)


def _held(cohort: Cohort, pool: Pool, ids: Tensor, mask: Tensor) -> Tensor:
    """The share [m, d] of those mixed, just now, who hold each weight; mask [m, d]: one's own."""
    shares = cohort.round.edges[-1][2]
    theirs = pool["mask"].to(cohort.dtype)
    return blend(mask.to(cohort.dtype), theirs, pool.rows(ids), shares, 1 - shares.sum(dim=1))
