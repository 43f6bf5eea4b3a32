"""How good models are: loss and accuracy of many models, each on one client's samples, in one batched pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.cohort.program import sample_losses
from kinfolk.kernels.dispatch import there


@dataclass(frozen=True)
class Scores:
    """Mean cross-entropy and share of right answers per model; NaN for a client without samples."""

    loss: Tensor  # [p] float64
    accuracy: Tensor  # [p] float64
    common: Tensor | None = None  # [p] float64: accuracy on the test samples common to all clients


def score_chunk(
    predict: Callable[[Tensor, Tensor, Tensor], Tensor],
    models: Tensor,
    x: Tensor,
    y: Tensor,
    starts: Tensor,
    sizes: Tensor,
    width: int,
) -> Scores:
    """Score p models [p, d] on the samples starts[i] .. starts[i]+sizes[i] of x and y.

    predict(models, x, index [p, b]) gives scores [p, b, C]. `sizes` [p] lives on the CPU. At most `width` samples of
    each client are taken at a time, to bound memory.
    """
    longest = int(sizes.max())
    device = x.device
    loss = torch.zeros(sizes.numel(), dtype=torch.float64, device=device)
    right = torch.zeros_like(loss)
    ragged = int(sizes.min()) < longest
    count = there(sizes, device)
    limits = count[:, None]
    with torch.no_grad():
        for first in range(0, longest, width):
            position = torch.arange(first, min(first + width, longest), device=device)[None, :]
            inside = position < limits
            index = starts[:, None] + torch.where(inside, position, 0) if ragged else starts[:, None] + position
            index = index.clamp(max=max(x.shape[0] - 1, 0))
            labels = y[index]
            logits = predict(models, x, index)
            losses = sample_losses(logits, labels)
            hits = logits.argmax(dim=2) == labels
            if ragged:
                losses, hits = losses.masked_fill(~inside, 0.0), hits & inside
            loss += losses.sum(dim=1, dtype=torch.float64)
            right += hits.sum(dim=1)
    return Scores(loss / count, right / count)
