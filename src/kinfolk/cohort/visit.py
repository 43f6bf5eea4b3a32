"""Clients that have a model only while they take part in a round.

Where all clients use one model between rounds, that model and the data are all there is to keep. A visit is a cohort of
some clients of another: it has rows of `weights` for these alone, and everything else in common with the other.
"""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.evaluation import Scores
from kinfolk.cohort.program import rounding, sample_losses
from kinfolk.cohort.workers import side_by_side
from kinfolk.data.federation import Part

WIDTH = 1024  # samples at a time


def visit(cohort: Cohort, rows: Tensor, here: Tensor, models: bool = True) -> Cohort:
    """The cohort of the clients in these rows [k], given on the CPU and on the cohort's device. No sample is copied.

    models: whether they have rows of `weights` of their own; else all see one, and it must not matter which.
    """
    guests = copy.copy(cohort)
    guests.ids = cohort.ids[here]
    guests.weights = cohort.weights[here] if models else cohort.weights[:1].expand(rows.numel(), -1)
    train, test = (_some(part, rows, here) for part in (cohort.data.train, cohort.data.test))
    clusters = None if cohort.data.clusters is None else cohort.data.clusters[rows]
    guests.data = replace(cohort.data, train=train, test=test, clusters=clusters)
    return guests


def _some(part: Part, rows: Tensor, here: Tensor) -> Part:
    return replace(part, starts=part.starts[here], sizes=part.sizes[rows])


def rows_of(state: Any, here: Tensor) -> Any:
    """The state of the clients in rows here [k]."""
    kept = {field.name: field.metadata.get("shared") for field in fields(state)}
    values = {name: getattr(state, name) for name in kept}
    return replace(state, **{name: value[here] for name, value in values.items() if not kept[name]})


def merged(state: Any, theirs: Any, here: Tensor) -> Any:
    """The state of all with that of the clients in rows here [k] written into it: copying all would take long."""
    changes = {}
    for field in fields(state):
        mine, new = getattr(state, field.name), getattr(theirs, field.name)
        changes[field.name] = new if field.metadata.get("shared") else mine.index_copy_(0, here, new)
    return replace(state, **changes)


def one_for_all(cohort: Cohort, model: Tensor, part: Part, x: Tensor) -> Scores:
    """The model [d] on the samples of each client of the part, whose clients lie one behind another.

    x: the samples as the cohort's program reads them. Clients share batches, so many small ones cost no more than a
    large one.
    """
    cohort.model.eval()
    block = model[None].to(cohort.dtype)
    count = part.y.numel()

    def work(first: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(first, min(first + WIDTH, count), device=cohort.device)[None]
        with cohort.room.threads(index.numel()), rounding(cohort.device, cohort.precision), torch.no_grad():
            logits = cohort.program.logits(block, x, index)
            losses = sample_losses(logits, part.y[index])[0].to(torch.float64)
            return losses, (logits.argmax(dim=2) == part.y[index])[0].to(torch.float64)

    firsts = range(0, count, WIDTH)
    pieces = side_by_side(work, firsts, cohort.room.workers(len(firsts), WIDTH))
    sizes = part.sizes.to(cohort.device)
    nothing = torch.zeros(0, dtype=torch.float64, device=cohort.device)
    found = [torch.cat([nothing, *(piece[side] for piece in pieces)]) for side in (0, 1)]
    loss, right = (torch.segment_reduce(values, "sum", lengths=sizes, initial=0) for values in found)
    return Scores(loss / sizes, right / sizes)


def evaluate(cohort: Cohort, model: Tensor, common: bool = True) -> Scores:
    """As `Cohort.evaluate`, of the one model [d] that all clients use."""
    scores = one_for_all(cohort, model, cohort.data.test, cohort.test_x)
    if cohort.data.common is None or not common:
        return scores
    everywhere = one_for_all(cohort, model, cohort.data.common, cohort.program.samples(cohort.data.common.x))
    return replace(scores, common=everywhere.accuracy.expand(len(cohort)))
