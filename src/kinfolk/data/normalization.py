"""Bringing the channels of images or features to one scale, for all clients at once.

`per_client` is P4's: every client standardises with the mean and variance of its own training samples. No noise is
added to these numbers, and one sample changes all inputs of its client: what differential privacy promises for a record
does not strictly hold for a model trained on such inputs. `grouped` looks at one sample at a time and has no such gap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.data.federation import Federation, Part
from kinfolk.errors import UserError

GROUPS = 27
EPSILON = 1e-5
ROWS = 1024  # samples at a time: what is needed beside the result stays small


def per_client(federation: Federation, epsilon: float = EPSILON) -> Federation:
    """(x - mean) / sqrt(variance + epsilon) per client and channel; a channel that is constant becomes 0.

    Mean and (population) variance are of the client's training samples, over samples and pixels; its test samples are
    brought to scale with the same numbers.
    """
    _check(federation)
    check_owners("per-client", federation.common, federation.newcomers, federation.validation)
    mean, factor = _moments(federation.train, federation.clients, epsilon)

    def scaled(part: Part) -> Part:
        owner = part.owners().to(part.x.device)
        return _mapped(part, lambda x, rows: x.sub(_spread(mean, owner[rows])).mul_(_spread(factor, owner[rows])))

    gaps = (*federation.gaps, "the scale of inputs, from each client's own records without noise")
    return replace(federation, train=scaled(federation.train), test=scaled(federation.test), gaps=gaps)


def grouped(federation: Federation, groups: int = GROUPS, epsilon: float = EPSILON) -> Federation:
    """Every sample's channels, in `groups` of neighbours, to mean 0 and variance 1 over each group and its pixels."""
    _check(federation)
    if federation.input_shape[0] % groups:
        raise UserError(
            f"data.norm = 'group' makes {groups} groups of channels, which {federation.input_shape[0]} channels cannot "
            "be divided into: it is meant for scattering features (data.features = 'scattering')"
        )

    def scaled(part: Part) -> Part:
        return _mapped(part, lambda x, rows: F.group_norm(x, groups, eps=epsilon))

    return federation.mapped(scaled)


def check_owners(norm: str | None, common: object, newcomers: object, validation: object) -> None:
    """Refuse a scale that some samples have no owner for (each None if there are none): those of a common test set, and
    of clients that never train."""
    if norm == "per-client" and common is not None:
        raise UserError(
            "data.norm = 'per-client' has no scale for test samples that belong to nobody: leave out data.global_test, "
            "or use norm = 'group'"
        )
    if norm == "per-client" and (newcomers is not None or validation is not None):
        raise UserError(
            "data.norm = 'per-client' takes the scale from training samples, which clients that never train have none "
            "of: leave out data.new_clients and data.validation_clients, or use norm = 'group'"
        )


NORMS: dict[str, Callable[[Federation], Federation]] = {"per-client": per_client, "group": grouped}


def _check(federation: Federation) -> None:
    if len(federation.input_shape) != 3:
        raise UserError(f"data.norm needs images or features [C, H, W], the data have {list(federation.input_shape)}")


def _moments(part: Part, clients: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """Per client and channel, float64 [n, C]: the mean, and what to multiply by after it is taken off."""
    owner, channels = part.owners().to(part.x.device), part.x.shape[1]
    count = part.sizes.to(part.x.device, torch.float64).clamp(min=1)[:, None] * part.x[0, 0].numel()

    def total(pixels: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Sums over each client's samples and their pixels."""
        sums = torch.zeros(clients, channels, dtype=torch.float64, device=part.x.device)
        for rows in _slices(part):
            sums.index_add_(0, owner[rows], pixels(part.x[rows], rows).sum((2, 3), dtype=torch.float64))
        return sums

    mean = total(lambda x, rows: x) / count
    # The mean is taken off in single precision, in which that of equal values is exact: their variance is exactly 0.
    variance = total(lambda x, rows: x.sub(_spread(mean, owner[rows])).square_()) / count
    return mean, torch.where(variance > 0, (variance + epsilon).rsqrt(), 0.0)


def _spread(values: Tensor, owner: Tensor) -> Tensor:
    """Values [n, C] for the samples of `owner`: [rows, C, 1, 1]."""
    return values.to(torch.float32)[owner, :, None, None]


def _slices(part: Part) -> list[slice]:
    return [slice(at, at + ROWS) for at in range(0, len(part.x), ROWS)]


def _mapped(part: Part, change: Callable[[Tensor, slice], Tensor]) -> Part:
    x = torch.empty_like(part.x)
    for rows in _slices(part):
        x[rows] = change(part.x[rows], rows)
    return replace(part, x=x)
