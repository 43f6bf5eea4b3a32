"""What every split shares: what it may look at, what it returns, how it draws, what it must refuse."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kinfolk.errors import UserError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Labels:
    """What a split may look at: the labels and the users of a data set, never its pixels."""

    train: Ints  # [N_train]
    test: Ints  # [N_test]
    classes: int
    train_user: Ints | None = None  # [N_train]; negative: user unknown
    test_user: Ints | None = None  # [N_test]

    def __post_init__(self) -> None:
        for side, found in (("train", self.train), ("test", self.test)):
            wrong = found[(found < 0) | (found >= self.classes)]
            if wrong.size:
                raise UserError(
                    f"{wrong.size} {side} samples have labels outside 0..{self.classes - 1} "
                    f"(the first is {wrong[0]}); the set declares {self.classes} classes"
                )

    @property
    def pool(self) -> Ints:
        """[N_train + N_test] every label, train samples first: the index space of a split."""
        return np.concatenate([self.train, self.test])


@dataclass(frozen=True)
class Split:
    """Who holds which samples. Index i < N_train is train sample i, else test sample i - N_train."""

    train: list[Ints]  # per client, sorted indices into the pool
    test: list[Ints]  # per client, same index space
    clusters: Ints | None  # [n] the true cluster of each client, where the split defines one
    quarter_turns: Ints | None  # [n] how many times rot90 is applied to a client's images
    swaps: Ints | None  # [n, 2] the two labels exchanged
    notes: list[str]  # what the reader of a result should know, one line each
    users: Ints | None = None  # [n] the user behind each client (by-user only)
    common: Ints | None = None  # sorted indices of the test samples common to all, if there are any
    validation: Split | None = None  # clients that never train, to choose settings by; nothing in `train`
    newcomers: Split | None = None  # clients that never train, to be tested on; nothing in `train`
    sample_turns: Ints | None = None  # [N_train + N_test] quarter turns of each image, whoever holds it

    @property
    def cluster_names(self) -> list[str] | None:
        """A short name per cluster id, for tables and pictures: '90°', '0↔1', or 'class 3'."""
        if self.clusters is None:
            return None
        ids, first = np.unique(self.clusters, return_index=True)
        if self.quarter_turns is not None:
            shown = [f"{90 * turns}°" for turns in self.quarter_turns[first]]
        elif self.swaps is not None:
            shown = [f"{a}↔{b}" for a, b in self.swaps[first]]
        else:
            shown = [f"class {c}" for c in ids]
        names = [""] * (int(ids.max()) + 1)
        for c, name in zip(ids, shown):
            names[c] = name
        return names


class SplitKind(Protocol):
    """The settings of one kind of split, a frozen dataclass whose fields are the keys of `[data] split`."""

    def divide(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        """Share `labels` out; `train` and `test` are samples per client, None for the natural number."""
        ...


def generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """Random numbers that depend on (seed, purpose, index) alone, whatever was drawn before."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{index}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def exchange(labels: Ints, pair: Ints) -> Ints:
    """`labels` with the two labels of `pair` ([2] or [..., 2]) exchanged. Twice gives them back."""
    a, b = pair[..., 0], pair[..., 1]
    return np.where(labels == a, b, np.where(labels == b, a, labels))


def class_counts(parts: list[Ints], labels: Labels, swaps: Ints | None = None) -> Ints:
    """[n, C] how many samples of each class every client holds, as it sees the labels (after its swap)."""
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    seen = labels.pool[np.concatenate(parts)]
    if swaps is not None:
        seen = exchange(seen, swaps[owner])
    counts = np.bincount(owner * labels.classes + seen, minlength=len(parts) * labels.classes)
    return counts.reshape(len(parts), labels.classes)


def check_sizes(clients: int, train: int | None, test: int | None) -> None:
    """Refuse a federation of nobody, and clients without samples."""
    if clients < 1:
        raise UserError(f"data.clients = {clients}: at least 1 client is needed")
    for side, size in (("train", train), ("test", test)):
        if size is not None and size < 1:
            raise UserError(f"data.{side} = {size}: every client needs at least 1 {side} sample")


def check_supply(clients: int, size: int, available: int, what: str) -> None:
    """Refuse more samples than there are to share out without giving one to two clients."""
    if clients * size > available:
        raise UserError(f"{clients} clients × {size} {what} samples need {clients * size}, the set has {available}")


def natural_size(clients: int, available: int, what: str) -> int:
    """The largest equal share of `available` samples; refuses to leave clients empty."""
    if available < clients:
        raise UserError(f"{available} {what} samples cannot be shared out among {clients} clients")
    return available // clients
