"""Rules by name, as `[aggregation] rule = "krum"` calls them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

from kinfolk.aggregation.inbox import Inbox
from kinfolk.errors import UserError, nearest
from kinfolk.settings import build


class Rule(Protocol):
    """How a client makes one model of its own and those of peers. A frozen dataclass of settings."""

    judges: ClassVar[bool]  # whether it needs `Inbox.losses`

    @property
    def least(self) -> int:
        """How many models, the own among them, it needs: a client with fewer keeps its own."""

    def combine(self, inbox: Inbox) -> tuple[Tensor, Tensor]:
        """The new models, and the share of each peer in them: ([m, d], [m, k] float64)."""


R = TypeVar("R")
_RULES: dict[str, type[Any]] = {}


def register(name: str) -> Callable[[type[R]], type[R]]:
    """Class decorator: make a rule available under `name`."""

    def add(cls: type[R]) -> type[R]:
        if not dataclasses.is_dataclass(cls) or not hasattr(cls, "combine"):
            raise TypeError(f"{cls.__name__} must be a dataclass with combine(inbox)")
        known = _RULES.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"the rule name '{name}' is taken by {known.__module__}.{known.__qualname__}")
        cls.rule_name = name  # type: ignore[attr-defined]
        _RULES[name] = cls
        return cls

    return add


def find(name: str) -> type[Any]:
    """The rule class called `name`."""
    if name not in _RULES:
        raise UserError(f"unknown aggregation rule '{name}': {nearest(name, _RULES)}")
    return _RULES[name]


def names() -> list[str]:
    return sorted(_RULES)


def make(values: dict[str, Any], where: str = "aggregation") -> Rule:
    """The rule values["rule"], with the other values as its settings; the plain mean if none is named."""
    values = dict(values)
    name = values.pop("rule", "mean")
    if not isinstance(name, str):
        raise UserError(f"'{where}.rule' = {name!r}: must be one of {', '.join(names())}")
    rule: Rule = build(find(name), values, where)
    return rule


def check(rule: Rule, peers: int, where: str = "aggregation") -> None:
    """An error if a client that hears from `peers` others could never have as many models as the rule needs."""
    if peers + 1 < rule.least:
        given = f"'{where}.byzantine' = {rule.byzantine}" if hasattr(rule, "byzantine") else f"[{where}]"
        raise UserError(
            f"{given}: {rule.rule_name} then needs {rule.least} models, "  # type: ignore[attr-defined]
            f"but a client has {peers + 1} (its own and {peers} of peers): let it average more peers"
            + (", or set byzantine lower" if hasattr(rule, "byzantine") else "")
        )
