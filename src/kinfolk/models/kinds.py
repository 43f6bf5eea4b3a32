"""Which layers there are passes of our own for: those of PyTorch with nothing unusual about them."""

from __future__ import annotations

from typing import Any

from torch import nn


def plain(conv: nn.Conv2d) -> bool:
    """A square convolution of stride 1 with a bias, and nothing else to it."""
    return (
        type(conv) is nn.Conv2d
        and conv.stride == (1, 1)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
        and conv.bias is not None
        and not isinstance(conv.padding, str)
        and conv.kernel_size[0] == conv.kernel_size[1]
        and conv.padding[0] == conv.padding[1]
    )


def flattens(part: nn.Module) -> bool:
    """Whether all but the samples becomes one dimension."""
    return type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1)


def halves(pool: nn.Module) -> bool:
    """Pooling of 2 × 2 pixels to one."""
    wanted = {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    return all(_single(getattr(pool, key)) == value for key, value in wanted.items())


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value
