"""PENS: find peers whose models do well on my data, by counting how often each was among the best.

Onoszko, Karlsson, Mogren, Zec: Decentralized federated learning of deep neural networks on non-iid data. ICML workshop
on Federated Learning for User Privacy and Data Confidentiality, 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.errors import UserError
from kinfolk.matching import cost, lists
from kinfolk.methods.backbone import HELP, Backbone, Kind
from kinfolk.methods.registry import register
from kinfolk.methods.stages import cut_short
from kinfolk.peers.base import Peers
from kinfolk.settings import setting

MOST = 20_000  # clients: the two tables of counts are n² short integers, 1.6 GB there


@dataclass(frozen=True)
class State:
    neighbors: Tensor  # [m, *] ids, -1 for none: this round's top k in stage one, the permanent list Π in stage two
    selected: Tensor  # [m, n] int16 how often each peer was in the top k (cnt); [m, 0] once Π is fixed
    sampled: Tensor  # [m, n] int16 how often each peer was looked at (smp); [m, 0] once Π is fixed


@register("pens")
@dataclass(frozen=True)
class PENS:
    """For T1 rounds a client averages with the k of l random peers whose models have the lowest loss on its own data;
    then it fixes those that came out more often than by chance, and averages with k of them every round.

    Where it departs: models are judged by loss on the whole training set. A peer whose answer did not arrive does not
    count as looked at. A client whose permanent list would be empty takes its k most often selected peers instead, and
    gossips at random if it never selected anybody. Counts take 4n bytes per client: 400 MB for 10,000 clients.
    """

    candidates: int = setting(10, "peers looked at each round of stage one (l)", ge=1, peers=True)
    neighbors: int = setting(5, "peers averaged with each round (k)", ge=1, peers=True)
    discover_rounds: int = setting(100, "rounds of stage one (T1)", ge=0, le=32_767)
    rule: Literal["expected", "paper", "conditional"] = setting(
        "expected", "who stays: selected more than by a random choice; T1(l+k)/n times; k/l of the times looked at"
    )
    backbone: Kind = setting("full", HELP)
    tune_epochs: int = setting(1, "epochs on the head alone (alt), or on the copy that is tested (ft)", ge=1)

    def notices(self, rounds: int) -> list[str]:
        """What the user should know of these settings in a run of so many rounds."""
        return cut_short(self.discover_rounds, rounds)

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.pens(n, self.candidates, self.neighbors, self.discover_rounds, rounds)

    def start(self, cohort: Cohort) -> State:
        if cohort.n > MOST:
            raise UserError(f"method 'pens' counts every pair of clients: {cohort.n} clients are more than {MOST}")
        self._backbone.start(cohort)
        nobody = torch.zeros(len(cohort), 0, dtype=torch.int64, device=cohort.device)
        counts = nobody.new_zeros(len(cohort), cohort.n if self.discover_rounds else 0, dtype=torch.int16)
        return State(nobody, counts, counts)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        self._backbone.train(t, cohort)
        peers.publish(t, weights=cohort.weights)
        return (self._discover if t <= self.discover_rounds else self._settled)(t, cohort, state, peers)

    def _discover(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        """Stage one: average with the best k of l random peers, and count them."""
        candidates = peers.sample(t, self.candidates)  # [m, l]
        pool = peers.pull(t, candidates)
        losses = self._backbone.losses(cohort, pool, candidates)
        neighbors = lists.best(candidates, -losses, self.neighbors)
        cohort.watch(candidates, losses, None, neighbors, self._backbone.losses)
        self._backbone.mix(cohort, pool, neighbors)
        observed = torch.where(losses.isnan(), -1, candidates)
        selected, sampled = _add(state.selected, neighbors), _add(state.sampled, observed)
        if t < self.discover_rounds:
            return State(neighbors, selected, sampled)
        nothing = selected[:, :0].clone()
        return State(self.permanent(selected, sampled, peers.others()), nothing, nothing)

    def permanent(self, selected: Tensor, sampled: Tensor, others: Tensor | None = None) -> Tensor:
        """The lists Π [m, *] of those selected [m, n] often enough for how often they were sampled [m, n].

        others: [m] how many peers each client can reach, all n - 1 if None.
        """
        n = selected.shape[1]
        reach = (torch.full_like(selected[:, 0], n - 1).long() if others is None else others)[:, None]
        rounds, looked = self.discover_rounds, reach.clamp(max=self.candidates)  # T1, l
        taken = looked.clamp(max=self.neighbors)  # k
        if self.rule == "paper":
            enough = selected.int() * (reach + 1) >= rounds * (looked + taken)
        elif self.rule == "expected":
            enough = selected.int() * reach > rounds * taken
        else:
            enough = selected.int() * looked > sampled.int() * taken
        peers = torch.arange(n, device=selected.device).expand(selected.shape)
        found = lists.pack(enough & (selected > 0), peers)
        # Nobody was selected often enough: take the most often selected, the lower id of equals.
        empty = torch.nonzero((found < 0).all(dim=1)).flatten()
        counts = torch.where(selected[empty] > 0, selected[empty].to(torch.float32), torch.nan)
        often = lists.best(peers[empty], counts, self.neighbors)
        found = torch.nn.functional.pad(found, (0, max(0, self.neighbors - found.shape[1])), value=-1)
        found[empty, : self.neighbors] = often
        return lists.pack(found >= 0, found)

    def _settled(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        """Stage two: average with k of the permanent list, or of everybody if it is empty."""
        known = lists.choose(cohort.seed, "pens", t, cohort.ids, state.neighbors, self.neighbors)
        anybody = peers.sample(t, self.neighbors)
        chosen = torch.where((state.neighbors >= 0).any(dim=1, keepdim=True), known, anybody)
        self._backbone.mix(cohort, peers.pull(t, chosen), chosen)
        return state

    @property
    def _backbone(self) -> Backbone:
        return Backbone(self.backbone, self.tune_epochs)


def _add(counts: Tensor, ids: Tensor) -> Tensor:
    """counts [m, n] plus one for each of ids [m, *] (-1: none)."""
    return counts.scatter_add(1, ids.clamp(min=0), (ids >= 0).to(counts.dtype))
