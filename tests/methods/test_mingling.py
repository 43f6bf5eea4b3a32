"""PANM with `mingle`: averages are with all kin that have been looked at, not with k of them only."""

from typing import Any

import pytest
import torch
from test_panm import KIN, engine_of, mixed_with, rows, see_perfectly
from torch import Tensor

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


def step(engine: Any, t: int) -> tuple[list[set[int]], list[set[int]], list[set[int]]]:
    """Take round t: whom each client listed before, whom it drew, and whom it averaged with."""
    shard = engine.shards[0]
    listed = shard.state.neighbors
    drawn = shard.peers.sample(t, 8, exclude=listed)
    engine.step(t, False)
    return rows(listed), rows(drawn), mixed_with(engine)


@pytest.mark.parametrize("similarity", ["gradient", "loss"])
@pytest.mark.parametrize("confirm", [False, True])
def test_stage_one_averages_with_all_kin_in_sight_while_the_list_stays_short(similarity: str, confirm: bool) -> None:
    """Confirmed are at most 2k: those listed and the k likest."""
    engine = engine_of(**SETTINGS, mingle=True, similarity=similarity, confirm=confirm)
    for t in range(1, 7):
        engine.step(t, False)
    more = 0
    for t in range(7, 12):
        for listed, drawn, now, kin in zip(*step(engine, t), KIN):
            new = drawn & kin
            assert now <= (listed | drawn) & kin
            assert now >= listed
            assert len(now & new) == (min(3, len(new)) if confirm else len(new))
            more += len(now) > 3
        assert all(len(mine) == 3 and mine <= kin for mine, kin in zip(rows(engine.shards[0].state.neighbors), KIN))
    assert more > 20


@pytest.mark.parametrize("opinion", ["drift", "similarity"])
def test_two_opinions_must_agree_on_whoever_is_not_found(opinion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To one of them even ids are strangers, unless they are listed."""
    engine = engine_of(**SETTINGS, mingle=True)
    for t in range(1, 7):
        engine.step(t, False)
    listed = engine.shards[0].state.neighbors.clone()
    drifted, seen = PANM._drift, PANM._similarity

    def among(ids: Tensor) -> Tensor:
        return (ids[:, :, None] == listed[:, None, :]).any(dim=2)

    def odd_only(found: Tensor, ids: Tensor, otherwise: float) -> Tensor:
        return torch.where((ids % 2 == 1) | among(ids), found, otherwise)

    def similarity(*given: Any) -> Tensor:  # those listed stay the most similar
        found = seen(*given) + 0.1 * among(given[3])
        return found if opinion == "drift" else odd_only(found, given[3], 0.0)

    monkeypatch.setattr(PANM, "_similarity", similarity)
    if opinion == "drift":
        monkeypatch.setattr(PANM, "_drift", lambda *given: odd_only(drifted(*given), given[3], 0.2))
    met = 0
    mixed = step(engine, 7)
    for mine, drawn, now, kept, kin in zip(*mixed, rows(engine.shards[0].state.neighbors), KIN):
        odd = {peer for peer in drawn & kin if peer % 2 == 1}
        assert now - mine - kept <= odd
        met += len(now & odd)
    assert met > 0


def test_whoever_has_no_kin_in_sight_averages_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_stage_two_averages_with_all_that_were_looked_at_and_judged_kin() -> None:
    engine = engine_of(**{**SETTINGS, "discover_rounds": 10, "candidates": 4}, mingle=True)
    for t in range(1, 30):
        engine.step(t, False)
    before = rows(engine.shards[0].state.neighbors)
    assert before == KIN  # lists are longer than what is looked at
    engine.step(30, False)
    assert all(len(now) == 4 and now <= kin for now, kin in zip(mixed_with(engine), KIN))


def test_without_it_averages_are_with_k() -> None:
    engine = engine_of(**{**SETTINGS, "discover_rounds": 4}, mingle=False)
    for t in range(1, 5):
        engine.step(t, False)
        assert mixed_with(engine) == rows(engine.shards[0].state.neighbors)
    for t in range(5, 9):
        engine.step(t, False)
        assert all(len(now) == 3 for now in mixed_with(engine))


def test_the_presets_differ_in_it() -> None:
    assert PANM(preset="robust").mingle
    assert not PANM(preset="paper").mingle
    assert PANM(preset="paper", mingle=True).mingle


# -- stage two asks for losses where a stranger would join ---------------------------------------------------------

CONFIRMED: dict[str, Any] = {**SETTINGS, "mingle": True, "confirm": True, "discover_rounds": 6}


def everybody_drifts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all had come the same way: by their drift strangers are kin."""

    def drift(self: PANM, cohort: Any, pool: Any, ids: Tensor, update: Tensor) -> Tensor:
        return torch.where(pool.rows(ids) >= 0, 0.9, torch.nan).double()

    monkeypatch.setattr(PANM, "_drift", drift)


@pytest.mark.parametrize("confirm", [False, True])
def test_who_has_come_the_same_way_may_join_only_if_its_loss_agrees(
    confirm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(**{**CONFIRMED, "confirm": confirm})
    for t in range(1, 7):
        engine.step(t, False)
    everybody_drifts_alike(monkeypatch)
    for t in range(7, 25):
        engine.step(t, False)
    found = rows(engine.shards[0].state.neighbors)
    if confirm:
        assert found == KIN
    else:
        assert all(mine > kin for mine, kin in zip(found, KIN))


def test_a_listed_one_leaves_when_its_loss_turns_bad_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(**CONFIRMED)
    for t in range(1, 7):
        engine.step(t, False)
    everybody_drifts_alike(monkeypatch)  # so that strangers go on asking
    for t in range(7, 25):
        engine.step(t, False)
    assert rows(engine.shards[0].state.neighbors) == KIN

    def losses(self: Cohort, pool: Any, ids: Tensor, *more: Any) -> Tensor:
        same = self.clusters[self.ids][:, None] == self.clusters[ids.clamp(min=0)]
        good = same & (ids != 15)
        return torch.where(pool.rows(ids) >= 0, torch.where(good, 0.5, 2.0).double() + 1e-3 * (ids % 5), torch.nan)

    monkeypatch.setattr(Cohort, "losses", losses)
    for t in range(25, 50):
        engine.step(t, False)
    found = rows(engine.shards[0].state.neighbors)
    for client, (mine, kin) in enumerate(zip(found, KIN)):
        assert client == 15 or mine == kin - {15}


def test_nobody_is_asked_for_a_loss_where_no_stranger_would_join(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(**CONFIRMED)
    for t in range(1, 25):
        engine.step(t, False)
    assert rows(engine.shards[0].state.neighbors) == KIN
    asked: list[int] = []
    monkeypatch.setattr(Cohort, "losses", lambda self, pool, ids, *more: asked.append(1))
    for t in range(25, 30):
        engine.step(t, False)
    assert not asked
