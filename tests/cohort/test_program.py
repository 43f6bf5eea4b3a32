"""Which way a net is computed, and what the user is told of it."""

import pytest
import torch
from torch import nn

from conftest import make_cohort, make_federation
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.program import Derived, Explicit, program_for
from kinfolk.cohort.replay import Replay
from kinfolk.models import NETS

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
