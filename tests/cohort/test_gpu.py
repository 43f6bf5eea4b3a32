"""The same cohort on a GPU and on a CPU. Skipped where there is no GPU; tests/kernels runs the programs anywhere."""

from dataclasses import replace

import pytest
import torch
from coarse import rounded_operands
from torch import nn

from conftest import make_federation
from kinfolk import Cohort, Training
from kinfolk.cohort import augment
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.program import Derived, Explicit
from kinfolk.models import NETS
from kinfolk.peers.base import Peers
from kinfolk.peers.inprocess import InProcess

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

EQUAL, RAGGED = [40] * 6, [40, 7, 90, 33, 1, 64]
SETTINGS = Training(epochs=2, batch_size=32, lr=0.02)
SHAPES = {"linear": (20,), "mlp": (1, 28, 28), "cnn": (3, 32, 32), "cnn4": (3, 32, 32), "cnn2": (1, 28, 28)}


def cohort_of(
    name: str, sizes: list[int], device: str, precision: str, settings: Training = SETTINGS, chunk: int | None = None
) -> Cohort:
    data = make_federation(sizes, SHAPES[name], classes=10)
    module = initial_model(lambda: NETS[name](SHAPES[name], 10), 0)
    return Cohort(data, module, settings, device=device, precision=precision, chunk=chunk)


def rounds(cohort: Cohort, count: int) -> torch.Tensor:
    """What `count` rounds of training change, on the CPU in float64: [m, d]."""
    for t in range(1, count + 1):
        cohort.train(t)
    return (cohort.weights - cohort.initial).cpu().double()


@pytest.mark.parametrize("sizes", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", SHAPES)
def test_training_is_that_of_a_cpu(name: str, sizes: list[int]) -> None:
    """Four rounds: run, recorded, and twice replayed; each from the common start, and one after the other. A client's
    bound is on the way its model has gone. Rounding turns some ReLUs and maxima of a convolutional net around (on a CPU
    in float32 too: with cnn4 it sets some clients off their way in every round, half of them or more in four), so those
    in the middle are held to it, the best two after four rounds, and nobody may go another way."""
    on_gpu = cohort_of(name, sizes, "cuda", "float32")
    assert isinstance(on_gpu.program, Explicit)
    on_cpu = cohort_of(name, sizes, "cpu", "float64")
    right = each_round(on_cpu, 4)
    errors = (each_round(on_gpu, 4) - right).norm(dim=2) / right.norm(dim=2)
    assert float(errors.median()) < 1e-4
    assert float(errors.max()) < 0.5
    assert on_gpu._replay is not None
    assert on_gpu._replay.trouble is None
    for cohort in (on_gpu, on_cpu):
        cohort.weights = cohort.initial.expand(len(cohort), -1).clone()
    right = rounds(on_cpu, 4)
    errors = (rounds(on_gpu, 4) - right).norm(dim=1) / right.norm(dim=1)
    assert float(errors.sort().values[1]) < 1e-4
    assert float(errors.max()) < 0.5


def each_round(cohort: Cohort, count: int) -> torch.Tensor:
    """What each of `count` rounds changes when it begins from the common start: [count, m, d], CPU, float64."""
    found = []
    for t in range(1, count + 1):
        cohort.weights = cohort.initial.expand(len(cohort), -1).clone()
        cohort.train(t)
        found.append((cohort.weights - cohort.initial).cpu().double())
    return torch.stack(found)


@pytest.mark.parametrize("sizes", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_coarser_training_is_as_near_as_coarser_products_allow(name: str, sizes: list[int], precision: str) -> None:
    """Rounding turns ReLUs and winners of pooling windows over, so how far training is off depends on the net: the
    bound is twice what rounding the operands of all products does in otherwise exact arithmetic. One round at a time,
    four of them: run, recorded, and twice replayed."""
    right = each_round(cohort_of(name, sizes, "cpu", "float64"), 4)
    ours, coarse = cohort_of(name, sizes, "cuda", precision), cohort_of(name, sizes, "cpu", "float64")
    coarse.program = Derived(coarse.model, coarse.layout, "float64", coarse.device)
    coarse.train_x = coarse.data.train.x
    with rounded_operands(precision):
        expected = each_round(coarse, 4)
    errors, known = (
        (found - right).norm(dim=2) / right.norm(dim=2).clamp(min=1e-12) for found in (each_round(ours, 4), expected)
    )
    assert isinstance(ours.program, Explicit)
    assert float(errors.flatten().median()) < 2 * float(known.flatten().median()) + 1e-4
    assert float(errors.max()) < 0.5
    assert ours._replay is not None
    assert ours._replay.trouble is None


@pytest.mark.parametrize("sizes", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", ["mlp", "cnn4"])
def test_augmented_training_is_that_of_a_cpu_and_is_replayed(name: str, sizes: list[int]) -> None:
    settings = replace(SETTINGS, augment="crop-flip")
    on_gpu = cohort_of(name, sizes, "cuda", "float32", settings)
    right = rounds(cohort_of(name, sizes, "cpu", "float64", settings), 5)
    errors = (rounds(on_gpu, 5) - right).norm(dim=1) / right.norm(dim=1)
    assert float(errors.median()) < 1e-3
    assert float(errors.max()) < 0.5
    assert on_gpu._replay is not None
    assert on_gpu._replay.trouble is None
    assert any(recording is not None for recording in on_gpu._replay._met.values())
    pairs = cohort_of(name, sizes, "cuda", "float32", settings, chunk=2)
    assert float((rounds(pairs, 5) - right).norm(dim=1).div(right.norm(dim=1)).median()) < 1e-3


def test_looks_and_moved_images_are_those_of_a_cpu() -> None:
    ids, x = torch.arange(7), torch.randn(30, 3, 12, 11)
    looks = augment.draw(0, 3, ids, 4, 20)
    assert torch.equal(augment.draw(0, 3, ids.cuda(), 4, 20).cpu(), looks)
    index = torch.arange(140).view(7, 20) % 30
    found = augment.seen(x.cuda(), index.cuda(), looks[:, 0].cuda())
    assert torch.equal(found.cpu(), augment.seen(x, index, looks[:, 0]))


def test_the_accuracy_on_common_samples_is_that_of_a_cpu() -> None:
    found = {}
    for device, precision in (("cuda", "float32"), ("cpu", "float64")):
        cohort = cohort_of("cnn4", RAGGED, "cpu", precision)
        data = replace(cohort.data, common=cohort.data.test.select(torch.tensor([2])))
        module = initial_model(lambda: NETS["cnn4"](SHAPES["cnn4"], 10), 0)
        there = Cohort(data, module, SETTINGS, device=device, precision=precision)
        there.train(1)
        common = there.evaluate().common
        assert common is not None
        found[device] = common.cpu()
    assert float((found["cuda"] - found["cpu"]).abs().max()) < 0.16  # at most one of seven samples


def test_any_module_is_trained_and_replayed_too() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3))

    def cohort(device: str, precision: str) -> Cohort:
        data = make_federation(RAGGED, (2, 6, 6))
        return Cohort(data, initial_model(make, 0), SETTINGS, device=device, precision=precision)

    on_gpu = cohort("cuda", "float32")
    assert isinstance(on_gpu.program, Derived)
    assert on_gpu.notice is not None
    right = rounds(cohort("cpu", "float64"), 4)
    assert float((rounds(on_gpu, 4) - right).norm() / right.norm()) < 1e-4


def test_losses_and_mixing_are_those_of_a_cpu() -> None:
    found = {}
    for device, precision in (("cuda", "float32"), ("cpu", "float64")):
        cohort = cohort_of("cnn", RAGGED, device, precision)
        cohort.train(1)
        peers = Peers(6, cohort, InProcess())
        ids = torch.tensor([[1, 2], [0, -1], [5, 4], [-1, -1], [3, 0], [2, 1]], device=cohort.device)
        peers.publish(1, weights=cohort.weights)
        pool = peers.pull(1, ids)
        losses = cohort.losses(pool, ids)
        cohort.mix(pool, ids)
        found[device] = losses.cpu(), cohort.weights.cpu().double()
    torch.testing.assert_close(found["cuda"][0], found["cpu"][0], rtol=1e-3, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(found["cuda"][1], found["cpu"][1], rtol=1e-3, atol=1e-4)


def test_a_client_that_diverges_is_put_back_and_nobody_uses_it() -> None:
    cohort = cohort_of("mlp", EQUAL, "cuda", "float32")
    cohort.train_x[cohort.data.train.starts[2]] = torch.nan
    before = cohort.weights.clone()
    cohort.train(1)
    assert cohort.round.quarantined.nonzero().flatten().tolist() == [2]
    assert torch.equal(cohort.weights[2], before[2])
    peers = Peers(6, cohort, InProcess())
    peers.publish(1, weights=cohort.weights)
    ids = torch.tensor([[2], [2], [0], [2], [2], [2]], device="cuda")
    assert (peers.pull(1, ids).rows(ids) >= 0).flatten().tolist() == [False, False, True, False, False, False]
