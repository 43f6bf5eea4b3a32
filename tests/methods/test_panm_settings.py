"""PANM's settings: presets, ranges, what is refused and what is spoken of."""

from typing import Any

import pytest
import torch
from test_panm import SEED, N, engine_of, mixed_with, rows, see_perfectly
from torch import nn

import kinfolk
from conftest import tiny_experiment
from kinfolk import randomness
from kinfolk.config import read
from kinfolk.errors import UserError
from kinfolk.matching.lists import choose
from kinfolk.methods.panm import PANM
from kinfolk.runs.similarity import read_similarity


def test_without_stage_one_matching_starts_from_random_lists_with_a_notice() -> None:
    assert PANM().notices(300) == []
    (notice,) = PANM(discover_rounds=0).notices(300)
    assert "random lists" in notice

    said = []

    class Listens(kinfolk.Observer):
        def notice(self, text: str) -> None:
            said.append(text)

    method = {"name": "panm", "neighbors": 2, "candidates": 3, "discover_rounds": 0}
    kinfolk.run(tiny_experiment(method=method), out="a", observer=Listens())
    assert notice in said

    engine = engine_of(neighbors=3, candidates=6, discover_rounds=0, match_every=3)
    engine.step(1, False)
    lists = rows(engine.shards[0].state.neighbors)
    assert all(len(mine) == 3 and i not in mine for i, mine in enumerate(lists))
    assert len({frozenset(mine) for mine in lists}) > N / 2
    assert mixed_with(engine) == lists
    engine.step(2, False)
    assert rows(engine.shards[0].state.neighbors) == lists
    engine.step(3, False)
    matched = rows(engine.shards[0].state.neighbors)
    assert matched != lists
    engine.step(4, False)
    assert rows(engine.shards[0].state.neighbors) == matched  # drawn once


@pytest.mark.parametrize(
    "bad",
    [
        *("alpha=1.01", "alpha=-0.01", "match_every=0", "neighbors=0", "candidates=0", "discover_rounds=-1"),
        *("average=0", "validation=-0.1", "validation=1", "partners=all"),
        *("memory=0", "memory=1.1", "limit=0", "preset=best", "similarity=cosine", "matcher=both", "loss_score=linear"),
        *("loss_eval=some", "loss_eval=20"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(bad: str) -> None:
    with pytest.raises(UserError, match=bad.split("=")[0]):
        read(tiny_experiment(), ["method.name=panm", f"method.{bad}"])


def test_the_ends_of_the_ranges_and_k_above_l_are_fine() -> None:
    for good in (["alpha=0"], ["alpha=1"], ["neighbors=5", "candidates=2"], ["discover_rounds=0"], ["memory=1"]):
        read(tiny_experiment(), ["method.name=panm", *(f"method.{one}" for one in good)])
    method = {"name": "panm", "neighbors": 6, "candidates": 2, "discover_rounds": 2}
    assert torch.isfinite(kinfolk.run(tiny_experiment(method=method), out="a").weights()).all()


def test_a_run_that_ends_in_stage_one_and_a_share_that_is_not_used_are_spoken_of() -> None:
    (notice,) = PANM(discover_rounds=60).notices(60)
    assert "stage two never begins; try 20" in notice
    assert PANM(discover_rounds=59).notices(60) == []
    (notice,) = PANM(similarity="loss", alpha=1.0).notices(300)
    assert "method.alpha" in notice


def test_a_preset_fills_in_what_is_not_named() -> None:
    def resolved(*settings: str) -> tuple[Any, ...]:
        config = read(tiny_experiment(), ["method.name=panm", *(f"method.{one}" for one in settings)])
        method = config.sections()["method"]
        assert read(config.sections()) == config
        return tuple(method[key] for key in ("preset", "loss_score", "confirm", "matcher", "mingle", "company"))

    assert resolved() == ("robust", "log", True, "evidence", True, True)
    assert resolved("preset=paper") == ("paper", "inverse", False, "mixture", False, False)
    assert resolved("preset=paper", "loss_score=log") == ("paper", "log", False, "mixture", False, False)
    assert resolved("preset=paper", "matcher=evidence") == ("paper", "inverse", False, "evidence", False, False)
    assert resolved("confirm=false") == ("robust", "log", False, "evidence", True, True)
    assert resolved("mingle=false", "company=false") == ("robust", "log", True, "evidence", False, False)
    assert resolved("matcher=mixture", "loss_score=inverse") == ("robust", "inverse", True, "mixture", True, True)


def test_partners_may_be_drawn_from_the_whole_list(monkeypatch: pytest.MonkeyPatch) -> None:
    see_perfectly(monkeypatch)
    few, many = 2, 4
    engine = engine_of(neighbors=few, candidates=many, discover_rounds=8, preset="paper", partners="list")
    shard = engine.shards[0]
    for t in range(1, 13):
        engine.step(t, False)
    others = 0
    for t in range(13, 33):
        listed, count = rows(shard.state.neighbors), shard.peers.models_received.clone()
        known = rows(choose(SEED, "listed", t, torch.arange(N), shard.state.neighbors, many))
        strangers = rows(shard.peers.sample(t, many, exclude=shard.state.neighbors))
        engine.step(t, False)
        now = rows(choose(SEED, "aggregate", t, torch.arange(N), shard.state.neighbors, few))
        assert mixed_with(engine) == now
        new = [len(chosen - s - c) for chosen, s, c in zip(now, known, strangers)]  # these have to be fetched too
        spent = (shard.peers.models_received - count).tolist()
        assert spent == [min(many, len(b)) + many + more for b, more in zip(listed, new)]
        others += sum(new)
    assert others > N


# -- samples kept to judge by --------------------------------------------------------------------------------------


def test_with_samples_set_aside_losses_are_theirs_and_training_is_without_them() -> None:
    engine = engine_of(similarity="loss", neighbors=3, candidates=6, discover_rounds=2, preset="paper", validation=0.25)
    shard = engine.shards[0]
    cohort, aside = shard.cohort, shard.cohort.validation
    assert aside is not None
    whole = torch.tensor([8 + i % 5 for i in range(N)])
    assert torch.equal(cohort.data.train.sizes + aside.sizes, whole)
    assert aside.sizes.tolist() == [2, 2, 3, 3, 3] * 4 + [2, 2, 3, 3]
    cohort.begin(t=1)
    cohort.train(1)
    shard.peers.publish(1, weights=cohort.weights)
    ids = torch.arange(N).roll(1)[:, None]
    pool = shard.peers.pull(1, ids)
    found = shard.method._similarity(cohort, pool, ids, cohort.weights[:, :0])
    for i in range(N):
        mine = slice(int(aside.starts[i]), int(aside.starts[i] + aside.sizes[i]))
        layer = nn.Linear(6, 3).double()
        cohort.layout.load(cohort.weights[(i - 1) % N], layer)
        loss = nn.functional.cross_entropy(layer(aside.x[mine]), aside.y[mine])
        assert float(found[i]) == pytest.approx(1 / float(loss.detach()), rel=1e-9)


def test_a_batch_of_own_samples_is_drawn_anew_each_round_and_the_same_for_all_peers() -> None:
    engine = engine_of(similarity="loss", neighbors=3, candidates=6, preset="paper", loss_eval="batch")
    shard = engine.shards[0]
    cohort = shard.cohort
    train, size = cohort.data.train, cohort.training.batch_size
    assert 1 < size < int(train.sizes.min())
    batches = {}
    for t in (1, 2):
        cohort.begin(t=t)
        cohort.train(t)
        shard.peers.publish(t, weights=cohort.weights)
        ids = torch.stack([torch.arange(N).roll(1), torch.arange(N).roll(2)], dim=1)
        found = shard.method._similarity(cohort, shard.peers.pull(t, ids), ids, cohort.weights[:, :0])
        order = randomness.permutations(cohort.seed, "judge", t, cohort.ids, train.sizes)[:, 0, :size]
        for i in range(N):
            batches[t, i] = sorted(order[i].tolist())
            rows = train.starts[i] + order[i]
            for column, peer in enumerate(ids[i].tolist()):
                layer = nn.Linear(6, 3).double()
                cohort.layout.load(cohort.weights[peer], layer)
                loss = nn.functional.cross_entropy(layer(train.x[rows]), train.y[rows])
                assert float(found[i, column]) == pytest.approx(1 / float(loss.detach()), rel=1e-9)
    assert any(batches[1, i] != batches[2, i] for i in range(N))


@pytest.mark.parametrize("by", [{"validation": 0.2}, {"loss_eval": "batch"}], ids=["kept", "batch"])
@pytest.mark.parametrize("settings", [{"similarity": "loss", "preset": "paper"}, {"similarity": "gradient"}])
def test_what_is_judged_by_is_the_same_on_shards_and_for_who_is_watched(
    settings: dict[str, Any], by: dict[str, Any]
) -> None:
    common = {"name": "panm", "neighbors": 2, "candidates": 3, "discover_rounds": 2, **settings}
    method = {**common, **by}
    watching = {"rounds": 4, "watch": [0, 3], "watch_rounds": [1, 4], "watch_all": True}
    one = kinfolk.run(tiny_experiment(method=method, run=watching), out="a")
    other = kinfolk.run(tiny_experiment(method=method, run={**watching, "engine": "sharded", "shards": 3}), out="b")
    torch.testing.assert_close(one.weights(), other.weights(), rtol=1e-5, atol=1e-6)
    plain = kinfolk.run(tiny_experiment(method=common, run=watching), out="c")
    assert not torch.equal(one.weights(), plain.weights())


@pytest.mark.parametrize("by", [{"validation": 0.2}, {"loss_eval": "batch"}], ids=["kept", "batch"])
def test_watched_clients_judge_by_their_own_samples(by: dict[str, Any]) -> None:
    method = {"name": "panm", "similarity": "loss", "preset": "paper", "neighbors": 2, "candidates": 3}
    found = []
    for everybody in (False, True):
        run = {"rounds": 2, "watch": [1, 3], "watch_rounds": [1, 2], "watch_all": everybody}
        result = kinfolk.run(tiny_experiment(method={**method, **by}, run=run), out=str(everybody))
        seen = read_similarity(result.folder)
        rows = zip(seen.round.tolist(), seen.client.tolist(), seen.peer.tolist(), seen.similarity.tolist())
        found.append({(t, client, peer): similarity for t, client, peer, similarity in rows})
    few, many = found
    assert len(few) < len(many)
    assert few == pytest.approx({key: many[key] for key in few}, rel=1e-6)


def test_samples_set_aside_where_nothing_is_judged_by_loss_are_spoken_of() -> None:
    (notice,) = PANM(preset="paper", validation=0.2).notices(300)
    assert "method.validation" in notice
    assert PANM(validation=0.2).notices(300) == []  # robust judges by loss in stage one
    assert PANM(preset="paper", similarity="loss", validation=0.2).notices(300) == []


def test_a_batch_to_judge_by_that_is_never_drawn_is_spoken_of() -> None:
    (notice,) = PANM(preset="paper", loss_eval="batch").notices(300)
    assert "method.loss_eval: nothing is judged by loss" in notice
    (notice,) = PANM(loss_eval="batch", validation=0.2).notices(300)
    assert "method.loss_eval: with method.validation" in notice
    assert PANM(loss_eval="batch").notices(300) == []
