"""Peers that lie: who they are in a run, what the others do about it, and whether that suits the method."""

from __future__ import annotations

import dataclasses
from typing import Any

from kinfolk import aggregation
from kinfolk.aggregation import Rule
from kinfolk.config import Config
from kinfolk.data.federation import Federation
from kinfolk.errors import UserError
from kinfolk.peers.attacks import Plan, flipped, plan

WEIGHTLESS = ("median", "trimmed-mean", "krum")  # rules to which coefficients only say who takes part


def prepare(config: Config, data: Federation) -> tuple[Federation, Rule | None, Plan | None, list[str]]:
    """The data as attackers have made them, the rule (None: the plain mean), who attacks (None: nobody), notices."""
    attack, data, notices = _attack(config, data)
    rule, more = _rule(config, data.clients, attack)
    return data, rule, attack, notices + more


def _attack(config: Config, data: Federation) -> tuple[Plan | None, Federation, list[str]]:
    faults, n = config.faults, data.clients
    found = plan(faults, n, config.run.seed)
    if found is None:
        given = faults.attackers
        nobody = [f"faults.attackers = {given} of {n} clients: nobody attacks"] if given else []
        return None, data, nobody
    if faults.attack == "gaming" and getattr(config.method, "server", False):
        raise UserError(
            f"faults.attack = 'gaming': in method '{config.method_name}' a server averages, and nobody chooses peers"
        )
    if faults.attack == "label-flip":
        part = data.train
        labels = flipped(part.y, part.sizes, found.attackers, data.classes)
        data = dataclasses.replace(data, train=dataclasses.replace(part, y=labels))
    return found, data, []


def _rule(config: Config, n: int, attack: Plan | None) -> tuple[Rule | None, list[str]]:
    rule, method = config.aggregation, config.method
    name = config.rule_name
    if name == "mean":
        return None, []
    if not getattr(method, "averages", True):
        return None, [f"method '{config.method_name}' averages nothing: aggregation.rule = {name} is ignored"]
    if (why := getattr(method, "only_mean", None)) is not None:
        raise UserError(f"aggregation.rule = '{name}': method '{config.method_name}' {why}; use 'mean'")
    server = bool(getattr(method, "server", False))
    if server and rule.judges:
        raise UserError(
            f"aggregation.rule = '{name}' judges models on data of one's own, "
            f"which the server of method '{config.method_name}' does not have; use another rule"
        )
    if rule.judges and getattr(method, "noisy", False):
        raise UserError(
            f"aggregation.rule = '{name}' judges models on a client's own records without noise, and what it chooses "
            f"is part of what method '{config.method_name}' sends next; use another rule"
        )
    models = _participants(method, n) if server else _averaged(config, n) + 1
    most = models if server else max(models, _most_averaged(config, n) + 1)
    _enough(rule, most, server)
    notices = [] if attack is None else _outnumbered(rule, models, server, n, int(attack.attackers.sum()))
    if name in WEIGHTLESS and (server or getattr(method, "weighs", False) or getattr(method, "choice", "") == "afind"):
        notices.append(f"aggregation.rule = {name} takes no weights: those of the method only say who takes part")
    if (why := getattr(method, "unruled", None)) is not None:
        notices.append(f"aggregation.rule = {name} is what averagers apply: {why}")
    return rule, notices


def _participants(method: Any, n: int) -> int:
    """How many models a server hears of in a round."""
    return max(1, round(getattr(method, "participation", 1.0) * n))


def _averaged(config: Config, n: int) -> int:
    """With how many peers a client averages: as many as the method is set to, or all that it can reach."""
    method, most = config.method, config.peers.most(n)
    fixed = getattr(method, "choice", "random") == "random" and hasattr(method, "neighbors")
    return min(method.neighbors, most) if fixed else most


def _most_averaged(config: Config, n: int) -> int:
    """With how many it may average in some round, where that is more."""
    return min(getattr(config.method, "most_averaged", 0), config.peers.most(n))


def _enough(rule: Rule, models: int, server: bool) -> None:
    """An error if there could never be as many models as the rule needs."""
    if not server:
        aggregation.check(rule, models - 1)
    elif models < rule.least:
        raise UserError(
            f"'aggregation.byzantine' = {getattr(rule, 'byzantine', 0)}: the rule then needs {rule.least} models, but "
            f"the server hears of {models}: set byzantine lower, or let more clients take part"
        )


def _outnumbered(rule: Rule, models: int, server: bool, n: int, attackers: int) -> list[str]:
    """A notice if on average more attackers are among the models than the rule is set for."""
    expected = attackers * models / n if server else attackers * (models - 1) / max(1, n - 1)
    borne = getattr(rule, "byzantine", None)
    if borne is None or getattr(rule, "radius", None) is not None or expected <= borne:
        return []
    heard = models if server else models - 1
    return [f"aggregation.byzantine = {borne}, but of {heard} models {expected:.1f} are attackers' on average"]
