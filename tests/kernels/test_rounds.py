"""The GPU programs of matching and mixing against plain torch: run by Triton's interpreter where there is no GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import DEVICE, take_over, tl, triton
from torch import Tensor

from kinfolk import randomness
from kinfolk.cohort import judging, mixing
from kinfolk.matching import company, evidence, lists, mixture, outcome, similarity
from kinfolk.peers import base
from kinfolk.peers.faults import Faults

NAN, INF = torch.nan, torch.inf


def both(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Any]:
    """What plain torch finds and what the programs find, each on copies of the tensors."""
    found = []
    for used in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            take_over(patch, used)
            found.append(function(*map(_copied, args), **{name: _copied(value) for name, value in options.items()}))
    return found[0], found[1]


def _copied(value: Any) -> Any:
    return value.to(DEVICE, copy=True) if isinstance(value, Tensor) else value


def same(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    plain, fused = both(function, *args, **options)
    if isinstance(plain, Tensor):
        plain, fused = (plain,), (fused,)
    for right, ours in zip(plain, fused, strict=True):
        assert right.dtype == ours.dtype
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12, equal_nan=True)


def numbers(*shape: int, low: int = 0, high: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 0, missing: float = 0.0) -> Tensor:
    """Normal float64, some of them NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.where(torch.rand(shape, generator=generator) < missing, NAN, values)


def some_lists(m: int, w: int, n: int, seed: int = 0, missing: float = 0.3) -> Tensor:
    """[m, w] different ids below n, with gaps."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(m, n, generator=generator).argsort(dim=1)[:, :w]
    return torch.where(torch.rand(m, drawn.shape[1], generator=generator) < missing, -1, drawn)


# -- draws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [randomness.bits, randomness.uniform])
def test_draws_have_the_same_bits(draw: Callable[..., Tensor]) -> None:
    client, index = numbers(7, low=-5, high=2**40), numbers(3, 5, low=-9, high=2**62, seed=1)
    for a, b in [
        (client[:, None, None], index),
        (client[:, None], index[0]),
        (client, torch.zeros_like(client)),
        (client.int(), torch.tensor(3)),
        (client[:, None], index.T[:, 1]),
        (client[:0, None], index[0]),
    ]:
        plain, fused = both(draw, 3, "test", 9, a, b)
        assert torch.equal(plain, fused)


@pytest.mark.parametrize("count", [1, 2, 5, 17])
def test_floyds_sampling_is_the_same(count: int) -> None:
    sizes = torch.tensor([0, 1, 2, 3, 5, 16, 17, 18, 400, 2**40])
    plain, fused = both(randomness.positions, 1, "test", 2, torch.arange(10) + 7, sizes, count)
    assert torch.equal(plain, fused)


@pytest.mark.parametrize(("n", "count", "more"), [(1, 3, 0), (2, 1, 1), (9, 4, 3), (40, 10, 45)])
def test_peers_drawn_are_the_same(n: int, count: int, more: int) -> None:
    m = min(n, 5)
    clients = torch.arange(m)
    sizes = numbers(m, high=n + 1, seed=2)
    sizes[0] = n
    barred = numbers(m, more, low=-1, high=n + 1, seed=3)  # with repetitions, and n for nobody
    plain, fused = both(base._draw, 4, "peers", 1, clients, sizes, clients[:, None], barred, n, count)
    assert torch.equal(plain, fused)


@pytest.mark.parametrize("faults", [Faults(), Faults(loss=0.5)])
def test_answers_are_found_and_counted_as_they_are(faults: Faults) -> None:
    m, n = 6, 9
    here = torch.tensor([0, 1, -1, 3, 5, -1, 8])
    clients = torch.arange(m)
    away = torch.tensor([0, 0, 1, 0, 0, 0]).bool()
    ids = some_lists(m, 8, n)

    def pulled(here: Tensor, ids: Tensor, away: Tensor, clients: Tensor) -> tuple[Tensor, ...]:
        position = base.placed(here, n)
        pool = base.Pool(position, {}, lambda asked: (faults.lost(0, 1, clients[:, None], asked), away))
        ledger = torch.arange(4 * m, device=ids.device).view(4, m)
        pool.count(ids, ledger, 1, 2, 2**33)
        pool.count(ids[:, 1:3], ledger, 0, 0, 5)
        return position, pool.rows(ids), pool.rows(ids.T.contiguous().T[:, ::2]), ledger

    same(pulled, here, ids, away, clients)


# -- lists ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("w", "v", "count"), [(1, 0, 1), (3, 20, 5), (6, 3, 11), (70, 1, 2)])
def test_choosing_is_the_same(w: int, v: int, count: int) -> None:
    clients, first, others = torch.arange(5), some_lists(5, w, 90), some_lists(5, v, 90, seed=1)
    first[0], first[1] = -1, torch.arange(w)
    same(lists.choose, 0, "a", 3, clients, first[:, ::2], count)
    same(lists.choose_more, 0, ("a", "b"), 3, clients, first, others, count)
    same(lists.choose_more, 0, ("a", "b"), 3, clients[:2], first[:2], others[:2, :0], count)


@pytest.mark.parametrize(("w", "count"), [(1, 1), (15, 5), (4, 6), (65, 2)])
def test_the_best_are_the_same(w: int, count: int) -> None:
    ids = some_lists(8, w, 80)
    scores = floats(8, w, missing=0.3)
    scores[1] = 0.5  # all equal
    scores[2] = NAN
    scores[3, ::2], scores[4, ::2] = -INF, INF
    scores[5] = scores[5].round()
    ids[6] = -1
    same(lists.best, ids, scores, count)
    same(lists.best, ids[:2, : w // 2 + 1], scores.float()[:2, : w // 2 + 1], count)


@pytest.mark.parametrize("room", [1, 40])
def test_packing_is_the_same(room: int) -> None:
    ids, mask = some_lists(7, 20, 50), numbers(7, 20, high=2).bool()
    mask[0], mask[1] = False, True
    same(lists.pack, mask, ids, room)
    same(lists.packed, ids, room)
    same(lists.packed, ids[:, 3:9], room)


def test_who_stands_in_a_list_is_the_same() -> None:
    there, ids = some_lists(7, 5, 12), some_lists(7, 11, 12, seed=1)
    there[0], ids[1] = -1, -1
    for function in (lambda a, b: lists.contains(a, b), lambda a, b: lists.without(b, a)):
        same(function, there, ids)
        same(function, ids[:, 2:], there)
        same(function, there[:, :1], ids[:, ::3])


def test_what_a_matching_leaves_is_the_same() -> None:
    m, known, strangers = 12, 5, 6
    listed = some_lists(m, 9, 30, missing=0.2)
    listed[3:9] = -1
    looked_at = torch.cat([listed[:, :known], 30 + some_lists(m, strangers, 30, seed=1)], dim=1)
    looked_at = torch.where(looked_at == 29, -1, looked_at)
    listed[9:, known:] = -1
    scores = floats(m, known + strangers, missing=0.2)
    scores[5], scores[6] = NAN, 0.25
    scores[looked_at < 0] = NAN
    kin = numbers(m, known + strangers, high=2, seed=3).bool() & ~scores.isnan()
    kin[4:7], kin[9:] = False, False
    skipped = torch.zeros(m).bool()
    skipped[[1, 5]] = True
    cases, so_far = numbers(m, high=128, seed=4), numbers(m, len(outcome.COUNTED), high=99, seed=5).to(torch.int32)
    for count in (3, 20):
        for seen in (None, cases):
            same(outcome.outcome, looked_at, scores, kin, skipped, listed, known, count, seen, so_far)
    same(outcome.outcome, looked_at, scores, kin, skipped, listed[:, :0], known, 3, cases, so_far)


# -- similarities --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("origin", [False, True])
def test_cosines_are_the_same(kind: torch.dtype, origin: bool) -> None:
    mine, theirs = floats(5, 8500).to(kind), floats(7, 8500, seed=1).to(kind)
    mine[1] = theirs[2] = 0
    theirs[3] = -2 * mine[0]
    theirs[6] = NAN  # nobody's
    rows = numbers(5, 18, low=-1, high=6, seed=2)
    rows[4] = -1
    start = floats(8500, seed=3).to(kind) if origin else None
    if start is not None:
        mine[1] = theirs[2] = start
    plain, fused = both(similarity.cosines, mine, theirs, rows, start)
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-6 if kind == torch.float32 else 1e-13, equal_nan=True)
    assert float(fused[1].nan_to_num().abs().max()) == 0


@pytest.mark.parametrize("origin", [False, True])
def test_cosines_among_the_same_rows_are_the_same(origin: bool) -> None:
    """Some peers' numbers are not finite: nobody else is harmed."""
    models, start = floats(20, 900).float(), floats(900, seed=3).float() if origin else None
    models[4, 7] = models[6] = NAN
    rows = numbers(20, 12, low=-1, high=4, seed=2)
    plain, fused = both(lambda a, b, c: similarity.cosines(a, a, b, c), models, rows, start)
    some = [i for i in range(20) if i not in (4, 6)]
    torch.testing.assert_close(fused[some], plain[some], rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_cosines_of_gradients_are_the_same(kind: torch.dtype) -> None:
    """Mine are some columns of longer rows; a peer may be asked for several times."""
    mine, theirs = floats(6, 8600).to(kind), floats(3, 8500, seed=1).to(kind)
    mine[1] = theirs[2] = 0
    mine[3] = NAN
    mine[0, 60:8560] = -3 * theirs[0]
    rows = torch.tensor([0, 0, 2, 1, 0, 1])
    plain, fused = both(lambda a, b, c: judging._cosines(a[:, 60:8560], b, c), mine, theirs, rows)
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-6 if kind == torch.float32 else 1e-13)
    assert fused[1:4].tolist() == [0, 0, 0]
    assert float(fused[0]) == pytest.approx(-1)


# -- judging by evidence -------------------------------------------------------------------------------------------


def looks(m: int, c: int) -> tuple[Tensor, Tensor]:
    """Scores and who is listed: two groups, ties, nobody seen, nobody or one listed."""
    listed = (torch.arange(c) < c // 2).repeat(m, 1)
    scores = 0.1 * floats(m, c, seed=c, missing=0.2) + numbers(m, c, high=2, seed=c + 1)
    scores[0] = NAN
    scores[1, 1 : c // 2] = NAN
    scores[2, : c // 2] = NAN
    scores[3] = 0.5
    scores[4] = scores[4].round()
    listed[5] = numbers(c, high=2, seed=c + 2).bool()
    return scores, listed


@pytest.mark.parametrize("c", [1, 15, 64])
def test_kin_by_evidence_are_the_same(c: int) -> None:
    m, n = 9, 70
    scores, listed = looks(m, c)
    ids = some_lists(m, c, n, missing=0.0)
    scores[6, 0], ids[6, 0] = NAN, -1
    ids[7, ::2] = -1  # seen, but no place in the table
    table = 3 * floats(m, n, seed=4, missing=0.5).float()
    unit = floats(m, seed=5).abs()
    for rate in (0.3, 1.0):
        plain, fused = both(evidence.look, ids, scores, listed, table, unit, rate, 1.5)
        for name in ("kin", "skipped"):
            assert torch.equal(getattr(plain, name), getattr(fused, name)), name
        torch.testing.assert_close(fused.unit, plain.unit, rtol=1e-12, atol=0)
        torch.testing.assert_close(fused.evidence, plain.evidence, rtol=1e-6, atol=1e-6, equal_nan=True)
    same(evidence.alike, scores, listed, 1.5)


# -- the company that clients keep ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("c", "w"), [(1, 9), (5, 64), (20, 100), (63, 150)])
def test_company_is_the_same(c: int, w: int) -> None:
    m, p = 9, 70
    theirs = (floats(p, w, seed=c) > floats(p, 1, seed=c + 1)).to(torch.uint8)
    theirs[0], theirs[1] = 0, 1
    mine = theirs[numbers(m, high=p, seed=c + 2)]
    rows = some_lists(m, c, p, missing=0.2)
    listed = numbers(m, c, high=2, seed=c + 3).bool()
    rows[0], listed[1], listed[2] = -1, False, True
    same(company.kept, mine, theirs, rows, listed)
    table = numbers(m, w, high=5, seed=c + 4).int()
    same(company.met, table, torch.arange(m) % w, some_lists(m, min(c, w), w, missing=0.3), 7)


@pytest.mark.parametrize("c", [1, 15, 16, 17, 63, 64, 65])
def test_a_client_is_its_own_company_however_many_peers_it_averages_with(c: int) -> None:
    """Also where nobody is missing and they fill all places that a program has for them."""
    table, ids = numbers(5, 90, high=5, seed=c).int(), 10 + some_lists(5, c, 80)
    plain, fused = both(company.met, table, torch.arange(5), ids, 7)
    assert torch.equal(plain, fused)
    assert (fused.diagonal() == 7).all()


# -- the mixture ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("c", "seeds"), [(1, 1), (3, 5), (9, 1), (20, 5), (62, 3)])
def test_the_mixture_is_the_same(c: int, seeds: int) -> None:
    scores, listed = looks(9, c)
    listed[7:] = False
    observed = numbers(9, c, high=9, seed=7) > 0
    for seen in (None, observed) if c == 9 else (observed,):
        plain, fused = both(mixture.match, scores, seen, listed, seeds)
        check_match(plain, fused)


def check_match(plain: mixture.Match, fused: mixture.Match) -> None:
    assert torch.equal(plain.same, fused.same)
    assert torch.equal(plain.skipped, fused.skipped)
    assert plain.events == fused.events
    torch.testing.assert_close(fused.mean, plain.mean, rtol=1e-9, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(fused.variance, plain.variance, rtol=1e-9, atol=1e-12, equal_nan=True)


@triton.jit
def _turning(y, size, count, mean, variance, LEVEL_1: tl.constexpr, LEVEL_2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores that send the state {4, 3} to {4}, that to {4, 3, 1} and that back to {4}."""
    upper = mean > 2.0
    size_0 = tl.where(upper, size, 4 - size)
    level = tl.where(size_0 == 2, 0.0, tl.where(size_0 == 1, LEVEL_1, LEVEL_2))
    members = y > tl.where(size_0 == 1, 0.5, 3.5)
    return level + tl.where(upper, tl.where(members, 0.01, -0.01), 0.0)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a compiled program cannot be given other scores")
@pytest.mark.parametrize("levels", [(-2.0, -1.0), (-1.0, -2.0)])
def test_a_cycle_ends_in_its_likelier_state(levels: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tests/matching: true hard EM never goes round, so the scores are made to."""
    from kinfolk.kernels import mixture as program

    monkeypatch.setattr(program, "_density", lambda *args: _turning(*args, *levels))
    take_over(monkeypatch, True)
    scores = torch.tensor([[4.0, 3.0, 1.0, 0.0]], dtype=torch.float64)
    found = mixture.match(scores, None, torch.tensor([[1, 1, 0, 0]]).bool(), 2)
    assert found.same[0].int().tolist() == ([1, 0, 0, 0] if levels[0] > levels[1] else [1, 1, 1, 0])
    assert found.events["cycle"] == 1


# -- mixing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(("width", "apart"), [(1100, 1100), (1102, 1104), (1101, 1104), (1100, 1101)])
def test_mixing_is_the_same(kind: torch.dtype, weighed: bool, width: int, apart: int) -> None:
    mine, theirs = floats(6, width).to(kind), floats(8, apart, seed=1).to(kind)[:, :width]
    theirs[7] = NAN  # nobody's
    rows = numbers(6, 4, low=-1, high=7, seed=2)
    rows[1] = -1
    absent = torch.tensor([0, 0, 1, 0, 0, 0]).bool()
    coefficients = floats(6, 4, seed=3).abs() if weighed else None
    own = floats(6, seed=4).abs()
    own[3] = 0
    if coefficients is not None:
        coefficients[3] = 0  # nothing counts: it keeps its model
    for mine_counts in (1.0, 0.3, own):
        plain, fused = both(mixing.mix, mine, theirs, rows, coefficients, mine_counts, absent)
        bound = 1e-6 if kind == torch.float32 else 1e-12
        torch.testing.assert_close(fused[0], plain[0], rtol=bound, atol=bound)
        torch.testing.assert_close(fused[1], plain[1], rtol=1e-12, atol=0)
