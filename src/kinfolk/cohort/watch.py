"""Watching: what a few chosen clients saw of their peers, noted for whoever looks at the run afterwards.

Methods call `cohort.watch(...)` wherever they compare models. It costs nothing unless a client of the cohort is watched
in this round, and nothing that is noted ever flows back into the run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinfolk.data.federation import Part
from kinfolk.errors import UserError
from kinfolk.peers.base import Pool

if TYPE_CHECKING:
    from kinfolk.cohort.cohort import Cohort

# measure(cohort, pool, ids [w, c], **own) -> similarity [w, c], for a cohort of the watched clients alone
Measure = Callable[..., Tensor]


@dataclass(frozen=True)
class Watching:
    """Whom to watch and when."""

    clients: tuple[int, ...] = ()
    rounds: tuple[int, ...] = ()  # none: every evaluated round
    everybody: bool = False  # compare the watched with all they can reach, not only with whom they looked at

    def check(self, n: int) -> None:
        """Refuse clients that are not there."""
        for client in self.clients:
            if client >= n:
                raise UserError(f"'run.watch' names client {client}, but there are only {n}: 0 to {n - 1}")

    def due(self, t: int, evaluate: bool) -> bool:
        """Whether round t is watched; `evaluate` says whether it is evaluated."""
        return t in self.rounds if self.rounds else evaluate


@dataclass(frozen=True)
class Seen:
    """What watched clients saw: parallel tensors [s]."""

    client: Tensor
    peer: Tensor
    similarity: Tensor  # float64, as the method measures it
    listed: Tensor  # bool: on the client's list before
    chosen: Tensor  # bool: on the list afterwards
    looked_at: Tensor  # bool: the client itself looked at this peer; otherwise only the observer did


@dataclass
class Watch:
    """The notes of one round."""

    rows: Tensor  # [w] the watched clients' rows in the cohort
    everybody: Callable[[], tuple[Pool, Tensor]] | None = None  # all models, and whom the watched can reach [w, *]
    seen: list[Seen] = field(default_factory=list)

    def note(
        self,
        cohort: Cohort,
        ids: Tensor,
        similarity: Tensor,
        listed: Tensor | None,
        chosen: Tensor,
        measure: Measure,
        own: dict[str, Tensor],
    ) -> None:
        """The arguments of `Cohort.watch`."""
        rows = self.rows
        looked_at = ids[rows].masked_fill(similarity[rows].isnan(), -1)
        wanted, values = looked_at, similarity[rows]
        if self.everybody is not None:
            pool, wanted = self.everybody()
            values = measure(_few(cohort, rows), pool, wanted, **{name: tensor[rows] for name, tensor in own.items()})
            values = values.masked_fill(cohort.round.absent[rows, None], torch.nan)
        place, column = torch.nonzero((wanted >= 0) & ~values.isnan(), as_tuple=True)
        before = wanted[:, :0] if listed is None else listed[rows]
        notes = [_among(wanted, some)[place, column] for some in (before, chosen[rows], looked_at)]
        self.seen.append(Seen(cohort.ids[rows][place], wanted[place, column], values[place, column], *notes))


def _among(ids: Tensor, lists: Tensor) -> Tensor:
    """Which of ids [w, c] stand in the list [w, *] of the same row."""
    return (ids[:, :, None] == lists[:, None, :]).any(dim=2)


def _few(cohort: Cohort, rows: Tensor) -> Cohort:
    """A cohort of the clients in `rows` alone, on the same data and model."""
    few = copy.copy(cohort)
    few.ids, few.weights = cohort.ids[rows], cohort.weights[rows]
    few.data = replace(cohort.data, train=_only(cohort.data.train, rows), test=_only(cohort.data.test, rows))
    few.validation = None if cohort.validation is None else _only(cohort.validation, rows)
    return few


def _only(part: Part, rows: Tensor) -> Part:
    return replace(part, starts=part.starts[rows], sizes=part.sizes[rows.cpu()])
