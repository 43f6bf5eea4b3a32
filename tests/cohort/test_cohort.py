"""Layout, evaluation and mixing of a cohort."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import make_cohort, make_federation
from kinfolk import Cohort, Peers
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.layout import Layout
from kinfolk.peers.base import Pool
from kinfolk.peers.inprocess import InProcess


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.fixture
def cohort() -> Cohort:
    cohort = make_cohort(make_federation([12, 5, 30, 9]), mlp)
    cohort.train(1)
    return cohort


def pool_of(cohort: Cohort) -> Pool:
    peers = Peers(len(cohort), cohort, InProcess())
    peers.publish(1, weights=cohort.weights)
    return peers.pull(1, torch.arange(len(cohort)).expand(len(cohort), -1))


def module_of(cohort: Cohort, row: Tensor) -> nn.Module:
    module = mlp().double()
    cohort.layout.load(row, module)
    return module


def test_layout_flattens_views_and_loads_back() -> None:
    module = mlp()
    layout = Layout.of(module)
    row = layout.flatten(module)
    assert row.shape == (layout.size,) == (6 * 5 + 5 + 5 * 3 + 3,)
    views = layout.views(row.expand(4, -1).clone())
    for name, parameter in module.named_parameters():
        assert torch.equal(views[name][2], parameter)
    other = mlp()
    layout.load(row, other)
    assert torch.equal(layout.flatten(other), row)


def test_the_initial_model_is_the_seeds_and_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (Layout.of(m).flatten(m) for m in (initial_model(mlp, s) for s in (1, 1, 2)))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("tests", [7, 1500], ids=["few", "in several passes"])
def test_evaluation_is_that_of_each_module_on_its_own_test_set(tests: int) -> None:
    cohort = make_cohort(make_federation([12, 5, 30, 9], tests=tests), mlp)
    cohort.train(1)
    scores = cohort.evaluate()
    part = cohort.data.test
    for i in range(4):
        rows = slice(int(part.starts[i]), int(part.starts[i] + part.sizes[i]))
        logits = module_of(cohort, cohort.weights[i])(part.x[rows])
        assert scores.loss[i].item() == pytest.approx(F.cross_entropy(logits, part.y[rows]).item(), abs=1e-12)
        assert scores.accuracy[i].item() == pytest.approx((logits.argmax(1) == part.y[rows]).double().mean().item())


def test_losses_of_pulled_models_are_on_the_clients_own_training_data(cohort: Cohort) -> None:
    ids = torch.tensor([[1, 2], [3, -1], [0, 1], [2, 0]])
    losses = cohort.losses(pool_of(cohort), ids)
    part = cohort.data.train
    for i, row in enumerate(ids.tolist()):
        for c, j in enumerate(row):
            if j < 0:
                assert torch.isnan(losses[i, c])
                continue
            rows = slice(int(part.starts[i]), int(part.starts[i] + part.sizes[i]))
            logits = module_of(cohort, cohort.weights[j])(part.x[rows])
            assert losses[i, c].item() == pytest.approx(F.cross_entropy(logits, part.y[rows]).item(), abs=1e-12)


def test_mixing_is_the_uniform_mean_of_self_and_those_who_answered(cohort: Cohort) -> None:
    before = cohort.weights
    cohort.mix(pool_of(cohort), torch.tensor([[1, 2], [3, -1], [-1, -1], [0, 1]]))
    torch.testing.assert_close(cohort.weights[0], (before[0] + before[1] + before[2]) / 3)
    torch.testing.assert_close(cohort.weights[1], (before[1] + before[3]) / 2)
    assert torch.equal(cohort.weights[2], before[2])
    torch.testing.assert_close(cohort.weights[3], (before[3] + before[0] + before[1]) / 3)


def test_mixing_scales_given_weights_to_one_and_logs_the_edges(cohort: Cohort) -> None:
    before = cohort.weights
    weights = torch.tensor([[1.0, 3.0], [2.0, 9.0], [0.0, 0.0], [1.0, 0.0]])
    cohort.mix(
        pool_of(cohort), torch.tensor([[1, 2], [3, -1], [0, 1], [0, 1]]), weights, own=torch.tensor([4.0, 0, 0, 1])
    )
    torch.testing.assert_close(cohort.weights[0], (4 * before[0] + before[1] + 3 * before[2]) / 8)
    torch.testing.assert_close(cohort.weights[1], before[3])  # own weight 0, one answer
    assert torch.equal(cohort.weights[2], before[2])  # nothing has weight: itself
    torch.testing.assert_close(cohort.weights[3], (before[3] + before[0]) / 2)
    client, neighbors, shares = cohort.round.edges[0]
    assert client.tolist() == [0, 1, 2, 3]
    assert neighbors.tolist() == [[1, 2], [3, -1], [0, 1], [0, 1]]
    assert shares.tolist() == [[0.125, 0.375], [1.0, 0.0], [0.0, 0.0], [0.5, 0.0]]


def test_what_lies_in_an_unused_row_never_reaches_a_model(cohort: Cohort) -> None:
    poisoned = cohort.weights.clone()
    poisoned[0] = torch.nan
    peers = Peers(4, cohort, InProcess())
    peers.publish(1, weights=poisoned)
    ids = torch.tensor([[1], [-1], [3], [-1]])
    cohort.mix(peers.pull(1, ids), ids)
    assert torch.isfinite(cohort.weights).all()


def test_absent_clients_keep_their_model(cohort: Cohort) -> None:
    before = cohort.weights
    cohort.begin(absent=torch.tensor([False, True, False, False]))
    cohort.mix(pool_of(cohort), torch.tensor([[2], [2], [0], [0]]))
    assert torch.equal(cohort.weights[1], before[1])
    cohort.adopt(torch.zeros(cohort.layout.size))
    assert torch.equal(cohort.weights[1], before[1])
    assert (cohort.weights[[0, 2, 3]] == 0).all()


def test_a_chunk_is_small_on_a_cpu_and_can_be_set() -> None:
    wide = make_cohort(make_federation([40] * 6, (2000,)), lambda: nn.Linear(2000, 3000))
    assert [rows.numel() for rows in wide._alike(torch.ones(6, dtype=torch.int64))] == [1] * 6
    small = make_cohort(make_federation([40] * 6), mlp)
    assert [rows.numel() for rows in small._alike(torch.ones(6, dtype=torch.int64))] == [6]
    small.chunk = 4
    assert [rows.numel() for rows in small._alike(torch.ones(6, dtype=torch.int64))] == [4, 2]


def test_clients_of_very_different_size_do_not_share_a_chunk() -> None:
    cohort = make_cohort(make_federation([8] * 6), mlp)
    chunks = [rows.tolist() for rows in cohort._alike(torch.tensor([50, 1, 0, 2, 3, 60]))]
    assert chunks == [[5, 0], [4, 3, 1]]  # the longest first
