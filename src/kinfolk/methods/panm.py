"""PANM: every client finds its kin by the similarity of models, and averages with them only.

Li, Li, Shao, Wu: Towards Effective Clustered Federated Learning: A Peer-to-peer Framework with Adaptive Neighbor
Matching. IEEE Transactions on Big Data, 2022.

Stage one, confident neighbor initialisation (CNI): each round look at l random candidates beside the k neighbors of the
round before, keep the k most similar of them all, average with those. Stage two, heuristic neighbor matching (HNM):
every tau rounds look at up to l of the listed neighbors and l strangers, fit two Gaussians to their similarities, and
keep whoever belongs to the upper one; average with k of the list.

Departures: the printed initialisation of the EM names the components the wrong way round (the higher mean decides, so
it does not matter); candidates are drawn from peers that are not neighbors already; degenerate cases are decided in
`matching/mixture.py`. Preset "paper" is otherwise as printed. Preset "robust" takes -log F for 1/F, confirms the choice
of stage one by loss, judges in stage two by the drift, with a memory (`matching/evidence.py`), and by the company that
a peer keeps (`matching/company.py`), and averages with all kin whose models it has fetched to look at them, not with k
of them only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.judging import Look
from kinfolk.matching import company, cost, evidence, mixture
from kinfolk.matching.confident import confident
from kinfolk.matching.lists import ahead, choose, choose_more, columns, contains, nobody, packed, without
from kinfolk.matching.outcome import COUNTED, outcome, uncounted
from kinfolk.matching.similarity import cosines, inverse_loss, log_loss
from kinfolk.methods import holdout
from kinfolk.methods.registry import register
from kinfolk.methods.stages import cut_short
from kinfolk.peers.base import Peers, Pool
from kinfolk.settings import setting

WIDE = 256  # peers up to which a list may as well have a column for each

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"loss_score": "inverse", "confirm": False, "mingle": False, "matcher": "mixture", "company": False},
    "robust": {"loss_score": "log", "confirm": True, "mingle": True, "matcher": "evidence", "company": True},
}


@dataclass(frozen=True)
class State:
    neighbors: Tensor  # [m, *] the neighbor list N_i: k long in stage one, free in stage two
    evidence: Tensor  # [m, *] what a client has learnt of each peer (matcher "evidence"; else [m, 0]), NaN: nothing
    whose: Tensor  # [m, *] which peer it is about, where there are too many for a column each
    unit: Tensor  # [m] the spread that evidence is measured in
    met: Tensor  # [m, *] when a client last averaged with each peer (with `company`; else [m, 0])
    cases: Tensor  # [m, q] how often each of these has come up in a matching
    counted: ClassVar = "cases", COUNTED


@register("panm")
@dataclass(frozen=True)
class PANM:
    """Every client finds its kin by the similarity of models or updates, and averages with k of them each round; in
    preset "robust" with all of them that it has looked at."""

    similarity: Literal["loss", "gradient"] = setting("gradient", "compare models by loss on own data, or by updates")
    neighbors: int = setting(
        5, "peers kept in stage one and averaged with (k); more: mingle, average", ge=1, peers=True
    )
    candidates: int = setting(10, "strangers, and listed neighbors, looked at in a matching (l)", ge=1, peers=True)
    discover_rounds: int = setting(100, "rounds of stage one (T1)", ge=0)
    match_every: int = setting(1, "rounds between matchings in stage two (tau)", ge=1)
    alpha: float = setting(
        0.5, "share of this round's update against the whole drift; 1: theta1, 0: theta2", ge=0, le=1
    )
    candidate_pool: Literal["strangers", "all"] = setting(
        "strangers", "stage one draws from: not yet neighbors, or all"
    )
    preset: Literal["paper", "robust"] = setting("robust", "as printed, or with what made matching reliable")
    loss_score: Literal["inverse", "log"] | None = setting(None, "similarity from a loss: 1/F or -log F; none: preset")
    confirm: bool | None = setting(
        None, "stage one: of old neighbors and those likest by update or drift, 2k, the k best by loss; none: preset"
    )
    mingle: bool | None = setting(
        None, "average with all kin that have been looked at, not with k of them only; none: preset"
    )
    matcher: Literal["mixture", "evidence"] | None = setting(
        None, "stage two: hard EM, or drift with memory; none: preset"
    )
    average: int | None = setting(
        None, "peers of the list averaged with in a round of stage two; none: k; n - 1: all of it", ge=1, peers=True
    )
    partners: Literal["judged", "list"] = setting(
        "judged", "who a matching averages with: those just judged kin and then others of the list, or any of the list"
    )
    company: bool | None = setting(
        None, "stage two: kin must have averaged with the same peers of late (lists are sent); none: preset"
    )
    validation: float = setting(
        0.0, "share of the samples that models are judged by and not trained on; 0: by those trained on", ge=0, lt=1
    )
    loss_eval: Literal["all", "batch"] = setting(
        "all", "own samples that models are judged by: all, or one batch of them, drawn anew each round"
    )
    memory: float = setting(0.3, "weight of a new look in the running average (matcher evidence)", gt=0, le=1)
    limit: float = setting(3.0, "how many spreads below the neighbors a kin may lie (matcher evidence, mingle)", gt=0)

    def __post_init__(self) -> None:
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def notices(self, rounds: int) -> list[str]:
        """What the user should know of these settings in a run of so many rounds."""
        said = cut_short(self.discover_rounds, rounds)
        if self.discover_rounds == 0:
            said.append("method.discover_rounds = 0: matching starts from random lists, without stage one")
        if self.similarity == "loss" and self.alpha != PANM.alpha:
            said.append("method.alpha weighs the two parts of the gradient metric: similarity = loss has no use for it")
        by_loss = self.similarity == "loss" or self.confirm
        if self.validation and not by_loss:
            said.append("method.validation: nothing is judged by loss here, and the samples set aside are of no use")
        if self.loss_eval == "batch" and not by_loss:
            said.append("method.loss_eval: nothing is judged by loss here")
        if self.loss_eval == "batch" and self.validation:
            said.append("method.loss_eval: with method.validation models are judged by all samples that are set aside")
        return said

    @property
    def most_averaged(self) -> int:
        """With how many peers a client averages at most: with `mingle` with all kin that it looks at."""
        count = self.average or self.neighbors
        looked_at = (self.candidates + self.neighbors, 2 * self.candidates)  # in stage one, and in a matching
        return max(count, self.neighbors, *(looked_at if self.mingle else ()))

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        first = min(rounds, self.discover_rounds)
        stages = self.match_every, first, rounds - first
        return cost.panm(n, self.candidates, self.neighbors, *stages, self.average)

    def start(self, cohort: Cohort) -> State:
        if self.validation:
            holdout.hold_out(cohort, self.validation)
        nothing = evidence.nothing(len(cohort), cohort.n if self.matcher == "evidence" else 0, cohort.device)
        unit = torch.zeros(len(cohort), dtype=torch.float64, device=cohort.device)
        empty = torch.full((len(cohort), self.neighbors), -1, device=cohort.device)
        met = company.nothing(len(cohort), cohort.n if self.company else 0, cohort.device)
        return State(empty, *nothing, unit, met, uncounted(len(cohort), cohort.device))

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        before = cohort.weights
        cohort.train(t)
        update = cohort.weights - before if "update" in self._names(t) else before[:, :0]
        offered = {"update": update} if update.numel() else {}
        if "company" in self._names(t):
            offered["company"] = company.since(state.met, self._since(t, cohort.n))
        peers.publish(t, weights=cohort.weights, **offered)
        if t == 1 and self.discover_rounds == 0:
            state = replace(state, neighbors=peers.sample(0, self.neighbors))
        if t <= self.discover_rounds:
            return self._discover(t, cohort, state, peers, update)
        if t % self.match_every == 0:
            return self._match(t, cohort, state, peers, update)
        chosen = choose(cohort.seed, "aggregate", t, cohort.ids, state.neighbors, self.average or self.neighbors)
        return self._average(t, cohort, state, peers.pull(t, chosen), chosen)

    def _names(self, t: int) -> tuple[str, ...]:
        """What a round needs of a peer: its model, its update where updates are compared, its company if it matters."""
        first = t <= self.discover_rounds
        update = self.similarity == "gradient" and (first or self.matcher == "mixture")
        known = self.company and not first and t % self.match_every == 0
        return ("weights", *(["update"] if update else []), *(["company"] if known else []))

    def _since(self, t: int, n: int) -> int:
        """The first round that counts for the company kept before round t: long enough ago that a client has looked at
        everybody about twice, but not before the last quarter of stage one."""
        return max(1, t - -(-2 * n // self.candidates), self.discover_rounds - self.discover_rounds // 4)

    def _average(self, t: int, cohort: Cohort, state: State, pool: Pool, ids: Tensor) -> State:
        """Average with the peers ids [m, c], who are company from then on, also if an answer was lost."""
        cohort.mix(pool, ids)
        if not self.company or t < self._since(t, cohort.n):
            return state
        return replace(state, met=company.met(state.met, cohort.ids, ids, t))

    def _discover(self, t: int, cohort: Cohort, state: State, peers: Peers, update: Tensor) -> State:
        """CNI: the k most similar of old neighbors and new candidates."""
        neighbors = state.neighbors
        if self.candidate_pool == "strangers":
            candidates = peers.sample(t, self.candidates, exclude=neighbors)
        else:
            candidates = without(peers.sample(t, self.candidates), neighbors)  # those are looked at already
        looked_at = torch.cat([neighbors, candidates], dim=1)
        pool = peers.pull(t, looked_at, self._names(t))
        similarity = self._similarity(cohort, pool, looked_at, update)
        score, proposed = similarity, looked_at
        if self.confirm:
            score, proposed = self._opinions(cohort, pool, looked_at, neighbors, similarity, update)
        eligible = contains(proposed, looked_at)
        found = confident(looked_at, score.masked_fill(~eligible, torch.nan), self.neighbors)
        kept = torch.where(found[:, :1] < 0, neighbors, found)  # nobody answered: the list stays
        cohort.watch(looked_at, similarity, neighbors, kept, self._similarity, update=update)
        if self.mingle:
            drift = self._drift(cohort, pool, looked_at, update)
            kin = self._kin(looked_at, drift, score, found) & eligible
            found = torch.where(kin, looked_at, nobody(cohort.device))
        return replace(self._average(t, cohort, state, pool, found), neighbors=kept)

    def _opinions(
        self, cohort: Cohort, pool: Pool, looked_at: Tensor, neighbors: Tensor, similarity: Tensor, update: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[m, c] similarity by loss, and [m, 2k] the old neighbors and the candidates that are likest by their way.

        Late in training updates say little: they may propose, but only a loss may put an old neighbor out.
        """
        if self.similarity == "gradient":
            likeness, score = similarity, log_loss(self._losses(cohort, pool, looked_at))
        else:
            likeness, score = self._drift(cohort, pool, looked_at, update), similarity
        first = likeness + ahead(looked_at.shape[1], neighbors.shape[1], cohort.device)
        return score, confident(looked_at, first, 2 * self.neighbors)

    def _kin(self, looked_at: Tensor, drift: Tensor, score: Tensor, found: Tensor) -> Tensor:
        """[m, c] bool: who was found, and who lies among these by drift and by loss.

        The k with the lowest loss are mostly those averaged with before. Who keeps to them ends in a small circle,
        which learns too little from outside and overfits: lists of kin alone, and still worse models. As long as all
        models are near their common start, one opinion alone would let strangers in, and who averages with strangers
        keeps them near.
        """
        chosen = contains(found, looked_at)
        alike = [evidence.alike(opinion, chosen, self.limit) for opinion in (drift, score)]
        return chosen | (alike[0] & alike[1])

    def _match(self, t: int, cohort: Cohort, state: State, peers: Peers, update: Tensor) -> State:
        """HNM: who of some listed neighbors (S) and some strangers (C) is kin (H)."""
        listed = state.neighbors
        known = choose(cohort.seed, "listed", t, cohort.ids, listed, self.candidates)  # S
        strangers = peers.sample(t, self.candidates, exclude=listed)  # C
        looked_at = torch.cat([known, strangers], dim=1)
        pool = peers.pull(t, looked_at, self._names(t))
        old = columns(looked_at.shape[1], known.shape[1], cohort.device).expand_as(looked_at)
        measure = self._similarity if self.matcher == "mixture" else self._drift
        similarity = measure(cohort, pool, looked_at, update)
        if self.matcher == "mixture":
            found = mixture.match(similarity, None, old, self.neighbors)
            kin, skipped, cases = found.same, found.skipped, found.cases
        else:
            kin, skipped, state = self._judge(looked_at, similarity, old, state)
            cases = None

        if self.company:
            mine = company.since(state.met, self._since(t, cohort.n))
            kin = kin & company.kept(mine, pool["company"], pool.rows(looked_at), old)

        # H, and who is listed but was not looked at this time
        judged = looked_at, similarity, kin, skipped, listed, known.shape[1], self.neighbors
        same, rest, counts = outcome(*judged, cases, state.cases)
        state = replace(state, cases=counts)
        matched = torch.cat([same, rest], dim=1)
        cohort.watch(looked_at, similarity, listed, matched, measure, update=update)
        mixed = self._first(cohort, t, same, rest)
        if self.mingle:
            mixed = torch.cat([same, without(mixed, same)], dim=1)
        state = self._average(t, cohort, state, pool | peers.pull(t, without(mixed, looked_at)), mixed)
        return replace(state, neighbors=packed(matched, self._room(t, cohort, listed)))

    def _room(self, t: int, cohort: Cohort, listed: Tensor) -> int | None:
        """Columns for the lists after a matching, which adds at most l peers; None: as many as the longest needs.

        On a GPU lists are cut to their length only now and then, and those of few peers never: Python has to wait to
        know it.
        """
        if cohort.device.type == "cpu" or (cohort.n > WIDE and t % 8 == 0):
            return None
        return min(cohort.n - 1, listed.shape[1] + self.candidates)

    def _judge(self, ids: Tensor, drift: Tensor, old: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Who is kin by the direction in which its model has moved from the common start, remembered over rounds; and
        which clients saw nobody.

        Once stage one has found kin, models of a cluster move together and away from the others, whatever the metric
        of stage one: the drift tells them apart by a wide margin, needs no forward pass and nothing more to be sent.
        """
        at, known, whose = evidence.places(ids, state.evidence, state.whose)
        found = evidence.look(at, drift, old, known, state.unit, self.memory, self.limit)
        return found.kin, found.skipped, replace(state, evidence=found.evidence, whose=whose, unit=found.unit)

    def _first(self, cohort: Cohort, t: int, same: Tensor, rest: Tensor) -> Tensor:
        """Peers to average with: those just judged and already here first, then others of the list; or any of both."""
        count = self.average or self.neighbors
        if self.partners == "list":
            return choose(cohort.seed, "aggregate", t, cohort.ids, torch.cat([same, rest], dim=1), count)
        purposes = ("aggregate", "aggregate more")
        return choose_more(cohort.seed, purposes, t, cohort.ids, same, rest, count)

    def _similarity(self, cohort: Cohort, pool: Pool, ids: Tensor, update: Tensor) -> Tensor:
        """[m, c] similarity of each client with the peers ids [m, c], NaN for those who did not answer."""
        if self.similarity == "loss":
            losses = self._losses(cohort, pool, ids)
            return inverse_loss(losses) if self.loss_score == "inverse" else log_loss(losses)
        if self.alpha == 0:  # theta2: the whole way from the common initial model
            return self._drift(cohort, pool, ids, update)
        recent = self.alpha * cosines(update, pool["update"], pool.rows(ids))  # theta1: this round's updates
        return recent if self.alpha == 1 else recent + (1 - self.alpha) * self._drift(cohort, pool, ids, update)

    def _losses(self, cohort: Cohort, pool: Pool, ids: Tensor) -> Tensor:
        """[m, c] loss of the peers' models on a client's own samples."""
        if self.validation:
            return holdout.losses(cohort, pool, ids)
        if self.loss_eval == "all":
            return cohort.losses(pool, ids)
        look = Look.of(cohort, cohort.round.t, most=cohort.training.batch_size)
        return cohort.over_pairs(pool, ids, "weights", partial(look.losses, pool["weights"]))

    def _drift(self, cohort: Cohort, pool: Pool, ids: Tensor, update: Tensor) -> Tensor:
        """[m, c] theta2 alone: how alike the ways are that two models have come from the common initial model."""
        return pool.once("drift", ids, lambda: cosines(cohort.weights, pool["weights"], pool.rows(ids), cohort.initial))
