"""What methods cost in communication, as the PANM paper counts it (its Table 6): nominal, before anything is lost.

The unit is Δ = n models, one for every client: a method that makes every client receive three models a round costs
3 Δ a round. A model counts when it is received, whoever receives it, client or server. What a run really received is in
its `models_received` and `bytes_received`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Communication in units of Δ = n models."""

    total: float  # over the whole run
    peak: float  # the most that one place, server or client, has to carry in one exchange


def nothing() -> Cost:
    """Local training."""
    return Cost(0, 0)


def fedavg(rounds: int, share: float = 1) -> Cost:
    """Every round every client sends its model up and gets one down: 2 Δ. The server carries n models at once.

    Where only a share of the clients takes part in a round, both shrink with it.
    """
    return Cost(2 * share * rounds, share)


def scaffold(rounds: int, share: float = 1) -> Cost:
    """Every round every client sends two vectors of a model's size up and gets two down: 4 Δ."""
    return Cost(4 * share * rounds, 2 * share)


def ifca(models: int, rounds: int, share: float = 1) -> Cost:
    """Every round every client gets all c models down and sends one up: (c + 1) Δ. The server sends c·n at once."""
    return Cost((models + 1) * share * rounds, models * share)


def gossip(n: int, neighbors: int, rounds: int) -> Cost:
    """Random, fixed and oracle gossip: every client receives k models a round."""
    return Cost(neighbors * rounds, neighbors / n)


def pens(n: int, candidates: int, neighbors: int, discover_rounds: int, rounds: int) -> Cost:
    """Every client receives l candidates in each of the first T1 rounds, and k of its permanent list after that.

    The k it averages with in stage one are among the l and already there: they are not counted again.
    """
    first = min(discover_rounds, rounds)
    return Cost(first * candidates + (rounds - first) * neighbors, max(candidates if first else 0, neighbors) / n)


def panm(
    n: int,
    candidates: int,
    neighbors: int,
    match_every: int,
    stage1: int,
    stage2: int,
    averaged: int | None = None,
) -> Cost:
    """T1 rounds of l candidates and k old neighbors (there are none in round 1); then k neighbors a round, and every τ
    rounds instead 2l models: l of the list and l candidates, among which those to average with are already there.

    averaged: peers of the list in a round of stage two, if not k; of more than l the others come beside the 2l models.

    total = T1 (l + k) - k + (T2 - T2/τ) k + (T2/τ) 2l, where T2/τ is the number of rounds t with T1 < t <= T1 + T2
    that τ divides. The formula was inferred from the paper's two totals, which it gives exactly. The peak is stage
    one's, (l + k) models for one client, as published; a matching round of stage two brings 2l, more if l > k.
    """
    matchings = (stage1 + stage2) // match_every - stage1 // match_every
    first = stage1 * (candidates + neighbors) - neighbors if stage1 else 0
    beside = 0 if averaged is None else max(0, averaged - candidates)
    second = (stage2 - matchings) * (averaged or neighbors) + matchings * (2 * candidates + beside)
    peak = candidates + (neighbors if averaged is None else max(neighbors, candidates + beside))
    return Cost(first + second, peak / n)


def afind(n: int, exchanges: int, rounds: int) -> Cost:
    """At most: every client receives all other models in each of the exchanges of a round.

    One exchange is after training, with whom one averages; another is before it, with whom one judges and is judged by.
    Everybody is asked in round 1; how many after that the threshold decides, so the true cost is known only afterwards.
    """
    return Cost(exchanges * (n - 1) * rounds, (n - 1) / n)


def mixture(n: int, components: int, rounds: int) -> Cost:
    """FedeRiCo in full: every client receives M models a round, and sends M back to their owners, changed.

    How many come back to one client depends on how many use its model: at most all others.
    """
    return Cost(2 * components * rounds, (n - 1) / n)
