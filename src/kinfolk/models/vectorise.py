"""From one `nn.Module` to a function over many clients' parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from kinfolk.errors import UserError


class Vectorised:
    """Call `module` for m clients at once: parameters name -> [m, *shape], x [m, b, ...] -> logits [m, b, C].

    Buffers and frozen parameters are shared by all clients and never change.
    """

    def __init__(self, module: nn.Module) -> None:
        refuse_what_cannot_be_vectorised(module)
        self.module = module
        self._call = vmap(self._one, in_dims=(0, 0))

    def _one(self, parameters: dict[str, Tensor], x: Tensor) -> Any:
        return functional_call(self.module, parameters, (x,))

    def __call__(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        try:
            if x.shape[0] == 1:  # one client needs no batching rules, and they cost more than a small layer
                alone: Tensor = self._one({name: rows[0] for name, rows in parameters.items()}, x[0])
                return alone[None]
            logits: Tensor = self._call(parameters, x)
        except RuntimeError as error:
            if "random" in str(error) and "vmap" in str(error):
                raise UserError(
                    "the model draws random numbers in its forward pass (F.dropout?), which cannot be repeated "
                    "for each client: remove it, or use weight decay instead"
                ) from None
            raise
        return logits


def refuse_what_cannot_be_vectorised(module: nn.Module) -> None:
    """BatchNorm keeps statistics in place, dropout draws from a global generator: neither is a pure function."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            raise UserError(
                f"layer '{name}' is {type(part).__name__}: its statistics cannot be kept for many clients at once. "
                f"Use nn.GroupNorm(groups, {part.num_features}) instead"
            )
        if isinstance(part, (nn.modules.dropout._DropoutNd, nn.modules.rnn.RNNBase)) and getattr(part, "p", True):
            raise UserError(
                f"layer '{name}' ({type(part).__name__}) cannot be vectorised over clients: take it out of the model"
            )
    if not any(p.requires_grad for p in module.parameters()):
        raise UserError("the model has no trainable parameters")


def activations(module: nn.Module, input_shape: tuple[int, ...], classes: int, dtype: torch.dtype) -> int:
    """Numbers that the layers put out for one sample: what a forward pass has to remember.

    As it is the first call of the model, it also refuses one whose output is no score for each class.
    """
    count = 0

    def add(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal count
        if isinstance(output, Tensor):
            count += output.numel()

    leaves = [part for part in module.modules() if not list(part.children())]
    hooks = [leaf.register_forward_hook(add) for leaf in leaves]
    device = next(module.parameters()).device
    try:
        with torch.no_grad():
            scores = module(torch.zeros(1, *input_shape, dtype=dtype, device=device))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the model does not accept inputs of shape {list(input_shape)}: {str(error).splitlines()[0]}"
        ) from None
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[1] < classes:
        found = list(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise UserError(f"the model returns {found} for one sample: [1, {classes}], a score for each class, is needed")
    return count
