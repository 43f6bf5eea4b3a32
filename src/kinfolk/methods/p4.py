"""P4: private models at home, noisy proxies among alike clients.

Maheri, Siby, Abdollahi, Borovykh, Haddadi: P4: Towards Private, Personalized, and Peer-to-Peer Learning. 2024.

Every client has two models. The private one never leaves it. The proxy is trained with differential privacy; in round 1
the proxies also tell who is alike. Groups of clients whose proxies are near each other average theirs in every round,
each member in turn, and both models of a client learn from each other.

Departures: a member that does not hear from the one whose turn it is keeps its own proxy; models are distilled by
KL(other ‖ own), as in ProxyFL, unless `reverse_kl` asks for the printed direction. Preset "paper" is otherwise as
printed, with the repairs of the noise formula. Preset "robust": at a budget that means something the printed proxies
are noise, and groups found by them random (docs/methods/p4.md). There the inputs are projected onto few directions that
do not depend on the data, groups are large, so that the noise averages out, and a client's own model is the group's
proxy, tuned on its own records: that costs nothing, because it stays at home.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.training import all_finite
from kinfolk.data.federation import Federation
from kinfolk.data.projection import CPU, projected
from kinfolk.errors import UserError
from kinfolk.matching import cost
from kinfolk.methods import groups as grouping
from kinfolk.methods.groups import Groups
from kinfolk.methods.private import Budget, account, begin, is_linear
from kinfolk.methods.registry import register
from kinfolk.methods.twins import GAP, Twins, mean_gradient
from kinfolk.peers.base import Peers
from kinfolk.settings import setting

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"noise": "noble", "groups": "l1", "cap": 8, "alpha": 0.5, "private": "distilled", "projection": 0},
    "robust": {
        "noise": "calibrated",
        "groups": "random",
        "cap": 64,
        "alpha": 0.0,
        "private": "tuned",
        "projection": 3000,
    },
}
NOISE, LARGEST = 0.7, 30.0  # of a linear model on inputs of length one: noise on a score at the end, noisy step size
TUNING_RATE = 2.0  # and plain step size
SAMPLED = 35  # H of the paper
DISTILLING_RATE = 1e-3  # plain steps on features by scattering


@dataclass(frozen=True)
class State:
    personal: Tensor  # [m, d] the private models, what a client is tested with
    neighbors: Tensor  # [m, *] the others of the group
    clusters: Tensor  # [m] its name, -1 if it is not known yet
    apart: Tensor  # [m] sum of the known distances to its others when it was formed, NaN if none is known
    average: Tensor  # [m, d] running average of the group's proxies (`averaging`; else [m, 0])


@register("p4")
@dataclass(frozen=True)
class P4(Budget):
    """Clients keep a private model each and average noisy proxies, trained with differential privacy, in groups."""

    preset: Literal["paper", "robust"] = setting("robust", "as printed, or with what beats training alone")
    groups: grouping.Kind | None = setting(
        None, "by distance of round 1's proxies, by a noisy class histogram, by chance, or true clusters; none: preset"
    )
    cap: int | None = setting(None, "most clients of a group; none: preset", ge=1)
    sampled: int | None = setting(
        None,
        "peers that a client compares with in round 1 (H; groups l1); none: 35, or all where there are fewer",
        ge=1,
        peers={"groups": "l1"},
    )
    histogram_share: float = setting(0.1, "of the budget, for the histogram (groups histogram)", gt=0, lt=1)
    rotate_every: int = setting(5, "rounds until the next member averages for the group; 0: each for itself", ge=0)
    group_lr: float = setting(1.0, "step of the group's proxy towards the mean (eta_g)", gt=0)
    releases: int | None = setting(None, "rounds in which proxies are trained and sent; none: all", ge=1)
    proxy: bool = setting(True, "false: no private model; the noisy one is what a client uses")
    alpha: float | None = setting(None, "share of the private model in the proxy's loss; none: preset", ge=0, le=1)
    beta: float = setting(0.3, "share of the proxy in the private model's loss (private distilled)", ge=0, le=1)
    reverse_kl: bool = setting(False, "distil with KL(own ‖ other), as printed, instead of KL(other ‖ own)")
    teacher: Literal["proxy", "uniform"] = setting("proxy", "uniform: a control, without any knowledge of others")
    private: Literal["distilled", "tuned"] | None = setting(
        None, "distilled: trained beside the proxy; tuned: the group's proxy, trained on own records; none: preset"
    )
    private_lr: float | None = setting(None, "step of the private model (eta_p); none: 0.001 distilled, 2 tuned", gt=0)
    tune_steps: int = setting(50, "steps of a tuned model, each on all own records", ge=0)
    projection: int | None = setting(
        None, "directions that inputs are projected onto, to length one; 0: as they are; none: preset", ge=0
    )
    averaging: float = setting(0.0, "memory of the running average of proxies that is tuned; 0: the last", ge=0, lt=1)
    forms_groups = True

    def __post_init__(self) -> None:
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()

    def among(self, n: int) -> P4:
        """The settings in a federation of n clients: who names more peers to compare with than there are is told."""
        if self.sampled is None:
            return replace(self, sampled=SAMPLED)
        if self.groups == "l1" and self.sampled > max(1, n - 1):
            raise UserError(
                f"'method.sampled' = {self.sampled}: among {n} clients each has {n - 1} to compare with; "
                f"lower it, or leave it out for {SAMPLED} or as many as there are"
            )
        return self

    @property
    def compared(self) -> int:
        """H."""
        return self.sampled or SAMPLED

    def notices(self, rounds: int) -> list[str]:
        """What the user should know of these settings in a run of so many rounds."""
        said = [f"not covered by epsilon: {gap}" for gap in self._gaps()]
        if self.groups == "l1" and self.compared < self.most - 1:
            said.append(f"method.sampled = {self.compared}: fewer than a group has members")
        return said

    @property
    def unruled(self) -> str | None:
        """What no rule of a receiver protects from."""
        if not self.rotate_every or not self.proxy:
            return None
        return (
            "a member averages for its group in turn, and nobody judges what it hands out; "
            "with method.rotate_every = 0 everybody averages for itself"
        )

    def _gaps(self) -> list[str]:
        return [GAP] if self.proxy and self.alpha else []

    @property
    def most(self) -> int:
        """Members of a group."""
        return self.cap or 1

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula: H proxies in round 1, and every round one up and one down."""
        others = min(self.most, n) - 1
        first = min(self.compared, n - 1) if self.groups == "l1" else 0
        each = (2 if self.rotate_every else others) * min(rounds, self.releases or rounds)
        return cost.Cost(first + each, max(first, others) / n)

    def arrange(self, federation: Federation, device: torch.device = CPU) -> Federation:
        """The samples as both models see them; computed on `device`."""
        return projected(federation, self.projection, device) if self.projection else federation

    def start(self, cohort: Cohort) -> State:
        share = self.histogram_share if self.groups == "histogram" else 0.0
        self.open_account(cohort, self.releases, self._gaps(), share)
        begin(cohort)
        cohort.proxies = self.proxy
        nobody = Groups.none(cohort, self.most)
        average = torch.zeros_like(cohort.weights) if self.averaging else cohort.weights[:, :0]
        cohort.personal = cohort.weights
        return State(cohort.weights, nobody.neighbors, nobody.name, nobody.apart, average)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        sharing = self.releases is None or t <= self.releases
        before = cohort.weights
        personal = self._twins(cohort).train(t, cohort, state.personal, sharing)
        if sharing:
            peers.publish(t, weights=cohort.weights)
            groups = self._find(t, cohort, peers, Groups(state.neighbors, state.clusters, state.apart))
            self._average(t, cohort, peers, groups, before)
            average = self._remember(t, cohort, state.average)
            state = replace(
                state, neighbors=groups.neighbors, clusters=groups.name, apart=groups.apart, average=average
            )
        if not self.proxy:
            personal = cohort.weights
        elif self.private == "tuned":
            personal = self._tuned(cohort, state) if cohort.round.evaluate else state.personal
        cohort.personal = personal
        return replace(state, personal=personal)

    # -- local training ------------------------------------------------------------------------------------------

    def _twins(self, cohort: Cohort) -> Twins:
        trains = self.proxy and self.private == "distilled"
        return Twins(
            alpha=self.alpha or 0.0 if self.proxy else 0.0,
            beta=self.beta,
            proxy_rate=self._rate(cohort),
            private_rate=(self.private_lr or DISTILLING_RATE) if trains else None,
            reverse=self.reverse_kl,
            uniform=self.teacher == "uniform",
        )

    def _rate(self, cohort: Cohort) -> Tensor | float:
        """Of a noisy step: [m, 1] or the same for all.

        Of a linear model on inputs of length one the noise on a score, after all steps and averaged over a group, is
        rate · deviation · sqrt(steps / members) / records: the rate is what makes this `NOISE`, whatever the budget.
        """
        if self.lr is not None or not self._unit(cohort):
            return self.step_size(None if self.proxy and self.private == "distilled" else 0.1, self.group_lr)
        releases = account(cohort)
        records = (cohort.data.train.sizes * releases.plan.rate()).clamp(min=1)
        steps = releases.rounds * self.local_steps / min(self.most, cohort.n)
        rate = NOISE * records / (releases.plan.deviation(self.clip) * math.sqrt(steps) * self.group_lr)
        return rate.clamp(max=LARGEST / self.clip)[:, None].to(cohort.device, cohort.dtype)

    def _unit(self, cohort: Cohort) -> bool:
        """Whether the model is linear and its inputs have length one."""
        return bool(self.projection) and is_linear(cohort)

    def _tuned(self, cohort: Cohort, state: State) -> Tensor:
        """The group's proxies after some plain steps on own records: [m, d]. Nothing of it is ever sent."""
        releases = account(cohort)
        here = releases.present()
        start = state.average if self.averaging else cohort.weights
        rate = self.private_lr or (TUNING_RATE if self._unit(cohort) else cohort.training.lr)
        batches = releases.everything(here)
        models = start
        for _ in range(self.tune_steps):
            models = models - rate * mean_gradient(releases.plain(models, batches), batches)
        models = torch.where(all_finite(models)[:, None], models, start)
        return torch.where(here[:, None], models, state.personal)

    # -- among peers ---------------------------------------------------------------------------------------------

    def _find(self, t: int, cohort: Cohort, peers: Peers, groups: Groups) -> Groups:
        """Phase 1: who is in my group; afterwards only for those who missed it."""
        if t > 1:
            return grouping.joined(t, cohort, peers, groups)
        if self.groups == "l1":
            sampled = peers.sample(t, self.compared)
            return grouping.by_distance(t, cohort, peers, peers.pull(t, sampled), sampled, self.most)
        if self.groups == "histogram":
            return grouping.by_statistic(t, cohort, peers, self._histogram(t, cohort), self.most)
        return grouping.drawn(cohort, peers, self.most, kin=self.groups == "oracle")

    def _histogram(self, t: int, cohort: Cohort) -> Tensor:
        """Shares of the classes among each client's records, with noise: [m, C]."""
        counts = torch.from_numpy(cohort.data.class_counts()).to(cohort.device, torch.float64)
        noisy = account(cohort).statistic(t, "histogram", counts, math.sqrt(2))  # one count less, another more
        noisy = noisy.clamp(min=0)
        return noisy / noisy.sum(dim=1, keepdim=True)

    def _average(self, t: int, cohort: Cohort, peers: Peers, groups: Groups, before: Tensor) -> None:
        """Phase 2: the mean of the group's proxies that arrive; before: [m, d] the proxies as the round found them."""
        if not self.rotate_every:
            cohort.mix(peers.pull(t, groups.neighbors), groups.neighbors)
            self._step_further(cohort, before, ~cohort.round.absent)
            return
        whose = grouping.aggregator(cohort, groups, t // self.rotate_every)
        mine = whose == cohort.ids
        inbound = torch.where(mine[:, None], groups.neighbors, -1)
        cohort.mix(peers.pull(t, inbound), inbound)
        self._step_further(cohort, before, mine & ~cohort.round.absent)
        peers.publish(t, group=cohort.weights, listed=groups.neighbors, turn=whose)
        asked = torch.where(mine, -1, whose)[:, None]
        pool = peers.pull(t, asked, ("group", "listed", "turn"))
        if not pool["group"].shape[0]:
            return
        rows = pool.rows(asked)[:, 0]
        row = rows.clamp(min=0)
        in_turn = pool["turn"][row] == whose  # by its own list too, and I am on that
        ours = (rows >= 0) & in_turn & (pool["listed"][row] == cohort.ids[:, None]).any(dim=1)
        cohort.weights = torch.where(ours[:, None], pool["group"][row], cohort.weights)
        ids, members, shares = cohort.round.edges.pop()
        taken = ours[:, None].to(shares.dtype)
        cohort.round.edges.append((ids, torch.cat([members, asked], dim=1), torch.cat([shares, taken], dim=1)))

    def _step_further(self, cohort: Cohort, before: Tensor, who: Tensor) -> None:
        """w + eta_g · (mean - w) in place of the mean."""
        if self.group_lr != 1:
            moved = before + self.group_lr * (cohort.weights - before)
            cohort.weights = torch.where(who[:, None], moved, cohort.weights)

    def _remember(self, t: int, cohort: Cohort, average: Tensor) -> Tensor:
        """The running average [m, d] of the group's proxies: what is made of releases is free."""
        if not self.averaging:
            return average
        return cohort.weights if t == 1 else torch.lerp(cohort.weights, average, self.averaging)
