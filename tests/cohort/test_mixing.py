"""Weighted sums of models on a CPU against plain sums: gaps, shards, nobody there."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from kinfolk.cohort import mixing
from kinfolk.cohort.mixing import blend, mix

M, K = 23, 4


def peers(generator: torch.Generator, gaps: bool) -> Tensor:
    """[M, K] distinct rows, some of them -1."""
    rows = torch.stack([torch.randperm(M, generator=generator)[:K] for _ in range(M)])
    return rows.masked_fill(torch.rand(rows.shape, generator=generator) < 0.3, -1) if gaps else rows


def plainly(weights: Tensor, theirs: Tensor, rows: Tensor, shares: Tensor, mine: Tensor) -> Tensor:
    mixed = weights.double() * mine.double()[:, None]
    for i, j in (rows >= 0).nonzero().tolist():
        mixed[i] += shares[i, j].double() * theirs[rows[i, j]].double()
    return mixed


@pytest.mark.parametrize("columns", [1, 511, 513, 5000])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_blend_is_the_plain_sum(columns: int, gaps: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    weights = torch.randn(M, columns, generator=generator, dtype=dtype)
    rows = peers(generator, gaps)
    shares = torch.rand(M, K, generator=generator, dtype=torch.float64)
    mine = torch.rand(M, generator=generator, dtype=torch.float64)
    before = weights.clone()
    found = blend(weights, weights, rows, shares, mine)
    assert found.dtype == dtype
    expected = plainly(weights, weights, rows, shares, mine)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    gathered = mixing._gathered(weights, weights, rows, shares.to(dtype), mine.to(dtype))
    torch.testing.assert_close(gathered.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(weights, before)  # everybody reads what was there before anybody mixed


@pytest.mark.parametrize("columns", [7, 1500, 9001])
def test_every_bit_is_the_same_wherever_the_peers_lie(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    weights = torch.randn(M, columns, generator=generator)
    rows = peers(generator, gaps=True)
    shares, mine = torch.rand(M, K, generator=generator), torch.rand(M, generator=generator)
    whole = blend(weights, weights, rows, shares, mine)
    order = torch.randperm(M, generator=generator)
    pool, places = weights[order], torch.where(rows >= 0, order.argsort()[rows.clamp(min=0)], -1)
    for shard in (slice(0, 1), slice(1, 9), slice(9, M), slice(0, M)):
        part = blend(weights[shard].clone(), pool, places[shard], shares[shard], mine[shard])
        assert torch.equal(part, whole[shard])


def test_narrower_pieces_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(M, 9001, generator=generator)
    rows = peers(generator, gaps=False)
    shares, mine = torch.rand(M, K, generator=generator), torch.rand(M, generator=generator)
    wide = blend(weights, weights, rows, shares, mine)
    monkeypatch.setattr(mixing, "WIDEST", 512)
    assert torch.equal(blend(weights, weights, rows, shares, mine), wide)


def test_what_lies_where_nobody_is_does_not_count() -> None:
    weights = torch.ones(3, 600)
    theirs = torch.full((4, 600), torch.nan)
    theirs[2] = 3.0
    rows = torch.tensor([[2, -1], [-1, -1], [-1, 2]])
    shares, mine = torch.full((3, 2), 0.5), torch.tensor([0.5, 1.0, 0.5])
    found = blend(weights, theirs, rows, shares, mine)
    assert torch.equal(found[:, 0], torch.tensor([2.0, 1.0, 2.0]))
    assert not found.isnan().any()


def test_whoever_has_nobody_to_mix_with_keeps_its_model() -> None:
    weights = torch.randn(4, 1000, generator=torch.Generator().manual_seed(2))
    absent = torch.tensor([False, True, False, False])
    rows = torch.tensor([[-1, -1], [0, 2], [3, -1], [-1, -1]])
    mixed, shares = mix(weights, weights, rows, None, 1.0, absent)
    assert torch.equal(mixed[[0, 1, 3]], weights[[0, 1, 3]])
    torch.testing.assert_close(mixed[2], (weights[2] + weights[3]) / 2)
    assert shares.tolist() == [[0.0, 0.0], [0.0, 0.0], [0.5, 0.0], [0.0, 0.0]]


def test_where_nobody_answered_anybody_all_keep_their_models() -> None:
    weights = torch.randn(4, 1000, generator=torch.Generator().manual_seed(3))
    rows = torch.full((4, 2), -1)
    mixed, _ = mix(weights, weights[:0], rows, None, 1.0, torch.zeros(4, dtype=torch.bool))
    assert torch.equal(mixed, weights)


FAR = """
import mmap
import torch
from kinfolk.cohort.mixing import mix

m, d = 10_900, 200_000  # more than 2^31 numbers, of which few are touched
memory = mmap.mmap(-1, 4 * m * d, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
generator = torch.Generator().manual_seed(0)
models = torch.frombuffer(memory, dtype=torch.float32).view(m, d)[:, :300]
models[:] = torch.randn(models.shape, generator=generator)
rows = torch.randint(m, (m, 3), generator=generator)
mixed, _ = mix(models, models, rows, None, 1.0, torch.zeros(m, dtype=torch.bool))
torch.testing.assert_close(mixed, (models + models[rows].sum(dim=1)) / 4)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is there when it is touched")
def test_models_that_lie_far_apart_are_found() -> None:
    found = subprocess.run([sys.executable, "-c", FAR], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]


def test_what_lay_in_the_memory_of_a_blend_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(into: Tensor, a: Tensor, b: Tensor, *, beta: float, out: Tensor) -> None:
        out.copy_(into.mul(beta) + a.to_dense() @ b)  # as torch does it where it comes without MKL

    weights = torch.randn(4, 700, generator=torch.Generator().manual_seed(4))
    rows, shares, mine = torch.tensor([[1], [2], [3], [0]]), torch.full((4, 1), 0.5), torch.full((4,), 0.5)
    expected = blend(weights, weights, rows, shares, mine)
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, torch.nan))
    monkeypatch.setattr(torch, "addmm", plain)
    torch.testing.assert_close(blend(weights, weights, rows, shares, mine), expected)


@pytest.mark.parametrize("threads", [1, 8, 64])
@pytest.mark.parametrize("models", [3, 1000, 4095, 20_000, 100_000])
def test_copies_of_pieces_are_bounded_however_many_threads_there_are(models: int, threads: int) -> None:
    busy, width = mixing._held(4 * models, threads, mixing._columns(models))
    assert 1 <= busy <= threads
    assert width >= mixing.NARROWEST
    assert busy * width * 4 * models <= mixing.HELD
    assert busy == threads or 2 * mixing.NARROWEST * (busy + 1) * 4 * models > mixing.HELD


def test_models_of_others_are_copied_within_these_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    weights, theirs = torch.randn(M, 9000, generator=generator), torch.randn(M, 9000, generator=generator)
    rows, shares = peers(generator, gaps=True), torch.rand(M, K, generator=generator)
    expected = blend(weights, theirs, rows, shares, shares[:, 0])
    together, largest = torch.cat, []

    def cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
        found = together(tensors, dim=dim)
        largest.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(torch, "cat", cat)
    monkeypatch.setattr(mixing, "HELD", 2 * M * 4 * 512)
    assert torch.equal(blend(weights, theirs, rows, shares, shares[:, 0]), expected)
    assert max(largest) <= mixing.HELD
