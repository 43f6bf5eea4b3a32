"""Methods by name: shipped ones, a user's own, and those that installed packages add."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from kinfolk.cohort.cohort import Cohort
from kinfolk.errors import UserError, nearest
from kinfolk.peers.base import Peers


class Method(Protocol):
    """How a client learns with others. A frozen dataclass: its fields are the settings of `[method]`.

    `State` is a dataclass of tensors with leading dimension m (or None): it is checkpointed, sharded and resumed by
    walking its fields. A field declared with `shared()` is the same for all clients and has no such dimension. A state
    that has a field `neighbors` [m, *] (ids, -1 for none) is judged by that list; any other by who was mixed in. One
    that has a field `clusters` [m] is compared with the true clusters (`ari`). A field `personal` [m, d] holds the
    models that clients use where these are not the cohort's own. A class attribute `counted` says which field [m, q],
    and by what names [q], counts how often something out of the ordinary has decided (`unusual` in a row of metrics).

    Optional: `arrange(federation, device)`, the data as the method may see them; `notices(rounds)`, what the user
    should know of the settings; `needs_clusters = True`; `server = True` if it works through a server that reaches all;
    `one_model = True` if between rounds all clients use the same model, a shared field `model` [d] of the state;
    `meets(cohort, state, part)`, how clients that never train fare where it is not with this one model; beside it
    `visitors(t, seed, n, device)`, ids [k] of the only clients that do anything in round t, None for all;
    `nominal(rounds, n)`, the `matching.cost.Cost` of so many rounds by a formula; `among(n)`, the settings as they are
    among n clients, or an error.

    `ask(t, cohort, state, peers, few)`, what is done ahead of round t by clients that need no models of their own: a
    state; with it `asked(t, state, seed, n, device)`, ids [k] of these clients, None for all. few: not many models may
    be in memory at a time. `tell(cohort, state)`, the state once all clients know what came of it: called where `ask`
    returns another state than it was given, and when a run goes on from a checkpoint.

    `wrap(module, input_shape)`, what becomes of the user's net; `report(cohort, state)`, more for a row of metrics;
    `notes(state)` [q], what to keep of every round, and `noted(rows)`, columns [r] of a table of such rows [r, q];
    `files(cohort, state)`, what to keep as JSON when a run has ended, by the names of files; `reported(parts)` and
    `filed(parts)`, these two where they are not the same of every cohort: then they may say anything of theirs;
    `forms_groups = True` if `clusters` are groups that are to be judged as such. For an exported model: `projection`,
    the directions that `arrange` projects samples onto (0: none).

    For `[aggregation]`: `averages = False` if it averages no models, `weighs = True` if it weighs them, `only_mean`, a
    text that says why no other rule than the mean will do, `unruled`, a text that says what no rule protects from,
    `most_averaged`, with how many peers at most, where these may be more than `neighbors`, `noisy = True` if what is
    sent may depend on a client's records through noisy steps only.
    """

    def start(self, cohort: Cohort) -> Any:
        """The state before round 1."""

    def step(self, t: int, cohort: Cohort, state: Any, peers: Peers) -> Any:
        """Round t: train, look around, mix. Changes models through the cohort and returns the new state."""


M = TypeVar("M")
_METHODS: dict[str, type[Any]] = {}
_plugins_loaded = False
_broken: list[str] = []  # plugins that could not be loaded, and why


def register(name: str) -> Callable[[type[M]], type[M]]:
    """Class decorator: make a method available under `name` in experiment files and on the command line."""

    def add(cls: type[M]) -> type[M]:
        if not dataclasses.is_dataclass(cls) or not hasattr(cls, "start") or not hasattr(cls, "step"):
            raise TypeError(f"{cls.__name__} must be a dataclass with start(cohort) and step(t, cohort, state, peers)")
        known = _METHODS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"the method name '{name}' is taken by {known.__module__}.{known.__qualname__}")
        cls.method_name = name  # type: ignore[attr-defined]
        _METHODS[name] = cls
        return cls

    return add


def shared() -> Any:
    """A state field that all clients have in common (no leading dimension m)."""
    return dataclasses.field(metadata={"shared": True})


def find(name: str) -> type[Any]:
    """The method class called `name`."""
    _load_plugins()
    if name not in _METHODS:
        raise UserError("; ".join([f"unknown method '{name}': {nearest(name, _METHODS)}", *_broken]))
    return _METHODS[name]


def names(pattern: str = "*") -> list[str]:
    """Names of the methods that match a wildcard pattern."""
    _load_plugins()
    return sorted(name for name in _METHODS if fnmatch(name, pattern))


def summary(cls: type) -> str:
    """The first sentence of a method's docstring."""
    return (cls.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")


def _load_plugins() -> None:
    """Packages that declare an entry point in the group `kinfolk.methods` register on import; one that fails is told
    of, and everything else works."""
    global _plugins_loaded
    if not _plugins_loaded:
        _plugins_loaded = True
        for entry in entry_points(group="kinfolk.methods"):
            try:
                entry.load()
            except (Exception, SystemExit) as error:
                package = f" of package {entry.dist.name}" if entry.dist else ""
                reason = " ".join([f"{type(error).__name__}:", *str(error).split()])  # in one line
                _broken.append(f"the plugin '{entry.name}'{package} cannot be loaded: {reason}")
                print(f"note: {_broken[-1]}", file=sys.stderr)
