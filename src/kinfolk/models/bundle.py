"""All that FedCG's server sends as one module: the net, its graph, and two classifiers of domains.

An input is a row: the pixels of a sample and behind them omega [D], its domains. In training omega is read from there;
in a test it is what the student says, unless domains are given.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from kinfolk.models.domains import DomainNet, assigned, classifier


class Bundle(nn.Module):
    """Parameters in this order: graph and net, student, teacher."""

    def __init__(self, net: DomainNet, input_shape: tuple[int, ...], soft: bool, given: bool) -> None:
        super().__init__()
        self.net = net
        domains = net.graph.shape[0]
        self.student = Looking(input_shape, domains)
        self.teacher = Looking(input_shape, domains)
        self.domains, self.input_shape = domains, input_shape
        self.soft, self.given = soft, given

    def forward(self, x: Tensor) -> Tensor:
        """x [b, pixels + D] -> scores [b, C]."""
        pixels, omega = apart(x, self.input_shape)
        if not self.training and not self.given:
            omega = assigned(self.student(x), self.soft)
        scores: Tensor = self.net(pixels, omega)
        return scores


class Looking(nn.Module):
    """A classifier of domains that looks at the pixels of a row."""

    def __init__(self, input_shape: tuple[int, ...], domains: int) -> None:
        super().__init__()
        self.input_shape = input_shape
        self.layers = classifier(input_shape, domains)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(apart(x, self.input_shape)[0])
        return scores


def apart(x: Tensor, input_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The pixels [b, ...] and domains [b, D] of rows x [b, pixels + D]."""
    size = math.prod(input_shape)
    return x[:, :size].view(-1, *input_shape), x[:, size:]
