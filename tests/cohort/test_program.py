"""Which way a net is computed, and what the user is told of it."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from conftest import make_cohort, make_federation
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.program import Derived, Explicit, program_for
from kinfolk.cohort.replay import Replay
from kinfolk.models import NETS
from kinfolk.models.convolve import Convolve

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_a_known_net_gets_its_own_passes_and_a_gpu_is_said_to_compile() -> None:
    pytest.importorskip("triton")
    net = NETS["cnn"]((3, 24, 24), 10)
    program, notice = program_for(net, Layout.of(net), (3, 24, 24), GPU, "tf32")
    assert isinstance(program, Explicit)
    assert notice is not None
    assert "compiles" in notice
    program, notice = program_for(net, Layout.of(net), (3, 24, 24), CPU, "tf32")
    assert isinstance(program, Explicit)
    assert notice is None


def test_a_short_run_does_not_compile() -> None:
    pytest.importorskip("triton")
    net = NETS["cnn"]((3, 24, 24), 10)
    program, notice = program_for(net, Layout.of(net), (3, 24, 24), GPU, "tf32", short=True)
    assert isinstance(program, Derived)
    assert notice is not None
    assert "so short a run" in notice
    net = NETS["mlp"]((8,), 3)  # nothing to compile
    assert isinstance(program_for(net, Layout.of(net), (8,), GPU, "tf32", short=True)[0], Explicit)


def test_another_net_is_computed_through_autograd_with_a_notice_that_says_why() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 3))
    program, notice = program_for(net, Layout.of(net), (8,), GPU, "float32")
    assert isinstance(program, Derived)
    assert notice is not None
    assert "several times slower" in notice
    assert "GELU" in notice
    assert program_for(net, Layout.of(net), (8,), CPU, "float32")[1] is None


def test_steps_that_cannot_be_recorded_are_told() -> None:
    cohort = make_cohort(make_federation([4, 4]), lambda: nn.Linear(6, 3))
    assert cohort.trouble() is None
    cohort._replay = Replay()
    assert cohort.trouble() is None
    cohort._replay.trouble = "it waits"
    assert "it waits" in str(cohort.trouble())
    cohort._replay = Replay()
    cohort._replay.crowded = "it is full"
    assert str(cohort.trouble()).startswith("not all local steps are recorded for this GPU")
    assert "it is full" in str(cohort.trouble())


def test_what_is_recorded_does_not_keep_a_cohort_alive() -> None:
    """Or the memory of a GPU would stay taken after a run, until Python happens to look for cycles."""

    class Kept(Replay):
        def __call__(self, key: Any, work: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.work = work
            return inputs[0].clone(), work(*inputs)

    cohort = make_cohort(make_federation([4, 4]), lambda: nn.Linear(6, 3))
    cohort._replay = replay = Kept()
    gc.collect()
    gc.disable()
    try:
        cohort.train(1)
        assert replay.work is not None
        seen = weakref.ref(cohort)
        del cohort
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "cnn4", "derived"])
def test_a_gradient_of_some_columns_is_that_part_of_the_whole(kind: str, precision: str) -> None:
    """Every parameter by itself, and from each on to the last."""
    torch.manual_seed(0)
    shape = (3, 24, 24) if kind.startswith("cnn") else (12,)
    net = nn.Sequential(nn.Linear(12, 7), nn.GELU(), nn.Linear(7, 3)) if kind == "derived" else NETS[kind](shape, 3)
    layout = Layout.of(net)
    program, _ = program_for(net, layout, shape, CPU, precision)
    block = layout.flatten(net).expand(3, -1) + 0.01 * torch.randn(3, layout.size)
    x, index = program.samples(torch.randn(9, *shape)), torch.randint(9, (3, 4))
    labels, share = torch.randint(3, (3, 4)), torch.rand(3, 4)
    loss, whole = program.gradients(program.slots(block), x, labels, index, share)
    gradient = torch.cat([part.flatten(1) for part in program.within(whole, slice(0, layout.size))], dim=1)
    ends = [*layout.offsets[1:], layout.size]
    for columns in [slice(*pair) for pair in zip(layout.offsets, ends)] + [
        slice(at, ends[-1]) for at in layout.offsets
    ]:
        mine, found = program.slopes(block, x, labels, index, share, columns)
        torch.testing.assert_close(mine, loss, rtol=0, atol=0)
        torch.testing.assert_close(found, gradient[:, columns], rtol=0, atol=0)


def test_the_way_back_ends_with_the_layer_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """AFIND+ compares gradients in the last layer of the body: the convolutions before it have nothing to do."""
    net = NETS["cnn"]((3, 24, 24), 10)
    layout = Layout.of(net)
    program, _ = program_for(net, layout, (3, 24, 24), CPU, "float32")
    x = program.samples(torch.randn(5, 3, 24, 24))
    given = layout.flatten(net)[None], x, torch.zeros(1, 5, dtype=torch.long), torch.arange(5)[None], None
    went: list[bool] = []
    back = Convolve.backward
    monkeypatch.setattr(Convolve, "backward", lambda *a, **k: went.append(True) or back(*a, **k))  # type: ignore[func-returns-value]
    program.slopes(*given, layout.divide(net).proxy)
    assert not went
    program.slopes(*given, slice(0, layout.size))
    assert went == [True] * 3
