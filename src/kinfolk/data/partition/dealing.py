"""From numbers to samples: given how many samples of each class a client gets, which ones it gets.

Every kind of split first decides counts[n, C] and then deals here, from one shuffled pile of samples per
class. A client takes a contiguous stretch of a pile; a pile that runs out starts again from its top, so a
sample goes to a second client only when every sample has gone to a first one, and never twice to one client.
"""

import numpy as np

from kinfolk.data.partition.base import Ints, generator
from kinfolk.errors import UserError


def stacks(labels: Ints, classes: int, seed: int, purpose: str, offset: int = 0) -> list[Ints]:
    """The samples of each class in random order, as pool indices; `offset` is where `labels` start."""
    ordered = np.argsort(labels, kind="stable") + offset
    ends = np.cumsum(np.bincount(labels, minlength=classes))
    by_class = np.split(ordered, ends[:-1])
    return [generator(seed, f"{purpose}/stack", c).permutation(by_class[c]) for c in range(classes)]


def deal(counts: Ints, piles: list[Ints]) -> list[Ints]:
    """Give client i counts[i, c] samples of pile c; returns the sorted indices of every client.

    counts: [n, C], with no entry larger than its pile.
    """
    clients = len(counts)
    taken: list[Ints] = []
    owners: list[Ints] = []
    for c, pile in enumerate(piles):
        most = int(counts[:, c].max(initial=0))
        if most > len(pile):  # starting the pile again would give a sample twice to one client
            raise UserError(f"a client needs {most} samples of class {c}, the set has {len(pile)}")
        taken.append(np.resize(pile, int(counts[:, c].sum())))
        owners.append(np.repeat(np.arange(clients), counts[:, c]))
    sample, owner = np.concatenate(taken), np.concatenate(owners)
    order = np.lexsort((sample, owner))
    return np.split(sample[order], np.cumsum(counts.sum(1))[:-1])


def reuse_notes(counts: Ints, piles: list[Ints], side: str, where: str = "") -> list[str]:
    """At most one line that says which classes ran out and how many samples went to several clients."""
    wanted = counts.sum(0)
    stock = np.array([len(pile) for pile in piles])
    short = np.flatnonzero(wanted > stock)
    if not short.size:
        return []
    shared = int(np.minimum(wanted - stock, stock)[short].sum())
    most = int(np.ceil(wanted[short] / stock[short]).max())
    return [f"{_classes(short, len(stock))} exhausted{where}: {shared_line(shared, side, most)}"]


def shared_line(shared: int, side: str, most: int) -> str:
    """How many samples went to several clients, and to how many at most."""
    users = "two clients" if most == 2 else f"up to {most} clients"
    return f"{shared} {side} samples used by {users}"


def _classes(ids: Ints, total: int) -> str:
    if len(ids) == 1:
        return f"class {ids[0]}"
    if len(ids) == total:
        return f"all {total} classes"
    shown = ", ".join(str(c) for c in ids[:8])
    return f"classes {shown}" + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")


def apportion(counts: Ints, totals: Ints) -> Ints:
    """A stratified share: totals[i] of client i's samples, in proportion to counts (largest remainder).

    counts: [n, C]; totals: [n], at most the row sums. Ties go to the lower class.
    """
    held = counts.sum(1, keepdims=True)
    scaled = counts * totals[:, None]
    share: Ints = scaled // held
    remainder = scaled % held
    rank = np.argsort(np.argsort(-remainder, axis=1, kind="stable"), axis=1, kind="stable")
    share += rank < (totals - share.sum(1))[:, None]
    return share


def deal_pooled(train: Ints, test: Ints, piles: list[Ints]) -> tuple[list[Ints], list[Ints], list[str]]:
    """Deal train and test counts ([n, C] each) from the same piles.

    A pile is cut in a train and a test part first, so that a sample that has to be used again keeps its role:
    what one client trains on is never what another is tested on.
    """
    train_piles, test_piles = [], []
    for c, pile in enumerate(piles):
        wanted_train, wanted_test = int(train[:, c].sum()), int(test[:, c].sum())
        cut = wanted_test
        if wanted_train + wanted_test > len(pile):
            cut = round(len(pile) * wanted_test / (wanted_train + wanted_test))
            cut = max(cut, int(test[:, c].max()))
            cut = min(cut, len(pile) - int(train[:, c].max()))
        test_piles.append(pile[:cut])
        train_piles.append(pile[cut:])
    notes = reuse_notes(train, train_piles, "train") + reuse_notes(test, test_piles, "test")
    return deal(train, train_piles), deal(test, test_piles), notes


def matched_tests(held: Ints, labels: Ints, size: int, seed: int, offset: int) -> tuple[list[Ints], list[str]]:
    """Test sets with the label proportions of the train sets: about `size` samples, rounded up per class.

    held: [n, C] train samples per class. No sample twice in one client; different clients may share samples.
    """
    classes = held.shape[1]
    ordered = np.argsort(labels, kind="stable") + offset
    stock = np.bincount(labels, minlength=classes)
    piles = np.split(ordered, np.cumsum(stock)[:-1])
    # The ceiling in integers: in floats 100 × 0.07 is a little above 7 and would give 8.
    wanted = -(-size * held // held.sum(1, keepdims=True))
    given = np.minimum(wanted, stock)
    empty = np.flatnonzero(given.sum(1) == 0)
    if empty.size:
        raise UserError(f"client {empty[0]} would have no test samples: the set has none of its classes")
    tests = []
    for client, row in enumerate(given):
        draws = generator(seed, "matched test", client)
        parts = [draws.choice(piles[c], row[c], replace=False) for c in np.flatnonzero(row)]
        tests.append(np.sort(np.concatenate(parts)))
    short = np.flatnonzero((wanted > stock).any(1))
    notes = []
    if short.size:
        notes.append(
            f"{len(short)} of {len(held)} clients want more test samples of a class than the set has "
            f"(data.test = {size}): they hold all of them"
        )
    return tests, notes
