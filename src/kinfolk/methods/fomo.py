"""FedFOMO: weigh each peer's model by how much it lowers the loss on samples that one does not train on.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization. ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.cohort.cohort import Cohort
from kinfolk.errors import UserError
from kinfolk.matching import cost, lists
from kinfolk.methods import companions, holdout
from kinfolk.methods.choice import Choice, Chosen, Memory
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers, Pool
from kinfolk.settings import setting

MOST = 10_000  # clients: what each has found of the others is n² numbers, 800 MB there
NEAREST = 1e-12  # two models no farther apart than this are the same


@dataclass(frozen=True)
class State(Memory):
    trust: Tensor  # [m, n] float64: sum of the shares each peer has had so far


@register("fomo")
@dataclass(frozen=True)
class FedFOMO:
    """Every client moves towards those of 10 peers' models, and its own trained one, that do better on a fifth of its
    samples, which it does not train on; the weight of each is the drop in loss over the distance.

    Drop and distance are from the model as it was before the round's training. If no model does better, a client keeps
    the one it has trained. Where it chooses by itself it looks at those that have had the largest shares so far, or
    else, with probability `explore`, at random ones.
    """

    neighbors: int = setting(10, "peers looked at each round (choice random)", ge=1, peers={"choice": "random"})
    choice: companions.Kind = setting("random", "whom to look at: random or trusted peers; or as AFIND+ finds them")
    explore: float = setting(0.5, "probability of looking at random peers, not at the most trusted", ge=0, le=1)
    explore_decay: float = setting(0.0, "taken off that probability after every round", ge=0, le=1)
    validation: float = setting(0.2, "share of the training samples that models are judged by", gt=0, lt=1)
    weighs = True

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return companions.nominal(self.choice, self.neighbors, rounds, n)

    def start(self, cohort: Cohort) -> State:
        if cohort.n > MOST:
            raise UserError(f"method 'fomo' remembers every pair of clients: {cohort.n} clients are more than {MOST}")
        holdout.hold_out(cohort, self.validation)
        trust = torch.zeros(len(cohort), cohort.n, dtype=torch.float64, device=cohort.device)
        return State(**self._choice.start(cohort), trust=trust)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        if self.choice == "random":
            chosen = Chosen(self._candidates(t, cohort, state.trust, peers))
        else:
            chosen = self._choice.before(t, cohort, state, peers)
        before = cohort.weights
        cohort.train(t)
        peers.publish(t, weights=cohort.weights)
        pool = peers.pull(t, chosen.ids)
        memory = self._choice.after(t, cohort, state, peers, chosen, pool).memory

        base, own = (holdout.own_losses(cohort, models) for models in (before, cohort.weights))
        mine = _worth(base - own, torch.linalg.vector_norm(cohort.weights - before, dim=1, dtype=torch.float64))
        theirs = worths(cohort, pool, chosen.ids, before, base)
        cohort.watch(chosen.ids, theirs, None, chosen.ids, worths, before=before, base=base)
        worth = theirs.nan_to_num(0.0)
        cohort.mix(pool, chosen.ids, worth, own=mine)
        share = worth / (worth.sum(dim=1) + mine).clamp(min=torch.finfo(torch.float64).tiny)[:, None]
        trust = state.trust.scatter_add(1, chosen.ids.clamp(min=0), torch.where(chosen.ids >= 0, share, 0.0))
        return State(**memory, trust=trust)

    def _candidates(self, t: int, cohort: Cohort, trust: Tensor, peers: Peers) -> Tensor:
        """[m, k] The most trusted peers, or random ones; whoever trusts too few looks at random ones beside them."""
        chance = max(0.0, self.explore - self.explore_decay * (t - 1))
        draw = randomness.uniform(cohort.seed, "explore", t, cohort.ids, torch.zeros_like(cohort.ids))
        everybody = torch.arange(cohort.n, device=cohort.device).expand(trust.shape)
        trusted = lists.best(everybody, torch.where(trust > 0, trust, torch.nan), self.neighbors)
        return companions.fill(t, cohort, peers, trusted.masked_fill((draw < chance)[:, None], -1), self.neighbors)

    @property
    def _choice(self) -> Choice:
        return companions.choice(self.choice, self.neighbors)


def worths(cohort: Cohort, pool: Pool, ids: Tensor, before: Tensor, base: Tensor) -> Tensor:
    """What the models of the peers ids [m, c] are worth to each client: [m, c], NaN where none arrived.

    before: [m, d] the client's own model and base: [m] its loss.
    """
    losses = holdout.losses(cohort, pool, ids)
    rows, theirs = pool.rows(ids), pool["weights"]
    if not rows.shape[1] or not theirs.shape[0]:
        return losses
    far = [
        torch.linalg.vector_norm(theirs[column] - before, dim=1, dtype=torch.float64)
        for column in rows.clamp(min=0).unbind(dim=1)
    ]
    return torch.where(rows >= 0, _worth(base[:, None] - losses, torch.stack(far, dim=1)), torch.nan)


def _worth(drop: Tensor, distance: Tensor) -> Tensor:
    """Drop in loss over distance; 0 for a rise, for a loss that is not finite and for a model that is the same."""
    useful = torch.isfinite(drop) & (drop > 0) & torch.isfinite(distance) & (distance > NEAREST)
    return torch.where(useful, drop / distance, 0.0)
