"""PANM with `mingle`: averages are with all kin that have been looked at, not with k of them only."""

from typing import Any

import pytest
import torch
from test_panm import KIN, engine_of, mixed_with, rows, see_perfectly
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.matching import evidence
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


@pytest.mark.parametrize("match_every", [1, 3])
@pytest.mark.parametrize("mingle", [False, True])
@pytest.mark.parametrize("wanted", [5, 19])
def test_stage_two_averages_with_as_many_of_the_list_as_is_said(wanted: int, mingle: bool, match_every: int) -> None:
    """Fetched are only those who have not been looked at; stage one still keeps to k."""
    settings = {**SETTINGS, "discover_rounds": 10, "candidates": 4, "match_every": match_every}
    engine = engine_of(**settings, mingle=mingle, average=wanted)
    for t in range(1, 90):
        engine.step(t, False)
        assert t > 10 or mingle or all(len(now) == 3 for now in mixed_with(engine))
    assert rows(engine.shards[0].state.neighbors) == KIN
    for t in range(90, 93):
        engine.step(t, False)
        for now, kin in zip(mixed_with(engine), KIN):
            assert now <= kin
            assert len(now) == min(wanted, len(kin))


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


# -- stage two asks what company a peer keeps ----------------------------------------------------------------------

KEPT: dict[str, Any] = {**SETTINGS, "mingle": True, "company": True, "discover_rounds": 12}


def everybody_drifts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all had come the same way: by their drift strangers are kin."""

    def drift(self: PANM, cohort: Any, pool: Any, ids: Tensor, update: Tensor) -> Tensor:
        return torch.where(pool.rows(ids) >= 0, 0.9, torch.nan).double()

    monkeypatch.setattr(PANM, "_drift", drift)


@pytest.mark.parametrize("kept", [False, True])
def test_who_has_come_the_same_way_may_join_only_if_it_keeps_the_same_company(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(**{**KEPT, "company": kept})
    for t in range(1, 13):
        engine.step(t, False)
    everybody_drifts_alike(monkeypatch)
    for t in range(13, 40):
        engine.step(t, False)
    found = rows(engine.shards[0].state.neighbors)
    if kept:
        assert found == KIN
    else:
        assert all(mine > kin for mine, kin in zip(found, KIN))


def test_a_client_that_met_two_groups_finds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 0 has averaged with everybody of late; its list and its neighbors' company are right."""
    engine = engine_of(**KEPT)
    for t in range(1, 13):
        engine.step(t, False)
    everybody_drifts_alike(monkeypatch)
    engine.shards[0].state.met[0] = 12
    for t in range(13, 40):
        engine.step(t, False)
    assert rows(engine.shards[0].state.neighbors) == KIN


def test_one_who_changes_company_is_put_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(**KEPT)
    for t in range(1, 40):
        engine.step(t, False)
    assert rows(engine.shards[0].state.neighbors) == KIN
    everybody_drifts_alike(monkeypatch)
    for t in range(40, 60):
        met = engine.shards[0].state.met
        met[15] = torch.where(torch.arange(24) % 3 == 1, t, 0)  # client 15 keeps the company of another group
        engine.step(t, False)
    for client, (mine, kin) in enumerate(zip(rows(engine.shards[0].state.neighbors), KIN)):
        if client % 3 == 0 and client != 15:
            assert mine == kin - {15}


@pytest.mark.parametrize("every", [1, 3])
def test_companies_travel_only_when_they_are_compared(every: int) -> None:
    """They are a byte for each peer beside a model."""
    received = []
    for kept in (False, True):
        engine = engine_of(**{**KEPT, "company": kept, "match_every": every})
        for t in range(1, 13):
            engine.step(t, False)
        before = engine.shards[0].peers.bytes_received.clone()
        models = engine.shards[0].peers.models_received.clone()
        engine.step(13, False)
        peers = engine.shards[0].peers
        received.append(((peers.bytes_received - before) / (peers.models_received - models)).mean().item())
    more = received[1] - received[0]
    assert 0 < more <= 24 if every == 1 else more == 0


def test_more_peers_than_a_client_remembers_are_told_apart_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of seven columns for 24 clients: memory grows with the number of clients, not with its square."""
    monkeypatch.setattr(evidence, "WIDEST", 7)
    engine = engine_of(**{**KEPT, "company": False})
    for t in range(1, 40):
        engine.step(t, False)
    state = engine.shards[0].state
    assert state.evidence.shape == state.whose.shape == (24, 7)
    assert rows(state.neighbors) == KIN


def test_company_is_that_of_the_last_rounds_and_not_of_the_first_of_stage_one() -> None:
    method = PANM(discover_rounds=100, candidates=10)
    assert method._since(101, 100) == 81  # a client has looked at everybody about twice
    assert method._since(101, 200) == 75  # but not before the last quarter of stage one
    assert method._since(300, 200) == 260
    assert PANM(discover_rounds=0)._since(3, 100) == 1
    engine = engine_of(**KEPT)  # twelve rounds of stage one
    for t in range(1, 11):
        engine.step(t, False)
    met = engine.shards[0].state.met
    assert set(met.unique().tolist()) == {0, 9, 10}
