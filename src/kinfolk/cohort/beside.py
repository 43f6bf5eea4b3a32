"""A second, smaller net that the clients of a cohort train on the same samples, with labels of its own."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import Tensor, nn

from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.program import program_for
from kinfolk.cohort.room import Room
from kinfolk.cohort.training import Training
from kinfolk.models.vectorise import activations


def beside(cohort: Cohort, module: nn.Module, labels: Tensor, classes: int, training: Training) -> Cohort:
    """The same clients and round with another net, labels [N] of all training samples, and other settings.

    Only for training models that are handed to `trained`: it has none of its own. A client that is quarantined there is
    so in both.
    """
    other = copy.copy(cohort)
    other.model, other.training = module, training
    other.layout = Layout.of(module)
    shape = cohort.data.input_shape
    other.program, _ = program_for(module, other.layout, shape, cohort.device, cohort.precision, short=True)
    put_out = activations(module, shape, classes, cohort.dtype)
    kept = cohort.data.train.x[:1].numel() + 3 * (other.program.outputs or put_out)
    width = cohort.weights.element_size()
    other.room = Room(cohort.device, other.program.concurrent, other.layout.size, kept, width)
    other.data = replace(cohort.data, train=replace(cohort.data.train, y=labels))
    other._replay = None
    return other
