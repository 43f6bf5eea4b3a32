"""PANM with `mingle`: from the middle of stage one on averages are with kin among the candidates, not with the list."""

from typing import Any

import pytest
import torch
from test_panm import KIN, N, engine_of, mixed_with, rows, see_perfectly
from torch import Tensor

from kinfolk import engines
from kinfolk.methods.panm import PANM

SETTINGS: dict[str, Any] = {
    "neighbors": 3, "candidates": 8, "preset": "paper", "matcher": "evidence", "discover_rounds": 24,
}  # fmt: skip


def drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways of kin are alike, those of strangers not."""

    def drift(self: PANM, cohort: Any, pool: Any, ids: Tensor, update: Tensor) -> Tensor:
        kin = cohort.clusters[cohort.ids][:, None] == cohort.clusters[ids.clamp(min=0)]
        score = torch.where(kin, 0.9, 0.2).double() + 1e-3 * (ids % 5)
        return torch.where(pool.rows(ids) >= 0, score, torch.nan)

    monkeypatch.setattr(PANM, "_drift", drift)


def partners(engine: engines.Engine, rounds: int) -> list[set[int]]:
    """Everybody whom each client averaged with after the first two rounds, in which lists form."""
    found: list[set[int]] = [set() for _ in range(N)]
    for t in range(1, rounds + 1):
        engine.step(t, False)
        for mine, now in zip(found, mixed_with(engine)):
            mine |= now if t > 4 else set()
    return found


@pytest.mark.parametrize("shards", [1, 3])
def test_averages_reach_all_kin_and_nobody_else_while_the_list_stays_short(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_perfectly(monkeypatch)
    drift_apart(monkeypatch)
    engine = engine_of(shards, **SETTINGS, mingle=True)
    met = partners(engine, 24)
    assert met == KIN
    lists = [mine for shard in engine.shards for mine in rows(shard.state.neighbors)]
    assert all(len(mine) == 3 and mine <= kin for mine, kin in zip(lists, KIN))


def test_not_before_the_middle_of_stage_one(monkeypatch: pytest.MonkeyPatch) -> None:
    see_perfectly(monkeypatch)
    drift_apart(monkeypatch)
    engine = engine_of(**SETTINGS, mingle=True)
    for t in range(1, 14):
        engine.step(t, False)
        same = [now == mine for now, mine in zip(mixed_with(engine), rows(engine.shards[0].state.neighbors))]
        assert all(same) if t <= 12 else not all(same)


def test_candidates_come_first_and_the_list_fills_up(monkeypatch: pytest.MonkeyPatch) -> None:
    see_perfectly(monkeypatch)
    drift_apart(monkeypatch)
    engine = engine_of(**SETTINGS, mingle=True)
    for t in range(1, 13):
        engine.step(t, False)
    lists = rows(engine.shards[0].state.neighbors)
    peers = engine.shards[0].peers
    candidates = rows(peers.sample(13, 8, exclude=engine.shards[0].state.neighbors))
    engine.step(13, False)
    for now, mine, drawn, kin in zip(mixed_with(engine), lists, candidates, KIN):
        new = drawn & kin
        assert len(now & new) == min(3, len(new))
        assert now - new <= mine | drawn


def test_without_it_averages_are_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    see_perfectly(monkeypatch)
    engine = engine_of(**SETTINGS, mingle=False)
    for t in range(1, 6):
        engine.step(t, False)
        assert mixed_with(engine) == rows(engine.shards[0].state.neighbors)


def test_whoever_has_too_few_kin_in_sight_takes_the_rest_from_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    see_perfectly(monkeypatch)
    nobody = lambda self, cohort, pool, ids, update: torch.full(ids.shape, torch.nan, dtype=torch.float64)  # noqa: E731
    monkeypatch.setattr(PANM, "_drift", nobody)
    engine = engine_of(**{**SETTINGS, "discover_rounds": 1}, mingle=True)
    engine.step(1, False)
    assert mixed_with(engine) == rows(engine.shards[0].state.neighbors)


def test_the_presets_differ_in_it() -> None:
    assert PANM(preset="robust").mingle
    assert not PANM(preset="paper").mingle
    assert PANM(preset="paper", mingle=True).mingle
