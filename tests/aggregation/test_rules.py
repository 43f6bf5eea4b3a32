"""Every rule against plain loops, on lists with gaps and models that are not finite, and in degenerate cases."""

from __future__ import annotations

import itertools
from typing import Any

import plain_rules as plain
import pytest
import torch
from torch import Tensor

from kinfolk.aggregation import (
    Balance,
    Clipping,
    Inbox,
    Krum,
    Mean,
    Median,
    MKrum,
    TrimmedMean,
    Ubar,
    check,
    find,
    make,
    names,
)
from kinfolk.aggregation import inbox as rooms
from kinfolk.aggregation.coordinates import network
from kinfolk.errors import UserError

LOOPS: dict[str, tuple[Any, Any]] = {
    "median": (Median(), plain.median),
    "trimmed 1": (TrimmedMean(1), lambda own, peers: plain.trimmed_mean(own, peers, 1)),
    "trimmed 2": (TrimmedMean(2), lambda own, peers: plain.trimmed_mean(own, peers, 2)),
    "krum 0": (Krum(0), lambda own, peers: plain.krum(own, peers, 0, 1)),
    "krum 2": (Krum(2), lambda own, peers: plain.krum(own, peers, 2, 1)),
    "krum printed": (Krum(1, printed=True), lambda own, peers: plain.krum(own, peers, 1, 1, printed=True)),
    "m-krum": (MKrum(1), lambda own, peers: plain.krum(own, peers, 1, None)),
    "m-krum keep": (MKrum(1, keep=2), lambda own, peers: plain.krum(own, peers, 1, 2)),
    "m-krum keep too many": (MKrum(2, keep=50), lambda own, peers: plain.krum(own, peers, 2, 50)),
    "m-krum printed": (MKrum(1, printed=True), lambda own, peers: plain.krum(own, peers, 1, None, printed=True)),
    "clipping": (Clipping(2.5), lambda own, peers: plain.clipping(own, peers, 2.5, 0)),
    "clipping adaptive": (Clipping(byzantine=2), lambda own, peers: plain.clipping(own, peers, None, 2)),
    "balance": (Balance(1.6, 0.5, 0.3), lambda own, peers: plain.balance(own, peers, 1.6, 0.5, 0.3, 0.4)),
    "ubar": (Ubar(0.6, 0.3), lambda own, peers: plain.ubar(own, peers, 0.6, 0.3, judge)),
    "ubar all": (Ubar(1.0, 0.0), lambda own, peers: plain.ubar(own, peers, 1.0, 0.0, judge)),
}
ROBUST = {name: rule for name, (rule, _) in LOOPS.items()}


def judge(model: Tensor) -> float:
    """A loss: the distance from a vector of ones."""
    return float((model.double() - 1).norm())


def judged(inbox: Inbox) -> Inbox:
    """With losses computed pair by pair."""

    def losses(rows: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.tensor([judge(model) for model in inbox.own], dtype=torch.float64)
        theirs = torch.full(rows.shape, torch.nan, dtype=torch.float64)
        for i, j in itertools.product(*map(range, rows.shape)):
            if rows[i, j] >= 0:
                theirs[i, j] = judge(inbox.theirs[rows[i, j]])
        return own, theirs

    return Inbox(
        inbox.own, inbox.theirs, inbox.rows, inbox.coefficients, inbox.mine, inbox.absent, 0.4, losses, inbox.room
    )  # fmt: skip


def drawn(
    seed: int, m: int = 9, k: int = 6, d: int = 11, dtype: torch.dtype = torch.float64, p: int | None = None
) -> Inbox:
    """Random models and lists of different peers."""
    generator = torch.Generator().manual_seed(seed)
    p = p or k + 5
    own = torch.randn(m, d, generator=generator, dtype=torch.float64)
    theirs = torch.randn(p, d, generator=generator, dtype=torch.float64)
    theirs[::4] *= 3
    rows = torch.stack([torch.randperm(p, generator=generator)[:k] for _ in range(m)])
    return judged(Inbox(own.to(dtype), theirs.to(dtype), rows))


def alone(inbox: Inbox, i: int) -> tuple[Tensor, list[Tensor]]:
    return inbox.own[i], [inbox.theirs[row] for row in inbox.rows[i] if row >= 0]


def single(*models: list[float], dtype: torch.dtype = torch.float64, **more: Any) -> Inbox:
    """One client whose own model is the first."""
    stack = torch.tensor(models, dtype=dtype)
    return judged(Inbox(stack[:1], stack[1:], torch.arange(len(models) - 1)[None], **more))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_equals_a_plain_loop(name: str, dtype: torch.dtype) -> None:
    rule, loop = LOOPS[name]
    for seed, k in enumerate([6, 1, 2, 3, 5, 9]):
        inbox = drawn(seed, k=k, dtype=dtype)
        mixed, shares = rule.combine(inbox)
        assert mixed.dtype == dtype
        assert shares.shape == inbox.rows.shape
        wanted = torch.stack([loop(*alone(inbox, i)) for i in range(9)])
        torch.testing.assert_close(mixed.double(), wanted, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("name", LOOPS)
def test_equals_a_plain_loop_where_peers_are_missing_or_not_finite(name: str) -> None:
    rule, loop = LOOPS[name]
    for seed in range(5):
        inbox = drawn(seed, m=12, k=7, p=9)
        inbox.theirs[0, 3], inbox.theirs[4, 0], inbox.theirs[7] = torch.nan, torch.inf, -torch.inf
        gone = torch.rand(12, 7, generator=torch.Generator().manual_seed(seed)) < torch.linspace(0, 1, 12)[:, None]
        inbox = judged(Inbox(inbox.own, inbox.theirs, torch.where(gone, -1, inbox.rows)))
        mixed, shares = rule.combine(inbox)
        wanted = torch.stack([loop(*alone(inbox, i)) for i in range(12)])
        torch.testing.assert_close(mixed, wanted, rtol=0, atol=1e-12)
        bad = (inbox.rows < 0) | ~torch.isfinite(inbox.theirs).all(1)[inbox.rows.clamp(min=0)]
        assert not shares[bad].any()


@pytest.mark.parametrize("name", ROBUST)
def test_what_came_in_is_not_changed(name: str) -> None:
    inbox, before = drawn(2), drawn(2)
    ROBUST[name].combine(inbox)
    for field in ("own", "theirs", "rows"):
        assert torch.equal(getattr(inbox, field), getattr(before, field))


@pytest.mark.parametrize("name", ROBUST)
def test_shares_make_the_model_of_rules_that_average(name: str) -> None:
    if name.startswith(("median", "trimmed")):
        return
    inbox = drawn(3)
    mixed, shares = ROBUST[name].combine(inbox)
    again = (shares[:, :, None] * inbox.theirs[inbox.rows]).sum(1) + (1 - shares.sum(1))[:, None] * inbox.own
    torch.testing.assert_close(mixed, again)
    assert bool((shares >= 0).all())
    assert bool((shares.sum(1) <= 1 + 1e-12).all())


@pytest.mark.parametrize("name", ROBUST)
def test_clients_do_not_depend_on_who_is_computed_with_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = drawn(5, m=20, k=6, d=301, dtype=torch.float32)
    whole, shares = ROBUST[name].combine(inbox)
    parts = [
        judged(Inbox(inbox.own[s], inbox.theirs, inbox.rows[s])) for s in (slice(0, 1), slice(1, 14), slice(14, 20))
    ]
    assert torch.equal(torch.cat([ROBUST[name].combine(part)[0] for part in parts]), whole)
    monkeypatch.setattr(rooms, "WITHIN", 1)
    small, its = ROBUST[name].combine(judged(inbox))
    assert torch.equal(small, whole)
    assert torch.equal(its, shares)


@pytest.mark.parametrize("name", ROBUST)
def test_many_blocks_of_columns_give_what_one_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = ROBUST[name].combine(drawn(6, d=37))
    monkeypatch.setattr(rooms, "BLOCK", 5)
    torch.testing.assert_close(ROBUST[name].combine(drawn(6, d=37))[0], whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*ROBUST, "mean"])
def test_without_any_peer_or_when_absent_a_client_keeps_its_model(name: str) -> None:
    rule = ROBUST.get(name, Mean())
    full = drawn(1, m=3, k=4)
    nobody = judged(Inbox(full.own, full.theirs, torch.full((3, 4), -1)))
    silence = judged(Inbox(full.own, full.theirs[:0], torch.full((3, 4), -1)))
    no_list = judged(Inbox(full.own, full.theirs, torch.zeros((3, 0), dtype=torch.long)))
    away = judged(Inbox(full.own, full.theirs, full.rows, absent=torch.ones(3, dtype=torch.bool)))
    for inbox in (nobody, silence, no_list, away):
        mixed, shares = rule.combine(inbox)
        assert torch.equal(mixed, full.own)
        assert shares.shape == inbox.rows.shape
        assert not shares.any()


@pytest.mark.parametrize("name", ROBUST)
def test_equal_models_stay_what_they_are(name: str) -> None:
    own = torch.linspace(-1, 2, 13).expand(4, 13).contiguous()
    inbox = judged(Inbox(own, own, torch.tensor([[1, 2, 3], [0, 2, 3], [0, 1, -1], [-1, -1, 0]])))
    torch.testing.assert_close(ROBUST[name].combine(inbox)[0], own, rtol=2e-7, atol=0)


def test_golden_numbers() -> None:
    """Median, trimmed mean, Krum, m-Krum (n - f averaged) and clipping agree with ByzFL 0.0.11 on this list."""
    inbox = single([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 10.0], [0.5, 2.5, 2.0], [100.0, -100.0, 50.0])
    golden = {
        "median": [4.0, 2.5, 6.0],
        "trimmed": [4.0, 3.166666666667, 6.333333333333],
        "krum": [4.0, 5.0, 6.0],
        "m-krum": [3.125, 4.375, 5.25],
        "clip": [1.613627910142, 2.276600608716, 3.411059110316],
    }
    rules = {"median": Median(), "trimmed": TrimmedMean(1), "krum": Krum(1), "m-krum": MKrum(1), "clip": Clipping(2.0)}
    for name, rule in rules.items():
        mixed = rule.combine(inbox)[0][0]
        torch.testing.assert_close(mixed, torch.tensor(golden[name], dtype=torch.float64), rtol=0, atol=1e-9)


def test_ties_are_decided_by_the_order_of_the_list_with_the_own_model_first() -> None:
    square = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]
    for first in range(4):
        models = square[first:] + square[:first]
        assert Krum(1).combine(single(*models))[0][0].tolist() == models[0]
        assert MKrum(1, keep=2).combine(single(*models))[1][0].tolist() == [0.5, 0.0, 0.0]
    around = single([0.0], [2.0], [-2.0])
    _, shares = Ubar(0.5, 0.5).combine(around)
    assert shares[0].tolist() == [0.5, 0.0]
    same = Inbox(around.own, around.theirs, around.rows, losses=lambda rows: (torch.zeros(1), torch.ones(rows.shape)))
    assert Ubar(1.0, 0.5).combine(same)[1][0].tolist() == [0.5, 0.0]
    even = Inbox(around.own, around.theirs, around.rows, losses=lambda rows: (torch.ones(1), torch.ones(rows.shape)))
    assert Ubar(1.0, 0.5).combine(even)[1][0].tolist() == [0.25, 0.25]


@pytest.mark.parametrize("name", ["median", "trimmed 1", "krum 0", "m-krum"])
def test_an_own_model_that_is_not_finite_is_left_out_of_the_list(name: str) -> None:
    peers = [[1.0, 2.0], [1.5, 2.0], [1.0, 2.5], [1.2, 2.1]]
    rule, loop = LOOPS[name]
    inbox = single([torch.nan, 0.0], *peers)
    torch.testing.assert_close(rule.combine(inbox)[0][0], loop(*alone(inbox, 0)))


@pytest.mark.parametrize("name", ["clipping", "clipping adaptive", "balance", "ubar"])
def test_a_center_that_is_not_finite_stays(name: str) -> None:
    mixed, shares = ROBUST[name].combine(single([torch.nan, 0.0], [1.0, 2.0], [1.5, 2.0], [1.0, 1.0]))
    assert not shares.any()
    assert torch.isnan(mixed[0, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ROBUST)
def test_the_largest_numbers_there_are_never_make_a_model_infinite(name: str, dtype: torch.dtype) -> None:
    huge = torch.finfo(dtype).max
    inbox = single([1.0, 2.0], [1.1, 2.0], [huge, -huge], [1.0, 2.1], [0.9, 1.9], [-huge, huge], dtype=dtype)
    mixed, _ = ROBUST[name].combine(inbox)
    assert bool(torch.isfinite(mixed).all())
    if name not in ("krum 0", "m-krum", "m-krum printed", "trimmed 1"):  # f = 2 here
        assert float((mixed - 1.5).abs().max()) < 3


def test_distances_too_large_for_a_number_do_not_look_small() -> None:
    assert Krum(1).combine(single([0.0], [1e200], [2e200]))[0].item() == 0.0


def test_coefficients_weigh_the_mean_and_zero_takes_no_part() -> None:
    inbox = drawn(2, m=2, k=4)
    coefficients = torch.tensor([[1.0, 2.0, 0.0, 4.0], [0.0, 0.0, 0.0, 3.0]])
    mine = torch.tensor([0.5, 1.0])
    weighed = Inbox(inbox.own, inbox.theirs, inbox.rows, coefficients, mine)
    expected, _ = Mean().combine(weighed)
    for rule in (MKrum(0), Clipping(1e9)):
        torch.testing.assert_close(rule.combine(weighed)[0], expected)
    torch.testing.assert_close(Balance(1e9, own=0.0).combine(weighed)[1][0], torch.tensor([1, 2, 0, 4]).double() / 7)
    _, shares = Median().combine(weighed)
    assert shares.tolist() == [[0.25, 0.25, 0.0, 0.25], [0.0, 0.0, 0.0, 0.5]]


def test_own_weight_zero_leaves_the_own_model_out_of_lists_but_not_from_the_center() -> None:
    own, peers = [9.0], [[1.0], [2.0], [2.5]]
    inbox = single(own, *peers, mine=0.0)
    assert Median().combine(inbox)[0].item() == 2.0
    assert Krum(1).combine(inbox)[0].item() == 2.0
    assert Clipping(100.0).combine(inbox)[0].item() == pytest.approx(5.5 / 3)
    assert Clipping(1.0).combine(inbox)[0].item() == pytest.approx(8.0)


def test_balance_accepts_less_as_rounds_pass() -> None:
    models = [[10.0, 0.0], [10.0, 2.5], [10.0, 1.5], [10.0, 0.9]]
    counts = []
    for progress in (0.0, 0.5, 1.0):
        stack = torch.tensor(models)
        inbox = Inbox(stack[:1], stack[1:], torch.arange(3)[None], progress=progress)
        counts.append(int((Balance(0.3, 1.0).combine(inbox)[1] > 0).sum()))
    assert counts == [3, 2, 1 if 3 * 0.3679 > 0.9 else 0]


def test_ubar_asks_only_for_the_shortlist_and_never_takes_a_loss_that_is_no_number() -> None:
    asked = []

    def losses(rows: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(rows.tolist())
        return torch.tensor([0.5]), torch.tensor([[torch.nan, -torch.inf, 2.0]])[:, : rows.shape[1]]

    stack = torch.tensor([[0.0], [5.0], [1.0], [2.0], [3.0], [4.0]])
    inbox = Inbox(stack[:1], stack[1:], torch.tensor([[0, 1, 2, 3, 4]]), losses=losses)
    _, shares = Ubar(0.5).combine(inbox)
    assert asked == [[[1, 2, 3]]]
    assert shares.tolist() == [[0.0, 0.0, 0.0, 0.5, 0.0]]
    assert not Ubar(0.4).combine(inbox)[1].any()
    with pytest.raises(ValueError, match="losses"):
        Ubar().combine(Inbox(stack[:1], stack[1:], torch.tensor([[0, 1]])))


def test_the_sorting_network_sorts_and_needs_less_for_the_middle() -> None:
    for size in range(1, 10):
        for wanted in (frozenset(range(size)), frozenset({size // 2})):
            for bits in itertools.product([0, 1], repeat=size):  # what sorts all of these sorts everything
                values = list(bits)
                for low, high, smaller, larger in network(size, wanted):
                    a, b = values[low], values[high]
                    values[low] = min(a, b) if smaller else -9
                    values[high] = max(a, b) if larger else -9
                assert all(values[place] == sorted(bits)[place] for place in wanted)
    assert len(network(11, frozenset({5}))) <= len(network(11, frozenset(range(11))))


def test_rules_by_name() -> None:
    assert names() == ["balance", "clipping", "krum", "m-krum", "mean", "median", "trimmed-mean", "ubar"]
    assert make({}) == Mean()
    assert make({"rule": "m-krum", "byzantine": 2, "keep": 3}) == MKrum(byzantine=2, keep=3)
    assert [name for name in names() if find(name).judges] == ["ubar"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rule": "krumm"}, "unknown aggregation rule 'krumm': did you mean 'krum'?"),
        ({"rule": 3}, "'aggregation.rule' = 3: must be one of balance, "),
        ({"rule": "krum", "byzantine": -1}, "'aggregation.byzantine' = -1: must be at least 0"),
        ({"rule": "krum", "byzantine": 0.5}, "'aggregation.byzantine' = 0.5"),
        ({"rule": "median", "byzantine": 1}, "unknown key 'aggregation.byzantine'"),
        ({"rule": "clipping", "radius": 0.0}, "'aggregation.radius' = 0.0: must be greater than 0"),
        ({"rule": "balance", "own": 1.5}, "'aggregation.own' = 1.5: must be at most 1"),
        ({"rule": "ubar", "honest": 0.0}, "'aggregation.honest' = 0.0: must be greater than 0"),
        ({"rule": "m-krum", "keep": 0}, "'aggregation.keep' = 0: must be at least 1"),
    ],
)
def test_wrong_settings_are_explained(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        make(values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_lists_that_are_always_too_short_are_refused() -> None:
    for rule, needs in ((TrimmedMean(2), 5), (Krum(2), 5), (Krum(2, True), 7), (MKrum(0), 1), (Clipping(), 3)):
        assert rule.least == needs
        check(rule, needs - 1)
    with pytest.raises(UserError, match=r"'aggregation.byzantine' = 2: krum then needs 5 models, but a client has 4"):
        check(Krum(2), 3)
    check(Median(), 0)
