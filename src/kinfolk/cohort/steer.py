"""What some methods do to a client's gradients before it takes a step.

A `Steer` brings tensors of its own, one row per client. On a GPU they are inputs of the recorded steps, so a steer must
not look at their values on the CPU, and whatever changes from round to round must be one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Steer(Protocol):
    """Changes gradients in place."""

    @property
    def beside(self) -> tuple[Tensor, ...]:
        """The tensors [m, d] or [m] that `bend` is given, cut down to the clients it is called for."""

    @property
    def key(self) -> tuple[object, ...]:
        """Everything else that `bend` depends on."""

    def bend(self, slots: list[Tensor], gradients: list[Tensor], *beside: list[Tensor], step: int = 0) -> None:
        """slots: what moves of the models; gradients: of each slot; beside: the tensors in the same slots, one of
        numbers [m] by itself; step: how many were taken before."""


@dataclass(frozen=True)
class Proximal:
    """A pull towards other models: adds strength/2 · |w - anchor|² to the loss."""

    anchor: Tensor  # [m, d]
    strength: float

    @property
    def beside(self) -> tuple[Tensor, ...]:
        return (self.anchor,)

    @property
    def key(self) -> tuple[object, ...]:
        return ("proximal", self.strength)

    def bend(self, slots: list[Tensor], gradients: list[Tensor], *beside: list[Tensor], step: int = 0) -> None:
        for slot, gradient, anchor in zip(slots, gradients, beside[0]):
            gradient.add_(slot - anchor, alpha=self.strength)


@dataclass(frozen=True)
class Shifted:
    """The same is added to every gradient of a client."""

    shift: Tensor  # [m, d]

    @property
    def beside(self) -> tuple[Tensor, ...]:
        return (self.shift,)

    @property
    def key(self) -> tuple[object, ...]:
        return ("shifted",)

    def bend(self, slots: list[Tensor], gradients: list[Tensor], *beside: list[Tensor], step: int = 0) -> None:
        for gradient, shift in zip(gradients, beside[0]):
            gradient.add_(shift)


@dataclass(frozen=True)
class Masked:
    """Only some parameters of each client move, and no step follows a gradient longer than `longest`."""

    mask: Tensor  # [m, d] 0 or 1, in the dtype of the models
    longest: float

    @property
    def beside(self) -> tuple[Tensor, ...]:
        return (self.mask,)

    @property
    def key(self) -> tuple[object, ...]:
        return ("masked", self.longest)

    def bend(self, slots: list[Tensor], gradients: list[Tensor], *beside: list[Tensor], step: int = 0) -> None:
        for gradient, mask in zip(gradients, beside[0]):
            gradient.mul_(mask)
        square = torch.stack([gradient.flatten(1).square().sum(dim=1) for gradient in gradients]).sum(dim=0)
        scale = (self.longest / square.sqrt().clamp(min=1e-12)).clamp(max=1)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
