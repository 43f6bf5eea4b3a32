"""FedCG's own passes on a CPU against autograd, client by client, and against torch's layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from kinfolk.cohort.layout import Layout
from kinfolk.cohort.program import Branching, Derived, program_for
from kinfolk.methods.fedcg import FedCG
from kinfolk.models import branched
from kinfolk.models.branched import ByGroups, BySamples
from kinfolk.models.rows import grouped

CLIENTS, BATCH, SAMPLES, CLASSES = 3, 7, 20, 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        yield


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, CLASSES),
    )  # fmt: skip


def one_convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(300, CLASSES))


def mlp(bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(200, 9, bias=bias), nn.ReLU(), nn.Linear(9, 8, bias=bias), nn.ReLU(),
        nn.Linear(8, CLASSES),
    )  # fmt: skip


NETS = {
    "cnn": cnn,
    "one convolution": one_convolution,
    "single pixels": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES)
    ),
    "mlp": mlp,
    "mlp without bias": lambda: mlp(False),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(200, CLASSES)),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"preset": "paper"},
    {"layers": "all", "first_graph": "rand"},
    {"layers": "all", "graph_layers": 2, "granularity": "full"},
    {"layers": "whole"},
    {"project": False, "first_graph": "uniform"},
    {"agnostic": False},
    {"domains": 1},
    {"granularity": "full", "first_graph": "rand", "param_relu": True},
]


def bundle(net: nn.Module, settings: dict[str, Any]) -> nn.Module:
    return FedCG(**settings).wrap(net, (2, 10, 10)).double()


def rows_of(domains: int, omega: str) -> Tensor:
    """Samples as FedCG's rows: in one domain each, in several, or in none."""
    pixels = torch.randn(SAMPLES, 200, dtype=torch.float64)
    given = torch.eye(domains, dtype=torch.float64)[torch.randint(domains, (SAMPLES,))]
    if omega == "soft":
        given[::2] = torch.rand(SAMPLES // 2, domains, dtype=torch.float64).softmax(dim=1)
        given[1] = 0
    return torch.cat([pixels, given], dim=1)


def expected_of(module: nn.Module, layout: Layout, row: Tensor, x: Tensor, labels: Tensor, share: Tensor) -> Any:
    """Loss and gradient [d] of one client, by autograd."""
    weights = {name: view[0].clone().requires_grad_() for name, view in layout.views(row[None]).items()}
    losses = nn.functional.cross_entropy(functional_call(module, weights, (x,)), labels, reduction="none")
    loss = (losses * share).sum()
    found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    return loss, torch.cat([grad.flatten() for grad in found])


@pytest.mark.parametrize("batch", [1, 1000], ids=["fields", "filters"])
@pytest.mark.parametrize("omega", ["hard", "soft"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("net", list(NETS))
def test_gradients_are_those_of_autograd(net: str, settings: dict[str, Any], omega: str, batch: int) -> None:
    """Whether fields or filters are projected (see `batch`), ragged batches too."""
    module = bundle(NETS[net](), settings)
    layout, domains = Layout.of(module), FedCG(**settings).domains
    program, _ = program_for(module, layout, (200 + domains,), CPU, "float64", batch=batch)
    assert isinstance(program, Branching)
    block = layout.flatten(module) + 0.1 * torch.randn(CLIENTS, layout.size, dtype=torch.float64)
    x, y = rows_of(domains, omega), torch.randint(CLASSES, (SAMPLES,))
    index = torch.randint(SAMPLES, (CLIENTS, BATCH))
    share = torch.full((CLIENTS, BATCH), 1 / BATCH, dtype=torch.float64)
    share[1, 3:], share[1, :3] = 0, 1 / 3
    spare = [torch.full_like(block, torch.nan)]
    loss, (gradients,) = program.gradients(program.slots(block), x, y[index], index, share, spare)
    module.train()
    for i in range(CLIENTS):
        wanted, gradient = expected_of(module, layout, block[i], x[index[i]], y[index[i]], share[i])
        torch.testing.assert_close(loss[i], wanted.detach())
        torch.testing.assert_close(gradients[i], gradient, rtol=1e-9, atol=1e-11)
        _, (own,) = program.gradients([block[i : i + 1]], x, y[index[i : i + 1]], index[i : i + 1], share[i : i + 1])
        assert torch.equal(own[0], gradients[i])  # whoever else is there
    even, _ = program.gradients(program.slots(block), x, y[index], index, None)
    torch.testing.assert_close(even[0], loss[0])


def test_fields_are_projected_where_they_are_fewer_than_filters() -> None:
    module = bundle(cnn(), {})  # 4 · 5 filters, 16 fields of a sample
    kinds = {}
    for batch in (1, 2):
        stack = branched.branched_stack(module, Layout.of(module).names, CPU, "float64", batch)  # type: ignore[arg-type]
        assert not isinstance(stack, str)
        kinds[batch] = type(stack.layers[1])
    assert kinds == {1: ByGroups, 2: BySamples}


@pytest.mark.parametrize("net", ["cnn", "mlp"])
def test_bf16_rounds_factors_and_stays_close(net: str) -> None:
    module = bundle(NETS[net](), {}).float()
    layout = Layout.of(module)
    block = layout.flatten(module).repeat(CLIENTS, 1)
    x, y = rows_of(4, "hard").float(), torch.randint(CLASSES, (SAMPLES,))
    index = torch.randint(SAMPLES, (CLIENTS, BATCH))
    found = []
    for precision, batch in (("float32", 1), ("bf16", 1), ("bf16", 1000)):
        program, _ = program_for(module, layout, (204,), CPU, precision, batch=batch)
        found.append(program.gradients(program.slots(block), x, y[index], index, None)[1][0])
    for rounded in found[1:]:
        assert rounded.dtype == torch.float32
        assert 0 < (rounded - found[0]).norm() / found[0].norm() < 0.1


def test_samples_are_sorted_into_groups_that_share_their_domains() -> None:
    omega = torch.tensor([[[0, 1.0], [1, 0], [0, 1]], [[0.5, 0.5], [0, 0], [0.5, 0.5]]])
    order, ordered, groups = grouped(omega)
    assert order.tolist() == [[1, 0, 2], [1, 0, 2]]
    assert [(group.client, group.place, group.domain) for group in groups] == [
        (0, slice(0, 1), 0), (0, slice(1, 3), 1), (1, slice(3, 4), -1), (1, slice(4, 6), -1),
    ]  # fmt: skip
    assert [None if group.omega is None else group.omega.tolist() for group in groups] == [
        None, None, [0, 0], [0.5, 0.5],
    ]  # fmt: skip
    assert ordered[0].tolist() == [[1, 0], [0, 1], [0, 1]]


def test_scores_are_the_modules_own_in_a_test_and_in_training() -> None:
    module = bundle(cnn(), {"preset": "paper"})
    layout = Layout.of(module)
    program, notice = program_for(module, layout, (204,), CPU, "float64")
    assert notice is None
    block = layout.flatten(module) + 0.1 * torch.randn(CLIENTS, layout.size, dtype=torch.float64)
    x, index = rows_of(4, "hard"), torch.randint(SAMPLES, (CLIENTS, BATCH))
    for training in (True, False, True):
        module.train(training)
        found = program.logits(block, x, index)
        for i in range(CLIENTS):
            weights = {name: view[0] for name, view in layout.views(block[i : i + 1]).items()}
            torch.testing.assert_close(found[i], functional_call(module, weights, (x[index[i]],)))


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(48, CLASSES)),
        nn.Sequential(nn.Flatten(), nn.Linear(200, 9), nn.Tanh(), nn.Linear(9, CLASSES)),
    ],
    ids=["stride", "tanh"],
)
def test_other_nets_go_through_autograd(net: nn.Module) -> None:
    module = bundle(net, {})
    program, _ = program_for(module, Layout.of(module), (204,), CPU, "float64")
    assert isinstance(program, Derived)


def test_on_a_gpu_it_has_programs_of_its_own_and_in_a_short_run_autograd() -> None:
    pytest.importorskip("triton")
    module = bundle(cnn(), {}).float()
    given = module, Layout.of(module), (204,), torch.device("cuda"), "float32"
    program, notice = program_for(*given)
    assert isinstance(program, Branching)
    assert "compiles" in str(notice)
    program, notice = program_for(*given, short=True)
    assert isinstance(program, Derived)
    assert "so short a run" in str(notice)
    module = bundle(mlp(), {}).float()  # nothing to compile
    program, notice = program_for(module, Layout.of(module), (204,), torch.device("cuda"), "float32", short=True)
    assert isinstance(program, Branching)
    assert notice is None
