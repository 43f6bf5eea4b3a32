"""FedCG's net as explicit passes over many clients on a GPU: nothing in them waits, so that steps can be recorded.

To a convolution every sample is a client by itself, with filters of its own, mixed of its domains': the programs of the
plain layer do the rest. Where filters have many more numbers than what they are multiplied with, as those of a linear
layer and of the last convolution of a deep net, a sample is multiplied with the filters of all domains at once, and
what comes out is weighed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kinfolk.models.branched import Branched, BranchedStack, Branches, plain_layers, split_layer, unreached
from kinfolk.models.bundle import Bundle
from kinfolk.models.convolve import Convolve
from kinfolk.models.domains import DomainLayer
from kinfolk.models.rows import Sorted
from kinfolk.models.stack import ChannelsLast, Convolved, Dense, Layer, Step, Views, product

MOST = 65_535  # samples that a program of a convolution takes as clients at a time: a GPU does not count further


class Own(Branches):
    """A convolution with ReLU and perhaps pooling, with filters for each sample."""

    def __init__(self, name: str, layer: DomainLayer, plain: Convolved) -> None:
        super().__init__(name, layer)
        self.program = plain.program

    def forward(self, views: Views, h: Tensor, index: Tensor, keep: bool, precision: str) -> tuple[Tensor, Any]:
        """h: the data set, where this is the first layer and reads it by index; else [m, b, H, W, C]."""
        assert isinstance(views, Sorted)
        rows, along = self.rows.forward(views, True, precision)
        shape = *index.shape, *self.rows.shape[1:]  # m, b, filters, width
        seen = torch.bmm(views.omega, rows.flatten(2)).view(shape)
        own = seen
        if self.agnostic:
            own = torch.addcmul(self._common(views)[:, None], seen, views[self.share].view(-1, 1, 1, 1))
        program, own = self.program, own.flatten(0, 1)
        x, each = (h if program.first else h.reshape(-1, 1, *h.shape[2:])), index.reshape(-1, 1)
        outs, kept = [], []
        for piece in _pieces(each.shape[0]):
            filters = own[piece, :, :-1]
            weight = filters.view(*filters.shape[:2], -1, program.kernel, program.kernel)
            wide, bias = program.widened(weight, precision), own[piece, :, -1].contiguous()
            mine = x if program.first else x[piece]
            out, winner = program.forward(mine, each[piece], wide, bias, keep, precision)
            outs.append(out)
            kept.append((mine, each[piece], weight, wide, winner))
        out = _joined(outs)
        return out.view(*index.shape, *out.shape[2:]), (rows, along, seen, kept)

    def backward(
        self, views: Views, grad: Tensor, kept: Any, index: Tensor, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        assert isinstance(views, Sorted)
        rows, along, seen, pieces = kept
        slope = grad.contiguous().view(-1, 1, *grad.shape[2:])
        places = _pieces(slope.shape[0])
        found = [self.program.backward(*mine, slope[at], inputs, precision) for at, mine in zip(places, pieces)]
        of_own = _joined([torch.cat([w.flatten(2), b[..., None]], dim=2) for w, b, _ in found]).view(seen.shape)
        of_seen = of_own
        if self.agnostic:
            self._write(into, of_own.sum(dim=1), (of_own * seen).sum(dim=(1, 2, 3)))
            of_seen = of_own * views[self.share].view(-1, 1, 1, 1)
        of_rows = torch.bmm(views.omega.transpose(1, 2), of_seen.flatten(2))
        self.rows.backward(views, of_rows.view(rows.shape), along, into, True, precision)
        if not inputs:
            return None
        below = _joined([piece for _, _, piece in found])
        return below.view(*index.shape, *below.shape[2:])


class ByDomains(Branched):
    """Fields are multiplied with the filters of all domains at once, and what comes out is weighed for each sample."""

    def __init__(self, name: str, layer: DomainLayer, plain: Dense | Convolve, fields: int) -> None:
        """fields: of a sample."""
        super().__init__(name, layer, plain)
        self.fields = fields

    def _multiply(self, views: Sorted, x: Tensor, precision: str) -> tuple[Tensor, Any]:
        rows, along = self.rows.forward(views, True, precision)
        every, omega = rows, views.omega
        if self.agnostic:  # what is common comes first, and everybody sees it
            every = torch.cat([self._common(views)[:, None], rows * views[self.share].view(-1, 1, 1, 1)], dim=1)
            omega = torch.cat([torch.ones_like(omega[..., :1]), omega], dim=2)
        omega = omega[:, :, None, :, None]  # m, b, fields, domains, filters
        z = product(x.flatten(1, 2), every.flatten(1, 2).transpose(1, 2), precision)
        out = (z.view(*x.shape[:3], every.shape[1], -1) * omega).sum(dim=3)
        return out, (rows, along, every, omega)

    def _back(
        self, views: Sorted, grad: Tensor, x: Tensor, kept: Any, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        rows, along, every, omega = kept
        slope = (grad[:, :, :, None] * omega).flatten(3).flatten(1, 2)
        of_rows = product(slope.transpose(1, 2), x.flatten(1, 2), precision).view(every.shape)
        if self.agnostic:
            of_common, of_rows = of_rows[:, 0], of_rows[:, 1:]
            self._write(into, of_common, (of_rows * rows).sum(dim=(1, 2, 3)))
            of_rows = of_rows * views[self.share].view(-1, 1, 1, 1)
        self.rows.backward(views, of_rows, along, into, True, precision)
        return product(slope, every.flatten(1, 2), precision).view(x.shape) if inputs else None


class ProgrammedStack(BranchedStack):
    """The layers of FedCG's net in order, for m clients at once; samples are rows of pixels with omega [D] behind."""

    def __init__(self, layers: list[Layer], precision: str, shape: tuple[int, ...], still: list[str]) -> None:
        super().__init__(layers, precision, shape, still)
        self._first = int(isinstance(layers[0], ChannelsLast))

    @property
    def compiles(self) -> bool:
        return any(isinstance(layer, (Convolved, Own)) for layer in self.layers)

    @property
    def outputs(self) -> int | None:
        """Numbers between layers for a sample: where filters are its own, these are most of them."""
        plain, own = super().outputs or 0, 0
        for layer in self.layers:
            if isinstance(layer, Own):
                own += layer.program.outputs + _as_own(layer.rows.shape)
            elif isinstance(layer, ByDomains):
                own += _by_domains(layer.rows.shape, layer.fields)
        return plain + own

    def samples(self, x: Tensor) -> Tensor:
        return x

    def prepared(self, views: Views, x: Tensor, labels: Tensor, index: Tensor, share: Tensor | None) -> Step:
        """The samples as the first layer wants them; nothing is sorted."""
        size, first = math.prod(self.shape), self.layers[0]
        rows = x[index]
        pixels, omega = rows[..., :size].reshape(-1, *self.shape), rows[..., size:]
        if isinstance(first, (Convolved, Own, ChannelsLast)):  # they read a data set: here that of the step
            index = torch.arange(index.numel(), device=x.device).view(index.shape)
            pixels = pixels if isinstance(first, ChannelsLast) else first.program.samples(pixels, self.precision)
        elif len(self.shape) > 1:
            pixels = pixels.permute(0, 2, 3, 1).reshape(*index.shape, *self.shape[1:], self.shape[0])
        else:
            pixels = pixels.view(*index.shape, -1)
        return Sorted(views, omega, []), pixels, labels, index, share


def programmed_stack(
    module: Bundle, names: tuple[str, ...], device: torch.device, precision: str
) -> ProgrammedStack | str:
    """The module as a stack for a GPU, or in a few words why it cannot be one. `names` are its trainable parameters."""
    steps = plain_layers(module, device, precision)
    if isinstance(steps, str):
        return steps
    made: list[Layer] = []
    for step in steps:
        found = split_layer(step, module) if isinstance(step, (Convolved, Dense)) else None
        made.append(step if found is None else _branched(*found, step))
    if isinstance(made[0], ChannelsLast) and isinstance(made[1], ByDomains):
        made = made[1:]  # it is given images as it wants them
    images = not isinstance(steps[0], Dense)
    shape = module.input_shape if images else (math.prod(module.input_shape),)
    return ProgrammedStack(made, precision, shape, unreached(names))


def _branched(name: str, layer: DomainLayer, step: Layer) -> Layer:
    """The layer with branches that stands for a plain one: whatever leaves fewer numbers in memory for a sample."""
    if isinstance(step, Dense):
        return ByDomains(name, layer, step, 1)
    assert isinstance(step, Convolved)
    program, shape = step.program, tuple(layer.rows.shape)
    fields = math.prod(program.out_size) * program.pool**2
    if _as_own(shape) <= _by_domains(shape, fields):
        return Own(name, layer, step)
    return ByDomains(name, layer, Convolve(name, layer.common, program.pool, first=False), fields)  # type: ignore[arg-type]


def _as_own(shape: tuple[int, ...]) -> int:
    """Numbers for a sample with filters of its own, of rows [D, filters, width]: as they are, mixed, and widened."""
    return 4 * shape[1] * shape[2]


def _by_domains(shape: tuple[int, ...], fields: int) -> int:
    """Numbers for a sample of so many fields: these, and the results of all domains, weighed or not."""
    return fields * (shape[2] + 2 * (shape[0] + 1) * shape[1])


def _pieces(samples: int) -> list[slice]:
    return [slice(first, min(first + MOST, samples)) for first in range(0, samples, MOST)]


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
