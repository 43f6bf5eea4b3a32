"""Splits in which clients differ by their labels: Dirichlet priors, or a few classes each."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kinfolk.data.partition.base import (
    Ints,
    Labels,
    Split,
    check_sizes,
    check_supply,
    generator,
    natural_size,
)
from kinfolk.data.partition.dealing import deal, matched_tests, reuse_notes, stacks
from kinfolk.data.partition.filling import fill
from kinfolk.errors import UserError

TRIES = 1000  # of class-split, before it says that min_size cannot be had


@dataclass(frozen=True)
class Dirichlet:
    """Label proportions drawn from a Dirichlet distribution: the smaller alpha, the more clients differ."""

    alpha: float = field(default=0.1, metadata={"help": "0.1 is very uneven, 100 nearly even"})
    mode: Literal["client-prior", "class-split"] = field(
        default="client-prior",
        metadata={"help": "client-prior: equal sizes, a prior per client; class-split: cut every class up"},
    )
    balance: bool = field(
        default=False, metadata={"help": "class-split: a client that has its share gets no further class"}
    )
    min_size: int = field(default=10, metadata={"help": "class-split: the fewest train samples of a client"})

    def __post_init__(self) -> None:
        if not (0 < self.alpha < np.inf):
            raise UserError(f"split.alpha = {self.alpha}: must be above 0 and finite")
        if self.mode not in ("client-prior", "class-split"):
            raise UserError(f"split.mode = {self.mode!r}: must be 'client-prior' or 'class-split'")
        if self.balance and self.mode == "client-prior":
            raise UserError("split.balance belongs to mode = 'class-split': client-prior sizes are equal")
        if self.min_size < 1:
            raise UserError(f"split.min_size = {self.min_size}: every client needs at least 1 sample")

    def divide(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        check_sizes(clients, train, test)
        size = train or natural_size(clients, len(labels.train), "train")
        check_supply(clients, size, len(labels.train), "train")
        stock = np.bincount(labels.train, minlength=labels.classes)
        notes = []
        if self.mode == "client-prior":
            counts, beside = self._client_prior(stock, clients, size, seed)
            if beside:
                notes.append(f"{beside} of {clients} clients hold classes outside their prior: their own ran out")
        else:
            counts = self._class_split(stock, clients, train, seed)
        return _with_matched_tests(labels, counts, test, seed, notes)

    def _client_prior(self, stock: Ints, clients: int, size: int, seed: int) -> tuple[Ints, int]:
        concentration = np.full(len(stock), self.alpha)
        prior = np.stack([generator(seed, "dirichlet/prior", i).dirichlet(concentration) for i in range(clients)])
        return fill(prior, np.full(clients, size), stock, seed, "dirichlet")

    def _class_split(self, stock: Ints, clients: int, train: int | None, seed: int) -> Ints:
        if train is not None:  # sizes vary: `train` is their mean, so only that many samples are cut up
            stock = generator(seed, "dirichlet/subset").multivariate_hypergeometric(
                stock, clients * train, method="marginals"
            )
        if clients * self.min_size > stock.sum():
            raise UserError(
                f"{clients} clients × split.min_size = {self.min_size} need "
                f"{clients * self.min_size} train samples, there are {stock.sum()}"
            )
        best = 0
        for attempt in range(TRIES):
            counts = self._cut(stock, clients, generator(seed, "dirichlet/cut", attempt))
            best = max(best, int(counts.sum(1).min()))
            if best >= self.min_size:
                return counts
        raise UserError(
            f"in {TRIES} tries the smallest of {clients} clients had at most {best} train samples, "
            f"split.min_size = {self.min_size}; raise split.alpha, or lower split.min_size or data.clients"
        )

    def _cut(self, stock: Ints, clients: int, draws: np.random.Generator) -> Ints:
        """[n, C] every class cut among the clients at random."""
        shares = draws.dirichlet(np.full(clients, self.alpha), size=len(stock))
        if not self.balance:
            edges = np.floor(np.cumsum(shares, axis=1) * stock[:, None]).astype(np.int64)
            edges[:, -1] = stock  # rounding must not lose the last sample
            return np.diff(edges, axis=1, prepend=0).T
        counts = np.zeros((clients, len(stock)), dtype=np.int64)
        sizes, fair = np.zeros(clients, dtype=np.int64), stock.sum() / clients
        for c in np.flatnonzero(stock):
            hungry = sizes < fair  # never nobody: this class is still to be given out
            share = np.where(hungry, shares[c], 0.0)
            if share.sum() == 0:  # a tiny alpha gave everything to clients that have enough
                share[draws.choice(np.flatnonzero(hungry))] = 1.0
            edges = np.floor(np.cumsum(share / share.sum()) * stock[c]).astype(np.int64)
            edges[np.flatnonzero(share)[-1] :] = stock[c]
            counts[:, c] = np.diff(edges, prepend=0)
            sizes += counts[:, c]
        return counts


@dataclass(frozen=True)
class Pathological:
    """Every client holds a few classes only, in equal sizes; every class is held by somebody."""

    classes_per_client: int = field(default=2, metadata={"help": "how many classes a client holds"})

    def __post_init__(self) -> None:
        if self.classes_per_client < 1:
            raise UserError(f"split.classes_per_client = {self.classes_per_client}: must be at least 1")

    def divide(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        check_sizes(clients, train, test)
        size = train or natural_size(clients, len(labels.train), "train")
        check_supply(clients, size, len(labels.train), "train")
        stock = np.bincount(labels.train, minlength=labels.classes)
        owned = self._owned(np.flatnonzero(stock), clients, seed)
        counts = np.zeros((clients, labels.classes), dtype=np.int64)
        for client, mine in enumerate(owned):
            draws = generator(seed, "pathological/count", client)
            counts[client, mine] = _limited(draws, size, stock[mine], client)
        piles = stacks(labels.train, labels.classes, seed, "label skew")
        return _with_matched_tests(labels, counts, test, seed, reuse_notes(counts, piles, "train"))

    def _owned(self, present: Ints, clients: int, seed: int) -> Ints:
        """[n, c] the classes of each client, distinct in a row, every class of `present` in some row."""
        held = self.classes_per_client
        if held > len(present):
            raise UserError(f"split.classes_per_client = {held}: the set has {len(present)} classes")
        if clients * held < len(present):
            raise UserError(
                f"{clients} clients × {held} classes cannot hold all {len(present)} of the set; "
                "raise data.clients or split.classes_per_client"
            )
        owned = np.stack(
            [generator(seed, "pathological/classes", i).permutation(present)[:held] for i in range(clients)]
        )
        for missing in np.setdiff1d(present, owned):
            # There are at least as many places as classes, so while one is missing another is held twice.
            ids, times = np.unique(owned, return_counts=True)
            places = np.argwhere(np.isin(owned, ids[times > 1]))
            row, column = generator(seed, "pathological/swap", int(missing)).choice(places)
            owned[row, column] = missing
        return owned


@dataclass(frozen=True)
class Classes:
    """Every client holds the classes that are written down for it, in equal sizes."""

    held: list[list[int]] = field(
        default_factory=lambda: [[0], [1]],
        metadata={"help": "the classes of client 0, of client 1, …; with more clients it begins again"},
    )

    def __post_init__(self) -> None:
        if not self.held or any(not mine or len(set(mine)) < len(mine) or min(mine) < 0 for mine in self.held):
            raise UserError(f"split.held = {self.held}: for each client a list of different classes, not empty")

    def divide(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        check_sizes(clients, train, test)
        stock = np.bincount(labels.train, minlength=labels.classes)
        lists = [self.held[client % len(self.held)] for client in range(clients)]
        for client, mine in enumerate(lists):
            if max(mine) >= labels.classes:
                raise UserError(f"split.held: client {client} has class {max(mine)}, the set has {labels.classes}")
        size = train or natural_size(clients, len(labels.train), "train")
        counts = np.zeros((clients, labels.classes), dtype=np.int64)
        for client, mine in enumerate(lists):
            counts[client, mine] = _limited(generator(seed, "classes/count", client), size, stock[mine], client)
        piles = stacks(labels.train, labels.classes, seed, "label skew")
        return _with_matched_tests(labels, counts, test, seed, reuse_notes(counts, piles, "train"))


def _limited(draws: np.random.Generator, size: int, stock: Ints, client: int) -> Ints:
    """[c] `size` samples over the classes evenly at random, none beyond its stock."""
    if size > stock.sum():
        raise UserError(
            f"client {client} needs {size} train samples of its {len(stock)} classes, the set has {stock.sum()}"
        )
    counts = np.zeros(len(stock), dtype=np.int64)
    while (missing := size - counts.sum()) > 0:  # a pass either finishes or uses up a class
        able = np.flatnonzero(counts < stock)
        more = draws.multinomial(missing, np.full(len(able), 1 / len(able)))
        counts[able] = np.minimum(counts[able] + more, stock[able])
    return counts


def _with_matched_tests(labels: Labels, counts: Ints, test: int | None, seed: int, notes: list[str]) -> Split:
    """Deal `counts` [n, C] from the train samples and draw test sets in the same proportions."""
    clients = len(counts)
    size = test or -(-len(labels.test) // clients)
    if size == 0:
        raise UserError("the set has no test samples")
    piles = stacks(labels.train, labels.classes, seed, "label skew")
    tests, more = matched_tests(counts, labels.test, size, seed, offset=len(labels.train))
    return Split(deal(counts, piles), tests, None, None, None, notes=notes + more)
