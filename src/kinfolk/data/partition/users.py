"""The split that the data came with: one client per real user."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kinfolk.data.partition.base import Labels, Split, check_sizes, generator
from kinfolk.errors import UserError


@dataclass(frozen=True)
class ByUser:
    """One client per real user (writer, celebrity, …), users chosen at random, with all that the user has."""

    min_samples: int = field(default=100, metadata={"help": "users with fewer samples are left out"})
    test_share: float = field(default=0.1, metadata={"help": "share of a user's samples kept for testing"})
    part: Literal["train", "test"] | None = field(
        default=None, metadata={"help": "only users and samples of this part of the set; none: of both"}
    )

    def __post_init__(self) -> None:
        if self.min_samples < 2:
            raise UserError(f"split.min_samples = {self.min_samples}: 2 are needed, to train and to test")
        if not 0 < self.test_share < 1:
            raise UserError(f"split.test_share = {self.test_share}: must be above 0 and below 1")

    def divide(self, labels: Labels, clients: int, train: int | None, test: int | None, seed: int) -> Split:
        check_sizes(clients, train, test)
        if labels.train_user is None:
            raise UserError("by-user needs a data set that knows its users; this one does not")
        nobody = [np.full(len(labels.train), -1), np.full(len(labels.test), -1)]
        known = [labels.train_user, nobody[1] if labels.test_user is None else labels.test_user]
        user = np.concatenate(
            [nobody[side] if self.part == other else known[side] for side, other in enumerate(("test", "train"))]
        )
        order = np.argsort(user, kind="stable")
        ids, begins, counts = np.unique(user[order], return_index=True, return_counts=True)
        able = np.flatnonzero((counts >= self.min_samples) & (ids >= 0))
        if len(able) < clients:
            raise UserError(
                f"data.clients = {clients}: {len(able)} of {np.count_nonzero(ids >= 0)} users have at least "
                f"split.min_samples = {self.min_samples} samples"
            )
        chosen = generator(seed, "by-user/choice").permutation(able)[:clients]
        train_parts, test_parts = [], []
        for row in chosen:
            mine = order[begins[row] : begins[row] + counts[row]]
            mine = generator(seed, "by-user/samples", int(ids[row])).permutation(mine)
            tests = min(max(1, round(self.test_share * len(mine))), len(mine) - 1)
            test_parts.append(np.sort(mine[:tests][:test]))
            train_parts.append(np.sort(mine[tests:][:train]))
        notes = [f"{clients} of {len(able)} users with at least {self.min_samples} samples"]
        return Split(train_parts, test_parts, None, None, None, notes, users=ids[chosen])
