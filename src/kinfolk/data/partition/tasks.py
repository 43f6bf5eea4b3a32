"""The splits of P4: train and test samples pooled, clients disjoint, each with its own 80/20 division.

A fifth of the clients can be kept for choosing settings: `part` draws the whole federation and takes these or the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from kinfolk.data.partition.base import Ints, Labels, Split, check_sizes, generator
from kinfolk.data.partition.dealing import apportion, deal_pooled, stacks
from kinfolk.data.partition.filling import fill
from kinfolk.errors import UserError

RESTARTS = 100  # of shards, before clients may share them
TUNING = 5  # one client of so many is for choosing settings
Portion = Literal["tuning", "rest"]
PART = "tuning: a fifth of a federation, to choose settings by; rest: the others; none: all"


@dataclass(frozen=True)
class Shards:
    """Every class is cut into equal shards; a client takes one shard of each of a few classes."""

    classes_per_client: int = field(default=2, metadata={"help": "how many classes a client holds (N)"})
    part: Portion | None = field(default=None, metadata={"help": PART})

    def __post_init__(self) -> None:
        if self.classes_per_client < 1:
            raise UserError(f"split.classes_per_client = {self.classes_per_client}: must be at least 1")

    def divide(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        check_sizes(clients, train, test)
        return _part(self.part, clients, seed, lambda n: self._whole(labels, n, train, test, seed))

    def _whole(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        pool, held = labels.pool, self.classes_per_client
        stock = np.bincount(pool, minlength=labels.classes)
        present = np.flatnonzero(stock)
        if held > len(present):
            raise UserError(f"split.classes_per_client = {held}: the set has {len(present)} classes")
        shards = -(-clients * held // len(present))  # P, per class
        rarest = present[np.argmin(stock[present])]
        if stock[rarest] < shards:
            raise UserError(
                f"class {rarest} has {stock[rarest]} samples for {shards} shards "
                f"({clients} clients × {held} classes over {len(present)} classes)"
            )
        size, test_size = _sizes(train, test, held * int(stock[rarest] // shards), clients, len(pool))
        if size < held:
            raise UserError(f"{size} samples per client cannot cover split.classes_per_client = {held}")
        owned, shared = _owned(len(present), held, clients, shards, seed)
        counts = np.zeros((clients, labels.classes), dtype=np.int64)
        counts[:, present] = _shard_counts(owned, size, stock[present], shards)
        notes = []
        if shared:
            notes.append(
                f"in {RESTARTS} tries some client found fewer than {held} classes with a free shard: "
                f"{shared} shards have a second client, unused samples first"
            )
        if (short := size - counts.sum(1)).any():
            notes.append(
                f"{np.count_nonzero(short)} of {clients} clients hold up to {short.max()} samples fewer "
                f"than {size}: their classes ran out"
            )
        tests = np.maximum(1, np.rint(counts.sum(1) * (test_size / size)).astype(np.int64))
        return _dealt(labels, counts, tests, seed, None, notes)


@dataclass(frozen=True)
class Alpha:
    """A share of every client's samples is drawn from all classes alike, the rest is of its main class."""

    gamma: float = field(
        default=0.5, metadata={"help": "share drawn from all classes alike: 1 is iid, 0 is one class each"}
    )
    part: Portion | None = field(default=None, metadata={"help": PART})

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise UserError(f"split.gamma = {self.gamma}: must be between 0 and 1")

    def divide(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        check_sizes(clients, train, test)
        return _part(self.part, clients, seed, lambda n: self._whole(labels, n, train, test, seed))

    def _whole(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        pool = labels.pool
        size, test_size = _sizes(train, test, len(pool) // clients, clients, len(pool))
        stock = np.bincount(pool, minlength=labels.classes)
        alike = round(self.gamma * size)
        main = np.arange(clients) % labels.classes
        # Main classes are served first, so that they run out only when their clients alone want too much.
        counts, notes = _main_counts(main, size - alike, stock)
        prior = np.full((clients, labels.classes), 1 / labels.classes)
        counts += fill(prior, np.full(clients, alike), stock - counts.sum(0), seed, "alpha")[0]
        notes.append(constant_predictor_line(self.gamma, labels.classes))
        return _dealt(labels, counts, np.full(clients, test_size), seed, main, notes)


def constant_predictor_line(gamma: float, classes: int = 10) -> str:
    """What a model scores that always answers its client's main class: the floor of every result."""
    score = 1 - (1 - 1 / classes) * gamma
    return f"gamma = {gamma:g}: always answering the main class scores about {100 * score:.1f} %"


def tuning_clients(clients: int, seed: int) -> Ints:
    """The sorted ids of the clients set apart for choosing hyper-parameters, a fifth; report on the others."""
    return np.sort(generator(seed, "tuning clients").permutation(clients)[: round(clients / TUNING)])


def _part(part: Portion | None, clients: int, seed: int, draw: Callable[[int], Split]) -> Split:
    """So many clients, alone or as a part of a larger federation; draw(n): the split of n clients."""
    if part is None:
        return draw(clients)
    if part == "rest" and clients % (TUNING - 1):
        raise UserError(
            f"data.clients = {clients}: split.part = 'rest' is four fifths of a federation, "
            f"so a multiple of {TUNING - 1} is needed"
        )
    whole = clients * TUNING if part == "tuning" else clients // (TUNING - 1) * TUNING
    try:
        split = draw(whole)
    except UserError as error:
        raise UserError(f"{error} (split.part = '{part}': {clients} of {whole} clients)") from None
    chosen = tuning_clients(whole, seed)
    rows = chosen if part == "tuning" else np.setdiff1d(np.arange(whole), chosen)
    what = "are for choosing settings" if part == "tuning" else "are left when a fifth is kept for choosing settings"
    return replace(
        split,
        train=[split.train[row] for row in rows],
        test=[split.test[row] for row in rows],
        clusters=None if split.clusters is None else split.clusters[rows],
        notes=[*split.notes, f"these {clients} of {whole} clients {what}"],
    )


def _sizes(train: int | None, test: int | None, natural: int, clients: int, available: int) -> tuple[int, int]:
    """Samples of a client in all (R), and how many of them are for testing: a fifth unless both are given."""
    if train is None and test is None:
        size, tests = natural, max(1, round(natural / 5))
    elif train is None:
        size, tests = 5 * (test or 0), test or 0
    else:
        tests = test or max(1, round(train / 4))
        size = train + tests
    if size < 2:
        raise UserError(f"{available} samples for {clients} clients: each needs 2, to train and to test")
    if clients * size > available:
        raise UserError(
            f"{clients} clients × {size} samples ({size - tests} train + {tests} test) "
            f"need {clients * size}, the set has {available}"
        )
    return size, tests


def _owned(classes: int, held: int, clients: int, shards: int, seed: int) -> tuple[Ints, int]:
    """[n, N] the classes of each client, and how many shards had to be taken twice.

    Clients choose in turn among the classes with free shards. The last ones can find too few such classes, so
    the whole choice starts again; when that does not help they also take shards that are taken.
    """
    for attempt in range(RESTARTS + 1):
        preference = generator(seed, "shards/classes", attempt).random((clients, classes))
        free = np.full(classes, shards)
        owned = np.empty((clients, held), dtype=np.int64)
        for client in range(clients):
            if np.count_nonzero(free > 0) < held and attempt < RESTARTS:
                break
            # Taken classes go behind all free ones; between free ones chance decides.
            owned[client] = np.argsort(preference[client] + (free <= 0))[:held]
            free[owned[client]] -= 1
        else:
            return owned, int(-free[free < 0].sum())
    raise AssertionError("the last attempt always finishes")


def _shard_counts(owned: Ints, size: int, stock: Ints, shards: int) -> Ints:
    """[n, L] samples of each class: as many from each shard, from leftovers where a shard is too short."""
    clients, held = owned.shape
    wanted = np.zeros((clients, len(stock)), dtype=np.int64)
    each, extra = divmod(size, held)
    np.put_along_axis(wanted, owned, each + (np.arange(held) < extra)[None, :], axis=1)
    counts = np.minimum(wanted, stock // shards)
    lacking = wanted - counts
    leftover = np.maximum(0, stock - counts.sum(0))
    before = np.cumsum(lacking, axis=0) - lacking  # what clients with lower ids ask of the same leftovers
    counts += np.clip(leftover - before, 0, lacking)
    return counts


def _main_counts(main: Ints, wanted: int, stock: Ints) -> tuple[Ints, list[str]]:
    """[n, C] `wanted` samples of each client's main class, or of the next class that has any."""
    left = stock.copy()
    counts = np.zeros((len(main), len(stock)), dtype=np.int64)
    for client, first in enumerate(main):
        missing = wanted
        for c in np.roll(np.arange(len(stock)), -first):
            take = min(missing, int(left[c]))
            counts[client, c] += take
            left[c] -= take
            missing -= take
            if missing == 0:
                break
    moved = wanted - counts[np.arange(len(main)), main]
    if not moved.any():
        return counts, []
    return counts, [
        f"main class exhausted for {np.count_nonzero(moved)} of {len(main)} clients (the first is client "
        f"{np.flatnonzero(moved)[0]}): {moved.sum()} samples are of the next class with stock"
    ]


def _dealt(labels: Labels, counts: Ints, tests: Ints, seed: int, clusters: Ints | None, notes: list[str]) -> Split:
    """Deal `counts` [n, C] from the pool, `tests` [n] of each client for testing, stratified by class."""
    if (counts.sum(1) < 2).any():
        raise UserError(f"client {counts.sum(1).argmin()} would have fewer than 2 samples of its classes")
    test_counts = apportion(counts, tests)
    piles = stacks(labels.pool, labels.classes, seed, "pooled")
    train_parts, test_parts, more = deal_pooled(counts - test_counts, test_counts, piles)
    return Split(train_parts, test_parts, clusters, quarter_turns=None, swaps=None, notes=notes + more)
