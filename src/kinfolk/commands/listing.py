"""What `kinfolk list` knows: methods, rules of aggregation and attacks, each with its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kinfolk import aggregation, methods
from kinfolk.errors import UserError, nearest
from kinfolk.peers.attacks import ATTACKS
from kinfolk.peers.faults import AIMED, SCALED, Faults
from kinfolk.settings import describe


@dataclass(frozen=True)
class Entry:
    """Something that can be named in an experiment."""

    description: str
    settings: list[tuple[str, str, str, str]]  # name, type, default, help

    def as_dict(self) -> dict[str, Any]:
        keys = ("name", "type", "default", "help")
        return {"description": self.description, "settings": [dict(zip(keys, row)) for row in self.settings]}


def find(pattern: str) -> dict[str, Entry]:
    """Methods by wildcards, or all `rules`, or all `attacks`."""
    if pattern == "rules":
        return rules()
    if pattern == "attacks":
        return attacks()
    found = methods.names(pattern)
    if not found:
        raise UserError(f"no method matches '{pattern}': {nearest(pattern, [*methods.names(), 'rules', 'attacks'])}")
    return {name: _of(methods.find(name)) for name in found}


def rules() -> dict[str, Entry]:
    """The rules of aggregation; their settings go into `[aggregation]`."""
    return {name: _of(aggregation.find(name)) for name in aggregation.names()}


def attacks() -> dict[str, Entry]:
    """The attacks; their settings go into `[faults]`."""
    known = [row for row in describe(Faults) if row[0].startswith("attack")]
    return {name: Entry(text, [row for row in known if _belongs(row[0], name)]) for name, text in ATTACKS.items()}


def _of(cls: type) -> Entry:
    return Entry(methods.summary(cls), describe(cls))


def _belongs(setting: str, attack: str) -> bool:
    kinds = {"attack": (), "attack_scale": SCALED, "attack_victim": AIMED}
    return attack in kinds.get(setting, (attack,)) and (setting, attack) != ("attack_start", "label-flip")
