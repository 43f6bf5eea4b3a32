"""Filters in the order of the programs, and their gradients back from it, beside plain indexing."""

import pytest
import torch
from interpreted import DEVICE, randn
from torch import Tensor

from kinfolk.kernels import filters
from kinfolk.kernels.convolution import Convolution

LAYERS = [  # channels, filters, kernel, pool, first
    (3, 20, 3, 2, True),
    (1, 5, 5, 2, True),
    (3, 33, 3, 1, True),
    (6, 20, 3, 2, False),
    (16, 32, 5, 1, False),
]


def layer(channels: int, count: int, kernel: int, pool: int, first: bool) -> Convolution:
    return Convolution(channels, count, kernel, 1, pool, (12, 12), first)


def expected(conv: Convolution, weight: Tensor) -> Tensor:
    """The widened filter, number by number."""
    tall = conv.pool if conv.first else conv.kernel
    wide = torch.zeros(len(weight), conv.pool, conv.tile, tall, conv.line("float32"))
    for right in range(conv.pool):
        for down in range(conv.pool if conv.first else 1):
            for row in range(conv.kernel):
                for column in range(conv.kernel):
                    for channel in range(conv.channels):
                        at = (column + right) * conv.lying + channel
                        at, of = (at + (row + down) * conv.span, down) if conv.first else (at, row)
                        wide[:, right, : conv.filters, of, at] = weight[:, :, channel, row, column].cpu()
    return wide


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("apart", [False, True])
def test_a_filter_is_widened_with_zeros_around(shape: tuple[int, int, int, int, bool], apart: bool) -> None:
    conv = layer(*shape)
    channels, count, kernel = shape[:3]
    weight = randn(3, count, channels, kernel, kernel)
    if apart:  # each filter with its bias behind it, and clients with something between them
        numbers = channels * kernel**2
        weight = randn(3, count * (numbers + 1) + 7)[:, : count * (numbers + 1)].view(3, count, numbers + 1)[:, :, :-1]
        weight = weight.view(3, count, channels, kernel, kernel)
    assert torch.equal(conv.widened(weight, "float32").cpu(), expected(conv, weight))


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("shares", [1, 5, 18])
@pytest.mark.parametrize("given", [False, True])
def test_a_gradient_goes_back_where_its_number_came_from(
    shape: tuple[int, int, int, int, bool], shares: int, given: bool
) -> None:
    """Each number of a filter gets what all of its copies in the widened one have got, from all shares."""
    conv = layer(*shape)
    channels, count, kernel = shape[:3]
    tall, line = conv.pool if conv.first else conv.kernel, conv.line("float32")
    dw, db = randn(shares, 2, tall, line, conv.pool, conv.tile, seed=1), randn(shares, 2, count, seed=2)
    numbers = count * channels * kernel**2
    block = torch.full((2, numbers + count + 3), 7.0, device=DEVICE)
    views = block[:, :numbers].view(2, count, channels, kernel, kernel), block[:, numbers : numbers + count]
    weight, bias = filters.narrow(dw, db, views if given else None, conv._shape(), wide=True)
    probe = randn(numbers, seed=3).view(1, count, channels, kernel, kernel)
    whole = dw.double().sum(dim=0).permute(0, 3, 4, 1, 2).cpu()  # as `widened` lays it out
    for client in range(2):
        there = (expected(conv, probe)[0].double() * whole[client]).sum()
        back = (probe[0].double() * weight[client].double()).sum().cpu()
        torch.testing.assert_close(back, there, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(bias, db.sum(dim=0), rtol=1e-5, atol=1e-5)
    one = torch.zeros(1, count, channels, kernel, kernel)
    one[0, count - 1, channels - 1, kernel - 1, 0] = 1
    exact = (expected(conv, one)[0].double() * whole[1]).sum()
    torch.testing.assert_close(
        weight[1, count - 1, channels - 1, kernel - 1, 0].double().cpu(), exact, atol=1e-5, rtol=0
    )
    if given:
        assert weight.data_ptr() == block.data_ptr()
        assert bool((block[:, numbers + count :] == 7).all())


@pytest.mark.parametrize("shares", [1, 5, 18])
@pytest.mark.parametrize("shape", LAYERS)
def test_a_gradient_by_taps_is_put_in_order(shape: tuple[int, int, int, int, bool], shares: int) -> None:
    conv = layer(*shape)
    channels, count, kernel = shape[:3]
    dw, db = randn(shares, 2, kernel, kernel, conv.lying, count, seed=1), randn(shares, 2, count, seed=2)
    weight, bias = filters.narrow(dw, db, None, conv._shape(), wide=False)
    in_order = dw.sum(dim=0)[:, :, :, :channels].permute(0, 4, 3, 1, 2)
    torch.testing.assert_close(weight, in_order, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias, db.sum(dim=0), rtol=1e-5, atol=1e-5)
