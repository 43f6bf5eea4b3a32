"""A trained net as an ordinary module, and a description from which anybody can build it with torch alone.

FedCG's net has its rows V^ computed once: at inference there is no graph and no projection left, only layers with one
set of filters for each domain, and the student that says how much a sample belongs to each.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.models.bundle import Bundle
from kinfolk.models.domains import DomainLayer, assigned
from kinfolk.models.norm import GroupNorm

# Layers that can be described, with the options that make them.
KINDS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Conv2d: (
        *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias"),
        "padding_mode",
    ),
    nn.Linear: ("in_features", "out_features", "bias"),
    GroupNorm: ("num_groups", "num_channels", "eps", "affine"),
    nn.GroupNorm: ("num_groups", "num_channels", "eps", "affine"),
    nn.MaxPool2d: ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    nn.AvgPool2d: ("kernel_size", "stride", "padding", "ceil_mode"),
    nn.AdaptiveAvgPool2d: ("output_size",),
    nn.Flatten: ("start_dim", "end_dim"),
    nn.ReLU: (),
    nn.Tanh: (),
}
NAMES = {kind.__name__: kind for kind in KINDS}


class Branches(nn.Module):
    """A convolution or linear layer with filters for several branches: weight [B, filters, ...], bias [B, filters].

    Its output is the sum of the branches' own, weighed by share [b, B] for each sample.
    """

    bias: Tensor | None

    def __init__(self, kind: str, options: dict[str, Any], branches: int) -> None:
        super().__init__()
        self.kind, self.options = kind, options  # of one branch, as a layer by itself
        layer = self.alone()
        self.weight = nn.Parameter(torch.zeros(branches, *layer.weight.shape))
        bias = None if layer.bias is None else nn.Parameter(torch.zeros(branches, len(layer.bias)))
        self.register_parameter("bias", bias)

    def alone(self) -> nn.Conv2d | nn.Linear:
        """An ordinary layer of this kind."""
        return cast(nn.Conv2d | nn.Linear, NAMES[self.kind](**self.options))

    def forward(self, z: Tensor, share: Tensor) -> Tensor:
        weight, bias = self.weight.flatten(0, 1), None if self.bias is None else self.bias.flatten()
        if self.kind == "Linear":
            out = F.linear(z, weight, bias)
        else:
            out = F.conv2d(z, weight, bias, *(self.options[name] for name in ("stride", "padding", "dilation")))
        return torch.einsum("bd,bd...->b...", share, out.view(len(out), *self.weight.shape[:2], *out.shape[2:]))


class DomainModel(nn.Module):
    """x [b, ...] -> scores [b, C], by way of the sample's domains, which `student` finds or the caller gives."""

    def __init__(self, layers: list[nn.Module], student: nn.Module | None, domains: int, soft: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.student = student
        self.domains, self.soft = domains, soft

    def forward(self, x: Tensor, omega: Tensor | None = None) -> Tensor:
        """omega [b, D]: how much each sample belongs to each domain; None: what the student says."""
        if omega is None:
            if self.student is None:
                raise ValueError(f"this model was trained with given domains: pass omega [b, {self.domains}]")
            omega = assigned(self.student(x), self.soft)
        share = torch.cat([torch.ones_like(omega[:, :1]), omega], dim=1)
        for layer in self.layers:
            x = layer(x, share) if isinstance(layer, Branches) else layer(x)
        return x


def plain(module: nn.Module) -> nn.Module:
    """A trained module as it is used outside: FedCG's with its rows computed, any other as it is."""
    if not isinstance(module, Bundle):
        return module
    graph = module.net.graph.detach()
    layers = [_fixed(layer, graph) if isinstance(layer, DomainLayer) else layer for layer in module.net.layers]
    if module.domains == 1:
        return nn.Sequential(*(_merged(layer) if isinstance(layer, Branches) else layer for layer in layers))
    student = None if module.given else module.student.layers
    return DomainModel(layers, student, module.domains, module.soft)


def _fixed(layer: DomainLayer, graph: Tensor) -> Branches:
    """The layer's common part (branch 0, zero where there is none) and its domains', scaled by lambda."""
    common = layer.common
    with torch.no_grad():
        rows = layer.used(graph) * (layer.share if layer.agnostic else 1.0)  # [D, filters, width]
        own = [] if common.bias is None else [common.bias[:, None]]
        first = torch.cat([common.weight.flatten(1), *own], dim=1) * (1.0 if layer.agnostic else 0.0)
        rows = torch.cat([first[None], rows])
        branches = Branches(type(common).__name__, _options(common), len(rows)).to(rows)
        weight = rows if common.bias is None else rows[..., :-1]
        branches.weight.copy_(weight.reshape(branches.weight.shape))
        if branches.bias is not None:
            branches.bias.copy_(rows[..., -1])
    return branches


def _merged(layer: Branches) -> nn.Module:
    """A layer whose branches all samples go through alike: one ordinary layer with the sum of their filters."""
    single = layer.alone().to(layer.weight)
    with torch.no_grad():
        single.weight.copy_(layer.weight.sum(dim=0))
        if layer.bias is not None and single.bias is not None:
            single.bias.copy_(layer.bias.sum(dim=0))
    return single


def describe(module: nn.Module) -> dict[str, Any] | None:
    """How to build the module with torch alone; None where it is no row of layers that are known here."""
    if isinstance(module, DomainModel):
        student = None if module.student is None else _layers(module.student)
        layers = _layers(module.layers)
        if layers is None or (student is None) != (module.student is None):
            return None
        return {"layers": layers, "student": student, "domains": module.domains, "soft": module.soft}
    layers = _layers(module) if type(module) is nn.Sequential else None
    return None if layers is None else {"layers": layers}


def _layers(modules: nn.Module) -> list[dict[str, Any]] | None:
    found: list[dict[str, Any]] = []
    for layer in cast(nn.Sequential, modules):
        if isinstance(layer, Branches):
            found.append({"kind": layer.kind, "options": layer.options, "branches": len(layer.weight)})
        elif type(layer) in KINDS:
            found.append({"kind": type(layer).__name__, "options": _options(layer)})
        else:
            return None
    return found


def _options(layer: nn.Module) -> dict[str, Any]:
    """What a layer of a known kind was made with."""
    options = {name: getattr(layer, name) for name in KINDS[type(layer)]}
    return options | ({"bias": options["bias"] is not None} if "bias" in options else {})


def build(description: dict[str, Any]) -> nn.Module:
    """The module that `describe` described, with numbers of its own."""
    layers = [_layer(**entry) for entry in description["layers"]]
    if "domains" not in description:
        return nn.Sequential(*layers)
    student = description["student"]
    made = None if student is None else nn.Sequential(*(_layer(**entry) for entry in student))
    return DomainModel(layers, made, description["domains"], description["soft"])


def _layer(kind: str, options: dict[str, Any], branches: int = 0) -> nn.Module:
    return Branches(kind, options, branches) if branches else NAMES[kind](**options)
