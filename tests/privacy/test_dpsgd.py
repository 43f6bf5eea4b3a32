"""Sampling and noise: rates, scale, independence, and no number twice."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn

from kinfolk.cohort.layout import Layout
from kinfolk.privacy import Mechanism
from kinfolk.privacy.dpsgd import PrivateGradients
from kinfolk.privacy.sampling import batch_sizes, draw
from kinfolk.privacy.source import Seeded, Source, System, add_noise

SURE = 1e-5  # an honest implementation fails a test of these once in 100,000 seeds; the seeds are fixed


def noise(source: Source, clients: int, columns: int, t: int = 1, purpose: str = "noise") -> torch.Tensor:
    into = torch.zeros(clients, columns, dtype=torch.float64)
    add_noise(source, purpose, t, torch.arange(clients), torch.ones(clients), into)
    return into


@pytest.mark.parametrize("source", [Seeded(3), System()])
def test_noise_is_normal_with_the_right_scale(source: Source) -> None:
    drawn = noise(source, 50, 20_001)
    count = drawn.numel()
    assert abs(float(drawn.std()) - 1) < 0.005  # 1,000,050 draws: the standard error is 0.0007
    assert abs(float(drawn.mean())) < 4.5 / math.sqrt(count)
    assert stats.kstest(drawn.flatten()[:: count // 20_000].numpy(), "norm").pvalue > SURE
    assert float(stats.kurtosis(drawn.flatten().numpy())) == pytest.approx(0, abs=0.03)
    assert 4.3 < float(drawn.abs().max()) < 6.5


def test_noise_has_each_clients_deviation_and_is_added() -> None:
    deviation, start = torch.tensor([0.5, 4.0, 0.0]), torch.tensor([10.0, -2.0, 1.0])
    into = start[:, None].expand(3, 30_000).double().contiguous()
    add_noise(Seeded(0), "noise", 1, torch.arange(3), deviation, into)
    torch.testing.assert_close(into.std(dim=1), deviation.double(), rtol=0.02, atol=0)
    torch.testing.assert_close(into.mean(dim=1), start.double(), rtol=0, atol=0.11)
    assert torch.equal(into[2], torch.full((30_000,), 1.0, dtype=torch.float64))


def test_noise_of_clients_rounds_purposes_and_seeds_is_independent() -> None:
    rows = torch.cat([
        noise(Seeded(0), 6, 20_000), noise(Seeded(0), 6, 20_000, t=2), noise(Seeded(0), 6, 20_000, purpose="other"),
        noise(Seeded(1), 6, 20_000), noise(System(), 2, 20_000), noise(System(), 2, 20_000),
    ])  # fmt: skip
    rows = torch.cat([rows[:, :10_000], rows[:, 10_000:]])  # the two halves of a row are cosines and sines
    correlation = torch.corrcoef(rows) - torch.eye(rows.shape[0])
    assert float(correlation.abs().max()) < 0.055  # 5.5 standard errors, about 1,500 pairs
    squares = torch.corrcoef(rows.square()) - torch.eye(rows.shape[0])
    assert float(squares.abs().max()) < 0.055


def test_a_thousand_restarts_never_repeat_noise_from_the_system() -> None:
    seen = {tuple(noise(System(), 1, 4)[0].tolist()) for _ in range(1000)}
    assert len(seen) == 1000


@pytest.mark.parametrize("columns", [1, 2, 63, 128, 129, 20_001])
def test_noise_is_the_same_bits_for_any_shards(columns: int) -> None:
    ids = torch.tensor([5, 900, 17, 3, 44])
    whole = torch.zeros(5, columns)
    add_noise(Seeded(2), "noise", 7, ids, torch.ones(5), whole)
    for rows in ([0], [3, 1], [2, 4, 0]):
        part = torch.zeros(len(rows), columns)
        add_noise(Seeded(2), "noise", 7, ids[rows], torch.ones(len(rows)), part)
        assert torch.equal(part, whole[rows])
    assert whole.unique().numel() > 0.99 * whole.numel()


# -- sampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [Seeded(0), System()])
def test_poisson_takes_every_record_on_its_own(source: Source) -> None:
    clients, size, rate = 4000, 30, 0.2
    batches = draw(source, 1, torch.arange(clients), torch.full((clients,), size), "poisson", rate)
    taken = torch.zeros(clients, size)
    for row, count in enumerate(batches.counts.tolist()):
        taken[row, batches.positions[row, :count]] = 1
    assert torch.equal(taken.sum(dim=1).long(), batches.counts)
    each = taken.sum(dim=0)
    deviation = math.sqrt(clients * rate * (1 - rate))
    assert float(((each - clients * rate) / deviation).abs().max()) < stats.norm.isf(SURE / 30)
    observed = torch.bincount(batches.counts, minlength=size + 1)[:13].double()
    expected = torch.from_numpy(stats.binom.pmf(range(13), size, rate)) * clients
    observed, expected = (
        torch.cat([v[:2].sum()[None], v[2:12], (clients - v[:12].sum())[None]]) for v in (observed, expected)
    )
    assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > SURE
    correlation = torch.corrcoef(taken.T) - torch.eye(size)
    assert float(correlation.abs().max()) < 5.5 / math.sqrt(clients)
    assert torch.equal(batches.divisor, torch.full((clients,), size * rate, dtype=torch.float64))


def test_poisson_batches_of_different_rounds_are_different() -> None:
    ids, sizes = torch.arange(20), torch.full((20,), 40)
    first, second = (draw(Seeded(0), t, ids, sizes, "poisson", 0.5) for t in (1, 2))
    again = draw(Seeded(0), 1, ids, sizes, "poisson", 0.5)
    assert torch.equal(first.positions, again.positions)
    assert not torch.equal(first.counts, second.counts)


def test_sampling_without_replacement_takes_the_papers_number() -> None:
    sizes = torch.tensor([160, 7, 1, 0, 40])
    assert batch_sizes(sizes, 0.1).tolist() == [16, 1, 1, 0, 4]
    assert batch_sizes(torch.tensor([100]), 0.29).tolist() == [29]  # 0.29 · 100 is a little less than 29 in floats
    batches = draw(Seeded(0), 1, torch.arange(5), sizes, "without-replacement", 0.1)
    assert batches.counts.tolist() == [16, 1, 1, 0, 4]
    for row, count in enumerate(batches.counts.tolist()):
        mine = batches.positions[row, :count]
        assert mine.unique().numel() == count
        assert count == 0 or int(mine.max()) < sizes[row]


def test_without_replacement_every_record_has_the_same_chance() -> None:
    clients, size, take = 6000, 12, 3
    batches = draw(Seeded(1), 1, torch.arange(clients), torch.full((clients,), size), "without-replacement", 0.25)
    each = torch.bincount(batches.positions[:, :take].flatten(), minlength=size)
    # The counts of a client's records are not independent; the chi-square of such counts is smaller than for free ones.
    assert stats.chisquare(each.numpy()).pvalue > SURE
    assert stats.chisquare(each.numpy()).pvalue < 1 - 1e-9


def test_rates_can_differ_between_clients() -> None:
    rate = torch.tensor([0.1, 0.9])
    batches = draw(Seeded(0), 1, torch.arange(2), torch.tensor([1000, 1000]), "poisson", rate)
    assert 60 < int(batches.counts[0]) < 140
    assert 860 < int(batches.counts[1]) < 940


# -- the whole step ----------------------------------------------------------------------------------------------


def test_the_gradient_is_the_noisy_sum_over_the_batch() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(30, 4)).double()
    layout = Layout.of(module)
    gradients = PrivateGradients(module, layout, (30,), 0.5)
    clients, size = 400, 8
    x, y = torch.randn(size, 30).double().repeat(clients, 1), torch.randint(4, (size,)).repeat(clients, 1)
    models = torch.randn(1, layout.size).double().expand(clients, -1)
    ids, starts = torch.arange(clients), torch.arange(clients) * size
    mechanism = Mechanism(1.5)
    deviation = torch.full((clients,), mechanism.deviation(0.5))
    assert float(deviation[0]) == 1.5  # 2 · sigma · C
    batches = draw(Seeded(0), 1, ids, torch.full((clients,), size), "none")
    found, sums = gradients(models, x, starts, batches, (y,), deviation, Seeded(0), 1, ids)
    rest = found * size - sums.total
    assert float(rest.std()) == pytest.approx(1.5, rel=0.02)  # 49,600 numbers: the standard error is 0.3 %
    torch.testing.assert_close(found.mean(dim=0) * size, sums.total[0], rtol=0, atol=5 * 1.5 / math.sqrt(clients))


def test_an_empty_batch_gives_noise_alone() -> None:
    module = nn.Sequential(nn.Linear(5, 3))
    layout = Layout.of(module)
    gradients = PrivateGradients(module, layout, (5,), 1.0)
    ids, sizes = torch.arange(40), torch.full((40,), 4)
    batches = draw(Seeded(0), 1, ids, sizes, "poisson", 0.1)
    empty = batches.counts == 0
    assert 15 < int(empty.sum()) < 36
    x, y = torch.randn(160, 5), torch.randint(3, (40, batches.positions.shape[1]))
    found, sums = gradients(
        torch.zeros(40, layout.size), x, ids * 4, batches, (y,), torch.ones(40), Seeded(0), 1, ids
    )  # fmt: skip
    assert not sums.total[empty].any()
    assert sums.total[~empty].abs().sum(dim=1).min() > 0
    assert torch.isnan(sums.loss[empty]).all()
    assert torch.isfinite(found).all()
    assert found[empty].std() > 0.5


def test_nobody_has_anything() -> None:
    module = nn.Sequential(nn.Linear(5, 3))
    gradients = PrivateGradients(module, Layout.of(module), (5,), 1.0)
    batches = draw(Seeded(0), 1, torch.arange(2), torch.tensor([0, 0]), "poisson", 0.5)
    labels = torch.zeros(2, 0, dtype=torch.int64)
    found, _ = gradients(
        torch.zeros(2, 18), torch.zeros(0, 5), torch.zeros(2, dtype=torch.int64), batches, (labels,),
        torch.ones(2), Seeded(0), 1, torch.arange(2),
    )  # fmt: skip
    assert found.std() > 0.3
