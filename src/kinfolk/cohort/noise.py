"""Gaussian noise on the gradients of local training: how much of it does a method bear?

It protects nobody: the gradient of a whole batch is cut, not that of each sample, and nothing is accounted for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk import randomness

PIECE = 2**22  # numbers drawn at a time


@dataclass(frozen=True)
class Noise:
    """On the gradient of every local step: it is cut to a length, and every number of it is disturbed."""

    longest: float
    deviation: float

    def on(self, seed: int, t: int, ids: Tensor, purpose: str) -> Noisy:
        """The noise of the clients ids [m] when they train for this purpose in round t."""
        return Noisy(randomness.bits(seed, f"noise/{purpose}", t, ids, torch.zeros_like(ids)), self)


@dataclass(frozen=True)
class Noisy:
    """A `Steer`. What changes from round to round is in the keys, so the steps can be replayed on a GPU."""

    keys: Tensor  # [m] all of a client's noise in a round is a function of its key
    noise: Noise

    @property
    def beside(self) -> tuple[Tensor, ...]:
        return (self.keys,)

    @property
    def key(self) -> tuple[object, ...]:
        return ("noisy", self.noise)

    def bend(self, slots: list[Tensor], gradients: list[Tensor], *beside: list[Tensor], step: int = 0) -> None:
        keys = beside[0][0]
        square = torch.stack([gradient.flatten(1).double().square().sum(dim=1) for gradient in gradients]).sum(dim=0)
        scale = self.noise.longest / square.sqrt().clamp(min=self.noise.longest)
        first = step * sum(gradient[0].numel() for gradient in gradients)
        for gradient in gradients:
            count = gradient[0].numel()
            gradient.mul_(scale.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1)))
            gradient.add_(_drawn(keys, first, count, gradient.dtype).view(gradient.shape), alpha=self.noise.deviation)
            first += count


def _drawn(keys: Tensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers first .. first + count of the noise of each key: [m, count]."""
    size = max(1, PIECE // keys.numel())
    places = range(first, first + count, size)
    pieces = [randomness.normal(0, "noise", 0, keys, min(size, first + count - at), at).to(dtype) for at in places]
    return torch.cat(pieces, dim=1)
