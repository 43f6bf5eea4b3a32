"""Settings are frozen dataclasses: every field is a config key with a type, a default and a help line.

`setting(5, "peers averaged each round", ge=1)` declares a field; `build(cls, values, where)` makes an instance from
what a TOML file or the command line gave and turns every mistake into one line that says where it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from kinfolk.errors import UserError, nearest

T = TypeVar("T")
BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("at least", lambda value, bound: value >= bound),
    "gt": ("greater than", lambda value, bound: value > bound),
    "le": ("at most", lambda value, bound: value <= bound),
    "lt": ("less than", lambda value, bound: value < bound),
}


def setting(
    default: Any = dataclasses.MISSING, help: str = "", *, peers: bool | dict[str, str] = False, **bounds: float
) -> Any:
    """A dataclass field with a help line and optional bounds (`ge`, `gt`, `le`, `lt`; for a list, of its entries).

    peers: it is a number of peers, of which nobody has more than there are; always, or where other settings are these.
    """
    metadata = {"help": help, "peers": peers, **bounds}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def build(cls: type[T], values: dict[str, Any], where: str) -> T:
    """An instance of the settings class `cls` from `values`; `where` is the section's name in messages."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            hint = nearest(key, fields) if fields else f"what [{where}] names has no settings"
            raise UserError(f"unknown key '{where}.{key}': {hint}")
    types = _hints(cls)  # type: ignore[arg-type]
    checked: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            checked[name] = _check(values[name], types[name], field, f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"'{where}.{name}' is missing: {field.metadata.get('help', 'it has no default')}")
    try:
        return cls(**checked)
    except UserError as error:  # raised by __post_init__, which does not know its section
        raise UserError(f"[{where}] {error}") from None


def peer_counts(settings: Any) -> dict[str, int]:
    """The numbers of peers among the settings that are in use, by name."""
    found = {}
    for field in dataclasses.fields(settings):
        where, value = field.metadata.get("peers", False), getattr(settings, field.name)
        used = where if isinstance(where, bool) else all(getattr(settings, key) == kind for key, kind in where.items())
        if used and value is not None:
            found[field.name] = value
    return found


def among(settings: Any, n: int) -> Any:
    """The settings as they are in a federation of n clients, where they depend on that; refuses what cannot be."""
    return settings.among(n) if hasattr(settings, "among") else settings


def describe(cls: type) -> list[tuple[str, str, str, str]]:
    """(name, type, default, help) of every setting of `cls`."""
    types = _hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = "" if made is dataclasses.MISSING else _plain(made)
        rows.append((field.name, _type_name(types[field.name]), default, field.metadata.get("help", "")))
    return rows


def _check(value: Any, kind: Any, field: dataclasses.Field[Any], where: str) -> Any:
    if value == "none" and type(None) in get_args(kind):  # TOML has no null, but a file's value can be taken back
        return None
    value = check_type(value, kind, where)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"'{where}' = {value!r}: must be a finite number")
    if value is not None:
        for name, (words, holds) in BOUNDS.items():
            parts = value if isinstance(value, list) else [value]
            if name in field.metadata and not all(holds(part, field.metadata[name]) for part in parts):
                raise UserError(f"'{where}' = {value!r}: must be {words} {field.metadata[name]:g}")
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check_type(value: Any, kind: Any, where: str) -> Any:
    """`value` if it is of type `kind`; `where` is its full name in the message."""
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise UserError(f"'{where}' = {value!r}: {message[0].lower()}{message[1:]}") from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _type_name(kind: Any) -> str:
    """A type as a user would say it: int, "a" or "b", int or none."""
    if kind is type(None):
        return "none"
    if get_origin(kind) is Literal:
        return " or ".join(_plain(choice) for choice in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_type_name(part) for part in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {_type_name(get_args(kind)[0])}"
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _plain(value: Any) -> str:
    return "none" if value is None else f'"{value}"' if isinstance(value, str) else str(value).lower()
