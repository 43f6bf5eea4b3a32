"""All that FedCG's server sends as one module: the net, its graph, and two who say which domain a sample belongs to.

An input is a row: the pixels of a sample and behind them omega [D], its domains. In training omega is read from there;
in a test it is what the student says, unless domains are given.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kinfolk.models import coarse
from kinfolk.models.domains import DomainNet, assigned, classifier


class Bundle(nn.Module):
    """Parameters in this order: graph and net, student, teacher."""

    student: Looking
    teacher: Looking | coarse.Teacher

    def __init__(
        self, net: DomainNet, input_shape: tuple[int, ...], soft: bool, given: bool, by_sums: bool = False
    ) -> None:
        """by_sums: teacher and student are found by sums of coarse looks, not trained."""
        super().__init__()
        self.net = net
        domains = net.graph.shape[0]
        if by_sums:
            self.student = Looking(input_shape, coarse.student(input_shape, domains))
            self.teacher = coarse.Teacher(coarse.width(input_shape), _classes(net, input_shape), domains)
        else:
            self.student, self.teacher = (Looking(input_shape, classifier(input_shape, domains)) for _ in range(2))
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
    """Layers that look at the pixels of a row: which domain does it belong to?"""

    def __init__(self, input_shape: tuple[int, ...], layers: nn.Sequential) -> None:
        super().__init__()
        self.input_shape = input_shape
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(apart(x, self.input_shape)[0])
        return scores


def apart(x: Tensor, input_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The pixels [b, ...] and domains [b, D] of rows x [b, pixels + D]."""
    size = math.prod(input_shape)
    return x[:, :size].view(-1, *input_shape), x[:, size:]


def _classes(net: DomainNet, input_shape: tuple[int, ...]) -> int:
    with torch.no_grad():
        scores: Tensor = net(torch.zeros(1, *input_shape), torch.zeros(1, net.graph.shape[0]))
    return scores.shape[1]
