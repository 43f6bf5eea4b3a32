"""DP-DSGT: noisy gradients that are tracked from peer to peer.

Bayrooti, Gao, Prorok: Differentially Private Decentralized Deep Learning with Consensus Algorithms. 2023, after the
gradient tracking of Pu and Nedić (Mathematical Programming, 2021).

Every client has a model x and a tracker y, which follows the mean gradient of all clients:

    g = noisy gradient at x,    y ← Σ_j W_ij y_j + g - g_old,    x ← Σ_j W_ij (x_j - eta y_j)

W are Metropolis weights, 1 / (1 + the larger number of peers) for each link and the rest for oneself: symmetric, so
that an exchange loses nothing and the mean of all y is that of all g. Where everybody reaches everybody all are 1/n.
Who misses a peer puts its weight on itself. Departures: none that changes the result; a round ends after the
exchange instead of before it, so that its gradient is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.mixing import mix
from kinfolk.errors import UserError
from kinfolk.matching import cost
from kinfolk.methods.groups import MANY
from kinfolk.methods.private import Budget, account, begin, found
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers, Pool

RATE = 0.3  # eta, as in DP-FedAvg


@dataclass(frozen=True)
class State:
    tracker: Tensor  # [m, d] Σ_j W_ij y_j, after the exchange
    gradient: Tensor  # [m, d] g_old


@register("dp-dsgt")
@dataclass(frozen=True)
class DPDSGT(Budget):
    """Every client follows a running estimate of everybody's mean gradient, which it averages with its peers' together
    with its model, weighted by who can reach whom.

    One noisy gradient a round. Linear models begin at zero.
    """

    only_mean = "keeps track of a sum of gradients, which other rules than a weighted mean would lose"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_steps != 1:
            raise UserError(f"local_steps = {self.local_steps}: dp-dsgt takes one noisy gradient a round")

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula, where everybody reaches everybody."""
        return cost.gossip(n, n - 1, rounds)

    def start(self, cohort: Cohort) -> State:
        if cohort.n > MANY:
            raise UserError(f"dp-dsgt keeps a table of who is linked with whom: at most {MANY} clients, not {cohort.n}")
        self.open_account(cohort)
        begin(cohort)
        nothing = torch.zeros_like(cohort.weights)
        return State(nothing, nothing)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        tracker, gradient = self._track(t, cohort, state)
        ids, degree = linked(peers), peers.others()
        peers.publish(t, weights=cohort.weights, tracker=tracker, degree=degree)
        pool = peers.pull(t, ids, ("weights", "tracker", "degree"))
        shares, own = metropolis(degree, pool, ids)
        cohort.mix(pool, ids, shares, own, record=peers.reach is not None)
        absent = cohort.round.absent
        tracker, _ = mix(tracker, pool["tracker"], pool.rows(ids), shares, own, absent)
        cohort.weights = torch.where(absent[:, None], cohort.weights, cohort.weights - self.step_size(RATE) * tracker)
        return State(tracker, gradient)

    def _track(self, t: int, cohort: Cohort, state: State) -> tuple[Tensor, Tensor]:
        """The trackers y and the gradients g [m, d]; both as they were of who may not take a step."""
        releases = account(cohort)
        may = releases.charge(t, cohort.data.train.sizes > 0)
        batches = releases.batches(t, 0, may)
        gradient, sums = releases.gradient(t, 0, cohort.weights, batches)
        gradient = releases.settled(state.gradient, gradient, may, found(sums, batches))
        return state.tracker + (gradient - state.gradient), gradient


def linked(peers: Peers) -> Tensor:
    """[m, k] all whom each client can ever reach, ascending, -1 where there are no more."""
    there = peers.reachable(0)
    ids = torch.where(there, torch.arange(peers.n, device=there.device), peers.n).sort(dim=1).values
    width = peers.n - 1 if peers.reach is None else int(there.sum(dim=1).max())
    ids = ids[:, : max(1, width)]
    return torch.where(ids < peers.n, ids, -1)


def metropolis(degree: Tensor, pool: Pool, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [m, k] of the peers ids [m, k] that answered, and of each client itself [m]; together they are one.

    degree: [m] with how many each client is linked; peers tell theirs.
    """
    rows = pool.rows(ids)
    theirs = F.pad(pool["degree"], (0, 1))[rows]  # the last one is nobody's
    weights = 1 / (1 + torch.maximum(degree[:, None], theirs)).to(torch.float64)
    weights = torch.where(rows >= 0, weights, 0.0)
    return weights, 1 - weights.sum(dim=1)
