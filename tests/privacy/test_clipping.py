"""Clipped sums: against a plain loop over clients and samples, and what one record can do to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.cohort.layout import Layout
from kinfolk.errors import UserError
from kinfolk.privacy import clipping
from kinfolk.privacy.accounting import Sampling
from kinfolk.privacy.clipping import Layered, Single, clipping_for
from kinfolk.privacy.dpsgd import PrivateGradients
from kinfolk.privacy.losses import cross_entropy, distilled
from kinfolk.privacy.sampling import Batches, draw
from kinfolk.privacy.source import Seeded

CLASSES, CLIP = 4, 0.7
IMAGE = (2, 8, 8)


class Curious(nn.Module):
    """A net we do not know: layers used twice, multiplied, with a norm that has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(128, 12), nn.Linear(12, CLASSES), nn.GroupNorm(3, 12)
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x.flatten(1))))
        return self.scale * self.last(h) + self.last(h * h)


NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, CLASSES)),
    "no bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, CLASSES, bias=False)),
    "relu": lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 9), nn.ReLU(), nn.Linear(9, CLASSES)),
    "tanh": lambda: nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(128, 9), nn.Tanh()), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, CLASSES)
    ),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3, bias=False), nn.ReLU(), nn.Flatten(),
        nn.Linear(5, CLASSES),
    ),
    "strides": lambda: nn.Sequential(
        nn.GroupNorm(2, 2, affine=False), nn.Conv2d(2, 8, 3, stride=2, padding=1), nn.Tanh(),
        nn.Conv2d(8, 4, (1, 2), dilation=2), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, CLASSES),
    ),
    "unknown": Curious,
}  # fmt: skip


def task(name: str, dtype: torch.dtype = torch.float64, sizes: tuple[int, ...] = (5, 17, 9)) -> tuple[nn.Module, ...]:
    """A net, models of clients [m, d], all their samples [N, ...], labels [N], and where each client's begin."""
    torch.manual_seed(len(name))
    module = NETS[name]().to(dtype)
    layout = Layout.of(module)
    models = 0.4 * torch.randn(len(sizes), layout.size, dtype=torch.float64)
    x = torch.randn(sum(sizes), *IMAGE, dtype=torch.float64) * 1.5
    y = torch.randint(CLASSES, (sum(sizes),))
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    return module, layout, models.to(dtype), x.to(dtype), y, starts, torch.tensor(sizes)  # type: ignore[return-value]


def plainly(
    module: nn.Module, layout: Layout, model: Tensor, x: Tensor, losses: Callable[[Tensor, int], Tensor], clip: float
) -> Tensor:
    """What one client should find, as anybody would write it: [d]"""
    layout.load(model, module)
    total = torch.zeros(layout.size, dtype=model.dtype)
    for number in range(x.shape[0]):
        loss = losses(module(x[number : number + 1]), number)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        total += gradient / max(1.0, float(gradient.norm()) / clip)
    return total


def gathered(values: Tensor, starts: Tensor, batches: Batches) -> Tensor:
    return values[batches.rows(starts)]


@pytest.mark.parametrize("sampling", ["none", "poisson", "without-replacement"])
@pytest.mark.parametrize("name", NETS)
def test_sums_are_those_of_a_plain_loop(name: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    module, layout, models, x, y, starts, sizes = task(name)
    gradients = PrivateGradients(module, layout, IMAGE, CLIP)
    assert isinstance(gradients.clipping, Single if name == "unknown" else Layered)
    batches = draw(Seeded(1), 1, torch.arange(3), sizes, sampling, 0.6 if sampling != "none" else 1.0)
    labels = gathered(y, starts, batches)
    found = gradients.sums(models, x, starts, batches, (labels,))
    for row in range(3):
        index = (starts[row] + batches.positions[row])[: int(batches.counts[row])]
        mine = y[index]
        expected = plainly(
            module, layout, models[row], x[index], lambda s, i: F.cross_entropy(s, mine[i : i + 1]), CLIP  # noqa: B023
        )  # fmt: skip
        torch.testing.assert_close(found.total[row], expected, rtol=0, atol=2e-6 * CLIP * len(index))
    assert float(found.clipped.max()) > 0
    # Without the margin for rounding it is the same to ten digits, and so it is in small chunks.
    monkeypatch.setattr(clipping, "SHRINK", 0.0)
    exact = gradients.sums(models, x, starts, batches, (labels,)).total
    torch.testing.assert_close(exact[2], expected, rtol=1e-10, atol=1e-10)
    monkeypatch.setattr(clipping, "NUMBERS", 3 * gradients.clipping.numbers)
    torch.testing.assert_close(
        gradients.sums(models, x, starts, batches, (labels,)).total, exact, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", NETS)
def test_float32_is_close_to_float64(name: str) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        module, layout, models, x, y, starts, sizes = task(name, dtype)
        batches = draw(Seeded(0), 1, torch.arange(3), sizes, "none")
        gradients = PrivateGradients(module, layout, IMAGE, CLIP)
        found.append(gradients.sums(models, x, starts, batches, (gathered(y, starts, batches),)).total.double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["linear", "tanh", "unknown"])
def test_distillation_is_part_of_what_is_clipped(name: str) -> None:
    module, layout, models, x, y, starts, sizes = task(name)
    batches = draw(Seeded(0), 1, torch.arange(3), sizes, "none")
    others = torch.softmax(torch.randn(3, 17, CLASSES, dtype=torch.float64), dim=2)
    gradients = PrivateGradients(module, layout, IMAGE, CLIP)
    found = gradients.sums(models, x, starts, batches, (gathered(y, starts, batches), others), distilled(0.3)).total
    for row in range(3):
        index = starts[row] + torch.arange(int(sizes[row]))

        def loss(scores: Tensor, i: int) -> Tensor:
            divergence = F.kl_div(F.log_softmax(scores, dim=1), others[row, i : i + 1], reduction="sum")  # noqa: B023
            return 0.7 * F.cross_entropy(scores, y[index[i : i + 1]]) + 0.3 * divergence  # noqa: B023

        expected = plainly(module, layout, models[row], x[index], loss, CLIP)
        torch.testing.assert_close(found[row], expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", NETS)
def test_a_client_finds_the_same_bits_alone_and_among_others(name: str) -> None:
    module, layout, models, x, y, starts, sizes = task(name, torch.float32, (20, 33, 20, 20, 7))
    gradients = PrivateGradients(module, layout, IMAGE, CLIP)
    source, ids = Seeded(5), torch.tensor([4, 9, 2, 30, 11])
    for sampling in ("none", "poisson", "without-replacement"):
        rate = 1.0 if sampling == "none" else 0.5

        def total(rows: list[int]) -> Tensor:
            batches = draw(source, 3, ids[rows], sizes[rows], sampling, rate)  # type: ignore[arg-type] # noqa: B023
            labels = gathered(y, starts[rows], batches)
            deviation = torch.full((len(rows),), 0.1)
            return gradients(models[rows], x, starts[rows], batches, (labels,), deviation, source, 3, ids[rows])[0]

        together = total([0, 1, 2, 3, 4])
        for part in ([0], [4, 1], [2, 3]):
            if name == "unknown":  # vmap's products depend on how many there are
                torch.testing.assert_close(total(part), together[part])
            else:
                assert torch.equal(total(part), together[part])


# -- what one record can do --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["linear", "relu", "cnn", "unknown"])
def test_one_record_moves_a_sum_by_at_most_twice_the_clipping_norm(name: str, dtype: torch.dtype) -> None:
    """1,000 neighbouring pairs in all; a fifth of the new records are extreme."""
    pairs, size = 125, 6
    module, layout, _, _, _, _, _ = task(name, dtype)
    gradients = PrivateGradients(module, layout, IMAGE, CLIP)
    models = torch.randn(pairs, layout.size, dtype=dtype) * torch.logspace(-2, 1, pairs, dtype=dtype)[:, None]
    x, y = torch.randn(pairs, size, *IMAGE, dtype=dtype), torch.randint(CLASSES, (pairs, size))
    other, label = x.clone(), y.clone()
    other[:, 2], label[:, 2] = torch.randn(pairs, *IMAGE, dtype=dtype) * 3, torch.randint(CLASSES, (pairs,))
    extreme = torch.arange(pairs) % 5 == 0
    other[extreme, 2] *= torch.logspace(-6, 12, int(extreme.sum()), dtype=dtype)[:, None, None, None]
    other[5, 2], other[10, 2], other[15, 2] = torch.nan, torch.inf, 0
    x[20, 2], other[20, 2], label[20, 2] = 50, -50, (y[20, 2] + 1) % CLASSES
    everything = draw(Seeded(0), 1, torch.arange(pairs), torch.full((pairs,), size), "none")

    def sums(samples: Tensor, labels: Tensor) -> Tensor:
        starts = torch.arange(pairs) * size
        return gradients.sums(models, samples.flatten(0, 1), starts, everything, (labels,)).total.double()

    moved = (sums(x, y) - sums(other, label)).norm(dim=1)
    assert torch.isfinite(moved).all()
    assert float(moved.max()) <= 2 * CLIP * (1 + 1e-6)
    assert float(moved.max()) > 1.2 * CLIP, "no pair came near the bound: the test would not notice a wrong one"


@pytest.mark.parametrize("channels", [2, 16])
def test_what_cancels_between_positions_leaves_no_loud_rounding(channels: int) -> None:
    """A huge constant image whose gradient is zero but for rounding, which no norm may overlook."""
    module = nn.Sequential(nn.Conv2d(1, channels, 3), nn.Flatten(), nn.Linear(channels * 9, 2))
    layout = Layout.of(module)
    generator = torch.Generator().manual_seed(0)
    models = torch.zeros(1, layout.size)
    ways = torch.randn(2, channels, 9, generator=generator)
    layout.views(models)["2.weight"][0] = (ways - ways.mean(dim=2, keepdim=True)).flatten(1)
    gradients = PrivateGradients(module, layout, (1, 5, 5), 2.0)
    batches = draw(Seeded(0), 1, torch.arange(1), torch.tensor([1]), "none")
    for loudness in (1e3, 1e6, 1e9, 1e12):
        x = torch.full((1, 1, 5, 5), loudness) * (1 + 1e-3 * torch.randn(1, 1, 5, 5, generator=generator))
        found = gradients.sums(models, x, torch.zeros(1, dtype=torch.int64), batches, (torch.tensor([[1]]),)).total
        assert float(found.double().norm()) <= 2.0 * (1 + 1e-6)


def test_a_record_with_a_broken_gradient_counts_for_nothing() -> None:
    module, layout, models, x, y, starts, sizes = task("relu")
    gradients = PrivateGradients(module, layout, IMAGE, CLIP)
    batches = draw(Seeded(0), 1, torch.arange(3), sizes, "none")
    x[2] = torch.nan
    labels = gathered(y, starts, batches)
    found = gradients.sums(models, x, starts, batches, (labels,)).total
    kept = torch.tensor([0, 1, 3, 4])
    mine = y[kept]
    expected = plainly(
        module, layout, models[0], x[kept], lambda s, i: F.cross_entropy(s, mine[i : i + 1]), CLIP
    )  # fmt: skip
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5)


# -- memory, and what is refused ---------------------------------------------------------------------------------


def test_chunks_keep_memory_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    module, layout, _, _, _, _, sizes = task("unknown", sizes=(40, 25, 40))
    gradients = PrivateGradients(module, layout, IMAGE, CLIP)
    monkeypatch.setattr(clipping, "NUMBERS", 10 * gradients.clipping.numbers)
    batches = draw(Seeded(0), 1, torch.arange(3), sizes, "none")
    layers = gradients._groups(batches, clipping.NUMBERS)
    for group in [group for layer in layers for group in layer]:
        assert group[0].numel() * (group[1].stop - group[1].start) <= 10
    seen = [(row, c) for layer in layers for rows, columns in layer for row in rows.tolist()
            for c in range(columns.start, columns.stop)]  # fmt: skip
    assert sorted(seen) == [(row, c) for row in range(3) for c in range(int(sizes[row]))]


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(2), nn.SyncBatchNorm(2)])
def test_batch_norm_is_refused(layer: nn.Module) -> None:
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(128, 4))
    with pytest.raises(UserError, match=r"mixes the records of a batch.*GroupNorm\(groups, 2\)"):
        clipping_for(module, Layout.of(module), IMAGE)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf")])
def test_a_wrong_clipping_norm_is_refused(clip: float) -> None:
    module = NETS["linear"]()
    with pytest.raises(UserError, match="clipping norm must be a positive number"):
        PrivateGradients(module, Layout.of(module), IMAGE, clip)


def test_what_is_not_understood_goes_sample_by_sample() -> None:
    for module in (
        nn.Sequential(nn.Flatten(), nn.Linear(128, 8), nn.Softplus(), nn.Linear(8, 4)),
        nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(144, 4)),
        nn.Sequential(nn.Conv2d(2, 4, 3, padding="same"), nn.Flatten(), nn.Linear(256, 4)),
        nn.Sequential(nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(128, 4)),
    ):
        assert isinstance(clipping_for(module, Layout.of(module), IMAGE), Single)
    tied = nn.Sequential(nn.Flatten(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
    tied[3].weight = tied[1].weight
    assert isinstance(clipping_for(tied, Layout.of(tied), IMAGE), Single)


def test_losses_of_samples() -> None:
    scores, labels = torch.randn(2, 3, CLASSES), torch.randint(CLASSES, (2, 3))
    others = F.one_hot(labels, CLASSES).float()
    torch.testing.assert_close(distilled(1.0)(scores, labels, others), cross_entropy(scores, labels))
