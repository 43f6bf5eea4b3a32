"""Convolution, ReLU and max-pooling of many clients on a CPU, forward and backward.

The library's convolution is fast on a CPU if channels come last, and there is nothing to gain from joining clients, so
each client's images go through it on their own, some dozens at a time: the widest result of the layer, that of the
convolution before pooling, then stays in cache and is never kept. What is kept for the way back is the pooled result
and which pixel won. ReLU comes after pooling, on a quarter of the pixels; the largest of
some numbers with negative ones cut off is the same either way, and so is its gradient.

Everything between layers lies channels last, [m, b, H, W, C].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SLICE = 2**20  # numbers that a convolution puts out at a time, at most

_aten = torch.ops.aten


class Convolve:
    """A convolution of stride 1 with ReLU, and pooling by 2 if `pool` is 2; the first one picks its images by index."""

    def __init__(self, name: str, conv: nn.Conv2d, pool: int, first: bool) -> None:
        self.weight, self.bias = f"{name}.weight", f"{name}.bias"
        self.channels = conv.out_channels
        self.side = conv.kernel_size[0]
        self.padding = int(conv.padding[0])
        self.pool = pool
        self.first = first

    def forward(
        self, views: dict[str, Tensor], h: Tensor, index: Tensor, keep: bool, precision: str
    ) -> tuple[Tensor, Any]:
        clients, batch = index.shape
        height, width = h.shape[2:4]  # of [N, C, H, W] and of [m, b, H, W, C]
        tall, wide = self._before_pooling(height, width)
        shape = (clients, batch, tall // self.pool, wide // self.pool, self.channels)
        out = torch.empty(shape, dtype=h.dtype)
        winner = torch.empty(shape if self.pool > 1 else 0, dtype=torch.int64)
        for client in range(clients):
            weight, bias = views[self.weight][client], views[self.bias][client]
            for piece in self._pieces(batch, height, width):
                grown = self._convolution(self._images(h, index, client, piece), weight, bias, precision)
                here = _channels_second(out[client, piece])
                if self.pool > 1:
                    _aten.max_pool2d_with_indices.out(
                        grown, [2, 2], [2, 2], out=here, indices=_channels_second(winner[client, piece])
                    )
                else:
                    here.copy_(grown)
        out.relu_()
        return out, (h, out, winner) if keep else None

    def backward(
        self,
        views: dict[str, Tensor],
        grad: Tensor,
        kept: Any,
        index: Tensor,
        into: dict[str, Tensor],
        inputs: bool,
        precision: str,
    ) -> Tensor | None:
        h, out, winner = kept
        grad = _aten.threshold_backward(grad.contiguous(), out, 0)
        clients, batch = index.shape
        height, width = h.shape[2:4]  # of [N, C, H, W] and of [m, b, H, W, C]
        below = torch.empty_like(h) if inputs else None
        for client in range(clients):
            weight = views[self.weight][client]
            of_weight, of_bias = into[self.weight][client].zero_(), into[self.bias][client].zero_()
            for piece in self._pieces(batch, height, width):
                wide = _channels_second(grad[client, piece])
                if self.pool > 1:
                    shape = (wide.shape[0], *self._before_pooling(height, width), self.channels)
                    like = _channels_second(torch.empty(shape, dtype=grad.dtype))
                    wide = _aten.max_pool2d_with_indices_backward(
                        wide, like, [2, 2], [2, 2], [0, 0], [1, 1], False, _channels_second(winner[client, piece])
                    )
                images = self._images(h, index, client, piece)
                found = self._convolution_backward(wide, images, weight, inputs, precision)
                if below is not None:
                    _channels_second(below[client, piece]).copy_(found[0])
                of_weight += found[1]
                of_bias += found[2]
        return below

    def _before_pooling(self, height: int, width: int) -> tuple[int, int]:
        grown = 2 * self.padding - self.side + 1
        return height + grown, width + grown

    def _pieces(self, batch: int, height: int, width: int) -> Iterator[slice]:
        tall, wide = self._before_pooling(height, width)
        count = -(-batch * self.channels * tall * wide // SLICE)
        size = -(-batch // max(1, min(count, batch)))  # all about as large
        for first in range(0, batch, size):
            yield slice(first, min(first + size, batch))

    def _images(self, h: Tensor, index: Tensor, client: int, piece: slice) -> Tensor:
        """Images [b, C, H, W] whose channels lie last in memory."""
        if self.first:
            images = h.index_select(0, index[client, piece])
            if images.shape[1] == 1:  # in either order, but by its strides the library takes it for channels first
                return _channels_second(images[:, 0, :, :, None])
            return images.contiguous(memory_format=torch.channels_last)
        return _channels_second(h[client, piece])

    def _convolution(self, images: Tensor, weight: Tensor, bias: Tensor, precision: str) -> Tensor:
        pad = [self.padding, self.padding]
        if precision == "bf16":
            images, weight, bias = (t.to(torch.bfloat16) for t in (images, weight, bias))
        out: Tensor = _aten.convolution(images, weight, bias, [1, 1], pad, [1, 1], False, [0, 0], 1)
        return out.to(torch.float32) if precision == "bf16" else out

    def _convolution_backward(
        self, grad: Tensor, images: Tensor, weight: Tensor, inputs: bool, precision: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        pad = [self.padding, self.padding]
        if precision == "bf16":
            grad, images, weight = (t.to(torch.bfloat16) for t in (grad, images, weight))
        found: tuple[Tensor, Tensor, Tensor] = _aten.convolution_backward(
            grad, images, weight, [self.channels], [1, 1], pad, [1, 1], False, [0, 0], 1, [inputs, True, True]
        )
        return found


def _channels_second(images: Tensor) -> Tensor:
    """[b, H, W, C] -> [b, C, H, W], the shape that the library wants, without moving anything."""
    return images.permute(0, 3, 1, 2)
