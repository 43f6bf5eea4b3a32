"""What every private method is made of: the settings of a budget, and noisy steps that are charged before they happen.

A method extends `Budget` and calls `open_account` in its `start`. In a round `Releases.trained` does everything a plain
DP-SGD needs; a method that wants more takes it apart: `charge`, then for each step `batches` and `gradient`, then
`settled`. Whoever cannot pay is left out of `charge`'s answer and offers its peers nothing in that round.

Charged is the step, not the message: a model that stays at home today may be part of what is sent tomorrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.program import rounding
from kinfolk.cohort.training import all_finite
from kinfolk.cohort.workers import side_by_side
from kinfolk.errors import UserError
from kinfolk.privacy.accounting import Accountant, Mechanism
from kinfolk.privacy.dpsgd import PrivateGradients, Sums
from kinfolk.privacy.guarantee import Guarantee
from kinfolk.privacy.journal import Journal
from kinfolk.privacy.ledger import Ledger
from kinfolk.privacy.losses import SampleLoss, cross_entropy
from kinfolk.privacy.plan import Plan, Rule, plan
from kinfolk.privacy.sampling import Batches, draw
from kinfolk.privacy.source import Seeded, Source, add_noise
from kinfolk.settings import setting

RATES = {"noble": 0.03, "rdp": 0.05, "calibrated": 0.05}  # step sizes until tuned, for features by scattering


@dataclass(frozen=True)
class Budget:
    """How much a client may tell of one record, and the noise that follows from it."""

    epsilon: float = setting(15.0, "budget of every client for all it sends: replacing one record", gt=0)
    delta: float | None = setting(None, "probability beside epsilon; none: 1/records of the client", gt=0, lt=1)
    noise: Rule | None = setting(
        None,
        "calibrated: the least that is enough; rdp: by Rényi; noble: a paper's formula; none: preset, else calibrated",
    )
    clip: float = setting(1.0, "norm that the gradient of a record is cut to (C)", gt=0)
    local_steps: int = setting(1, "noisy steps of a client in a round (K)", ge=1)
    sample_rate: float = setting(1.0, "share of its records that a client takes for a step (s)", gt=0, le=1)
    sampling: Literal["none", "without-replacement", "poisson"] = setting(
        "without-replacement", "how these are drawn, if they are not all"
    )
    lr: float | None = setting(None, "noisy step size eta_0, divided by max(1, round(s K)); none: the method's", gt=0)

    noisy = True  # what is sent may depend on records through noisy steps only

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise", self.rule)
        if self.sampling == "none" and self.sample_rate < 1:
            raise UserError(f"sample_rate = {self.sample_rate:g} needs a way of sampling: without-replacement, poisson")
        if self.sampling == "poisson" and self.sample_rate < 1 and self.noise == "rdp":
            raise UserError("noise = 'rdp' accounts for sampling without replacement only: take noise = 'calibrated'")

    @property
    def rule(self) -> Rule:
        """How the noise follows from the budget."""
        return self.noise or "calibrated"

    def step_size(self, otherwise: float | None = None, group_lr: float = 1.0) -> float:
        """Of a noisy step: eta_l = eta_0 / (max(1, round(s K)) · eta_g); otherwise: eta_0 if the user gave none."""
        first = self.lr or otherwise or RATES[self.rule]
        return first / (max(1, round(self.sample_rate * self.local_steps)) * group_lr)

    def open_account(
        self, cohort: Cohort, rounds: int | None = None, gaps: Sequence[str] = (), share: float = 0.0
    ) -> Releases:
        """The account of the cohort's clients, also in `cohort.account`.

        rounds: in which a client takes noisy steps; none: all of the run. gaps: what the promise does not cover.
        share: of the budget that is set aside for one statistic (see `Releases.statistic`).
        """
        if share and (self.noise != "calibrated" or self.sample_rate < 1):
            raise UserError("a statistic beside the steps needs noise = 'calibrated' and sample_rate = 1")
        releases = Releases(self, cohort, rounds or cohort.rounds or 1, (*gaps, *cohort.data.gaps), share)
        cohort.account = releases
        return releases


def is_linear(cohort: Cohort) -> bool:
    """Whether the model is one linear layer."""
    layers = [part for part in cohort.model.modules() if list(part.parameters(recurse=False))]
    return len(layers) == 1 and isinstance(layers[0], nn.Linear)


def begin(cohort: Cohort) -> Tensor:
    """To be called by a method's `start`: the common initial model [d], now everybody's; zero if it is linear.

    There is no symmetry to break then, and random weights would only be more noise.
    """
    model = torch.zeros_like(cohort.initial) if is_linear(cohort) else cohort.initial
    cohort.weights = model.expand(len(cohort), -1).clone()
    return model


def account(cohort: Cohort) -> Releases:
    """The account that the method has opened."""
    assert isinstance(cohort.account, Releases), "the method has not opened an account in its start"
    return cohort.account


class Releases:
    """Noisy gradients of all clients of a cohort, each charged to its client's budget before it is computed."""

    def __init__(
        self, budget: Budget, cohort: Cohort, rounds: int, gaps: Sequence[str] = (), share: float = 0.0
    ) -> None:
        self.budget, self.cohort, self.gaps = budget, cohort, tuple(gaps)
        self.sampling = budget.sampling if budget.sample_rate < 1 else "none"
        self.plan: Plan = plan(
            cohort.data.train.sizes, budget.epsilon, rounds, delta=budget.delta, steps=budget.local_steps,
            rate=budget.sample_rate, sampling=self.sampling, rule=budget.rule,
        )  # fmt: skip
        self.aside: tuple[Mechanism, ...] = ()  # for a statistic, of each kind of client
        if share:
            self.plan, self.aside = _divided(self.plan, rounds, share)
        self.rounds = rounds
        self.gradients = PrivateGradients(cohort.model, cohort.layout, cohort.data.input_shape, budget.clip)
        self.source: Source = Seeded(cohort.seed)
        self.file: Journal | None = None
        self.ledger = self._ledger(None, "")
        self._fetched: tuple[Any, dict[int, tuple[Tensor, Tensor]]] = (None, {})  # a round; its masks, also on the CPU

    def _ledger(self, file: Journal | None, data: str) -> Ledger:
        budget = self.budget
        nominal = self.rounds * budget.local_steps if budget.noise == "noble" else None
        accountant: Accountant = "rdp" if budget.noise == "rdp" else "best"
        return Ledger(
            self.cohort.ids, budget.epsilon, self.plan.delta, simulated=self.source.simulated, path=file, data=data,
            accountant=accountant, nominal=nominal,
        )  # fmt: skip

    # -- a round -------------------------------------------------------------------------------------------------

    def charge(self, t: int, active: Tensor | None = None) -> Tensor:
        """Charge this round's steps to everybody who is there (of those in `active` [m]): who may take them, [m] bool.

        Whoever may not is silent in this round. On the disk when this returns.
        """
        return self._charged(self._name(t), self.plan.mechanisms, self.plan.which, active)

    def statistic(self, t: int, name: str, values: Tensor, moved: float) -> Tensor:
        """Numbers [m, c] about the clients' records with noise, charged to what was set aside; NaN for who may not.

        moved: how far (Euclidean) replacing one record can move a client's numbers.
        """
        may = self._charged(f"seed {self.cohort.seed}, {name}", self.aside, self.plan.which, None)
        each = torch.tensor([one.noise_multiplier * moved for one in self.aside], dtype=torch.float64)
        noisy = values.to(torch.float64, copy=True)
        add_noise(self.source, f"private {name}", t, self.cohort.ids, each[self.plan.which], noisy)
        return torch.where(may[:, None], noisy, torch.nan)

    def _charged(self, name: str, mechanisms: Sequence[Mechanism], which: Tensor, active: Tensor | None) -> Tensor:
        now, device = self.cohort.round, self.cohort.device
        wanted = torch.ones(len(self.cohort), dtype=torch.bool) if now.everybody else (~now.absent).cpu()
        if active is not None:
            wanted = wanted & active.cpu()
        may = self.ledger.charge(name, mechanisms, wanted, which)
        refused = (wanted & ~may).to(device)
        now.withheld = refused if now.withheld is None else now.withheld | refused
        there = may.to(device)
        self._masks()[id(there)] = there, may
        return there

    def batches(self, t: int, step: int, may: Tensor) -> Batches:
        """The records of a step; nobody else than those who may [m] takes any."""
        cohort = self.cohort
        drawn = draw(
            self.source, t, cohort.ids, cohort.data.train.sizes, self.sampling, self.plan.rate(),
            f"private batch/{step}",
        )  # fmt: skip
        return self.only(drawn, may)

    def everything(self, who: Tensor) -> Batches:
        """All records of those who are meant [m], for models that are never sent."""
        cohort = self.cohort
        return self.only(draw(self.source, 0, cohort.ids, cohort.data.train.sizes, "none"), who)

    def only(self, batches: Batches, may: Tensor) -> Batches:
        """The same batches, and empty ones for others than those who may [m]."""
        here = self._on_cpu(may)
        counts, widths = (torch.where(here, column, 0) for column in (batches.counts, batches.widths))
        return replace(batches, counts=counts, widths=widths)

    def present(self) -> Tensor:
        """[m] bool: who is there in this round."""
        now = self.cohort.round
        here = ~now.absent
        if now.everybody:
            self._masks()[id(here)] = here, torch.ones(here.shape, dtype=torch.bool)
        return here

    def _on_cpu(self, mask: Tensor) -> Tensor:
        """The same [m] bool on the CPU: a GPU is asked once for each, and never for what is known here."""
        masks = self._masks()
        if id(mask) not in masks:
            masks[id(mask)] = mask, mask.cpu()  # kept with the mask, so that its id stays its own
        return masks[id(mask)][1]

    def _masks(self) -> dict[int, tuple[Tensor, Tensor]]:
        if self._fetched[0] is not self.cohort.round:
            self._fetched = self.cohort.round, {}
        return self._fetched[1]

    def gradient(
        self,
        t: int,
        step: int,
        models: Tensor,
        batches: Batches,
        loss: SampleLoss = cross_entropy,
        *others: Tensor,
    ) -> tuple[Tensor, Sums]:
        """The noisy gradients [m, d] of the models [m, d] on a step's batches, and what must stay at home.

        loss(scores, labels, *others) of single records; others: [m, width, ...], as wide as the batches.
        """
        cohort, data = self.cohort, self.cohort.data.train
        with rounding(cohort.device, cohort.precision):
            return self.gradients(
                models, data.x, data.starts, batches, (self.labels(batches), *others),
                self.plan.deviation(self.budget.clip), self.source, t, cohort.ids, f"private noise/{step}", loss,
            )  # fmt: skip

    def plain(self, models: Tensor, batches: Batches, loss: SampleLoss = cross_entropy, *others: Tensor) -> Sums:
        """The sums of the same gradients, neither cut nor noisy: for models that are never sent."""
        data = self.cohort.data.train
        with rounding(self.cohort.device, self.cohort.precision):
            targets = (self.labels(batches), *others)
            return self.gradients.uncut().sums(models, data.x, data.starts, batches, targets, loss)

    def labels(self, batches: Batches) -> Tensor:
        """[m, width] of a step's records."""
        return self.cohort.data.train.y[self._rows(batches)]

    def scores(self, models: Tensor, batches: Batches) -> Tensor:
        """Probabilities [m, width, C] that the models [m, d] give a step's records."""
        cohort, rows = self.cohort, self._rows(batches)
        cohort.model.eval()
        workers = cohort.room.workers(len(cohort), rows.shape[1])
        size = cohort.room.fitting(cohort.layout.size, rows.shape[1], len(cohort), workers)

        def work(first: int) -> Tensor:
            some = slice(first, first + size)
            with cohort.room.threads(size * rows.shape[1]), rounding(cohort.device, cohort.precision):
                return cohort.program.logits(models[some], cohort.train_x, rows[some]).softmax(dim=2)

        return torch.cat(side_by_side(work, range(0, len(cohort), size), workers))

    def _rows(self, batches: Batches) -> Tensor:
        data = self.cohort.data.train
        return batches.rows(data.starts).clamp(max=max(data.y.numel() - 1, 0))

    def settled(self, before: Tensor, after: Tensor, may: Tensor, *losses: Tensor) -> Tensor:
        """`after` [m, d] for those who may, `before` for others and for whom training led to NaN or infinity.

        These are in quarantine for the round; losses: [m], of non-empty batches.
        """
        finite = all_finite(after)
        for loss in losses:
            finite = finite & torch.isfinite(loss)
        self.cohort.round.quarantined |= ~finite & may
        return torch.where((finite & may)[:, None], after, before)

    def trained(
        self, t: int, models: Tensor, rate: float, active: Tensor | None = None, drift: Tensor | None = None
    ) -> Tensor:
        """The models [m, d] after a round's noisy steps of size `rate`, charged; of who may not, as they were.

        drift: [m, d] or [d], added to every gradient.
        """
        may = self.charge(t, active)
        after = models
        for step in range(self.budget.local_steps):
            batches = self.batches(t, step, may)
            gradient, sums = self.gradient(t, step, after, batches)
            after = after - rate * (gradient if drift is None else gradient + drift)
            loss = found(sums, batches)
        return self.settled(models, after, may, loss)

    # -- what is known of it -------------------------------------------------------------------------------------

    def keep(self, path: Path, data: str, accounts: Sequence[Any]) -> None:
        """From now on write every charge of these accounts, of all cohorts of a process, into one file."""
        file = Journal(path)
        for one in accounts:
            assert isinstance(one, Releases)
            state = one.ledger.state()
            one.file, one.ledger = file, one._ledger(file, data)
            one.ledger.restore(state)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def state(self) -> Tensor:
        return self.ledger.state()

    def restore(self, state: Tensor) -> None:
        self.ledger.restore(state)

    def spent(self) -> bool:
        return not bool(self.ledger.affordable(self.plan.mechanisms, self.plan.which).any())

    def refuse(self, t: int, accounts: Sequence[Any]) -> None:
        """An error if a run that goes on with round t has no budget left, or was planned for fewer rounds."""
        if t > self.rounds or self.ledger.repeats(self._name(t)):  # nothing more, or nothing new, is to be released
            return
        planned = {replace(one, releases=1) for one in self.plan.mechanisms}
        past = {replace(one, releases=1) for row in range(len(self.cohort)) for one in self.ledger.history(row)}
        if self.budget.noise == "noble" and past - planned:
            raise UserError(
                "noise = 'noble' was planned for another number of rounds: such a run cannot be made longer, as its "
                "nominal epsilon would mean nothing"
            )
        if all(one.spent() for one in accounts):
            self.ledger.refuse_if_spent(self.plan.mechanisms, self.plan.which)

    def figures(self) -> dict[str, Tensor]:
        return {"epsilon": self.ledger.spent(), "delta": self.plan.delta, "releases": self.ledger.releases()}

    def guarantee(self) -> Guarantee:
        return self.ledger.guarantee(nominal=self.plan.nominal, gaps=self.gaps)

    def _name(self, t: int) -> str:
        return f"seed {self.cohort.seed}, round {t}"


def _divided(whole: Plan, rounds: int, share: float) -> tuple[Plan, tuple[Mechanism, ...]]:
    """A plan with more noise, and one release beside it for each kind of client; together they cost what it did.

    Of releases without sampling the squares of 1/multiplier add up.
    """
    safe = 1 + 1e-5  # rounding must not cost the last release
    louder = [one.noise_multiplier * safe / math.sqrt(1 - share) for one in whole.mechanisms]
    steps = tuple(replace(one, noise_multiplier=noise) for one, noise in zip(whole.mechanisms, louder))
    single = [one.noise_multiplier / math.sqrt(rounds * one.releases) for one in whole.mechanisms]
    aside = tuple(Mechanism(multiplier * safe / math.sqrt(share)) for multiplier in single)
    return replace(whole, mechanisms=steps), aside


def found(sums: Sums, batches: Batches) -> Tensor:
    """[m] mean losses of a step, 0 where a batch is empty."""
    return torch.where(batches.counts.to(sums.loss.device) > 0, sums.loss, 0.0)
