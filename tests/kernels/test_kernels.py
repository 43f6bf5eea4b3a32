"""The GPU programs against plain torch: run by Triton's interpreter where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE, randn
from torch import Tensor, nn

from kinfolk.cohort.layout import Layout
from kinfolk.cohort.program import Derived, Explicit
from kinfolk.kernels.blend import blend
from kinfolk.kernels.convolution import Convolution
from kinfolk.kernels.descent import descend
from kinfolk.kernels.windows import DEAD as NOBODY
from kinfolk.models import NETS
from kinfolk.models.stack import Stack, stack_of

DEAD = int(NOBODY.value)  # in winners: the ReLU cut the window off
M, B = 2, 3
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")


def off(ours: Tensor, right: Tensor) -> float:
    return float((ours.double() - right).norm() / right.norm())


def compare(conv: Convolution, first: bool, precision: str = "float32") -> dict[str, float]:
    """Relative errors of a layer's output and gradients against autograd in float64.

    Rounded factors turn a few maxima around, so gradients are compared along the pixels that our forward pass chose;
    "choice" is how far these lie below the largest.
    """
    shape = (conv.channels, conv.height, conv.width)
    data = randn(9, *shape, seed=1)
    index = torch.randint(9, (M, B + 2), generator=torch.Generator().manual_seed(2)).to(DEVICE)[:, :B]  # strided
    weight = 0.2 * randn(M, conv.filters, conv.channels, conv.kernel, conv.kernel, seed=3)
    bias = randn(M, conv.filters + 5, seed=4)[:, : conv.filters]  # a view into rows, as in a matrix of models
    images = data[index].double().requires_grad_()
    exact = [weight.double().requires_grad_(), bias.double().requires_grad_()]
    planes = torch.stack([F.conv2d(images[i], exact[0][i], exact[1][i], padding=conv.padding) for i in range(M)])
    panes = _panes(planes, conv.pool)
    expected = F.relu(panes.amax(dim=-1))
    grad = randn(*expected.shape, seed=5)

    x = conv.samples(data, precision) if conv.first else data[index].permute(0, 1, 3, 4, 2).contiguous()
    wide = conv.widened(weight, precision)
    out, winner = conv.forward(x, index, wide, bias, True, precision)
    assert winner is not None
    assert torch.equal(out, conv.forward(x, index, wide, bias, False, precision)[0])
    alive = winner != DEAD
    chosen = panes.gather(-1, winner.long().clamp(max=conv.pool**2 - 1)[..., None])[..., 0] * alive
    wanted = torch.autograd.grad(chosen, [*exact, images], grad.double())
    dw, db, below = conv.backward(x, index, weight, wide, winner, grad, not conv.first, precision)
    errors = {
        "out": off(out, expected.detach()),
        "choice": off(chosen.detach(), expected.detach()),
        "weight": off(dw, wanted[0]),
        "bias": off(db, wanted[1]),
    }
    if below is not None:
        errors["inputs"] = off(below, wanted[2].permute(0, 1, 3, 4, 2))
    return errors


def _panes(planes: Tensor, pool: int) -> Tensor:
    """[m, b, O, H, W] -> [m, b, PH, PW, O, pool * pool]: what each window of pooling sees, row by row."""
    high, wide = (side // pool for side in planes.shape[3:])
    cut = planes[..., : high * pool, : wide * pool].unflatten(4, (wide, pool)).unflatten(3, (high, pool))
    return cut.permute(0, 1, 3, 5, 2, 4, 6).flatten(5)


@pytest.mark.parametrize(
    ("channels", "filters", "kernel", "padding", "pool", "size", "first"),
    [
        (3, 8, 3, 0, 2, (10, 10), True),
        (1, 6, 5, 2, 1, (6, 7), True),
        (4, 6, 3, 1, 2, (7, 6), True),
        (20, 6, 3, 1, 1, (5, 6), True),  # more channels than are padded to: taken like an inner layer
        (16, 8, 3, 0, 2, (7, 7), False),
        (5, 20, 3, 1, 2, (6, 7), False),
        (5, 6, 1, 0, 1, (4, 3), False),
        (33, 17, 2, 0, 2, (5, 5), False),
        (3, 32, 5, 0, 2, (9, 9), True),
        (1, 32, 5, 0, 2, (8, 9), True),
        pytest.param(32, 64, 5, 0, 2, (7, 8), False, marks=pytest.mark.slow),  # cnn4 has this layer, below
        (72, 70, 2, 1, 2, (2, 3), False),  # wider than a factor is taken at a time
    ],
)
def test_a_convolution_and_its_gradients_are_those_of_autograd(
    channels: int, filters: int, kernel: int, padding: int, pool: int, size: tuple[int, int], first: bool
) -> None:
    errors = compare(Convolution(channels, filters, kernel, padding, pool, size, first), first)
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize(
    ("precision", "bound"),
    [("tf32", 2e-3), pytest.param("bf16", 1e-2, marks=on_gpu)],  # 2^-11 and 2^-9 a factor; the interpreter has no bf16
)
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("first", [True, False])
def test_rounded_factors_stay_within_their_bounds(precision: str, bound: float, kernel: int, first: bool) -> None:
    errors = compare(Convolution(3 if first else 32, 64, kernel, 0, 2, (8, 7), first), first, precision)
    assert max(errors.values()) < bound, errors


def test_not_a_number_is_not_hidden() -> None:
    conv = Convolution(3, 4, 3, 0, 2, (6, 6), True)
    data, index = randn(2, 3, 6, 6), torch.tensor([[0, 1]], device=DEVICE)
    data[1, 0, 3, 3] = torch.nan
    wide = conv.widened(randn(1, 4, 3, 3, 3, seed=1), "float32")
    out, _ = conv.forward(conv.samples(data, "float32"), index, wide, randn(1, 4, seed=2), False, "float32")
    assert not out[0, 0].isnan().any()
    assert out[0, 1].isnan().any()


@pytest.mark.parametrize(("name", "shape"), [("cnn", (3, 22, 22)), ("cnn4", (3, 17, 16)), ("cnn2", (1, 9, 9))])
def test_a_whole_net_has_the_gradients_of_autograd(name: str, shape: tuple[int, ...]) -> None:
    net = NETS[name](shape, 10).to(DEVICE)
    layout = Layout.of(net)
    found = stack_of(net, layout.names, shape, torch.device("cuda"), "float32")
    assert isinstance(found, Stack)
    explicit, derived = Explicit(found, layout), Derived(net, layout, "float64", DEVICE)
    block = layout.flatten(net) + 0.01 * randn(M, layout.size)
    x, labels = randn(5, *shape, seed=1), torch.tensor([[1, 2], [4, 5]], device=DEVICE)
    index = torch.tensor([[0, 2], [4, 0]], device=DEVICE)
    share = torch.tensor([[1.0, 0.0], [0.3, 0.7]], device=DEVICE)
    loss, ours = explicit.gradients(explicit.slots(block), explicit.samples(x), labels, index, share)
    exact = derived.forward.module.double()
    right, theirs = Derived(exact, layout, "float64", DEVICE).gradients(
        derived.slots(block.double()), x.double(), labels, index, share
    )
    torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=1e-6)
    views = layout.views(ours[0])
    for name, gradient in zip(layout.names, theirs):
        assert off(views[name], gradient) < 2e-6, name
    logits = explicit.logits(block, explicit.samples(x), index)
    torch.testing.assert_close(logits.double(), Derived(exact, layout, "float64", DEVICE).logits(
        block.double(), x.double(), index
    ), rtol=1e-5, atol=1e-5)  # fmt: skip


def test_a_net_that_cannot_be_a_stack_says_why() -> None:
    layout = Layout.of(nn.Conv2d(3, 4, 3))
    odd = [
        (nn.Conv2d(3, 4, 3), "nn.Sequential"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)), "stride 1"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)), "ReLU"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(4, 2)), "pools"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2)), "Flatten"),
    ]
    for net, words in odd:
        layout = Layout.of(net)
        found = stack_of(net, layout.names, (3, 8, 8), torch.device("cuda"), "float32")
        assert isinstance(found, str)
        assert words in found


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_two_steps_of_descent_are_those_of_the_formula(decay: float) -> None:
    weights, gradients = randn(5, 1500), [randn(5, 1500, seed=1), randn(5, 1500, seed=2)]
    rates = torch.tensor([0.1, 0.0, 0.1, 0.2, 0.0], device=DEVICE)
    stale = torch.stack([rates, rates + 1], dim=1)[:, 0]  # a column of a matrix
    ours, velocity = weights.clone(), gradients[0].clone()
    descend(ours, velocity, velocity, stale, 0.9, decay, first=True)
    descend(ours, velocity, gradients[1], stale, 0.9, decay, first=False)
    right, speed = weights.double(), torch.zeros(5, 1500, dtype=torch.float64, device=DEVICE)
    for gradient in gradients:
        speed = 0.9 * speed + gradient + decay * right
        right = right - rates[:, None] * speed
    torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours[1], weights[1])  # a rate of 0 stands still


def test_blending_is_the_weighted_sum_of_those_who_are_there() -> None:
    mine, theirs = randn(4, 1100), randn(7, 1100, seed=1)
    rows = torch.tensor([[0, -1, 3], [1, 2, 6], [-1, -1, -1], [5, 5, 0]], device=DEVICE)
    shares, own = randn(4, 3, seed=2).abs(), randn(4, seed=3).abs()
    poisoned = theirs.clone()
    poisoned[4] = torch.nan  # nobody asked for it
    expected = own[:, None] * mine + (theirs[rows.clamp(min=0)] * (shares * (rows >= 0))[:, :, None]).sum(dim=1)
    torch.testing.assert_close(blend(mine, poisoned, rows, shares, own), expected, rtol=1e-5, atol=1e-5)
    wide = torch.cat([mine, mine], dim=1)[:, :1100]  # rows that do not lie one behind another
    torch.testing.assert_close(blend(wide, poisoned, rows, shares, own), expected, rtol=1e-5, atol=1e-5)
