"""DP-SGD for many clients at once: clip every sample's gradient, add up, add noise, divide.

gradient = (sum of clipped gradients + N(0, deviation²)) / batch, where deviation = noise multiplier · sensitivity · C,
and the sensitivity is 2 if neighbouring data sets differ in one replaced record (`Mechanism.deviation`). This module is
the only place where noise is added, and it is added to the sum.

Losses and norms that come back beside the gradient are not private: they stay with their client.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinfolk.cohort.layout import Layout
from kinfolk.cohort.workers import side_by_side
from kinfolk.errors import UserError
from kinfolk.privacy import clipping, source
from kinfolk.privacy.losses import SampleLoss, cross_entropy
from kinfolk.privacy.sampling import Batches
from kinfolk.privacy.source import Source


@dataclass(frozen=True)
class Sums:
    """What a step found of each client."""

    total: Tensor  # [m, d] clipped gradients, added up
    loss: Tensor  # [m] mean over the batch, NaN if it is empty; not private
    clipped: Tensor  # [m] share of samples whose gradient was cut; not private


class PrivateGradients:
    """Gradients with noise of one net for clients whose samples lie flat in x [N, ...], as in a `Federation`."""

    def __init__(self, module: nn.Module, layout: Layout, input_shape: tuple[int, ...], clip: float) -> None:
        if not (math.isfinite(clip) and clip > 0):
            raise UserError(f"clip = {clip:g}: the clipping norm must be a positive number")
        self.clip = clip
        self.layout = layout
        self.clipping = clipping.clipping_for(module, layout, input_shape)

    def uncut(self) -> PrivateGradients:
        """The same net without clipping, for sums that nobody else sees."""
        same = copy.copy(self)
        same.clip = math.inf
        return same

    def __call__(
        self,
        models: Tensor,
        x: Tensor,
        starts: Tensor,
        batches: Batches,
        targets: tuple[Tensor, ...],
        deviation: Tensor,
        randomness: Source,
        t: int,
        ids: Tensor,
        purpose: str = "private noise",
        loss: SampleLoss = cross_entropy,
    ) -> tuple[Tensor, Sums]:
        """Private gradients [m, d], and what must not leave the client.

        models [m, d]; starts [m]: first row of each client in x; targets: each [m, width, ...], as wide as
        `batches.positions`; deviation [m]: of the noise on the sum; ids [m]; purpose: another for every step of a
        round. A client with an empty batch gives noise only.
        """
        sums = self.sums(models, x, starts, batches, targets, loss)
        noisy = sums.total.clone()
        source.add_noise(randomness, purpose, t, ids, deviation, noisy)
        divisor = batches.divisor.clamp(min=1).to(models.device, models.dtype)
        return noisy.div_(divisor[:, None]), sums

    def sums(
        self,
        models: Tensor,
        x: Tensor,
        starts: Tensor,
        batches: Batches,
        targets: tuple[Tensor, ...],
        loss: SampleLoss = cross_entropy,
    ) -> Sums:
        """The sums without noise: not private."""
        device, clients = models.device, models.shape[0]
        begin, starts = starts.cpu(), starts.to(device)
        total = torch.zeros_like(models)
        losses, cut = (torch.zeros(clients, dtype=torch.float64, device=device) for _ in range(2))
        local = batches.positions.to(device)

        def work(group: tuple[Tensor, slice]) -> None:
            rows, columns = group
            here = rows if (span := _span(rows)) is None else span
            inside = torch.arange(columns.start, columns.stop) < batches.counts[here, None]
            everything = bool(inside.all())
            mask = None if everything else inside.to(device)
            found = _side_by_side(x, begin[here], columns) if batches.whole else None
            samples = x[starts[here, None] + local[here, columns]] if found is None else found
            part = total[here]  # a copy, or the place itself
            each, norms = self.clipping.add(
                models[here], samples, mask, tuple(one[here, columns] for one in targets), loss, self.clip, part
            )
            if span is None:
                total[here] = part
            cutting = norms > self.clip
            losses[here] += (each if mask is None else torch.where(mask, each, 0)).sum(dim=1, dtype=torch.float64)
            cut[here] += (cutting if mask is None else cutting & mask).sum(dim=1)

        numbers = clipping.GPU_NUMBERS if models.is_cuda else clipping.NUMBERS
        with source.one_thread(device) as workers:
            for layer in self._groups(batches, numbers):  # groups of a layer hold different clients
                side_by_side(work, layer, workers)
        counts = batches.counts.to(device)
        return Sums(total, losses / torch.where(counts > 0, counts, math.nan), cut / counts.clamp(min=1))

    def _groups(self, batches: Batches, numbers: int) -> list[list[tuple[Tensor, slice]]]:
        """Clients with batches of one width, in chunks that there is room for; a client's shapes are its own affair."""
        widths = batches.widths
        layers: dict[int, list[tuple[Tensor, slice]]] = {}
        most = max(1, numbers // max(self.clipping.numbers, 1))  # samples at a time
        for width in sorted(set(widths.tolist())):
            rows = torch.nonzero(widths == width).flatten()
            for number, first in enumerate(range(0, width, most)):
                columns = slice(first, min(first + most, width))
                few = max(1, most // (columns.stop - columns.start))
                layers.setdefault(number, []).extend((part, columns) for part in torch.split(rows, few))
        return list(layers.values())


def _side_by_side(x: Tensor, starts: Tensor, columns: slice) -> Tensor | None:
    """A view [m, b, ...] of the samples `columns` of clients, if each client's follow those of the one before."""
    width = columns.stop - columns.start
    if not width or bool((starts != starts[0] + width * torch.arange(starts.numel())).any()):
        return None
    first = int(starts[0]) + columns.start
    return x[first : first + starts.numel() * width].view(starts.numel(), width, *x.shape[1:])


def _span(rows: Tensor) -> slice | None:
    """The rows [*] as a slice, if they follow each other."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == rows.numel() else None
