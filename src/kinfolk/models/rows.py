"""What the samples of a batch see of FedCG's domains, and what the graph makes of these: forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.models.domains import DomainLayer
from kinfolk.models.stack import Views, product

GRAPH = "net.graph"


@dataclass(frozen=True)
class Group:
    """Samples of one client whose domains are the same."""

    client: int
    place: slice  # among the samples of all clients, client by client
    domain: int  # the one that they are wholly in; -1: omega says
    omega: Tensor | None  # [D]; none: there is such a domain

    def fields(self, count: int) -> slice:
        """Where their fields lie, when every sample has so many."""
        return slice(self.place.start * count, self.place.stop * count)

    def seen(self, rows: Tensor) -> Tensor:
        """What they see of rows [m, D, filters, width]: [filters, width]."""
        found: Tensor = rows[self.client, self.domain] if self.omega is None else rows[self.client]
        if self.omega is not None:
            found = torch.tensordot(self.omega, found, dims=1)
        return found

    def hand_back(self, into: Tensor, slopes: Tensor, fields: Tensor, precision: str) -> None:
        """Add slopes [filters, f] @ fields [f, width] to the gradient of the rows that they see."""
        if self.omega is not None:
            into[self.client] += self.omega[:, None, None] * product(slopes[None], fields[None], precision)
        elif precision == "bf16":
            into[self.client, self.domain] += product(slopes[None], fields[None], precision)[0]
        else:
            into[self.client, self.domain].addmm_(slopes, fields)


class Sorted(dict[str, Tensor]):
    """Parameters by name, and of the batch that they are used on the domains omega [m, b, D] and the groups."""

    def __init__(self, views: Views, omega: Tensor, groups: list[Group]) -> None:
        super().__init__(views)
        self.omega, self.groups = omega, groups


def grouped(omega: Tensor) -> tuple[Tensor, Tensor, list[Group]]:
    """The order [m, b] in which samples with domains omega [m, b, D] lie beside those like them; omega in that order,
    and the groups."""
    clients, batch, domains = omega.shape
    order = (omega @ torch.arange(1, domains + 1).to(omega)).argsort(dim=1, stable=True)
    omega = omega.gather(1, order[..., None].expand_as(omega))
    begins = torch.ones(clients, batch, dtype=torch.bool)
    torch.any(omega[:, 1:] != omega[:, :-1], dim=2, out=begins[:, 1:])
    firsts = begins.flatten().nonzero()[:, 0]
    each = omega.flatten(0, 1)[firsts]  # [G, D]
    most, domain = each.max(dim=1)
    wholly = (most == 1) & ((each != 0).sum(dim=1) == 1)
    where, starts = torch.where(wholly, domain, -1).tolist(), firsts.tolist()
    groups = [
        Group(start // batch, slice(start, stop), d, each[number] if d < 0 else None)
        for number, (start, stop, d) in enumerate(zip(starts, [*starts[1:], clients * batch], where))
    ]
    return order, omega, groups


class Rows:
    """The rows V [m, D, filters, width] of a layer, and what the graph makes of them."""

    def __init__(self, name: str, layer: DomainLayer) -> None:
        self.name = f"{name}.rows"
        self.shape = tuple(layer.rows.shape)  # D, filters, width
        self.relu, self.steps, self.whole = layer.graph.relu, layer.graph.steps, layer.graph.whole
        self.projections = [f"{name}.graph.projections.{step}" for step in range(len(layer.graph.projections))]

    @property
    def linear(self) -> bool:
        """Whether fields can be projected in place of filters."""
        return len(self.projections) == 1 and self.steps == 1 and not self.relu and not self.whole

    def forward(self, views: Views, project: bool, precision: str) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The rows [m, D, filters, width] that samples see, and what the way back needs. project: with W."""
        values, kept = views[self.name].flatten(2), []
        for step in range(self.steps):
            mixed = out = _along(views[GRAPH], values)
            if self.projections and project:
                weight = views[self.projections[step]]
                out = product(_wide(mixed, weight.shape[1]), weight, precision).view(*mixed.shape[:2], -1)
            if self._cut(step):
                out = out.relu()
            kept.append((mixed, out))
            values = out
        return values.view(-1, *self.shape), kept

    def backward(
        self, views: Views, grad: Tensor, kept: list[tuple[Tensor, Tensor]], into: Views, project: bool, precision: str
    ) -> None:
        """Write the gradients of V, and with `project` of W, given that of the rows that samples see.

        That may lie where the gradient of V belongs.
        """
        graph, grad = views[GRAPH].transpose(1, 2), grad.flatten(2)
        for step in range(self.steps - 1, -1, -1):
            mixed, out = kept[step]
            if self._cut(step):
                grad = torch.ops.aten.threshold_backward(grad, out, 0)
            if self.projections and project:
                name = self.projections[step]
                weight = views[name]
                after = _wide(grad, weight.shape[2])
                products(_wide(mixed, weight.shape[1]).transpose(1, 2), after, into[name], precision)
                grad = product(after, weight.transpose(1, 2), precision).view(mixed.shape)
            grad = _along(graph, grad)
        if grad.data_ptr() != into[self.name].data_ptr():
            into[self.name].copy_(grad.view(into[self.name].shape))

    def _cut(self, step: int) -> bool:
        return self.relu or step + 1 < self.steps


def _wide(values: Tensor, width: int) -> Tensor:
    """values [m, D, q] as what a projection of this width takes: [m, D · q / width, width]."""
    return values.reshape(values.shape[0], -1, width)


def _along(graph: Tensor, values: Tensor) -> Tensor:
    """graph [m, D, D] @ values [m, D, q]; most often every domain is alone, but asking a GPU would make it wait."""
    if graph.is_cuda:
        return torch.bmm(graph, values)
    alone = torch.eye(graph.shape[1], dtype=graph.dtype)
    return values if bool((graph == alone).all()) else torch.bmm(graph, values)


def multiplied(a: Tensor, b: Tensor, into: Tensor, precision: str) -> None:
    """a @ b, written to where it belongs."""
    if precision == "bf16":
        into.copy_(product(a[None], b[None], precision)[0])
    else:
        torch.mm(a, b, out=into)


def products(a: Tensor, b: Tensor, into: Tensor, precision: str) -> None:
    """The same for every client."""
    if precision == "bf16":
        into.copy_(product(a, b, precision))
    else:
        torch.bmm(a, b, out=into)
