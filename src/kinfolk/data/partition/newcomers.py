"""Clients that never train: how well a model does for people it has not met."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kinfolk.data.partition.base import Ints, Split, generator
from kinfolk.errors import UserError


def set_apart(split: Split, validation: int, new: int, seed: int) -> Split:
    """The split with so many of its clients, drawn at random, in `split.validation` and `split.newcomers` instead.

    All samples of theirs are for testing, but for those that a client trains on.
    """
    total = len(split.train)
    order = generator(seed, "newcomers").permutation(total)
    outside, rest = np.sort(order[: validation + new]), np.sort(order[validation + new :])
    kept = _only(split, rest)
    places = generator(seed, "newcomers/role").permutation(outside)
    trained = np.unique(np.concatenate(kept.train))
    roles = (places[:validation], places[validation:])
    apart = [_outsiders(split, np.sort(rows), trained) if rows.size else None for rows in roles]
    notes = list(kept.notes)
    said = [f"{count} {word}" for count, word in ((validation, "for validation"), (new, "new at the test")) if count]
    notes.append(f"of {total} clients {' and '.join(said)} never train")
    return replace(kept, notes=notes, validation=apart[0], newcomers=apart[1])


def _only(split: Split, rows: Ints) -> Split:
    """The split of some of its clients."""
    known = {name: getattr(split, name) for name in ("clusters", "quarter_turns", "swaps", "users")}
    columns: dict[str, Any] = {name: None if column is None else column[rows] for name, column in known.items()}
    return replace(split, train=[split.train[row] for row in rows], test=[split.test[row] for row in rows], **columns)


def _outsiders(split: Split, rows: Ints, trained: Ints) -> Split:
    """These clients with all their samples for testing, less those that are trained on."""
    some = _only(split, rows)
    whole = [np.union1d(train, test) for train, test in zip(some.train, some.test)]
    free = [part[~np.isin(part, trained)] for part in whole]
    if any(part.size == 0 for part in free):
        raise UserError(
            "data.new_clients: a client that never trains has no sample that others do not train on; "
            "the split shares out too few samples (by-user gives everybody samples of their own)"
        )
    return replace(some, train=[part[:0] for part in free], test=free, notes=[])
