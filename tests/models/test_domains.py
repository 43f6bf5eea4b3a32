"""FedCG's layers and graph against plain formulas, the golden values of the specification, and degenerate cases."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from kinfolk import UserError
from kinfolk.models.domains import (
    DomainLayer,
    DomainNet,
    Graph,
    Sharing,
    adjacency,
    assigned,
    classifier,
    evenness,
    first_adjacency,
    hamming,
    occupancy,
    splittable,
)


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        yield


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.ReLU(),
        nn.Flatten(), nn.Linear(36, 5),
    ).double()  # fmt: skip


def omega_of(count: int, domains: int) -> Tensor:
    return torch.rand(count, domains, dtype=torch.float64).softmax(dim=1)


# -- the graph ---------------------------------------------------------------------------------------------------


def test_adjacency_of_the_specification() -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])
    expected = torch.tensor([[0.5, 1 / 3, 1 / 6], [0.25, 0.5, 0.25], [1 / 6, 1 / 3, 0.5]])
    torch.testing.assert_close(adjacency(rows), expected)


@pytest.mark.parametrize("own", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("domains", [1, 2, 5])
def test_rows_of_a_graph_sum_to_one(domains: int, own: float) -> None:
    graphs = [
        first_adjacency(kind, domains, own, generator()) for kind in ("eye", "rand", "uniform", "even", "hamming")
    ]  # type: ignore[arg-type]
    for graph in (*graphs, adjacency(torch.randn(domains, 7), own)):
        torch.testing.assert_close(graph.sum(dim=1), torch.ones(domains))
        assert (graph >= 0).all()


def test_degenerate_graphs() -> None:
    assert adjacency(torch.randn(1, 4)).tolist() == [[1.0]]
    assert adjacency(torch.randn(2, 4)).tolist() == [[0.5, 0.5], [0.5, 0.5]]  # whatever the distance
    same = adjacency(torch.ones(3, 4))
    torch.testing.assert_close(same, torch.full((3, 3), 0.25).fill_diagonal_(0.5))
    rows = torch.randn(4, 3)
    rows[2, 1] = torch.nan
    found = adjacency(rows, 0.4)
    torch.testing.assert_close(found, torch.full((4, 4), 0.2).fill_diagonal_(0.4))  # every row has that distance
    near = adjacency(torch.tensor([[0.0], [0.0], [9.0]]))
    assert torch.isfinite(near).all()
    assert float(near[0, 1]) == pytest.approx(0.5)


def test_first_graphs() -> None:
    def graph(kind: Any, domains: int) -> Tensor:
        return first_adjacency(kind, domains, 0.5, generator())

    assert torch.equal(graph("eye", 3), torch.eye(3))
    torch.testing.assert_close(graph("uniform", 3), torch.full((3, 3), 0.25).fill_diagonal_(0.5))
    assert graph("even", 4).unique().tolist() == [0.25]
    assert graph("rand", 4).unique().numel() == 16
    assert torch.equal(graph("rand", 4), graph("rand", 4))
    four = hamming(4)  # 00 01 10 11: distances 1, 1, 2
    torch.testing.assert_close(four[0], torch.tensor([0.5, 0.2, 0.2, 0.1]))
    thirtytwo = hamming(32)
    assert float(thirtytwo[0, 1] / thirtytwo[0, 31]) == pytest.approx(5)


# -- the projection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("granularity", ["full", "per_filter"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_rows_used_are_the_formula(steps: Any, granularity: Any, relu: bool) -> None:
    sharing = Sharing(domains=3, graph_layers=steps, granularity=granularity, param_relu=relu)
    module = Graph(4, 40, sharing).double()
    rows, graph = torch.randn(3, 4, 40).double(), first_adjacency("rand", 3, 0.5, generator()).double()
    for filters in [[0, 1, 2, 3]] if granularity == "full" else [[0], [1], [2], [3]]:
        values = rows[:, filters].reshape(3, -1)
        for step, weight in enumerate(module.projections):
            mixed = torch.stack([sum(graph[d, e] * values[e] for e in range(3)) for d in range(3)])  # type: ignore[misc]
            values = mixed @ weight
            values = values.clamp(min=0) if relu or step + 1 < steps else values
        torch.testing.assert_close(module(rows, graph)[:, filters].reshape(3, -1), values)
    narrow = {"full": 160, "per_filter": 40}[granularity]
    shapes = [tuple(weight.shape) for weight in module.projections]
    assert shapes == ([(narrow, narrow)] if steps == 1 else [(narrow, narrow // 16), (narrow // 16, narrow)])


def test_a_square_projection_begins_near_the_identity() -> None:
    weight = Graph(5, 20, Sharing(granularity="auto")).projections[0]
    off = weight.detach() - torch.eye(100)
    assert 0.5e-3 < float(off.std()) < 2e-3


def test_without_projection_only_the_graph_is_at_work() -> None:
    module = Graph(2, 3, Sharing(domains=2, project=False, param_relu=False))
    rows, graph = torch.randn(2, 2, 3), torch.tensor([[0.7, 0.3], [0.1, 0.9]])
    torch.testing.assert_close(module(rows, graph)[0], 0.7 * rows[0] + 0.3 * rows[1])
    assert not list(module.parameters())


def test_a_projection_that_would_be_huge_is_refused_or_made_per_filter() -> None:
    filters, width = 32, 289  # of CelebA's convolutions: 9,248 parameters
    with torch.device("meta"):  # counted, not made
        assert Graph(filters, width, Sharing(granularity="auto")).projections[0].numel() == 85_525_504
    with pytest.raises(
        UserError, match=r"layer 'conv' has 10,001 parameters .* 100,020,001 entries.*per_filter"
    ) as caught:
        Graph(1, 10_001, Sharing(granularity="full"), "conv")
    assert "\n" not in str(caught.value)
    assert Graph(64, 801, Sharing(granularity="auto")).projections[0].shape == (801, 801)
    narrow = 51_264 // 16
    with torch.device("meta"):
        two = Graph(64, 801, Sharing(graph_layers=2, granularity="auto"))
    assert [tuple(weight.shape) for weight in two.projections] == [(51_264, narrow), (narrow, 51_264)]
    assert sum(weight.numel() for weight in two.projections) == 2 * 51_264 * 3_204  # 328.5 million


# -- the layer ---------------------------------------------------------------------------------------------------


def plainly(layer: nn.Conv2d | nn.Linear, row: Tensor, z: Tensor) -> Tensor:
    """The layer with the parameters `row` [filters, width]."""
    other = copy.deepcopy(layer)
    with torch.no_grad():
        has_bias = other.bias is not None
        other.weight.copy_((row[:, :-1] if has_bias else row).reshape(other.weight.shape))
        if has_bias:
            other.bias.copy_(row[:, -1])  # type: ignore[union-attr]
    return other(z)


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1, stride=2), (2, 7, 6)),
    "conv without bias": (lambda: nn.Conv2d(2, 4, (3, 2), bias=False, dilation=2), (2, 7, 6)),
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), (6,)),
}


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("agnostic", [True, False])
def test_a_layer_is_the_sum_over_domains(kind: str, agnostic: bool) -> None:
    make, shape = LAYERS[kind]
    plain = make().double()
    layer = DomainLayer(copy.deepcopy(plain), Sharing(domains=3, agnostic=agnostic)).double()
    if agnostic:
        with torch.no_grad():
            layer.share.fill_(0.7)
    graph, z, omega = adjacency(layer.rows.flatten(1).detach()), torch.randn(5, *shape).double(), omega_of(5, 3)
    rows = layer.used(graph)
    for b in range(5):
        branches = [omega[b, d] * plainly(plain, rows[d], z[b : b + 1])[0] for d in range(3)]
        expected = sum(branches) if not agnostic else plain(z[b : b + 1])[0] + 0.7 * sum(branches)
        torch.testing.assert_close(layer(z, omega, graph)[b], expected)


def test_one_domain_is_a_plain_residual_layer() -> None:
    """D = 1, A = I, W = I and no ReLU: f_a(z) + lambda f_s(z)."""
    plain = nn.Conv2d(2, 3, 3).double()
    layer = DomainLayer(copy.deepcopy(plain), Sharing(domains=1, param_relu=False)).double()
    with torch.no_grad():
        layer.graph.projections[0].copy_(torch.eye(layer.graph.projections[0].shape[0]))
        layer.share.fill_(1.7)
    z, own = torch.randn(4, 2, 6, 6).double(), layer.rows.detach()[0]
    found = layer(z, torch.ones(4, 1).double(), torch.ones(1, 1).double())
    torch.testing.assert_close(found, plain(z) + 1.7 * plainly(plain, own, z))


def test_rows_begin_different_for_every_domain() -> None:
    layer = DomainLayer(nn.Conv2d(2, 3, 3), Sharing(domains=4))
    assert torch.pdist(layer.rows.detach().flatten(1)).min() > 0.1
    assert float(layer.share.detach()) == 1


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_reach_a_domain_where_the_graph_does(steps: Any) -> None:
    """Of a sample in domain d: V_j moves if and only if A_dj > 0, with two layers if and only if (A²)_dj > 0."""
    chain = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    sharing = Sharing(domains=4, param_relu=False, graph_layers=steps)
    layer = DomainLayer(nn.Conv2d(2, 16, 3), sharing)
    reached = torch.linalg.matrix_power(chain, steps) > 0
    for d in range(4):
        omega = assigned(F.one_hot(torch.full((3,), d), 4).float(), soft=False)
        layer.zero_grad()
        layer(torch.randn(3, 2, 5, 5), omega, chain).square().sum().backward()
        gradient = layer.rows.grad
        assert gradient is not None
        assert (gradient.flatten(1).abs().amax(dim=1) > 0).tolist() == reached[d].tolist()


def test_relu_makes_parameters_that_are_never_negative_and_can_kill_a_layer() -> None:
    wrapped = DomainNet(net().float(), Sharing(domains=2))
    layer = wrapped.split()[0]
    assert (layer.used(torch.eye(2)) >= 0).all()
    assert 0 < wrapped.dead()[0] < 1
    with torch.no_grad():
        layer.rows.copy_(-layer.rows.abs() - 1)
    assert wrapped.dead() == [1.0]


# -- the net -----------------------------------------------------------------------------------------------------


def test_which_layers_differ_by_domain() -> None:
    assert splittable(net(), "last") == [2]
    assert splittable(net(), "all") == [0, 2]
    around = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Conv2d(2, 2, 3, groups=2))
    assert splittable(nn.Sequential(*around, nn.Conv2d(2, 2, 3)), "all") == [2]
    perceptron = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    assert splittable(perceptron, "all") == [1, 3]
    assert splittable(perceptron, "last") == [3]
    assert splittable(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "last") == [1]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.ReLU()), "no layer that can differ by domain"),
        (nn.Linear(2, 2), r"needs an nn\.Sequential"),
    ],
)
def test_a_net_that_cannot_be_split_is_one_line(module: nn.Module, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        DomainNet(module, Sharing())  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layers", ["last", "all"])
def test_without_its_share_the_net_is_the_plain_one(layers: Any) -> None:
    plain = net()
    wrapped = DomainNet(copy.deepcopy(plain), Sharing(domains=3, layers=layers)).double()
    with torch.no_grad():
        for layer in wrapped.split():
            layer.share.zero_()
    x = torch.randn(6, 2, 8, 8).double()
    torch.testing.assert_close(wrapped(x, omega_of(6, 3)), plain(x))
    assert len(wrapped.split()) == {"last": 1, "all": 2}[layers]


def test_distances_are_over_all_layers_and_no_gradient_reaches_the_graph() -> None:
    wrapped = DomainNet(net(), Sharing(domains=3, layers="all")).double()
    assert wrapped.rows().shape == (3, 3 * 19 + 4 * 27)
    scores = wrapped(torch.randn(4, 2, 8, 8).double(), omega_of(4, 3))
    scores.sum().backward()
    assert wrapped.graph.grad is None
    assert all(layer.share.grad is not None for layer in wrapped.split())


def test_many_clients_at_once_are_each_client_alone() -> None:
    wrapped = DomainNet(net(), Sharing(domains=3, layers="all")).double()
    names = dict(wrapped.named_parameters())
    many = {name: torch.randn(4, *p.shape).double() / 4 for name, p in names.items()}
    x, omega = torch.randn(4, 6, 2, 8, 8).double(), torch.stack([omega_of(6, 3) for _ in range(4)])
    together = vmap(lambda p, x, w: functional_call(wrapped, p, (x, w)))(many, x, omega)
    for i in range(4):
        alone = functional_call(wrapped, {name: rows[i] for name, rows in many.items()}, (x[i], omega[i]))
        torch.testing.assert_close(together[i], alone)


# -- domains of samples ------------------------------------------------------------------------------------------


def test_assignments_sum_to_one_and_hard_ones_are_the_highest() -> None:
    scores = torch.randn(50, 4)
    torch.testing.assert_close(assigned(scores, soft=True).sum(dim=1), torch.ones(50))
    hard = assigned(scores, soft=False)
    assert hard.sum(dim=1).unique().tolist() == [1]
    assert torch.equal(hard.argmax(dim=1), scores.argmax(dim=1))
    sharp = assigned(1e4 * scores, soft=True)
    torch.testing.assert_close(sharp, hard)


def test_the_classifier_has_the_papers_sizes() -> None:
    module = classifier((3, 20, 20), 5)
    assert [tuple(p.shape) for p in module.parameters()] == [(32, 3, 3, 3), (32,), (64, 32, 3, 3), (64,), (5, 64), (5,)]
    assert module(torch.randn(2, 3, 20, 20)).shape == (2, 5)
    assert classifier((6,), 3)(torch.randn(2, 6)).shape == (2, 3)


def test_occupancy_and_evenness() -> None:
    hard = F.one_hot(torch.tensor([0, 0, 0, 2]), 4)
    shares = occupancy(hard)
    assert shares.tolist() == [0.75, 0, 0.25, 0]
    assert float(evenness(shares)) == pytest.approx(0.8112781 / 2)  # entropy in bits over log2(4)
    assert float(evenness(torch.full((4,), 0.25).double())) == pytest.approx(1)
    assert float(evenness(torch.tensor([1.0, 0.0]))) == 0
    assert float(evenness(torch.ones(1))) == 0
