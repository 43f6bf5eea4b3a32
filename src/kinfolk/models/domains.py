"""Layers that differ by domain and share through a graph: the net of FedCG.

Caldarola, Mancini, Galasso, Ciccone, Rodolà, Caputo: Cluster-driven Graph Federated Learning over Multiple Domains.
CVPR Workshops 2021.

A chosen layer keeps what is common to all domains, f_a, and beside it a row of parameters V_d for each of D domains. A
step along a graph of the domains makes the rows that are used of them, W being a projection and A the graph:

    V^ = ReLU(A V W)    or with two layers and a bottleneck    V^ = ReLU(A ReLU(A V W1) W2)
    out = f_a(z) + lambda · sum_d omega_d f_{V^_d}(z)

where omega [b, D] says how much a sample belongs to each domain. A layer is linear in its parameters, so all of that is
one product with D + 1 times as many filters, and one sum over d.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.errors import UserError
from kinfolk.settings import setting

FULL = 10_000  # parameters of a layer up to which a projection of the whole row is made of itself
BOTTLENECK = 16  # how many times narrower the row is between two layers of the graph
SPREAD = 1e-3  # deviation of a projection from the identity at first
NEAREST = 1e-8  # distance below which rows count as this far apart


@dataclass(frozen=True)
class Sharing:
    """How domains share."""

    domains: int = setting(4, "domains (D)", ge=1)
    layers: Literal["last", "all", "whole"] = setting(
        "last", "which layers differ by domain: the last convolution, all, or the whole net: D models without a graph"
    )
    graph_layers: Literal[1, 2] = setting(1, "steps along the graph; two have a bottleneck between them")
    granularity: Literal["auto", "full", "per_filter"] = setting(
        "per_filter", "what W projects: a layer's whole row, or each filter's; auto: the whole up to 10,000 parameters"
    )
    project: bool = setting(True, "whether there is a projection W at all")
    param_relu: bool | None = setting(None, "whether the parameters that are used are cut off at zero; none: preset")
    agnostic: bool = setting(True, "whether there is a part common to all domains; without it lambda is one")


class Graph(nn.Module):
    """From the rows V [D, filters, width] of a layer to those that are used, of the same shape."""

    def __init__(self, filters: int, width: int, sharing: Sharing, name: str = "") -> None:
        super().__init__()
        self.relu, self.steps = sharing.param_relu is not False, sharing.graph_layers
        size = filters * width
        self.whole = sharing.granularity == "full" or (
            sharing.granularity == "auto" and (size <= FULL or sharing.graph_layers == 2)
        )
        if sharing.granularity == "full" and sharing.project and sharing.graph_layers == 1 and size > FULL:
            raise UserError(
                f"layer '{name}' has {size:,} parameters for each domain: a projection of all of them would have "
                f'{size * size:,} entries. Use granularity = "per_filter", or graph_layers = 2'
            )
        here = size if self.whole else width
        self.projections = nn.ParameterList(_projections(here, sharing) if sharing.project else [])

    def forward(self, rows: Tensor, graph: Tensor) -> Tensor:
        shape = rows.shape
        values = rows.flatten(1) if self.whole else rows
        for step in range(self.steps):
            values = torch.tensordot(graph, values, dims=1)
            if len(self.projections):
                values = values @ self.projections[step]
            if step + 1 < self.steps or self.relu:
                values = values.relu()
        return values.view(shape)


def _projections(size: int, sharing: Sharing) -> list[Tensor]:
    if sharing.graph_layers == 1:
        return [torch.eye(size) + SPREAD * torch.randn(size, size)]
    narrow = max(1, size // BOTTLENECK)
    linear = nn.Linear(size, narrow, bias=False), nn.Linear(narrow, size, bias=False)
    return [layer.weight.detach().T.contiguous() for layer in linear]


class DomainLayer(nn.Module):
    """A convolution or linear layer with a part common to all domains and one for each."""

    def __init__(self, layer: nn.Conv2d | nn.Linear, sharing: Sharing, name: str = "") -> None:
        """The rows V begin as other draws of the layer's own first parameters, different for every domain."""
        super().__init__()
        self.common = layer
        drawn = []
        for _ in range(sharing.domains):
            other = copy.deepcopy(layer)
            other.reset_parameters()
            drawn.append(_row(other))
        self.rows = nn.Parameter(torch.stack(drawn))  # [D, filters, width]
        self.graph = Graph(self.rows.shape[1], self.rows.shape[2], sharing, name)
        self.agnostic = sharing.agnostic
        if self.agnostic:
            self.share = nn.Parameter(torch.ones(()))  # lambda
        else:
            for parameter in layer.parameters():
                parameter.requires_grad_(False)

    def used(self, graph: Tensor) -> Tensor:
        """The rows [D, filters, width] that samples of each domain see."""
        found: Tensor = self.graph(self.rows, graph)
        return found

    def forward(self, z: Tensor, omega: Tensor, graph: Tensor) -> Tensor:
        rows = self.used(graph)
        if self.training and isinstance(self.common, nn.Conv2d):
            return self._mixed(z, omega, rows)
        if self.agnostic:
            rows = torch.cat([_row(self.common)[None], rows])
            omega = torch.cat([torch.ones_like(omega[:, :1]), self.share * omega], dim=1)
        domains, filters, _ = rows.shape
        flat = rows.flatten(0, 1)  # all domains' filters side by side
        bias = None if self.common.bias is None else flat[:, -1]
        weight = flat if bias is None else flat[:, :-1]
        if isinstance(self.common, nn.Linear):
            out = F.linear(z, weight, bias)
        else:
            conv = self.common
            weight = weight.reshape(-1, *conv.weight.shape[1:])
            out = F.conv2d(z, weight, bias, conv.stride, conv.padding, conv.dilation)
        out = out.view(out.shape[0], domains, filters, *out.shape[2:])
        return torch.einsum("bd,bd...->b...", omega, out)

    def _mixed(self, z: Tensor, omega: Tensor, rows: Tensor) -> Tensor:
        """The same for small batches: every sample has filters of its own, mixed of its domains'.

        One product with as many filters as the plain layer has, whatever D is.
        """
        own = torch.tensordot(omega, rows.flatten(1), dims=1).view(-1, *rows.shape[1:])  # [b, filters, width]
        if self.agnostic:
            own = _row(self.common) + self.share * own
        conv = self.common
        assert isinstance(conv, nn.Conv2d)
        padding = conv.padding if isinstance(conv.padding, tuple) else (0, 0)
        if isinstance(conv.padding, str):
            z = F.pad(z, conv._reversed_padding_repeated_twice)
        fields = F.unfold(z, conv.kernel_size, conv.dilation, padding, conv.stride)
        out = own @ fields if conv.bias is None else own[..., :-1] @ fields + own[..., -1:]
        height = (z.shape[2] + 2 * padding[0] - conv.dilation[0] * (conv.kernel_size[0] - 1) - 1) // conv.stride[0] + 1
        image: Tensor = out.view(out.shape[0], out.shape[1], height, -1)
        return image


def _row(layer: nn.Conv2d | nn.Linear) -> Tensor:
    """Weights and, if there is one, bias of each filter: [filters, width]."""
    weight = layer.weight.flatten(1)
    return weight if layer.bias is None else torch.cat([weight, layer.bias[:, None]], dim=1)


class DomainNet(nn.Module):
    """A stack of layers, some of which differ by domain, and the graph that they share.

    The graph [D, D] is a parameter, so that it travels with the others, but no gradient reaches it.
    """

    def __init__(self, net: nn.Sequential, sharing: Sharing, graph: Tensor | None = None) -> None:
        super().__init__()
        chosen = splittable(net, sharing.layers)
        if sharing.layers == "whole":
            sharing = replace(sharing, agnostic=False, project=False, param_relu=False, graph_layers=1)
            graph = None
        layers = [
            DomainLayer(layer, sharing, str(place)) if place in chosen else layer  # type: ignore[arg-type]
            for place, layer in enumerate(net)
        ]
        self.layers = nn.ModuleList(layers)
        self.graph = nn.Parameter(torch.eye(sharing.domains) if graph is None else graph)

    def forward(self, x: Tensor, omega: Tensor) -> Tensor:
        """x [b, ...], omega [b, D] -> scores [b, C]."""
        graph = self.graph.detach()
        for layer in self.layers:
            x = layer(x, omega, graph) if isinstance(layer, DomainLayer) else layer(x)
        return x

    def split(self) -> list[DomainLayer]:
        """The layers that differ by domain."""
        return [layer for layer in self.layers if isinstance(layer, DomainLayer)]

    def rows(self) -> Tensor:
        """The raw rows V of all such layers, one behind another: [D, q]. Distances between domains are of these."""
        return torch.cat([layer.rows.detach().flatten(1) for layer in self.split()], dim=1)

    def dead(self) -> list[float]:
        """For each such layer the share of its used parameters that are zero in all domains: 1 is a dead layer."""
        graph = self.graph.detach()
        return [float((layer.used(graph) == 0).all(dim=0).float().mean()) for layer in self.split()]

    def zeros(self) -> list[list[float]]:
        """For each such layer and each domain the share of its used parameters that are zero."""
        graph = self.graph.detach()
        return [(layer.used(graph) == 0).flatten(1).float().mean(dim=1).tolist() for layer in self.split()]


def splittable(net: nn.Module, layers: str) -> list[int]:
    """Places of the layers that may differ by domain: convolutions, or where there are none, linear ones but the last.

    A net of one linear layer has only that.
    """
    if not isinstance(net, nn.Sequential):
        raise UserError("FedCG needs an nn.Sequential: in this model it cannot tell which layer comes when")
    places = [place for place, layer in enumerate(net) if _splits(layer)]
    plain = [place for place, layer in enumerate(net) if isinstance(layer, nn.Linear)]
    if layers == "whole":
        return sorted(places + plain)
    places = places or plain[:-1] or plain
    if not places:
        raise UserError("the model has no layer that can differ by domain: a convolution or linear layer is needed")
    return places if layers == "all" else places[-1:]


def _splits(layer: nn.Module) -> bool:
    """Whether it is a convolution that all filters of all domains can share in one product, with zeros around."""
    return isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.padding_mode == "zeros"


def classifier(input_shape: tuple[int, ...], domains: int) -> nn.Sequential:
    """Which domain an image belongs to: two 3×3 convolutions (32, 64), the mean over pixels, a linear layer.

    Inputs that are no images have a hidden layer of 64 instead.
    """
    if len(input_shape) != 3:
        size = math.prod(input_shape)
        return nn.Sequential(nn.Flatten(), nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, domains))
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, domains),
    )  # fmt: skip


def assigned(scores: Tensor, soft: bool) -> Tensor:
    """omega [b, D] of a classifier's scores [b, D]: probabilities, or one for the highest and 0 for the others."""
    if soft:
        return scores.softmax(dim=1)
    best = scores.argmax(dim=1, keepdim=True)
    return (torch.arange(scores.shape[1], device=scores.device) == best).to(scores.dtype)


# -- the graph ---------------------------------------------------------------------------------------------------


def adjacency(rows: Tensor, own: float = 0.5) -> Tensor:
    """A [D, D] of the domains with rows V [D, q]: `own` (beta) on the diagonal, the rest by inverse distances.

    A domain with a distance that is no number treats all others alike.
    """
    distance = torch.linalg.vector_norm(rows[:, None].double() - rows[None].double(), dim=2)
    return _weighed(1 / distance.clamp(min=NEAREST), own).to(rows.dtype)


def hamming(domains: int, own: float = 0.5) -> Tensor:
    """A [D, D] by the inverse of how many binary digits the numbers of two domains differ in."""
    digits = torch.arange(domains)[:, None] >> torch.arange(max(1, (domains - 1).bit_length())) & 1
    apart = (digits[:, None] != digits[None]).sum(dim=2)
    return _weighed(1 / apart.clamp(min=1).double(), own).float()


def first_adjacency(
    kind: Literal["eye", "rand", "uniform", "even", "hamming"], domains: int, own: float, generator: torch.Generator
) -> Tensor:
    """The graph A [D, D] to begin with.

    eye: every domain alone; rand: random shares; uniform: `own` on the diagonal and the rest even; even: 1/D
    everywhere; hamming: see there.
    """
    if kind == "eye":
        return torch.eye(domains)
    if kind == "rand":
        drawn = torch.rand(domains, domains, generator=generator, dtype=torch.float64).clamp(min=1e-12)
        return (drawn / drawn.sum(dim=1, keepdim=True)).float()
    if kind == "even":
        return torch.full((domains, domains), 1 / domains)
    return hamming(domains, own) if kind == "hamming" else _weighed(torch.ones(domains, domains).double(), own).float()


def _weighed(near: Tensor, own: float) -> Tensor:
    """`own` on the diagonal, and the rest of one in proportion to near [D, D]; D = 1: [[1]]."""
    domains = near.shape[0]
    if domains == 1:
        return torch.ones_like(near)
    near = torch.where(torch.isfinite(near).all(dim=1, keepdim=True), near, 1.0).clone()
    near.fill_diagonal_(0)
    others = (1 - own) * near / near.sum(dim=1, keepdim=True)
    return others + own * torch.eye(domains, dtype=near.dtype, device=near.device)


# -- what domains are in use -------------------------------------------------------------------------------------


def occupancy(omega: Tensor) -> Tensor:
    """The share of samples [b, D] in each domain: [D] float64."""
    return omega.double().mean(dim=0)


def evenness(shares: Tensor) -> Tensor:
    """Entropy of shares [..., D] over its largest value: 1 where all domains are used alike, 0 where only one is."""
    domains = shares.shape[-1]
    entropy: Tensor = torch.special.entr(shares).sum(dim=-1)
    return entropy.clamp(min=0) / (math.log(domains) if domains > 1 else 1.0)
