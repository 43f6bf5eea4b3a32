"""Write your own method: a frozen dataclass whose fields are its settings, with `start` and `step`.

This one looks at a few random peers each round and averages only with the one whose model does best on its own data.
It uses nothing but `cohort` and `peers`, so it runs on one cohort, on shards, and on whatever comes later.
Run it with: python examples/custom_method.py
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import kinfolk
from kinfolk import Cohort, Peers, setting


@dataclass(frozen=True)
class State:
    neighbors: Tensor  # [m, 1] the friend of this round, -1 for none; precision and recall are measured on it


@kinfolk.register("best-friend")
@dataclass(frozen=True)
class BestFriend:
    """Each round every client averages its model with the best of a few random peers."""

    candidates: int = setting(5, "peers looked at each round", ge=1, peers=True)

    def start(self, cohort: Cohort) -> State:
        return State(torch.full((len(cohort), 1), -1, device=cohort.device))

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        cohort.train(t)
        peers.publish(t, weights=cohort.weights)
        candidates = peers.sample(t, self.candidates)  # [m, candidates]
        pool = peers.pull(t, candidates)
        losses = cohort.losses(pool, candidates)  # [m, candidates], NaN where nothing arrived
        best = losses.nan_to_num(nan=torch.inf).argmin(dim=1, keepdim=True)
        friend = torch.where(losses.gather(1, best).isnan(), -1, candidates.gather(1, best))
        cohort.mix(pool, friend)
        return State(friend)


if __name__ == "__main__":
    comparison = kinfolk.compare("digits", ["best-friend", "random"], overrides=["run.rounds=40"])
    for row in comparison.rows:
        found = (
            "" if row.neighbor_precision is None else f", {100 * row.neighbor_precision:.0f} % of its neighbors are kin"
        )
        print(f"{row.method:>12}: accuracy {100 * row.accuracy:.1f} %{found}")
