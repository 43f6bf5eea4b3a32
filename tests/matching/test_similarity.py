"""Similarities against numpy, and what becomes of vectors without length, losses without bounds and missing answers."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import make_cohort, make_federation
from kinfolk.matching import similarity
from kinfolk.matching.similarity import cosines, inverse_loss, log_loss
from kinfolk.methods.panm import PANM
from kinfolk.peers.base import Pool, placed


def by_numpy(mine: Tensor, theirs: Tensor, rows: Tensor, origin: Tensor | None = None) -> np.ndarray:
    a, b = mine.numpy().astype(np.float64), theirs.numpy().astype(np.float64)
    if origin is not None:
        a, b = a - origin.numpy(), b - origin.numpy()
    found = np.full(rows.shape, np.nan)
    for i, wanted in enumerate(rows.tolist()):
        for column, j in enumerate(wanted):
            if j >= 0:
                found[i, column] = a[i] @ b[j] / (np.linalg.norm(a[i]) * np.linalg.norm(b[j]))
    return found


def vectors(m: int, p: int, d: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(d)
    mine, theirs = (torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype) for n in (m, p))
    rows = torch.randint(-1, p, (m, 5), generator=generator)
    return mine, theirs, rows, torch.randn(d, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture(params=["all pairs", "wanted pairs"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All pairs as one product, or the wanted pairs only."""
    calls = []
    real = similarity._some
    monkeypatch.setattr(similarity, "_some", lambda *a: calls.append(1) or real(*a))
    monkeypatch.setattr(similarity, "DENSE", 0 if request.param == "wanted pairs" else 2048)
    yield
    assert bool(calls) == (request.param == "wanted pairs")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("block", [3, 7, 8192])
@pytest.mark.parametrize("narrowest", [2, 256])
def test_cosines_are_those_of_numpy(block: int, narrowest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "BLOCK", block)
    monkeypatch.setattr(similarity, "NARROWEST", narrowest)
    monkeypatch.setattr(similarity, "NEAR", 0)
    mine, theirs, rows, origin = vectors(6, 9, 17)
    found = cosines(mine, theirs, rows)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), by_numpy(mine, theirs, rows), rtol=1e-12, atol=1e-12)
    seen_from = cosines(mine, theirs, rows, origin).numpy()
    np.testing.assert_allclose(seen_from, by_numpy(mine, theirs, rows, origin), rtol=1e-12, atol=1e-12)
    among = rows.clamp(max=5)
    each_other = cosines(mine, mine, among, origin).numpy()
    np.testing.assert_allclose(each_other, by_numpy(mine, mine, among, origin), rtol=1e-12, atol=1e-12)
    assert torch.equal(found.isnan(), rows < 0)  # who did not answer, and nobody else
    assert (rows < 0).any()
    assert (rows >= 0).any()


@pytest.mark.usefixtures("path")
def test_float32_models_are_compared_to_the_precision_of_float32() -> None:
    mine, theirs, rows, _ = vectors(6, 9, 30_000, torch.float32)
    found = cosines(mine, theirs, rows)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), by_numpy(mine, theirs, rows), atol=1e-7)


@pytest.mark.usefixtures("path")
def test_threads_and_how_much_is_held_at_a_time_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs, rows, origin = vectors(40, 60, 70_000, torch.float32)
    found = cosines(mine, theirs, rows, origin)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for held in (similarity.HELD, 1):
            monkeypatch.setattr(similarity, "HELD", held)
            assert torch.equal(cosines(mine, theirs, rows, origin).nan_to_num(2), found.nan_to_num(2))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_allclose(found.numpy(), by_numpy(mine, theirs, rows, origin), atol=1e-6)


def test_many_peers_of_few_wanted_are_not_all_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    real = similarity._some
    monkeypatch.setattr(similarity, "_some", lambda *a: chosen.append(real(*a)) or chosen[-1])
    widths = []
    for m, p, c in ((5, 20, 5), (5, 21, 5), (3, 600, 2), (2, 9000, 2)):
        theirs, rows = torch.randn(p, 300, dtype=torch.float64), torch.randint(-1, p, (m, c))
        mine = torch.randn(m, 300, dtype=torch.float64)
        found = cosines(mine, theirs, rows)
        np.testing.assert_allclose(found.numpy(), by_numpy(mine, theirs, rows), rtol=1e-12, atol=1e-12)
        widths.append(chosen.pop()[1] if chosen else None)
    assert widths == [None, 4096, 256, 256]


def test_peers_that_are_gathered_give_the_same_as_peers_read_where_they_lie() -> None:
    mine, theirs, rows, _ = vectors(6, 90, 40)
    wanted = rows.clamp(min=0)
    multiply, _ = similarity._some(wanted, 90, mine)
    torch.testing.assert_close(similarity._gathered(mine, theirs, wanted), multiply(mine, theirs))


@pytest.mark.usefixtures("path")
def test_a_vector_without_length_has_cosine_zero() -> None:
    mine, theirs, _, origin = vectors(3, 4, 8)
    mine[1] = 0
    theirs[2] = 1e-14  # too short to have a direction
    rows = torch.arange(4).expand(3, 4)
    found = cosines(mine, theirs, rows)
    assert found[1].tolist() == [0.0] * 4
    assert found[:, 2].tolist() == [0.0] * 3
    assert (found[[0, 2]][:, [0, 1, 3]] != 0).all()
    mine[0] = origin
    assert cosines(mine, theirs, rows, origin)[0].tolist() == [0.0] * 4


@pytest.mark.usefixtures("path")
def test_short_vectors_still_have_a_direction_and_none_leaves_minus_one_to_one() -> None:
    mine, _, _, _ = vectors(4, 1, 50)
    theirs = torch.cat([mine * 1e-6, -3 * mine])
    found = cosines(mine * 1e-6, theirs, torch.arange(8).expand(4, 8))
    assert (found.abs() <= 1).all()
    assert found[:, :4].diagonal().tolist() == pytest.approx([1.0] * 4, abs=1e-12)
    assert found[:, 4:].diagonal().tolist() == pytest.approx([-1.0] * 4, abs=1e-12)


@pytest.mark.usefixtures("path")
def test_no_peers_wanted_gives_no_cosines() -> None:
    mine, theirs, _, _ = vectors(3, 4, 8)
    assert cosines(mine, theirs, torch.empty(3, 0, dtype=torch.int64)).shape == (3, 0)
    assert cosines(mine, theirs, torch.full((3, 2), -1)).isnan().all()


def test_losses_become_similarities_with_the_same_order() -> None:
    losses = torch.tensor([0.0, 1e-12, 1e-8, 0.25, 2.0, 1e30, math.inf, math.nan], dtype=torch.float64)
    inverse, log = inverse_loss(losses), log_loss(losses)
    assert inverse[:6].tolist() == pytest.approx([1e8, 1e8, 1e8, 4.0, 0.5, 1e-30], rel=1e-9)
    assert inverse[0] == inverse[1] == inverse[2]  # one cap for all: ties there are ties
    assert inverse[6] == 0
    assert log[3:5].tolist() == pytest.approx([-math.log(0.25), -math.log(2.0)])
    assert log[0] == log[1] == log[2] == pytest.approx(8 * math.log(10))
    assert torch.isfinite(log[:7]).all()  # an infinite similarity would spoil every mean it enters
    assert log[6] <= log[5] < log[4] - 10
    assert inverse[7].isnan()
    assert log[7].isnan()
    finite = torch.linspace(0.01, 50, 40, dtype=torch.float64)
    assert (inverse_loss(finite).diff() < 0).all()
    assert (log_loss(finite).diff() < 0).all()


def test_in_the_first_round_the_update_is_the_whole_drift() -> None:
    scores = {}
    for alpha in (0.0, 0.3, 1.0):
        cohort = make_cohort(make_federation([9, 12, 7, 10, 8]), lambda: nn.Linear(6, 3))
        ids = torch.tensor([[(i + 1) % 5, (i + 3) % 5, -1] for i in range(5)])
        everybody = torch.arange(5)
        by_round = []
        for t in (1, 2):
            before = cohort.weights
            cohort.train(t)
            tensors = {"weights": cohort.weights, "update": cohort.weights - before}
            pool = Pool(placed(everybody, 5), tensors)
            by_round.append(PANM(alpha=alpha)._similarity(cohort, pool, ids, cohort.weights - before))
        scores[alpha] = by_round
    for first in (scores[0.3][0], scores[1.0][0]):
        torch.testing.assert_close(first, scores[0.0][0], rtol=1e-12, atol=1e-12, equal_nan=True)
    assert torch.equal(scores[0.0][0].isnan(), ids < 0)
    late = {alpha: by_round[1] for alpha, by_round in scores.items()}
    assert (late[1.0] - late[0.0])[:, :2].abs().min() > 1e-4
    torch.testing.assert_close(late[0.3], 0.3 * late[1.0] + 0.7 * late[0.0], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("width", [100, 2 * similarity.BLOCK, 2 * similarity.BLOCK + 7])
@pytest.mark.parametrize("moved", [False, True])
def test_the_way_for_a_gpu_gives_the_same_cosines(width: int, moved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    mine, theirs = (torch.randn(n, width, generator=generator) for n in (5, 7))
    origin = torch.randn(width, generator=generator) if moved else None
    for peers in (theirs, mine):
        rows = torch.randint(-1, peers.shape[0], (5, 4), generator=generator)
        at_once = similarity._finish(*similarity._at_once(mine, peers, origin), rows)
        torch.testing.assert_close(at_once, cosines(mine, peers, rows, origin), rtol=1e-6, atol=1e-7, equal_nan=True)


def test_without_any_answer_there_is_no_similarity() -> None:
    rows = torch.full((3, 2), -1)
    assert cosines(torch.ones(3, 4), torch.ones(0, 4), rows, torch.zeros(4)).isnan().all()
