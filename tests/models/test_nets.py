"""The shipped nets: their sizes, their limits, and that every one of them has passes of its own."""

from typing import Any

import pytest
import torch
from torch import nn

from conftest import make_cohort, make_federation, tiny_experiment, train_plainly
from kinfolk import UserError
from kinfolk.cohort.layout import Layout
from kinfolk.config import read
from kinfolk.models import NETS, find, make
from kinfolk.models.norm import GroupNorm
from kinfolk.models.stack import Stack, stack_of
from kinfolk.privacy.clipping import Layered, clipping_for

SHAPES = {
    "linear": [(784,), (1, 28, 28)],
    "mlp": [(784,), (1, 28, 28)],
    "cnn": [(3, 32, 32), (1, 28, 28)],
    "cnn4": [(3, 32, 32), (1, 28, 28)],
    "cnn2": [(3, 32, 32), (1, 28, 28)],
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in NETS for shape in SHAPES[name]])
def test_every_net_has_passes_of_its_own(name: str, shape: tuple[int, ...], device: str) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
    net = NETS[name](shape, 10)
    names = tuple(key for key, _ in net.named_parameters())
    assert isinstance(stack_of(net, names, shape, torch.device(device), "float32"), Stack)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "weights"),
    [
        ("cnn", (3, 32, 32), 10, {}, 73_418),
        ("cnn4", (3, 32, 32), 10, {}, 878_538),
        ("cnn4", (1, 28, 28), 62, {}, 608_702),
        ("cnn4", (3, 32, 32), 10, {"padding": 2}, 2_156_490),
        ("cnn4", (1, 16, 16), 10, {"hidden": 7}, 832 + 51_264 + 64 * 7 + 7 + 80),
        ("cnn2", (1, 28, 28), 10, {}, 46_922),
        ("cnn2", (1, 8, 8), 10, {"padding": 2}, 832 + 512 * 10 + 10),
        ("cnn4", (1, 28, 28), 62, {"padding": 2, "hidden": 2048}, 6_603_710),  # LEAF's, for FEMNIST
        ("cnn-celeba", (3, 84, 84), 2, {}, 896 + 3 * 9_248 + 4 * 64 + 32 * 36 * 2 + 2),
        ("cnn-celeba", (3, 84, 84), 2, {"groups": 0}, 896 + 3 * 9_248 + 32 * 36 * 2 + 2),
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], weights: int) -> None:
    net = find(name)(shape, classes, **options)
    assert sum(p.numel() for p in net.parameters()) == weights
    assert net(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("cnn4", (1, 15, 28), {}, r"model 'cnn4' needs images .* \[1, 15, 28\], padding = 0"),
        ("cnn4", (784,), {}, r"the data have \[784\]"),
        ("cnn-celeba", (3, 84, 84), {"groups": 5}, "groups = 5 do not divide"),
        ("cnn-celeba", (784,), {}, r"needs images, the data have \[784\]"),
        ("cnn4", (3, 32, 32), {"hidden": 0}, "hidden = 0"),
        ("cnn4", (3, 32, 32), {"padding": 5}, "padding = 5"),
        ("cnn2", (1, 5, 5), {}, r"the data have \[1, 5, 5\]"),
        ("cnn2", (1, 28, 28), {"padding": -1}, "padding = -1"),
    ],
)
def test_what_a_net_cannot_take_is_one_line(
    name: str, shape: tuple[int, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        make(find(name), shape, 10, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "shape"), [("cnn4", (3, 18, 17)), ("cnn2", (1, 9, 8))])
def test_a_net_is_trained_as_by_a_plain_loop(name: str, shape: tuple[int, ...]) -> None:
    def factory() -> nn.Module:
        return NETS[name](shape, 3)

    cohort = make_cohort(make_federation([9, 5], shape), factory)
    cohort.train(1)
    expected = train_plainly(cohort, factory, 1)
    assert (cohort.weights - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_options_of_a_net_are_settings() -> None:
    config = read(tiny_experiment(), ["model.name=cnn4", "model.padding=2", "model.hidden=30"])
    assert config.model_options == {"hidden": 30, "padding": 2}
    with pytest.raises(UserError, match=r"unknown key 'model\.hidden'"):
        read(tiny_experiment(), ["model.name=cnn2", "model.hidden=3"])


@pytest.mark.parametrize(
    ("name", "shape", "weights"),
    [
        ("cnn-scattering", (243, 8, 8), 187_210),
        ("cnn-scattering", (81, 7, 7), 33_066),
        ("cnn-tanh", (3, 32, 32), 550_570),
        ("cnn-tanh", (1, 8, 8), 304_234),
    ],
)
def test_the_nets_of_p4(name: str, shape: tuple[int, ...], weights: int) -> None:
    net = find(name)(shape, 10)
    assert sum(p.numel() for p in net.parameters()) == weights
    assert net(torch.zeros(2, *shape)).shape == (2, 10)
    assert isinstance(clipping_for(net, Layout.of(net), shape), Layered)


def test_features_that_are_too_small_for_the_nets_of_p4_are_refused() -> None:
    for name in ("cnn-scattering", "cnn-tanh"):
        with pytest.raises(UserError, match=name):
            find(name)((3, 3, 3), 10)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 8, 6, 7), (5, 8)])
def test_group_normalisation_is_torchs(affine: bool, shape: tuple[int, ...]) -> None:
    ours, theirs = GroupNorm(4, 8, affine=affine), nn.GroupNorm(4, 8, affine=affine)
    if affine:
        for parameter in ours.parameters():
            nn.init.normal_(parameter)
        theirs.load_state_dict(ours.state_dict())
    z = torch.randn(shape)
    assert torch.allclose(ours(z), theirs(z), atol=1e-6)
