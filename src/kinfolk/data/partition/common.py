"""Test samples common to all clients, beside each client's own: how well a model does where nobody's labels prevail."""

from dataclasses import replace

import numpy as np

from kinfolk.data.partition.base import Ints, Labels, Split
from kinfolk.data.partition.dealing import stacks
from kinfolk.errors import UserError


def with_common_test(split: Split, labels: Labels, size: int, seed: int) -> Split:
    """The split with about `size` samples of the test set for everybody, as even over the classes as it has them.

    Some splits pool the train and the test set: what any client trains on is left out.
    """
    if split.quarter_turns is not None or split.swaps is not None:
        what = "labels exchanged" if split.quarter_turns is None else "images turned"
        raise UserError(f"data.global_test: some clients of this split have their {what}, so no test set fits all")
    first = len(labels.train)
    trained = np.zeros(first + len(labels.test), dtype=bool)
    for indices in split.train:
        trained[indices] = True
    free = ~trained[first:]
    piles = [pile[free[pile - first]] for pile in stacks(labels.test, labels.classes, seed, "global test", first)]
    stock = np.array([len(pile) for pile in piles])
    notes = list(split.notes)
    if size > stock.sum():
        if not stock.any():
            raise UserError("data.global_test: no test sample is left that no client trains on")
        notes.append(f"data.global_test = {size}: the test set has {stock.sum()} samples for it, all are used")
    counts = _even(stock, min(size, int(stock.sum())))
    chosen = np.sort(np.concatenate([pile[:count] for pile, count in zip(piles, counts)]))
    return replace(split, common=chosen, notes=notes)


def _even(stock: Ints, size: int) -> Ints:
    """[C] `size` samples over the classes, none beyond its stock; what is left over goes to the first classes."""
    counts = np.zeros_like(stock)
    while (missing := size - int(counts.sum())) > 0:  # a pass either finishes or uses up a class
        able = np.flatnonzero(counts < stock)
        more = missing // len(able) + (np.arange(len(able)) < missing % len(able))
        counts[able] = np.minimum(counts[able] + more, stock[able])
    return counts
