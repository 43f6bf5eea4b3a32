"""Cross-entropy and its gradient in one pass (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["batch"])
def _entropy(
    logits, labels, share, loss, grad, batch, classes, labels_step, share_step,
    SHARED: tl.constexpr, BB: tl.constexpr, CC: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CC)[None, :]
    total = tl.full([BB], 0.0, tl.float32)
    for first in range(0, batch, BB):
        sample = first + tl.arange(0, BB)
        here = sample < batch
        at = (client * batch + sample)[:, None] * classes + column
        inside = here[:, None] & (column < classes)
        z = tl.load(logits + at, mask=inside, other=float("-inf"))
        z = tl.where(here[:, None], z, 0.0)
        top = tl.max(z, 1)
        e = tl.exp(z - top[:, None])
        whole = tl.sum(e, 1)
        right = column == tl.load(labels + client * labels_step + sample, mask=here, other=0)[:, None]
        losses = tl.log(whole) - tl.sum(tl.where(right, z - top[:, None], 0.0), 1)
        if SHARED:
            part = tl.load(share + client * share_step + sample, mask=here, other=0.0).to(tl.float32)
        else:
            part = tl.full([BB], 1.0, tl.float32) / batch
        total += tl.where(here, losses * part, 0.0)
        tl.store(grad + at, (e / whole[:, None] - tl.where(right, 1.0, 0.0)) * part[:, None], mask=inside)
    tl.store(loss + client, tl.sum(total))


def entropy(logits: Tensor, labels: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean loss [m] over the samples and its gradient; logits: [m, b, C] float32, labels: [m, b], share: [m, b]."""
    clients, batch, classes = logits.shape
    logits = logits.contiguous()
    labels = labels if labels.stride(1) == 1 else labels.contiguous()
    share = share if share is None or share.stride(1) == 1 else share.contiguous()
    loss, grad = logits.new_empty(clients), torch.empty_like(logits)
    _entropy[(clients,)](
        logits, labels, labels if share is None else share, loss, grad, batch, classes, labels.stride(0),
        0 if share is None else share.stride(0),
        SHARED=share is not None, BB=min(128, max(16, triton.next_power_of_2(batch))),
        CC=max(2, triton.next_power_of_2(classes)),
    )  # fmt: skip
    return loss, grad
