"""Linear layers on a GPU, with programs of our own where these are faster than the library (`kernels/dense.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kinfolk.kernels import dense
from kinfolk.models.stack import Dense, Views


class DenseProgram(Dense):
    """A linear layer, with or without ReLU; the first of a net reads the data set by index."""

    def __init__(self, name: str, bias: bool, relu: bool, first: bool) -> None:
        super().__init__(name, bias, relu)
        self.first = first

    def forward(self, views: Views, h: Tensor, index: Tensor, keep: bool, precision: str) -> tuple[Tensor, Any]:
        if not self.first and index.shape[1] > dense.FEW:
            return super().forward(views, h, index, keep, precision)
        x, weight = h.flatten(1) if self.first else h, views[self.weight]
        out = dense.forward(x, index, weight, self._bias(views), self.relu, self.first, precision)
        return out, (x, weight, out) if keep else None

    def backward(
        self, views: Views, grad: Tensor, kept: Any, index: Tensor, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        x, weight, out = kept
        if index.shape[1] > dense.FEW:
            if self.first:
                x = x[index].to(torch.bfloat16) if precision == "bf16" else x[index]
            return super().backward(views, grad, (x, weight, out), index, into, inputs, precision)
        grad = grad.contiguous()
        places = into[self.weight], self._bias(into)
        dense.weights_backward(x, index, grad, out, *places, self.relu, self.first, precision)
        if not inputs:
            return None
        if precision == "bf16":
            return torch.bmm(grad.to(torch.bfloat16), weight.to(torch.bfloat16)).to(out.dtype)
        return torch.bmm(grad, weight)

    def _bias(self, views: Views) -> Tensor | None:
        return None if self.bias is None else views[self.bias]
