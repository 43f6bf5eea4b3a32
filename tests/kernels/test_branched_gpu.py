"""FedCG's own passes on a GPU against autograd over its module; without a GPU in Triton's interpreter."""

from typing import Any

import pytest
import torch
from interpreted import DEVICE
from torch import Tensor, nn

from kinfolk.cohort.layout import Layout
from kinfolk.cohort.program import Branching, Derived, program_for
from kinfolk.methods.fedcg import FedCG
from kinfolk.models import branched_gpu
from kinfolk.models import nets as kinfolk_nets

CLIENTS, BATCH, SAMPLES, CLASSES, DOMAINS = 2, 4, 12, 4, 3
GPU = torch.device("cuda")
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter has no bf16")


def cnn(channels: int = 2) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 3, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, CLASSES),
    )  # fmt: skip


NETS = {
    "cnn": (cnn, 2),
    "cnn with many channels": (lambda: cnn(6), 6),
    "one convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(300, CLASSES)), 1,
    ),
    "mlp": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(100, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, CLASSES)
        ), 1,
    ),
    "mlp without bias": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(100, 9, bias=False), nn.ReLU(), nn.Linear(9, CLASSES, bias=False)
        ), 1,
    ),
}  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {},
    {"preset": "paper"},
    {"layers": "all", "first_graph": "rand"},
    {"layers": "all", "graph_layers": 2, "granularity": "full"},
    {"layers": "whole"},
    {"agnostic": False, "first_graph": "rand"},
    {"granularity": "full", "first_graph": "rand", "param_relu": True},
]


def both(net: str, settings: dict[str, Any], precision: str, omega: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and gradient of random models, by our passes and by autograd."""
    torch.manual_seed(3)
    make, channels = NETS[net]
    shape = (channels, 10, 10)
    module = FedCG(domains=DOMAINS, **settings).wrap(make(), shape).to(DEVICE)
    layout, size = Layout.of(module), channels * 100
    given = torch.eye(DOMAINS)[torch.randint(DOMAINS, (SAMPLES,))]
    if omega == "soft":
        given[::2] = torch.rand(SAMPLES // 2, DOMAINS).softmax(dim=1)
        given[1] = 0
    x = torch.cat([torch.randn(SAMPLES, size), given], dim=1).to(DEVICE)
    y, index = torch.randint(CLASSES, (SAMPLES,)).to(DEVICE), torch.randint(SAMPLES, (CLIENTS, BATCH)).to(DEVICE)
    share = torch.full((CLIENTS, BATCH), 1 / BATCH, device=DEVICE)
    share[1, 3:], share[1, :3] = 0, 1 / 3
    block = layout.flatten(module) + 0.1 * torch.randn(CLIENTS, layout.size).to(DEVICE)
    program, _ = program_for(module, layout, (size + DOMAINS,), GPU, precision)
    assert isinstance(program, Branching)
    spare = [torch.full_like(block, torch.nan)]
    loss, (gradient,) = program.gradients([block], program.samples(x), y[index], index, share, spare)
    module.train()
    derived = Derived(module, layout, "float32", DEVICE)
    wanted, parts = derived.gradients(derived.slots(block), x, y[index], index, share)
    return loss, gradient, wanted, torch.cat([part.reshape(CLIENTS, -1) for part in parts], dim=1)


CASES = [
    *((net, settings, "soft") for net in ("mlp", "mlp without bias") for settings in SETTINGS),
    *(("one convolution", settings, "soft") for settings in SETTINGS[1:]),
    ("cnn", {}, "hard"),
    ("cnn", {"layers": "all", "first_graph": "rand"}, "soft"),
    ("cnn with many channels", {}, "soft"),
    ("cnn with many channels", {"layers": "whole"}, "hard"),
]


@pytest.mark.parametrize(("net", "settings", "omega"), CASES, ids=str)
def test_gradients_are_those_of_autograd(net: str, settings: dict[str, Any], omega: str) -> None:
    loss, gradient, wanted, expected = both(net, settings, "float32", omega)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("net", ["cnn", "cnn with many channels", "one convolution"])
def test_convolutions_may_be_multiplied_with_all_domains_at_once(
    net: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are where filters are large and images small: the last ones of a deep net."""
    monkeypatch.setattr(branched_gpu, "_as_own", lambda shape: 10**9)
    settings = {"layers": "all"} | settings
    loss, gradient, wanted, expected = both(net, settings, "float32", "soft")
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_a_large_filter_for_few_pixels_is_not_mixed_for_each_sample() -> None:
    """The net `cnn` on 28×28 pixels: its last convolution has 36,928 weights for the 4 pixels that pooling looks at."""
    for name, kind in (("cnn", branched_gpu.ByDomains), ("cnn2", branched_gpu.Own)):
        module = FedCG().wrap(kinfolk_nets.NETS[name]((1, 28, 28), 10), (1, 28, 28))
        stack = branched_gpu.programmed_stack(module, Layout.of(module).names, GPU, "float32")  # type: ignore[arg-type]
        assert isinstance(stack, branched_gpu.ProgrammedStack)
        assert [type(layer) for layer in stack.layers if isinstance(layer, branched_gpu.Branches)] == [kind]


@pytest.mark.parametrize("net", [pytest.param("cnn", marks=on_gpu), "mlp"])
def test_bf16_rounds_factors_and_stays_close(net: str) -> None:
    _, gradient, _, expected = both(net, {}, "bf16", "soft")
    assert gradient.dtype == torch.float32
    assert 0 < (gradient - expected).norm() / expected.norm() < 0.1


def test_more_samples_than_a_gpu_counts_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = both("cnn", {"layers": "all"}, "float32", "soft")[:2]
    monkeypatch.setattr(branched_gpu, "MOST", 3)  # of eight
    for found, wanted in zip(both("cnn", {"layers": "all"}, "float32", "soft")[:2], whole):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
