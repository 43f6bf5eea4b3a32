"""How a model lies in a row: the flat vector of a client's trainable parameters, and its named views."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kinfolk.errors import UserError
from kinfolk.models.nets import refuse_without_size


@dataclass(frozen=True)
class Division:
    """A model as a body that may be shared and a head of one's own: columns of a row of `weights[m, d]`."""

    body: slice
    head: slice  # the last linear layer
    proxy: slice  # in the body: the weight of its last layer


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
        refuse_without_size(module)
        trainable = [(name, p.shape) for name, p in module.named_parameters() if p.requires_grad]
        offsets, size = [], 0
        for _, shape in trainable:
            offsets.append(size)
            size += math.prod(shape)
        names = tuple(name for name, _ in trainable)
        return cls(names, tuple(shape for _, shape in trainable), tuple(offsets), size)

    def divide(self, module: nn.Module) -> Division:
        """The head is the last linear layer; whatever comes before it is the body."""
        owners = [name.rpartition(".")[0] for name in self.names]
        if not owners or not isinstance(module.get_submodule(owners[-1]), nn.Linear):
            raise UserError("the model has no head to keep: its last parameters are not those of a linear layer")
        first = owners.index(owners[-1])
        matrices = [i for i in range(first) if len(self.shapes[i]) > 1]
        if len(set(owners[first:])) > 1 or not matrices:
            raise UserError("the model has no body to share: there is no layer before its last linear one")
        start = self.offsets[first]
        last = self.offsets[matrices[-1]]
        proxy = slice(last, last + math.prod(self.shapes[matrices[-1]]))
        return Division(slice(0, start), slice(start, self.size), proxy)

    def flatten(self, module: nn.Module) -> Tensor:
        """The module's parameters as one row [d]."""
        parameters = dict(module.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self.names])

    def views(self, weights: Tensor, first: int = 0) -> dict[str, Tensor]:
        """weights [m, d] -> a view [m, *shape] per parameter; first: the column of a row that they begin with."""
        rows = weights.shape[0]
        return {
            name: weights[:, start - first : start - first + math.prod(shape)].view(rows, *shape)
            for name, shape, start in zip(self.names, self.shapes, self.offsets)
            if start >= first
        }

    def spans(self, names: Collection[str]) -> list[slice]:
        """The columns of these parameters, those side by side as one."""
        found: list[slice] = []
        for name, shape, start in zip(self.names, self.shapes, self.offsets):
            if name in names and found and found[-1].stop == start:
                found[-1] = slice(found[-1].start, start + math.prod(shape))
            elif name in names:
                found.append(slice(start, start + math.prod(shape)))
        return found

    def described(self) -> list[list[Any]]:
        """[name, shape] of every parameter, as JSON has it."""
        return [[name, list(shape)] for name, shape in zip(self.names, self.shapes)]

    def load(self, row: Tensor, module: nn.Module) -> None:
        """Write one client's row [d] into `module`, for use outside kinfolk."""
        if row.numel() != self.size:
            raise UserError(f"a model of {row.numel():,} numbers does not fit a module of {self.size:,}")
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, view in self.views(row[None]).items():
                parameters[name].copy_(view[0])
