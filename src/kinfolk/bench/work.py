"""How much a job has to compute and to move at least, counted from its net."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from kinfolk.bench.jobs import CLASSES, Job
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.training import local_steps

FLOAT = 4  # bytes


def layer_products(module: nn.Module, shape: tuple[int, ...]) -> list[int]:
    """Multiplications that each linear layer and convolution needs for one sample, in the order they are called."""
    counts: list[int] = []

    def count(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        if isinstance(layer, nn.Linear):
            counts.append(output.shape[1:].numel() * layer.in_features)
        elif isinstance(layer, nn.Conv2d):
            taps = math.prod(layer.kernel_size) * layer.in_channels // layer.groups
            counts.append(output.shape[1:].numel() * taps)

    hooks = [layer.register_forward_hook(count) for layer in module.modules()]
    try:
        with torch.no_grad():
            module(torch.zeros(1, *shape))
    finally:
        for hook in hooks:
            hook.remove()
    return counts


def flops(job: Job) -> int:
    """Additions and multiplications of a round's matrix products and convolutions.

    Forward, and in training back to the weights and back to the inputs as well; the first layer's inputs are data and
    need no gradient.
    """
    layers = layer_products(job.net(job.shape, CLASSES), job.shape)
    if job.candidates:
        return 2 * sum(layers) * job.clients * job.candidates * job.samples
    samples = job.samples * job.training.epochs
    return 2 * (3 * sum(layers) - layers[0]) * job.clients * samples


def traffic(job: Job) -> int:
    """Bytes that a round has to move at least, if nothing stays in a cache from one step to the next.

    Training: every step reads and writes the models and their momentum once, and reads its samples. Judging: every
    pulled model is read once for each client that judges it, every client's samples once.
    """
    d = Layout.of(job.net(job.shape, CLASSES)).size
    sample = math.prod(job.shape)
    if job.candidates:
        return FLOAT * job.clients * (job.candidates * d + job.samples * sample)
    steps = int(local_steps(torch.tensor(job.samples), job.training))
    return FLOAT * job.clients * (steps * 4 * d + job.training.epochs * job.samples * sample)
