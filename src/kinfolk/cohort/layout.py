"""How a model lies in a row: the flat vector of a client's trainable parameters, and its named views."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names, shapes and offsets of the parameters in a row of `weights[m, d]`."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    size: int  # d

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The trainable parameters of `module` in the order it names them (tied ones once)."""
        trainable = [(name, p.shape) for name, p in module.named_parameters() if p.requires_grad]
        offsets, size = [], 0
        for _, shape in trainable:
            offsets.append(size)
            size += math.prod(shape)
        names = tuple(name for name, _ in trainable)
        return cls(names, tuple(shape for _, shape in trainable), tuple(offsets), size)

    def flatten(self, module: nn.Module) -> Tensor:
        """The module's parameters as one row [d]."""
        parameters = dict(module.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self.names])

    def views(self, weights: Tensor) -> dict[str, Tensor]:
        """weights [m, d] -> a view [m, *shape] per parameter."""
        rows = weights.shape[0]
        return {
            name: weights[:, start : start + math.prod(shape)].view(rows, *shape)
            for name, shape, start in zip(self.names, self.shapes, self.offsets)
        }

    def load(self, row: Tensor, module: nn.Module) -> None:
        """Write one client's row [d] into `module`, for use outside kinfolk."""
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, view in self.views(row[None]).items():
                parameters[name].copy_(view[0])
