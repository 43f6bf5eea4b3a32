"""Clients that lie: what they publish in place of their models.

An attacker trains, chooses and averages like everybody else; only what others see of its model is false. Tables and
answers that are no models (who asks whom, a loss) stay true. IPM, ALIE, mimic and gaming know what others publish in
the same round, as is usual in the literature: in the simulator the exchange carries it to them, under names that no
method reads, so that a run in shards gives the same bits. Between real peers only attacks that need no such knowledge
will be possible.

A message with a number that is not finite, or larger than any model's, is refused by whoever gets it. It is so for
all, so it is not even offered here.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.errors import UserError
from kinfolk.peers.faults import Faults

if TYPE_CHECKING:
    from kinfolk.peers.base import Exchange

ATTACKS = {
    "sign-flip": "turns this round's update round, times the scale (1): start - scale · update",
    "label-flip": "trains on labels C - 1 - y in place of y, and hides nothing else",
    "gaussian": "adds normal noise to every number of its model, of deviation scale (1)",
    "ipm": "inner product manipulation: the honest clients' mean start, minus scale (2) times their mean update",
    "alie": "a little is enough: the honest clients' mean minus scale deviations in every number; scale none: as "
    "many as hide among them",
    "mimic": "copies the victim, an honest client (none given: the first), so that it counts too often",
    "nan": "publishes NaN in every number, which whoever gets it refuses",
    "free-rider": "publishes the model that it began the round with, without training",
    "gaming": "copies the victim (none given: one drawn for each) until that averages with it, then does as sign-flip",
}
KNOWING = ("ipm", "alie", "mimic", "gaming")  # attacks that know what others publish
SCALES = {"sign-flip": 1.0, "gaussian": 1.0, "ipm": 2.0, "gaming": 1.0}
UPDATES = ("update", "change")  # first words of the names under which methods publish differences of models
HUGE = 1e15  # larger than any number of a model; squares of such, and sums of them, still fit in float32
COLUMNS = 2**16  # numbers of all clients' models that are looked at together


@dataclass(frozen=True)
class Plan:
    """Who lies, and how: the same for all processes of a run."""

    faults: Faults
    attackers: Tensor  # [n] bool
    seed: int

    def victims(self, ids: Tensor) -> Tensor:
        """Whom each of the clients ids [m] would copy: [m]."""
        if self.faults.attack_victim is not None:
            return torch.full_like(ids, self.faults.attack_victim)
        honest = torch.nonzero(~self.attackers).flatten().to(ids.device)
        if self.faults.attack == "mimic":
            return honest[:1].expand_as(ids)
        return honest[randomness.bits(self.seed, "victim", 0, ids, torch.zeros_like(ids)) % honest.numel()]

    @property
    def scale(self) -> float:
        """How strong the attack is."""
        if self.faults.attack_scale is not None:
            return self.faults.attack_scale
        if self.faults.attack != "alie":
            return SCALES.get(self.faults.attack or "", 1.0)
        return hidden(self.attackers.numel(), int(self.attackers.sum()))


def plan(faults: Faults, n: int, seed: int) -> Plan | None:
    """The attackers among n clients; None where there are none."""
    given = faults.attackers
    if given is None:
        return None
    if isinstance(given, list):
        beyond = [client for client in given if client >= n]
        if beyond:
            raise UserError(f"'faults.attackers': there is no client {beyond[0]}, only 0 to {n - 1}")
        drawn = torch.tensor(given, dtype=torch.int64)
    else:
        order = randomness.permutations(seed, "attackers", 0, torch.zeros(1, dtype=torch.int64), torch.tensor([n]))
        drawn = order[0, 0, : int(given * n + 0.5)]
    attackers = torch.zeros(n, dtype=torch.bool)
    attackers[drawn] = True
    if bool(attackers.all()):
        raise UserError(f"'faults.attackers' = {given}: of {n} clients none would be honest")
    victim = faults.attack_victim
    if victim is not None and (victim >= n or bool(attackers[victim])):
        what = "an attacker itself" if victim < n else f"not among the clients 0 to {n - 1}"
        raise UserError(f"'faults.attack_victim' = {victim} is {what}")
    return Plan(faults, attackers, seed) if drawn.numel() else None


def hidden(n: int, attackers: int) -> float:
    """How many deviations from the mean ALIE may go: so far that a majority still has somebody honest beyond it.

    Baruch, Baruch, Goldberg: A Little Is Enough. NeurIPS 2019.
    """
    honest = n - attackers
    share = (honest - (n // 2 + 1 - attackers)) / honest
    return max(0.0, NormalDist().inv_cdf(min(max(share, 1e-9), 1 - 1e-9)))


def flipped(y: Tensor, sizes: Tensor, attackers: Tensor, classes: int) -> Tensor:
    """Labels [N] of clients who hold sizes [n] of them in turn, C - 1 - y in place of y for attackers [n] bool."""
    lying = torch.repeat_interleave(attackers.to(y.device), sizes.to(y.device))
    return torch.where(lying, classes - 1 - y, y)


class Attack:
    """What the attackers among the clients of one cohort do."""

    def __init__(self, plan: Plan, ids: Tensor, size: int) -> None:
        """ids: [m] the cohort's clients; size: numbers of a model."""
        self.plan, self.ids, self.size = plan, ids, size
        self.kind = plan.faults.attack
        self.first = plan.faults.attack_start or 1
        self.scale = plan.scale
        self.attackers = plan.attackers.to(ids.device)
        self.lying = self.attackers[ids]
        self.victims = torch.where(self.lying, plan.victims(ids), -1)
        self.turned = torch.zeros_like(self.lying)  # [m] gaming: whose victim has averaged with it
        self.refused = torch.zeros_like(self.lying)  # [m] whose message of this round no model could be
        self.start = torch.zeros(0)

    def begin(self, start: Tensor) -> None:
        """A round begins, with the models start [m, d]."""
        self.start, self.refused = start, torch.zeros_like(self.lying)

    def falsifies(self, tensor: Tensor) -> bool:
        """Whether a tensor [m, ...] is one that attackers falsify: a model, or a difference of two."""
        return tensor.is_floating_point() and tensor.dim() == 2 and tensor.shape[1] == self.size

    def lie(
        self, t: int, name: str, values: Tensor, offered: Tensor, exchange: Exchange, before: Tensor | None = None
    ) -> Tensor:
        """What is published as `name` in place of the true values [m, d]; who must not offer it is in `refused`.

        offered: [m] ids, -1 for who offers nothing; before: [d] or [m, d] what models were before this round, by
        default those it began with, zero for updates.
        """
        if t < self.first or self.kind == "label-flip":
            return values
        if before is None:
            before = torch.zeros_like(values[:1]) if name.split()[0] in UPDATES else self.start
        false = self._false(t, name, values, before.expand_as(values), offered, exchange)
        bad = self.lying & ~(false.abs() <= HUGE).all(dim=1)  # NaN among them
        self.refused |= bad
        return torch.where((self.lying & ~bad)[:, None], false, values)

    def _false(self, t: int, name: str, values: Tensor, before: Tensor, offered: Tensor, exchange: Exchange) -> Tensor:
        if self.kind == "nan":
            return torch.full_like(values, torch.nan)
        if self.kind == "free-rider":
            return before
        if self.kind == "gaussian":
            noise = randomness.normal(self.plan.seed, "attack", t, self.ids, self.size)
            return values + (self.scale * noise).to(values.dtype)
        turned = before - self.scale * (values - before)
        if self.kind == "sign-flip":
            return turned
        now, then = f"true {name}", f"true start of {name}"
        exchange.publish(t, offered, {now: values, then: before})
        if self.kind in ("mimic", "gaming"):
            return torch.where(self.turned[:, None], turned, self._copied(t, now, values, exchange))
        everybody = torch.arange(self.attackers.numel(), device=self.ids.device)
        ids, found = exchange.fetch(t, everybody, (now, then))
        return _against(self.kind == "ipm", ids, found[now], found[then], self.attackers, self.scale, values)

    def _copied(self, t: int, name: str, values: Tensor, exchange: Exchange) -> Tensor:
        """The victims' values [m, d], one's own where a victim offers none."""
        ids, found = exchange.fetch(t, self.victims, (name,))
        theirs = found[name]
        if not theirs.shape[0]:
            return values
        rows = self._places(ids)[self.victims]
        return torch.where(rows[:, None] >= 0, theirs[rows.clamp(min=0)], values)

    def _places(self, ids: Tensor) -> Tensor:
        """[n + 1] the row of each client among ids [p], -1 for those that are not there, and -1."""
        n = self.attackers.numel()
        places = torch.full((n + 1,), -1, dtype=torch.int64, device=ids.device)
        places[ids] = torch.arange(ids.numel(), device=ids.device)
        places[n] = -1
        return places

    def end(self, t: int, mixed: list[tuple[Tensor, Tensor, Tensor]], exchange: Exchange) -> None:
        """The round is over. mixed: ids [m], neighbors [m, k] and shares [m, k] of everybody's mixings in it.

        Who games learns whether its victim has averaged with it.
        """
        if self.kind != "gaming" or t < self.first:
            return
        count = self.attackers.sum()
        column = torch.where(self.attackers, self.attackers.cumsum(0) - 1, count)  # [n] of each attacker in the table
        width = int(self.plan.attackers.sum()) + 1
        used = torch.zeros(self.ids.numel(), width, dtype=torch.uint8, device=self.ids.device)
        for _, neighbors, shares in mixed:
            there = (shares > 0) & (neighbors >= 0)
            used.scatter_(1, torch.where(there, column[neighbors.clamp(min=0)], width - 1), 1)
        exchange.publish(t, self.ids, {"averaged with": used})
        ids, found = exchange.fetch(t, self.victims, ("averaged with",))
        if found["averaged with"].shape[0]:
            rows = self._places(ids)[self.victims]
            chosen = found["averaged with"][rows.clamp(min=0), column[self.ids]] == 1
            self.turned = self.turned | (chosen & (rows >= 0) & self.lying)


def _against(
    ipm: bool, ids: Tensor, values: Tensor, start: Tensor, attackers: Tensor, scale: float, own: Tensor
) -> Tensor:
    """IPM or ALIE against what honest clients publish: [m, d], one's own [m, d] where no such client does.

    ids: [p] who published, -1 for nobody; values and start: [p, d] their models now and at the start. Rows are put in
    the order of the clients first, with gaps, so that sums have the same bits however many there are.
    """
    n, device = attackers.numel(), values.device
    honest = torch.zeros(n + 1, dtype=torch.bool, device=device)
    honest[ids] = True
    honest = honest[:n] & ~attackers
    count = honest.sum().clamp(min=1)
    false = values.new_zeros(1, values.shape[1])
    for first in range(0, values.shape[1], COLUMNS):
        columns = slice(first, first + COLUMNS)
        now, then = (_in_order(part[:, columns], ids, honest) for part in (values, start))
        mean = now.sum(dim=0) / count
        if ipm:
            begun = then.sum(dim=0) / count
            wanted = begun - scale * (mean - begun)
        else:
            apart = torch.where(honest[:, None], now - mean, 0.0)
            wanted = mean - scale * (apart.square().sum(dim=0) / count).sqrt()
        false[0, columns] = wanted.to(values.dtype)
    return torch.where(honest.any(), false, own)


def _in_order(rows: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
    """The rows [p, c] of the clients ids [p], in the order of their numbers, 0 for those not wanted [n]: float64."""
    n = wanted.numel()
    placed = torch.zeros(n + 1, rows.shape[1], dtype=torch.float64, device=rows.device)
    placed[ids] = rows.to(torch.float64)
    return torch.where(wanted[:, None], placed[:n], 0.0)
