"""Splits in which clients differ by what was done to their samples: nothing, a rotation, a swap of labels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kinfolk.data.partition.base import (
    Ints,
    Labels,
    Split,
    check_sizes,
    check_supply,
    generator,
    natural_size,
)
from kinfolk.data.partition.dealing import deal, reuse_notes, shared_line, stacks
from kinfolk.errors import UserError

SWAPS = {2: [(0, 1), (6, 7)], 4: [(0, 1), (2, 3), (4, 5), (6, 7)]}


@dataclass(frozen=True)
class Iid:
    """Everybody draws from the same shuffled data set; nobody differs but by chance."""

    def divide(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        check_sizes(clients, train, test)
        train_size = train or natural_size(clients, len(labels.train), "train")
        check_supply(clients, train_size, len(labels.train), "train")
        test_size = test or _natural_test(clients, len(labels.test))
        if test_size > len(labels.test):
            raise UserError(f"data.test = {test_size}: the set has {len(labels.test)} test samples")
        train_order = generator(seed, "iid/train").permutation(len(labels.train))
        test_order = generator(seed, "iid/test").permutation(len(labels.test)) + len(labels.train)
        notes = []
        wanted = clients * test_size
        if wanted > len(test_order):  # starting again shares samples between clients, never inside one
            shared, most = min(wanted - len(test_order), len(test_order)), -(-wanted // len(test_order))
            notes.append(f"test set exhausted: {shared_line(shared, 'test', most)}")
        return Split(
            train=list(np.sort(train_order[: clients * train_size].reshape(clients, train_size), axis=1)),
            test=list(np.sort(np.resize(test_order, wanted).reshape(clients, test_size), axis=1)),
            clusters=None,
            quarter_turns=None,
            swaps=None,
            notes=notes,
        )


@dataclass(frozen=True)
class Rotation:
    """Class-balanced clients in clusters; every cluster sees its images turned by its own angle."""

    clusters: Literal[2, 4] = field(
        default=2, metadata={"help": "2: images at 0° and 180°; 4: at 0°, 90°, 180° and 270°"}
    )

    def __post_init__(self) -> None:
        _check_two_or_four(self.clusters)

    def divide(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        block, train_parts, test_parts, notes = _balanced_clusters(labels, self.clusters, clients, train, test, seed)
        turns = block * (4 // self.clusters)
        return Split(train_parts, test_parts, block, quarter_turns=turns, swaps=None, notes=notes)


@dataclass(frozen=True)
class LabelSwap:
    """Class-balanced clients in clusters; every cluster has two of the labels exchanged."""

    clusters: Literal[2, 4] = field(
        default=2, metadata={"help": "2: swaps 0↔1 and 6↔7; 4: swaps 0↔1, 2↔3, 4↔5 and 6↔7"}
    )

    def __post_init__(self) -> None:
        _check_two_or_four(self.clusters)

    def divide(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        if labels.classes < 8:
            raise UserError(f"label-swap exchanges labels up to 7, the set has {labels.classes} classes")
        block, train_parts, test_parts, notes = _balanced_clusters(labels, self.clusters, clients, train, test, seed)
        pairs = np.array(SWAPS[self.clusters], dtype=np.int64)
        return Split(train_parts, test_parts, block, quarter_turns=None, swaps=pairs[block], notes=notes)


def rotate(images: npt.NDArray[Any], quarter_turns: int) -> npt.NDArray[Any]:
    """`images` [..., H, W] turned by exact quarter turns, never interpolated. Four turns give them back."""
    height, width = images.shape[-2:]
    if quarter_turns % 2 and height != width:
        raise UserError(
            f"images of {height}×{width} change shape when turned by {90 * quarter_turns}°: "
            "rotation needs square images, or split.clusters = 2"
        )
    return np.ascontiguousarray(np.rot90(images, quarter_turns, axes=(-2, -1)))


def cluster_blocks(clients: int, clusters: int) -> Ints:
    """[n] contiguous blocks as equal as can be; the first ones get one extra when n is no multiple."""
    if clusters > clients:
        raise UserError(f"{clusters} clusters need at least {clusters} clients, data.clients = {clients}")
    sizes = np.full(clusters, clients // clusters)
    sizes[: clients % clusters] += 1
    return np.repeat(np.arange(clusters), sizes)


def _balanced_clusters(
    labels: Labels, clusters: int, clients: int, train: int | None, test: int | None, seed: int
) -> tuple[Ints, list[Ints], list[Ints], list[str]]:
    """The cluster, train part and test part of every client: class-balanced, and disjoint inside a cluster.

    Every cluster shuffles the whole set anew, so clusters may share samples: being turned or relabelled
    differently, they are not the same samples there.
    """
    check_sizes(clients, train, test)
    block = cluster_blocks(clients, clusters)
    largest = int(np.bincount(block).max())
    if train is not None and largest * train > len(labels.train):
        raise UserError(
            f"{largest} clients of a cluster × {train} train samples need {largest * train}, "
            f"the set has {len(labels.train)}"
        )
    sides = (("train", labels.train, train, 0), ("test", labels.test, test, len(labels.train)))
    parts: dict[str, list[Ints]] = {"train": [], "test": []}
    notes = []
    for side, found, size, offset in sides:
        stock = np.bincount(found, minlength=labels.classes)
        counts = _balanced_counts(stock, side, size, clients, largest, seed)
        for cluster in range(clusters):
            rows = counts[block == cluster]
            piles = stacks(found, labels.classes, seed, f"cluster {cluster}/{side}", offset)
            parts[side] += deal(rows, piles)
            notes += reuse_notes(rows, piles, side, f" in cluster {cluster}")
    return block, parts["train"], parts["test"], notes


def _balanced_counts(stock: Ints, side: str, size: int | None, clients: int, largest: int, seed: int) -> Ints:
    """[n, C] the same number of every class; what does not divide goes to distinct classes at random."""
    classes, rarest = len(stock), int(np.argmin(stock))
    if size is None:
        size = classes * int(stock[rarest] // largest)
        if size == 0:
            raise UserError(
                f"class {rarest} has {stock[rarest]} {side} samples for the {largest} clients of a cluster; "
                f"give data.{side}, or fewer clients"
            )
    each, extra = divmod(size, classes)
    if stock[rarest] < each:
        raise UserError(
            f"data.{side} = {size} takes {each} samples of every class, "
            f"the set has {stock[rarest]} {side} samples of class {rarest}"
        )
    counts = np.full((clients, classes), each)
    able = np.flatnonzero(stock > each)
    if extra > len(able):
        raise UserError(
            f"data.{side} = {size} takes one more than {each} from {extra} of the classes, "
            f"only {len(able)} have so many {side} samples"
        )
    if extra:
        for client in range(clients):
            counts[client, generator(seed, f"remainder/{side}", client).permutation(able)[:extra]] += 1
    return counts


def _natural_test(clients: int, available: int) -> int:
    if available < clients:
        raise UserError(
            f"{available} test samples cannot be shared out among {clients} clients; "
            "give data.test, and clients will share test samples"
        )
    return available // clients


def _check_two_or_four(clusters: int, known: Sequence[int] = (2, 4)) -> None:
    if clusters not in known:
        raise UserError(f"split.clusters = {clusters}: must be 2 or 4")
