"""Which GPUs have programs of ours; none is needed for these tests."""

from collections.abc import Iterator

import interpreted  # decides how Triton runs, before anything imports it
import pytest
import torch

from kinfolk import kernels
from kinfolk.cohort.layout import Layout
from kinfolk.kernels import dispatch
from kinfolk.models import NETS
from kinfolk.models.dense_gpu import DenseProgram
from kinfolk.models.stack import Dense, Gather, Stack, stack_of

assert interpreted.triton

GPU = torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """One with two GPUs: an H200, which is the current one, and a T4."""
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: [(9, 0), (7, 5)][number])
    dispatch._young.cache_clear()
    yield monkeypatch
    dispatch._young.cache_clear()


def test_the_current_gpu_has_programs(machine: pytest.MonkeyPatch) -> None:
    assert dispatch.refusal(GPU) is None
    assert dispatch.refusal(torch.device("cuda:0")) is None


def test_another_than_the_current_gpu_has_none(machine: pytest.MonkeyPatch) -> None:
    assert dispatch.refusal(torch.device("cuda:1")) == "programs are launched on GPU 0, which is the current one"


def test_an_old_gpu_has_none(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.cuda, "current_device", lambda: 1)
    for device in (GPU, torch.device("cuda:1")):
        assert dispatch.refusal(device) == "the GPU's compute capability is below 8.0"


def test_without_triton_there_are_none(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(kernels, "available", lambda: False)
    assert dispatch.refusal(GPU) == "Triton is not installed"


@pytest.mark.parametrize(("name", "shape"), [("mlp", (1, 8, 8)), ("cnn", (3, 32, 32))])
def test_nets_do_without_programs_on_an_old_gpu(name: str, shape: tuple[int, ...], machine: pytest.MonkeyPatch) -> None:
    net = NETS[name](shape, 10)
    names = Layout.of(net).names
    new = stack_of(net, names, shape, GPU, "float32", programs=True)
    machine.setattr(torch.cuda, "current_device", lambda: 1)
    old = stack_of(net, names, shape, GPU, "float32", programs=True)
    assert isinstance(new, Stack)
    assert isinstance(new.layers[-1], DenseProgram)
    if name == "cnn":
        assert old == "the GPU's compute capability is below 8.0"  # what the user is told
    else:
        assert isinstance(old, Stack)
        assert {type(layer) for layer in old.layers} == {Gather, Dense}
