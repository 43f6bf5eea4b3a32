"""How a cohort computes losses, gradients and steps: through our own passes where the net allows, else autograd."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.cohort.layout import Layout
from kinfolk.models.branched import BranchedStack, branched_stack
from kinfolk.models.branched_gpu import programmed_stack
from kinfolk.models.bundle import Bundle
from kinfolk.models.stack import Stack, stack_of
from kinfolk.models.vectorise import Vectorised


class Program(Protocol):
    """A net for many clients. A slot is a tensor [m, ...] of parameters that is stepped as one."""

    concurrent: bool  # whether several threads may call it at a time
    outputs: int | None  # numbers that it leaves between layers for a sample, if fewer than the module's layers put out

    def samples(self, x: Tensor) -> Tensor:
        """The data set [N, ...] in the order this program reads it; what the other calls take as x."""

    def slots(self, block: Tensor) -> list[Tensor]:
        """The models [m, d] as the tensors that gradients are taken of; changing them changes the models."""

    def within(self, slots: list[Tensor], columns: slice) -> list[Tensor]:
        """What of the slots (or of gradients of theirs) lies in these columns of the models, whole parameters only."""

    def gradients(
        self,
        slots: list[Tensor],
        x: Tensor,
        labels: Tensor,
        index: Tensor,
        share: Tensor | None,
        spare: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Loss [m] on x[index] with labels [m, b], and the gradient of each slot. share [m, b]: weights of samples.

        spare: earlier gradients that are not needed any more; the new ones may take their place.
        """

    def slopes(
        self, block: Tensor, x: Tensor, labels: Tensor, index: Tensor, share: Tensor | None, columns: slice
    ) -> tuple[Tensor, Tensor]:
        """Loss [m] of the models [m, d], and its gradient [m, *] in these columns alone, whole parameters."""

    def logits(self, block: Tensor, x: Tensor, index: Tensor) -> Tensor:
        """Scores [m, b, C] of the models [m, d] for the samples x[index]."""


class Explicit:
    """A stack of layers we know: the models are one slot, and their gradients come as one matrix."""

    concurrent = True

    def __init__(self, stack: Stack, layout: Layout) -> None:
        self.stack = stack
        self.layout = layout
        self.outputs = stack.outputs
        self._still = layout.spans(stack.still)

    def samples(self, x: Tensor) -> Tensor:
        return self.stack.samples(x)

    def slots(self, block: Tensor) -> list[Tensor]:
        return [block]

    def within(self, slots: list[Tensor], columns: slice) -> list[Tensor]:
        return [slots[0][:, columns]]

    def gradients(
        self,
        slots: list[Tensor],
        x: Tensor,
        labels: Tensor,
        index: Tensor,
        share: Tensor | None,
        spare: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        into = torch.empty_like(slots[0]) if spare is None else spare[0]
        for columns in self._still:
            into[:, columns].zero_()
        views = self.layout.views
        with torch.no_grad():
            loss = self.stack.gradients(views(slots[0]), x, labels, index, share, views(into))
        return loss, [into]

    def slopes(
        self, block: Tensor, x: Tensor, labels: Tensor, index: Tensor, share: Tensor | None, columns: slice
    ) -> tuple[Tensor, Tensor]:
        places = dict(zip(self.layout.names, self.layout.offsets))
        last, own = self.stack.owner(next(name for name in places if places[name] == columns.start))
        first = min(places[name] for name in own)
        into = block.new_empty(block.shape[0], block.shape[1] - first)  # layers lie in a row as they follow each other
        with torch.no_grad():
            views, of_views = self.layout.views(block), self.layout.views(into, first)
            loss = self.stack.gradients(views, x, labels, index, share, of_views, last)
        return loss, into[:, columns.start - first : columns.stop - first]

    def logits(self, block: Tensor, x: Tensor, index: Tensor) -> Tensor:
        with torch.no_grad():
            return self.stack.logits(self.layout.views(block), x, index)


class Branching(Explicit):
    """FedCG's net: gradients by its own passes; scores by the module, which asks the student in a test."""

    def __init__(
        self, stack: BranchedStack, module: nn.Module, layout: Layout, precision: str, device: torch.device
    ) -> None:
        super().__init__(stack, layout)
        self.module = module
        self._made = partial(Derived, layout=layout, precision=precision, device=device)
        self._idle: list[Derived] = []  # copies of the module, as many as threads have called at a time

    def slopes(
        self, block: Tensor, x: Tensor, labels: Tensor, index: Tensor, share: Tensor | None, columns: slice
    ) -> tuple[Tensor, Tensor]:
        loss, (gradient,) = self.gradients([block], x, labels, index, share)
        return loss, gradient[:, columns]

    def logits(self, block: Tensor, x: Tensor, index: Tensor) -> Tensor:
        try:
            mine = self._idle.pop()
        except IndexError:
            mine = self._made(copy.deepcopy(self.module))
        mine.forward.module.train(self.module.training)
        scores = mine.logits(block, x, index)
        self._idle.append(mine)
        return scores


class Derived:
    """Any module, through `vmap` and autograd; a slot for each of its parameters."""

    concurrent = False  # a call puts the clients' parameters into the one module
    outputs: int | None = None

    def __init__(self, module: nn.Module, layout: Layout, precision: str, device: torch.device) -> None:
        self.forward = Vectorised(module)
        self.layout = layout
        self._lower = partial(torch.autocast, device.type, torch.bfloat16, precision == "bf16")

    def samples(self, x: Tensor) -> Tensor:
        return x

    def slots(self, block: Tensor) -> list[Tensor]:
        return list(self.layout.views(block).values())

    def within(self, slots: list[Tensor], columns: slice) -> list[Tensor]:
        places = zip(slots, self.layout.offsets)
        return [slot for slot, start in places if columns.start <= start < columns.stop]

    def gradients(
        self,
        slots: list[Tensor],
        x: Tensor,
        labels: Tensor,
        index: Tensor,
        share: Tensor | None,
        spare: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        return self._derived(slots, x, labels, index, share, [True] * len(slots))

    def slopes(
        self, block: Tensor, x: Tensor, labels: Tensor, index: Tensor, share: Tensor | None, columns: slice
    ) -> tuple[Tensor, Tensor]:
        wanted = [columns.start <= start < columns.stop for start in self.layout.offsets]
        loss, gradients = self._derived(self.slots(block), x, labels, index, share, wanted)
        return loss, torch.cat([gradient.reshape(block.shape[0], -1) for gradient in gradients], dim=1)

    def _derived(
        self, slots: list[Tensor], x: Tensor, labels: Tensor, index: Tensor, share: Tensor | None, wanted: list[bool]
    ) -> tuple[Tensor, list[Tensor]]:
        """Loss [m] and the gradients of the wanted slots; autograd does not go back behind these."""
        weights = [slot.detach().requires_grad_(want) for slot, want in zip(slots, wanted)]
        with self._lower():
            logits = self.forward(dict(zip(self.layout.names, weights)), x[index])
        losses = sample_losses(logits.to(slots[0].dtype), labels)
        each = losses.mean(dim=1) if share is None else (losses * share.to(losses.dtype)).sum(dim=1)
        moving = [weight for weight in weights if weight.requires_grad]
        return each.detach(), list(torch.autograd.grad(each.sum(), moving, materialize_grads=True))

    def logits(self, block: Tensor, x: Tensor, index: Tensor) -> Tensor:
        with torch.no_grad(), self._lower():
            return self.forward(self.layout.views(block), x[index]).to(block.dtype)


def program_for(
    module: nn.Module,
    layout: Layout,
    input_shape: tuple[int, ...],
    device: torch.device,
    precision: str,
    short: bool = False,
    batch: int = 32,
) -> tuple[Program, str | None]:
    """The fastest way to compute with the module, and what the user should know of it.

    short: too little work is to come for anything that has to be compiled first; batch: samples of a step.
    """
    derived = Derived(module, layout, precision, device)  # refuses what cannot be vectorised at all
    found: Stack | str
    if isinstance(module, Bundle) and device.type == "cuda":
        found = programmed_stack(module, layout.names, device, precision)
    elif isinstance(module, Bundle):
        found = branched_stack(module, layout.names, device, precision, batch)
    else:
        found = stack_of(module, layout.names, input_shape, device, precision, programs=not short)
    if isinstance(found, Stack):
        program = Explicit(found, layout)
        if isinstance(found, BranchedStack):
            program = Branching(found, module, layout, precision, device)
        if device.type != "cuda" or not found.compiles:
            return program, None
        if not short:
            notice = "the first round compiles programs for this net and GPU: up to a minute, kept for later runs"
            return program, notice
        found = "compiling programs for so short a run would take longer than they save"
    notice = f"the model is computed through vmap and autograd, which is several times slower here: {found}"
    return derived, notice if device.type == "cuda" else None


def sample_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every sample: logits [m, b, C], labels [m, b] -> [m, b]."""
    losses: Tensor = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


@contextmanager
def rounding(device: torch.device, precision: str) -> Iterator[None]:
    """Let the matrix units of a GPU round factors to TF32, or forbid it; the user's own setting is put back."""
    if device.type != "cuda":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = precision in ("tf32", "bf16")
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before
