"""What a robust rule promises: no order, no origin, and bad models that cannot carry it away."""

from __future__ import annotations

import pytest
import torch
from test_rules import ROBUST, drawn, judged
from torch import Tensor

from kinfolk.aggregation import Balance, Clipping, Inbox, Krum, Mean, Median, MKrum, TrimmedMean, Ubar

SHIFTABLE = [name for name in ROBUST if name not in ("balance", "ubar", "ubar all")]
HELD = {
    "median": Median(), "trimmed": TrimmedMean(3), "krum": Krum(3), "krum printed": Krum(3, printed=True),
    "m-krum": MKrum(3), "clipping": Clipping(2.0), "clipping adaptive": Clipping(byzantine=3), "balance": Balance(),
    "ubar": Ubar(0.6),
}  # fmt: skip


@pytest.mark.parametrize("name", ROBUST)
def test_the_order_of_the_list_does_not_matter(name: str) -> None:
    for seed in range(4):
        inbox = drawn(seed)
        mixed, shares = ROBUST[name].combine(inbox)
        turn = torch.randperm(6, generator=torch.Generator().manual_seed(seed + 50))
        turned, its = ROBUST[name].combine(judged(Inbox(inbox.own, inbox.theirs, inbox.rows[:, turn])))
        torch.testing.assert_close(turned, mixed, rtol=0, atol=1e-12)
        torch.testing.assert_close(its, shares[:, turn])


@pytest.mark.parametrize("name", SHIFTABLE)
def test_moving_all_models_moves_the_result(name: str) -> None:
    inbox = drawn(8)
    offset = torch.linspace(-3, 5, 11, dtype=torch.float64)
    mixed, _ = ROBUST[name].combine(inbox)
    moved, _ = ROBUST[name].combine(Inbox(inbox.own + offset, inbox.theirs + offset, inbox.rows))
    torch.testing.assert_close(moved, mixed + offset, rtol=0, atol=1e-10)


def test_balance_measures_in_lengths_of_the_own_model() -> None:
    """So it does not move with the origin, but it grows with the models."""
    inbox = drawn(8)
    mixed, shares = Balance(1.6).combine(inbox)
    assert 0 < int((shares > 0).sum()) < shares.numel()
    grown, _ = Balance(1.6).combine(Inbox(inbox.own * 7, inbox.theirs * 7, inbox.rows, progress=0.4))
    torch.testing.assert_close(grown, mixed * 7)


def attacked(attack: str, strength: float) -> tuple[Inbox, Tensor]:
    """Six clients with seven honest peers, near each other, and three bad ones; and the honest models [p, d]."""
    generator = torch.Generator().manual_seed(1)
    center = torch.randn(40, generator=generator, dtype=torch.float64)
    honest = center + 0.05 * torch.randn(20, 40, generator=generator, dtype=torch.float64)
    if attack == "together":
        bad = strength * torch.ones(3, 40, dtype=torch.float64)
    elif attack == "apart":
        bad = strength * torch.randn(3, 40, generator=generator, dtype=torch.float64)
    elif attack == "signs":
        bad = -strength * honest[:3]
    else:
        bad = torch.full((3, 40), torch.nan, dtype=torch.float64)
    rows = torch.stack([torch.randperm(14, generator=generator)[:7] for _ in range(6)])
    rows = torch.cat([rows, torch.arange(14, 17).expand(6, 3)], dim=1)
    rows = rows.gather(1, torch.stack([torch.randperm(10, generator=generator) for _ in range(6)]))
    inbox = Inbox(honest[14:], torch.cat([honest[:14], bad]), rows, progress=0.5)

    def losses(wanted: Tensor) -> tuple[Tensor, Tensor]:
        apart = inbox.theirs[wanted.clamp(min=0)] - center
        return torch.full((6,), 0.4, dtype=torch.float64), apart.norm(dim=2)

    return Inbox(inbox.own, inbox.theirs, rows, progress=0.5, losses=losses), honest


@pytest.mark.parametrize("attack", ["together", "apart", "signs", "nan"])
@pytest.mark.parametrize("name", HELD)
def test_f_bad_models_move_the_result_by_no_more_than_the_honest_ones_differ(name: str, attack: str) -> None:
    for strength in (3.0, 1e3, 1e12, 1e200):
        inbox, honest = attacked(attack, strength)
        mixed, _ = HELD[name].combine(inbox)
        spread = torch.cdist(honest, honest).max()
        limit = 3 * 2.0 / 11 + spread if name == "clipping" else 2 * spread
        assert float((mixed - honest.mean(0)).norm(dim=1).max()) <= float(limit)


def test_the_plain_mean_is_carried_away() -> None:
    inbox, honest = attacked("together", 1e3)
    assert float((Mean().combine(inbox)[0] - honest.mean(0)).norm(dim=1).min()) > 1000


@pytest.mark.parametrize("name", ["trimmed", "krum", "m-krum"])
def test_one_bad_model_too_many_can_carry_it_away_or_the_client_stays_alone(name: str) -> None:
    """Why the number of bad peers is a setting: f + 1 that agree on a lie win, in a list that is just long enough."""
    own, lie = torch.zeros(1, 5), torch.full((4, 5), 1e3)
    rule = HELD[name]
    honest = 0.1 * torch.randn(rule.least - 5, 5, generator=torch.Generator().manual_seed(0))
    enough = Inbox(own, torch.cat([honest, lie]), torch.arange(rule.least - 1)[None])
    assert float(rule.combine(enough)[0].abs().max()) > 0.2
    short = Inbox(own, enough.theirs[1:], torch.arange(rule.least - 2)[None])
    assert torch.equal(rule.combine(short)[0], own)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ROBUST)
def test_a_gpu_computes_the_same(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        inbox = drawn(4, dtype=dtype, d=700)
        rows = torch.where(torch.arange(6) < torch.arange(9)[:, None], inbox.rows, -1)
        inbox = judged(Inbox(inbox.own, inbox.theirs, rows))

        def losses(wanted: Tensor, here: Inbox = inbox) -> tuple[Tensor, Tensor]:
            assert here.losses is not None
            own, theirs = here.losses(wanted.cpu())
            return own.cuda(), theirs.cuda()

        there = Inbox(inbox.own.cuda(), inbox.theirs.cuda(), rows.cuda(), progress=0.4, losses=losses)
        mixed, shares = ROBUST[name].combine(inbox)
        its, its_shares = ROBUST[name].combine(there)
        torch.testing.assert_close(its.cpu(), mixed, rtol=0, atol=1e-5)
        torch.testing.assert_close(its_shares.cpu(), shares, rtol=0, atol=1e-6)
