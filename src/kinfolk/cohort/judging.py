"""How models of peers do on a client's own samples: losses, and the way their gradients point.

Everything here works on pairs: model `models[i]` judged by the client in row `clients[i]` of the cohort.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.cohort.evaluation import Scores, score_chunk
from kinfolk.cohort.program import Program, rounding, sample_losses
from kinfolk.cohort.workers import side_by_side
from kinfolk.data.federation import Part
from kinfolk.kernels import dispatch
from kinfolk.kernels.dispatch import there

if TYPE_CHECKING:
    from kinfolk.cohort.cohort import Cohort

WHOLE, SOME = 200, 128  # samples up to which a client looks at all it has; how many it looks at otherwise


@dataclass(frozen=True)
class Look:
    """The training samples that each client judges models of peers by in a round."""

    cohort: Cohort
    index: Tensor  # [m, s] rows of the data set; meaningless where the share is 0
    share: Tensor  # [m, s] weights that sum to one for every client with samples
    head: slice | None  # columns in which a client puts its own parameters in place of a model's

    @classmethod
    def of(cls, cohort: Cohort, t: int, head: slice | None = None, most: int | None = None) -> Look:
        """All training samples of a client with few of them, else some at random; the same ones all through round t.

        most: so many at random of whoever has more.
        """
        part = cohort.data.train
        counts = torch.where(part.sizes > WHOLE, SOME, part.sizes) if most is None else part.sizes.clamp(max=most)
        width = max(1, int(counts.max()))
        order = randomness.permutations(cohort.seed, "judge", t, cohort.ids, part.sizes, 1)[:, 0, :width]
        counts = there(counts, cohort.device)[:, None]
        inside = torch.arange(order.shape[1], device=cohort.device) < counts
        index = part.starts[:, None] + torch.where(inside, order, 0)
        share = inside.to(torch.float64) / counts.clamp(min=1)
        return cls(cohort, index.clamp(max=max(part.x.shape[0] - 1, 0)), share, head)

    def losses(self, weights: Tensor, models: Tensor, clients: Tensor) -> Tensor:
        """Loss [p] of model weights[models[i]] on what client row clients[i] looks at."""
        cohort = self.cohort
        cohort.model.eval()

        def work(block: Tensor, which: Tensor, index: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
            losses = sample_losses(cohort.program.logits(block, cohort.train_x, index), cohort.data.train.y[index])
            return (losses * share).sum(dim=1, dtype=torch.float64), block[:, :0]

        return self._over(work, weights, models, clients, cohort.layout.size)[0]

    def slopes(self, weights: Tensor, models: Tensor, clients: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """As `losses`, with the gradient [p, columns] of each."""

        def work(block: Tensor, which: Tensor, index: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
            return self._slope(block, index, share, columns)

        return self._over(work, weights, models, clients, 3 * self.cohort.layout.size)

    def alignments(
        self, weights: Tensor, models: Tensor, clients: Tensor, columns: slice, against: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `losses`, with the cosine [p] between the gradient of each in these columns and against[models[i]].

        The gradients themselves are never all there at once. A zero vector has cosine 0.
        """

        def work(block: Tensor, which: Tensor, index: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
            loss, gradient = self._slope(block, index, share, columns)
            return loss, _cosines(gradient, against, which)

        beside = 0 if dispatch.fused(against) else 4 * against.shape[1]
        return self._over(work, weights, models, clients, 3 * self.cohort.layout.size + beside)

    def _slope(self, block: Tensor, index: Tensor, share: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        cohort, labels = self.cohort, self.cohort.data.train.y[index]
        loss, gradient = cohort.program.slopes(block, cohort.train_x, labels, index, share, columns)
        return loss.to(torch.float64), gradient

    def _over(
        self,
        work: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
        weights: Tensor,
        models: Tensor,
        clients: Tensor,
        numbers: int,
    ) -> tuple[Tensor, Tensor]:
        """What work(models [p, d], their rows [p], index, share) gives for chunks of pairs, joined.

        numbers: that each pair takes beside its samples.
        """
        cohort, width = self.cohort, self.index.shape[1]
        workers = cohort.room.workers(models.numel(), width)
        size = cohort.room.fitting(numbers, width, models.numel(), workers)
        models, clients = there(models, cohort.device), there(clients, cohort.device)

        def chunk(first: int) -> tuple[Tensor, Tensor]:
            which, whose = models[first : first + size], clients[first : first + size]
            block = _composed(cohort, weights, which, whose, self.head)
            with cohort.room.threads(which.numel() * width), rounding(cohort.device, cohort.precision):
                return work(block, which, self.index[whose], self.share[whose])

        pieces = side_by_side(chunk, range(0, models.numel(), size), workers)
        if not pieces:
            return torch.zeros(0, dtype=torch.float64, device=cohort.device), weights[:0, :0]
        return torch.cat([loss for loss, _ in pieces]), torch.cat([other for _, other in pieces])


@dataclass(frozen=True)
class Mixture:
    """Models that each client uses beside its own: what it predicts is the mean of their probabilities."""

    models: Tensor  # [p, d]
    rows: Tensor  # [m, c] which of them, -1 for none
    shares: Tensor  # [m, c] of each in the mean; the client's own model has the rest of one

    def predict(self, program: Program, clients: Tensor, own: Tensor, x: Tensor, index: Tensor) -> Tensor:
        """Log-probabilities [q, b, C] of the clients in rows [q], with models own [q, d], for the samples x[index]."""
        rows = self.rows[clients]
        shares = torch.where(rows >= 0, self.shares[clients], 0.0).to(own.dtype)
        mean = program.logits(own, x, index).softmax(dim=2) * (1 - shares.sum(dim=1))[:, None, None]
        for column in range(rows.shape[1] if self.models.shape[0] else 0):
            block = torch.where(rows[:, column, None] >= 0, self.models[rows[:, column].clamp(min=0)], own)
            mean += program.logits(block, x, index).softmax(dim=2) * shares[:, column, None, None]
        return mean.clamp(min=torch.finfo(mean.dtype).tiny).log()


def score(
    cohort: Cohort,
    weights: Tensor,
    models: Tensor,
    clients: Tensor,
    part: Part,
    x: Tensor | None = None,
    head: slice | None = None,
    mixture: Mixture | None = None,
) -> Scores:
    """Model weights[models[i]] on all samples that client row clients[i] has in the part, for every i.

    x: the samples of the part, prepared; by default those of the training part. head: columns in which the client puts
    its own parameters in place of the model's. mixture: what is used beside model i, in its row i.
    """
    x = cohort.train_x if x is None else x
    cohort.model.eval()
    width = max(1, min(int(part.sizes.max()), 1024))
    workers = cohort.room.workers(models.numel(), width)
    size = cohort.room.fitting(cohort.layout.size, width, models.numel(), workers)

    def work(first: int) -> Scores:
        which, whose = models[first : first + size], clients[first : first + size]
        block = _composed(cohort, weights, which, whose, head)
        starts, sizes = part.starts[there(whose, cohort.device)], part.sizes[whose]
        predict = cohort.program.logits
        if mixture is not None:
            predict = partial(mixture.predict, cohort.program, there(which, cohort.device))
        with cohort.room.threads(which.numel() * width), rounding(cohort.device, cohort.precision):
            return score_chunk(predict, block, x, part.y, starts, sizes, width)

    pieces = side_by_side(work, range(0, models.numel(), size), workers)
    if not pieces:
        nothing = torch.zeros(0, dtype=torch.float64, device=cohort.device)
        return Scores(nothing, nothing)
    return Scores(torch.cat([p.loss for p in pieces]), torch.cat([p.accuracy for p in pieces]))


def proxy_accuracy(cohort: Cohort) -> Tensor | None:
    """[m] accuracy of the clients' proxies on their own test sets, where a method has any."""
    if not cohort.proxies:
        return None
    rows = torch.arange(len(cohort))
    return score(cohort, cohort.weights, rows, rows, cohort.data.test, cohort.test_x).accuracy


def _composed(cohort: Cohort, weights: Tensor, models: Tensor, clients: Tensor, head: slice | None) -> Tensor:
    """The models [p, d], with the clients' own parameters in the columns of the head."""
    rows = there(models, weights.device)
    if dispatch.fused(weights) and rows.numel():
        from kinfolk.kernels.rows import copied

        block = copied(weights, rows)
    else:
        block = weights[rows]
    if head is not None:
        block[:, head] = cohort.weights[there(clients, cohort.device)][:, head]
    return block


def _cosines(mine: Tensor, theirs: Tensor, rows: Tensor) -> Tensor:
    """Of mine [p, c] with theirs[rows]: [p] float64, 0 where either is zero."""
    if dispatch.fused(mine):
        from kinfolk.kernels.cosines import cosines

        return cosines(mine, theirs, rows[:, None], None, 0.0)[:, 0]
    a, b = mine.to(torch.float64), theirs[rows].to(torch.float64)
    norms = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)
    return torch.where(norms > 0, (a * b).sum(dim=1) / norms, 0.0)
