"""PANM with `mingle`: in stage one averages are with kin among the candidates, not with the list."""

from typing import Any

import pytest
import torch
from test_panm import KIN, N, engine_of, mixed_with, rows, see_perfectly
from torch import Tensor

from kinfolk import engines
from kinfolk.cohort.cohort import Cohort
from kinfolk.methods.panm import PANM

SETTINGS: dict[str, Any] = {
    "neighbors": 3, "candidates": 8, "preset": "paper", "matcher": "evidence", "discover_rounds": 24,
}  # fmt: skip


def losses_of(monkeypatch: pytest.MonkeyPatch, kin: float, strangers: float) -> None:
    """What everybody's models lose on the samples of kin and of strangers."""

    def losses(self: Cohort, pool: Any, ids: Tensor, name: str = "weights", head: Any = None) -> Tensor:
        same = self.clusters[self.ids][:, None] == self.clusters[ids.clamp(min=0)]
        return torch.where(
            pool.rows(ids) >= 0, torch.where(same, kin, strangers).double() + 1e-3 * (ids % 5), torch.nan
        )

    monkeypatch.setattr(Cohort, "losses", losses)


def drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways of kin are alike, those of strangers not."""

    def drift(self: PANM, cohort: Any, pool: Any, ids: Tensor, update: Tensor) -> Tensor:
        kin = cohort.clusters[cohort.ids][:, None] == cohort.clusters[ids.clamp(min=0)]
        score = torch.where(kin, 0.9, 0.2).double() + 1e-3 * (ids % 5)
        return torch.where(pool.rows(ids) >= 0, score, torch.nan)

    monkeypatch.setattr(PANM, "_drift", drift)


@pytest.fixture(autouse=True)
def clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, drifts and losses all tell kin from strangers."""
    see_perfectly(monkeypatch)
    drift_apart(monkeypatch)
    losses_of(monkeypatch, 0.5, 2.0)


def partners(engine: engines.Engine, rounds: int) -> list[set[int]]:
    """Everybody whom each client averaged with after the first two rounds, in which lists form."""
    found: list[set[int]] = [set() for _ in range(N)]
    for t in range(1, rounds + 1):
        engine.step(t, False)
        for mine, now in zip(found, mixed_with(engine)):
            mine |= now if t > 4 else set()
    return found


@pytest.mark.parametrize("similarity", ["gradient", "loss"])
@pytest.mark.parametrize("shards", [1, 3])
def test_averages_reach_all_kin_and_nobody_else_while_the_list_stays_short(shards: int, similarity: str) -> None:
    engine = engine_of(shards, **SETTINGS, mingle=True, similarity=similarity)
    met = partners(engine, 24)
    assert met == KIN
    lists = [mine for shard in engine.shards for mine in rows(shard.state.neighbors)]
    assert all(len(mine) == 3 and mine <= kin for mine, kin in zip(lists, KIN))


def test_candidates_come_first_and_the_list_fills_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(**SETTINGS, mingle=True)
    for t in range(1, 6):
        engine.step(t, False)
    lists = rows(engine.shards[0].state.neighbors)
    peers = engine.shards[0].peers
    candidates = rows(peers.sample(6, 8, exclude=engine.shards[0].state.neighbors))
    engine.step(6, False)
    for now, mine, drawn, kin in zip(mixed_with(engine), lists, candidates, KIN):
        new = drawn & kin
        assert len(now & new) == min(3, len(new))
        assert now - new <= mine | drawn


def test_without_it_averages_are_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(**SETTINGS, mingle=False)
    for t in range(1, 6):
        engine.step(t, False)
        assert mixed_with(engine) == rows(engine.shards[0].state.neighbors)


@pytest.mark.parametrize("opinion", ["updates", "losses"])
def test_two_opinions_must_agree_on_a_new_peer(opinion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them sees only the candidates with odd ids as kin; from the second round on, when there is a list."""
    engine = engine_of(**SETTINGS, mingle=True, confirm=True)
    for t in range(1, 6):
        engine.step(t, False)
    shard = engine.shards[0]
    lists = rows(shard.state.neighbors)
    drawn = rows(shard.peers.sample(6, 8, exclude=shard.state.neighbors))
    listed = shard.state.neighbors.clone()
    seen, lost = PANM._similarity, Cohort.losses

    def odd(ids: Tensor) -> Tensor:
        return (ids % 2 == 1) | (ids[:, :, None] == listed[:, None, :]).any(dim=2)

    if opinion == "updates":
        monkeypatch.setattr(PANM, "_similarity", lambda *given: torch.where(odd(given[3]), seen(*given), -5.0))
    else:
        monkeypatch.setattr(Cohort, "losses", lambda *given: torch.where(odd(given[2]), lost(*given), 2.0))
    engine.step(6, False)
    met = 0
    for now, mine, new, kin in zip(mixed_with(engine), lists, drawn, KIN):
        wanted = {peer for peer in new & kin if peer % 2 == 1}
        unwanted = now - mine - wanted
        met += len(now & wanted)
        if opinion == "losses" or len(new - wanted) == 0 or len({p for p in new if p % 2 == 1}) >= 3:
            assert not unwanted
    assert met > 0


def test_whoever_has_too_few_kin_in_sight_takes_the_rest_from_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses say that nobody is kin but those on the list."""
    engine = engine_of(**SETTINGS, mingle=True, confirm=True)
    for t in range(1, 6):
        engine.step(t, False)
    listed = engine.shards[0].state.neighbors.clone()

    def losses(self: Cohort, pool: Any, ids: Tensor, *more: Any) -> Tensor:
        return torch.where((ids[:, :, None] == listed[:, None, :]).any(dim=2), 0.5, 2.0).double()

    monkeypatch.setattr(Cohort, "losses", losses)
    engine.step(6, False)
    assert mixed_with(engine) == rows(listed)


def test_the_presets_differ_in_it() -> None:
    assert PANM(preset="robust").mingle
    assert not PANM(preset="paper").mingle
    assert PANM(preset="paper", mingle=True).mingle
