"""A rule at work in a cohort: what its clients, or a server, make of the models that arrived."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.aggregation.inbox import CACHE, Inbox, Losses
from kinfolk.aggregation.registry import Rule
from kinfolk.cohort import judging
from kinfolk.cohort.cohort import Cohort
from kinfolk.peers.base import Pool


@dataclass(frozen=True)
class Combiner:
    """The rule of a run, for the clients of one cohort."""

    rule: Rule
    cohort: Cohort

    def peers(
        self, pool: Pool, ids: Tensor, coefficients: Tensor | None, own: Tensor | float, part: slice | None
    ) -> tuple[Tensor, Tensor]:
        """In place of the mean in `Cohort.mix`: the new models [m, d] and the shares of the peers ids [m, k].

        part: the columns that are shared. Only those are looked at; what the others are does not count.
        """
        cohort, rows = self.cohort, pool.rows(ids)
        models, theirs = cohort.weights, pool["weights"]
        if part is not None:
            models, theirs = models[:, part].contiguous(), theirs[:, part].contiguous()
        losses = self._losses(pool["weights"], part) if self.rule.judges else None
        inbox = Inbox(models, theirs, rows, coefficients, own, cohort.round.absent, self._progress(), losses, CACHE)
        mixed, shares = self.rule.combine(inbox)
        if part is None:
            return mixed, shares
        whole = cohort.weights.clone()
        whole[:, part] = mixed
        return whole, shares

    def server(self, before: Tensor, models: Tensor, weights: Tensor) -> Tensor:
        """What a server that has the model before [d] makes of models [p, d] with weights [p]: [d].

        Its own model is what distances are measured from, and is kept where the rule finds too few; but it takes no
        part among the others.
        """
        rows = torch.arange(models.shape[0], device=models.device)[None]
        inbox = Inbox(before[None], models.flatten(1), rows, weights[None], 0.0, progress=self._progress())
        return self.rule.combine(inbox)[0][0]

    def _progress(self) -> float:
        """Part of all rounds that has passed, this one among them."""
        cohort = self.cohort
        return 0.0 if cohort.rounds is None else min(1.0, cohort.round.t / cohort.rounds)

    def _losses(self, theirs: Tensor, part: slice | None) -> Losses:
        """Of models on each client's own training samples, with its own parameters outside of `part`."""
        cohort = self.cohort
        head = None if part is None else _rest(part, cohort.layout.size)

        def losses(rows: Tensor) -> tuple[Tensor, Tensor]:
            mine = torch.arange(len(cohort))
            own = judging.score(cohort, cohort.weights, mine, mine, cohort.data.train).loss
            if not theirs.shape[0]:
                return own, torch.full(rows.shape, torch.nan, dtype=torch.float64, device=rows.device)
            clients = mine.repeat_interleave(rows.shape[1])
            found = judging.score(cohort, theirs, rows.clamp(min=0).flatten(), clients, cohort.data.train, head=head)
            return own, found.loss.view(rows.shape)

        return losses


def _rest(part: slice, size: int) -> slice:
    """The columns before or after a part that begins or ends a model's row."""
    return slice(part.stop, size) if not part.start else slice(0, part.start)
