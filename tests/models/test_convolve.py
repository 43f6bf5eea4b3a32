"""Convolution, ReLU and pooling on a CPU against torch's own layers and autograd."""

import pytest
import torch
from torch import Tensor, nn

from kinfolk.models import convolve
from kinfolk.models.convolve import Convolve
from kinfolk.models.stack import Stack, stack_of

CLIENTS, BATCH = 3, 5


def layer_of(conv: nn.Conv2d, pool: int, first: bool) -> tuple[Convolve, dict[str, Tensor], dict[str, Tensor]]:
    """The layer, random parameters for each client, and a place for their gradients, all as rows of a matrix."""
    shapes = {"c.weight": conv.weight.shape, "c.bias": conv.bias.shape}  # type: ignore[union-attr]
    rows = torch.randn(CLIENTS, sum(s.numel() for s in shapes.values()), dtype=torch.float64) * 0.3
    places = [rows, torch.full_like(rows, torch.nan)]
    both = []
    for place in places:
        parts = place.split([s.numel() for s in shapes.values()], dim=1)
        both.append({name: part.view(CLIENTS, *shape) for (name, shape), part in zip(shapes.items(), parts)})
    return Convolve("c", conv, pool, first), both[0], both[1]


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("pool", [1, 2], ids=["plain", "pooled"])
@pytest.mark.parametrize(
    ("channels", "filters", "kernel", "padding", "size"),
    [(3, 4, 3, 0, (8, 8)), (1, 5, 5, 2, (7, 9)), (2, 1, 1, 0, (5, 4)), (4, 3, 3, 1, (2, 3)), (2, 3, 3, 2, (9, 6)),
     (1, 1, 3, 0, (4, 4))],
)  # fmt: skip
@pytest.mark.parametrize("at_a_time", [2**20, 100], ids=["whole batch", "in pieces"])
def test_a_layer_and_its_gradients_are_those_of_torch(
    channels: int, filters: int, kernel: int, padding: int, size: tuple[int, int], pool: int, first: bool,
    at_a_time: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(convolve, "SLICE", at_a_time)
    torch.manual_seed(kernel * 10 + padding)
    conv = nn.Conv2d(channels, filters, kernel, padding=padding)
    layer, views, into = layer_of(conv, pool, first)
    samples = torch.randn(20, channels, *size, dtype=torch.float64)
    index = torch.randint(20, (CLIENTS, BATCH))
    h = samples if first else samples[index].permute(0, 1, 3, 4, 2).contiguous()
    out, kept = layer.forward(views, h, index, True, "float64")
    grad = torch.randn(out.shape, dtype=torch.float64)
    below = layer.backward(views, grad, kept, index, into, not first, "float64")
    scored, nothing = layer.forward(views, h, index, False, "float64")
    assert nothing is None
    assert torch.equal(scored, out)
    for client in range(CLIENTS):
        x = samples[index[client]].requires_grad_()
        weight, bias = (views[name][client].clone().requires_grad_() for name in ("c.weight", "c.bias"))
        expected = nn.functional.conv2d(x, weight, bias, padding=padding).relu()
        if pool == 2:
            expected = nn.functional.max_pool2d(expected, 2)
        expected.backward(grad[client].permute(0, 3, 1, 2))
        close = {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(out[client].permute(0, 3, 1, 2), expected.detach(), **close)
        torch.testing.assert_close(into["c.weight"][client], weight.grad, **close)
        torch.testing.assert_close(into["c.bias"][client], bias.grad, **close)
        if below is not None:
            torch.testing.assert_close(below[client].permute(0, 3, 1, 2), x.grad, **close)
    assert (below is None) == first


def test_a_pixel_that_is_not_finite_reaches_the_result() -> None:
    layer, views, _ = layer_of(nn.Conv2d(1, 2, 3), 2, True)
    samples = torch.zeros(2, 1, 6, 6, dtype=torch.float64)
    samples[1, 0, 2, 2] = torch.nan
    out, _ = layer.forward(views, samples, torch.tensor([[0, 1]] * CLIENTS), False, "float64")
    assert torch.isfinite(out[:, 0]).all()
    assert torch.isnan(out[:, 1]).all()


def test_bf16_rounds_factors_and_stays_close() -> None:
    torch.manual_seed(0)
    layer, views, into = layer_of(nn.Conv2d(3, 8, 3), 2, True)
    views, into = ({name: t.float() for name, t in v.items()} for v in (views, into))
    samples, index = torch.randn(10, 3, 8, 8), torch.randint(10, (CLIENTS, BATCH))
    grad, found = torch.randn(CLIENTS, BATCH, 3, 3, 8), {}
    for precision in ("float32", "bf16"):
        out, kept = layer.forward(views, samples, index, True, precision)
        layer.backward(views, grad, kept, index, into, False, precision)
        found[precision] = [out, into["c.weight"].clone(), into["c.bias"].clone()]
    bounds = (0.01, 0.1, 0.1)  # gradients differ more: rounding changes which pixel of a window wins
    for exact, rounded, bound in zip(found["float32"], found["bf16"], bounds):
        assert rounded.dtype == torch.float32
        assert 0 < (exact - rounded).norm() / exact.norm() < bound


CONVOLUTIONS = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)]


@pytest.mark.parametrize(
    ("module", "shape", "words"),
    [
        (nn.Sequential(*CONVOLUTIONS, nn.Flatten(), nn.Linear(36, 3)), (3, 8, 8), None),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (3, 4), None),
        (nn.Sequential(nn.Linear(4, 2), nn.Flatten(), nn.Linear(6, 3)), (3, 4), "begin with Flatten"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)), (3, 8, 8), "stride"),
        (nn.Sequential(*CONVOLUTIONS, nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3)), (3, 8, 8), "followed by"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(16, 3)), (3, 8, 8),
         "pools otherwise"),
    ],
)  # fmt: skip
def test_which_nets_have_passes_of_their_own(module: nn.Module, shape: tuple[int, ...], words: str | None) -> None:
    names = tuple(name for name, _ in module.named_parameters())
    found = stack_of(module, names, shape, torch.device("cpu"), "float32")
    if words is None:
        assert isinstance(found, Stack)
    else:
        assert isinstance(found, str)
        assert words in found
