"""Linear layers, cross-entropy and products of all pairs on a GPU; without one in Triton's interpreter."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE, randn, take_over
from torch import Tensor

from kinfolk.cohort.layout import Layout
from kinfolk.kernels import dense, entropy, gram, rows
from kinfolk.matching import similarity
from kinfolk.models import NETS
from kinfolk.models.dense_gpu import DenseProgram
from kinfolk.models.stack import Dense, Gather, Layer, Stack

on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter has no bf16")
PRECISIONS = [("float32", 2e-6), ("tf32", 2e-3), pytest.param("bf16", 1e-2, marks=on_gpu)]
SHAPES = [(3, 5, 7, 4), (2, 40, 33, 70), (1, 1, 784, 10), (2, 130, 20, 200)]  # clients, samples, inputs, outputs


def off(ours: Tensor, right: Tensor) -> float:
    return float((ours.double() - right).norm() / right.norm())


def rows_of(m: int, shapes: list[tuple[int, ...]], seed: int, room: int = 0) -> list[Tensor]:
    """Parameters [m, *shape] that lie side by side in a row, with room between rows."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    rows = randn(m, sum(sizes) + room, seed=seed)
    return [part.view(m, *shape) for part, shape in zip(rows[:, : sum(sizes)].split(sizes, dim=1), shapes)]


@pytest.mark.parametrize(("precision", "bound"), PRECISIONS)
@pytest.mark.parametrize(("m", "b", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_layer_and_its_gradients_are_those_of_autograd(
    m: int, b: int, inputs: int, outputs: int, relu: bool, gather: bool, biased: bool, precision: str, bound: float
) -> None:
    weight, bias = rows_of(m, [(outputs, inputs), (outputs,)], seed=1, room=3)
    data = randn(11, inputs, seed=2)
    index = torch.randint(11, (m, b + 2), generator=torch.Generator().manual_seed(3)).to(DEVICE)[:, :b]  # strided
    x = data if gather else data[index]
    out = dense.forward(x, index, weight, bias if biased else None, relu, gather, precision)

    exact = [t.double().requires_grad_() for t in (data[index], weight, bias)]
    flat = exact[0] @ exact[1].transpose(1, 2) + (exact[2][:, None] if biased else 0)
    assert off(out, (F.relu(flat) if relu else flat).detach()) < bound

    grad = randn(*out.shape, seed=4)
    passed = flat * (out > 0) if relu else flat  # along what our forward pass let through
    wanted = torch.autograd.grad(passed, exact if biased else exact[:2], grad.double())
    into = [part.fill_(torch.nan) for part in rows_of(m, [(outputs, inputs), (outputs,)], seed=1, room=5)]
    dense.weights_backward(x, index, grad, out, into[0], into[1] if biased else None, relu, gather, precision)
    assert off(into[0], wanted[1]) < bound
    if biased:
        assert off(into[1], wanted[2]) < 1e-5  # a sum of numbers that are not rounded
    else:
        assert into[1].isnan().all()


@pytest.mark.parametrize(("precision", "bound"), PRECISIONS)
@pytest.mark.parametrize("batch", [3, 20, 40])
def test_a_whole_net_of_programs_is_that_of_the_library(
    batch: int, precision: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, gradients and scores; batches for which all is done by programs, and some."""
    net = NETS["mlp"]((30,), 5, hidden=24, layers=2).to(DEVICE)
    layout = Layout.of(net)
    names = [name.removesuffix(".weight") for name in layout.names if name.endswith(".weight")]
    ours: list[Layer] = [DenseProgram(name, True, name != names[-1], name == names[0]) for name in names]
    right: list[Layer] = [Gather(), *(Dense(name, True, name != names[-1]) for name in names)]
    models = layout.flatten(net) + 0.1 * randn(3, layout.size)
    generator = torch.Generator().manual_seed(1)
    x, labels = randn(50, 30, seed=2), torch.randint(5, (3, batch), generator=generator).to(DEVICE)
    index = torch.randint(50, (3, batch), generator=generator).to(DEVICE)

    def found(stack: Stack, weights: Tensor, samples: Tensor, used: bool) -> list[Tensor]:
        take_over(monkeypatch, used)
        into = torch.full_like(weights, torch.nan)
        loss = stack.gradients(layout.views(weights), samples, labels, index, None, layout.views(into))
        return [loss, into, stack.logits(layout.views(weights), samples, index)]

    exact = found(Stack(right, "float64"), models.double(), x.double(), False)
    library = found(Stack(right, precision), models, x, False)  # rounding turns a few ReLUs around there too
    for mine, theirs, wanted in zip(found(Stack(ours, precision), models, x, True), library, exact):
        assert off(mine, wanted) < max(3 * bound, 2 * off(theirs, wanted))


def test_a_model_that_is_not_finite_stays_so_behind_a_relu() -> None:
    weight, bias = rows_of(2, [(4, 3), (4,)], seed=1)
    weight[1, 2, 0] = torch.nan
    index = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
    out = dense.forward(randn(1, 3), index, weight, bias, True, True, "float32")
    assert out[0].isfinite().all()
    assert out[1, :, 2].isnan().all()


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
@pytest.mark.parametrize("batch", [1, 20, 300])
@pytest.mark.parametrize("shared", [True, False])
def test_cross_entropy_and_its_gradient_are_those_of_autograd(classes: int, batch: int, shared: bool) -> None:
    logits = 5 * randn(3, batch, classes, seed=1)
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(classes, (3, batch + 1), generator=generator).to(DEVICE)[:, :batch]
    weights = torch.rand(3, batch, generator=generator, dtype=torch.float64).to(DEVICE)
    weights[0, batch // 2 :] = 0  # a smaller client's padding
    share = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-9) if shared else None

    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    expected = losses.mean(dim=1) if share is None else (losses * share).sum(dim=1)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    loss, grad = entropy.entropy(logits, labels, share)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), slope, rtol=1e-5, atol=1e-7)


class Spy:
    """Stands in for a program and keeps what it is launched with."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grid = grid
        return self._launched

    def _launched(self, *given: Any, **options: Any) -> None:
        self.given, self.options = given, options


@pytest.mark.parametrize(
    ("clients", "batch", "outputs", "precision", "dot", "width"),
    [
        (100, 20, 200, "float32", "tf32x3", 64),
        (33, 20, 200, "float32", "tf32x3", 64),  # 132 programs
        (32, 20, 200, "float32", "tf32x3", 16),  # too few to fill a GPU
        (1, 32, 200, "tf32", "tf32", 16),
        (1, 33, 200, "float32", "tf32x3", 64),  # as many samples would not fit beside each other
        (100, 20, 10, "tf32", "tf32x3", 16),  # a head
        (100, 20, 16, "tf32", "tf32x3", 16),
        (100, 20, 17, "tf32", "tf32", 16),
        (200, 20, 17, "tf32", "tf32", 64),
        (100, 20, 10, "bf16", "bf16", 16),
    ],
)
def test_how_a_layer_is_cut_up_and_multiplied(
    clients: int, batch: int, outputs: int, precision: str, dot: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, weights = Spy(), Spy()
    monkeypatch.setattr(dense, "_forward", forward)
    monkeypatch.setattr(dense, "_weights", weights)
    x, index = randn(clients, batch, 30), torch.zeros(clients, batch, dtype=torch.int64, device=DEVICE)
    weight = randn(clients, outputs, 30)
    out = dense.forward(x, index, weight, None, True, False, precision)
    dense.weights_backward(x, index, out, out, weight, None, True, False, precision)
    assert (forward.options["DOT"], forward.options["BO"]) == (dot, width)
    assert weights.options["DOT"] == dot


@pytest.mark.parametrize("top", [0.0, 30.0, 60.0, 200.0])
def test_the_loss_of_a_confident_sample_does_not_depend_on_how_large_its_logits_are(top: float) -> None:
    logits = torch.tensor([[[top, top - 12.0, top - 20.0]]], device=DEVICE)
    loss, _ = entropy.entropy(logits, torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), None)
    exact = F.cross_entropy(logits[0].double(), torch.zeros(1, dtype=torch.int64, device=DEVICE))
    assert abs(float(loss) - float(exact)) < 1.5e-7  # 1 plus so little is rounded


def test_logits_that_are_huge_or_not_finite_spoil_nobody_elses_loss() -> None:
    logits = randn(3, 4, 5)
    logits[0] *= 1e30
    logits[1, 2, 3] = torch.nan
    loss, _ = entropy.entropy(logits, torch.zeros(3, 4, dtype=torch.int64, device=DEVICE), None)
    assert loss[0] > 1e20 or loss[0] == 0
    assert loss[1].isnan()
    assert loss[2].isfinite()


@pytest.mark.parametrize(
    ("m", "d", "longest"),
    [(5, 70, 16384), (130, 40, 16384), (130, 1001, 16384), (20, 3000, 16384), (20, 3000, 192)],
)
@pytest.mark.parametrize("from_start", [True, False])
def test_cosines_from_products_of_all_pairs_are_the_plain_ones(
    m: int, d: int, longest: int, from_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_over(monkeypatch, False)
    monkeypatch.setattr(gram, "LONGEST", longest)
    if DEVICE.type != "cuda":
        monkeypatch.setattr(gram, "PROGRAMS", 4)
    models = randn(m, d + 3, seed=1)[:, :d]  # rows apart
    models[1] = models[0] + 0.01 * randn(d, seed=5)  # nearly the same
    origin = randn(d, seed=2) if from_start else None
    models[2] = 0 if origin is None else origin  # no length
    models[3] *= 1e-3
    wanted = torch.randint(-1, m, (m, 7), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    wanted[:3, 0] = torch.tensor([1, 0, 0])
    found = gram.cosines(models, wanted, origin, similarity.SMALLEST_NORM)
    exact, start = models.double().cpu(), None if origin is None else origin.double().cpu()
    expected = similarity.cosines(exact, exact, wanted.cpu(), start)
    # A product is off by at most 2^-16 of itself; in a sum of few these need not cancel out.
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=2**-15, equal_nan=True)


def test_lengths_count_the_last_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 these numbers are 1 and a rest with a square of 1.5e-5, all of one sign."""
    take_over(monkeypatch, False)
    models = torch.ones(2, 640, device=DEVICE)
    models[0] += 125 / 128 * 2**-8
    models[1, 320:] = 0
    wanted = torch.tensor([[1, 0], [0, 1]], device=DEVICE)
    expected = torch.tensor([[0.5**0.5, 1.0], [0.5**0.5, 1.0]], dtype=torch.float64)
    found = gram.cosines(models, wanted, None, similarity.SMALLEST_NORM)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=5e-7)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter would take hours")
def test_sums_over_many_columns_do_not_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    take_over(monkeypatch, False)
    models = randn(1, 200_000, seed=1) + 0.3 * randn(1500, 200_000, seed=2)
    wanted = torch.randint(1500, (1500, 20), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    found = gram.cosines(models, wanted, None, similarity.SMALLEST_NORM)
    expected = similarity.cosines(models.double(), models.double(), wanted)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_no_program_adds_up_more_columns_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    take_over(monkeypatch, False)
    within, among, nothing = Spy(), Spy(), Spy()
    for name, spy in {"_within": within, "_among": among, "_sum": nothing, "_finish": nothing}.items():
        monkeypatch.setattr(gram, name, spy)
    monkeypatch.setattr(gram, "PROGRAMS", 6)
    wanted = torch.zeros(150, 1, dtype=torch.int64, device=DEVICE)
    for longest, inside, between in ((16384, 384, 192), (128, 128, 128)):
        monkeypatch.setattr(gram, "LONGEST", longest)
        gram.cosines(randn(150, 1000), wanted, None, 1e-12)  # two tiles, one pair of tiles
        assert (within.grid, within.given[5]) == ((2, -(-1024 // inside)), inside)
        assert (among.grid, among.given[5]) == ((1, -(-1024 // between)), between)
        assert nothing.options  # and what they have found is looked at


def test_models_are_copied_row_by_row() -> None:
    models = randn(6, 5003)[:, :5001]
    wanted = torch.tensor([3, 0, 3, 5], device=DEVICE)
    assert torch.equal(rows.copied(models, wanted), models[wanted])
