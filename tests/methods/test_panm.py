"""PANM against its definition: both stages round by round, what it receives, and whether it finds the kin."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import last_edges, make_federation, tiny_experiment
from kinfolk import Training, engines
from kinfolk.cohort.cohort import Cohort, initial_model
from kinfolk.config import read
from kinfolk.matching.lists import choose, contains
from kinfolk.matching.similarity import cosines
from kinfolk.methods.panm import PANM
from kinfolk.peers.faults import Faults

N, SEED = 24, 4
CLUSTERS = [i % 3 for i in range(N)]


def engine_of(shards: int = 1, faults: Faults | None = None, n: int = N, **settings: Any) -> engines.Engine:
    cohort = {
        "training": Training(epochs=1, batch_size=5, lr=0.1),
        "seed": SEED,
        "device": "cpu",
        "precision": "float64",
    }
    parts = engines.Parts(
        make_federation([8 + i % 5 for i in range(n)], clusters=[i % 3 for i in range(n)]),
        lambda: initial_model(lambda: nn.Linear(6, 3), SEED),
        PANM(**settings),
        faults or Faults(),
        cohort,
    )
    return engines.InProcessEngine(parts) if shards == 1 else engines.ShardedEngine(parts, shards)


def rows(lists: Tensor) -> list[set[int]]:
    return [{j for j in row if j >= 0} for row in lists.tolist()]


def mixed_with(engine: engines.Engine) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(N)]
    edges = last_edges(engine)
    for client, neighbor in zip(edges.client.tolist(), edges.neighbor.tolist()):
        assert neighbor not in found[client]  # nobody twice
        found[client].add(neighbor)
    return found


def received(engine: engines.Engine) -> list[int]:
    return [int(count) for shard in engine.shards for count in shard.peers.models_received]


def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every answer is lost."""
    monkeypatch.setattr(Faults, "lost", lambda self, seed, t, to, sender: torch.ones_like(to + sender).bool())


def see_perfectly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Similarity 1 for kin and 0 for strangers, and a little noise."""

    def similarity(self: PANM, cohort: Any, pool: Any, ids: Tensor, update: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(1e6 * cohort.weights.abs().sum()) % 2**31)
        kin = cohort.clusters[cohort.ids][:, None] == cohort.clusters[ids.clamp(min=0)]
        score = kin + 1e-3 * torch.randn(ids.shape, generator=generator, dtype=torch.float64)
        return torch.where(pool.rows(ids) >= 0, score, torch.nan)

    monkeypatch.setattr(PANM, "_similarity", similarity)


KIN = [{j for j in range(N) if j % 3 == i % 3 and j != i} for i in range(N)]


# -- does it find the kin ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["strangers", "all"])
@pytest.mark.parametrize("shards", [1, 3])
def test_with_a_perfect_similarity_every_list_becomes_exactly_the_kin(
    pool: str, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_perfectly(monkeypatch)
    settings = {"neighbors": 3, "candidates": 8, "discover_rounds": 8, "preset": "paper", "candidate_pool": pool}
    engine = engine_of(shards, **settings)
    for t in range(1, 9):
        engine.step(t, False)
    lists = [mine for shard in engine.shards for mine in rows(shard.state.neighbors)]
    assert all(len(mine) == 3 and mine <= kin for mine, kin in zip(lists, KIN))
    for t in range(9, 33):  # each round a missing kin is looked at with probability 8/17 or more
        engine.step(t, False)
    assert [mine for shard in engine.shards for mine in rows(shard.state.neighbors)] == KIN


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `make demo` runs, with each similarity, and what is possible at best and at worst."""
    folder = tmp_path_factory.mktemp("digits")
    chosen = {
        "gradient": ["method.similarity=gradient"],
        "loss": ["method.similarity=loss"],
        "oracle": ["method.name=oracle"],
        "random": ["method.name=random"],
        "local": ["method.name=local"],
    }
    common = ["run.evaluate_every=60", "run.device=cpu"]
    return {
        name: kinfolk.run(read("panm/digits", [*method, *common]), out=str(folder / name)).summary
        for name, method in chosen.items()
    }


@pytest.mark.parametrize("similarity", ["gradient", "loss"])
def test_it_finds_the_rotations_of_digits(similarity: str, digits: dict[str, dict[str, Any]]) -> None:
    found = digits[similarity]
    assert found["neighbor_precision"] == found["neighbor_recall"] == 1
    assert found["accuracy"] > digits["oracle"]["accuracy"] - 0.01
    assert found["accuracy"] > digits["random"]["accuracy"] + 0.02
    assert found["accuracy"] > digits["local"]["accuracy"] + 0.02


# -- stage one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["strangers", "all"])
def test_stage_one_averages_uniformly_with_the_k_most_similar(pool: str) -> None:
    settings = {"neighbors": 3, "candidates": 6, "preset": "paper", "alpha": 0.25, "candidate_pool": pool}
    engine = engine_of(**settings)
    shard = engine.shards[0]
    for t in (1, 2, 3):
        before, old = shard.cohort.weights, shard.state.neighbors
        shard.cohort.begin()
        shard.cohort.train(t)
        trained = shard.cohort.weights
        shard.cohort.weights = before
        candidates = shard.peers.sample(t, 6, exclude=old if pool == "strangers" else None)
        looked_at = [mine | fresh for mine, fresh in zip(rows(old), rows(candidates))]
        if pool == "strangers":
            assert not any(mine & fresh for mine, fresh in zip(rows(old), rows(candidates)))

        everybody = torch.arange(N).expand(N, N)
        update, drift = trained - before, trained - shard.cohort.initial
        score = 0.25 * cosines(update, update, everybody) + 0.75 * cosines(drift, drift, everybody)
        count = shard.peers.models_received.clone()
        engine.step(t, False)
        for i in range(N):
            expected = sorted(looked_at[i], key=lambda j: (-float(score[i, j]), j))[:3]
            assert shard.state.neighbors[i].tolist() == expected
            assert mixed_with(engine)[i] == set(expected)
            mean = trained[[i, *expected]].mean(dim=0)
            torch.testing.assert_close(shard.cohort.weights[i], mean, rtol=1e-12, atol=1e-12)
        assert last_edges(engine).weight.tolist() == pytest.approx([1 / 4] * 3 * N)
        assert (shard.peers.models_received - count).tolist() == [len(ids) for ids in looked_at]


def test_stage_one_by_loss_takes_the_models_that_do_best_on_my_data() -> None:
    engine = engine_of(neighbors=3, candidates=6, similarity="loss", preset="paper")
    shard = engine.shards[0]
    shard.cohort.train(1)
    losses = shard.cohort.train_losses(shard.cohort.weights)
    shard.cohort.weights = shard.cohort.initial.expand(N, -1).clone()
    candidates = shard.peers.sample(1, 6)
    engine.step(1, False)
    for i in range(N):
        assert (
            shard.state.neighbors[i].tolist() == sorted(candidates[i].tolist(), key=lambda j: float(losses[i, j]))[:3]
        )


def test_confirmed_neighbors_are_the_k_best_by_loss_of_the_2k_best_by_gradient() -> None:
    engine = engine_of(neighbors=2, candidates=8, alpha=1.0, confirm=True)
    shard = engine.shards[0]
    shard.cohort.train(1)
    losses = shard.cohort.train_losses(shard.cohort.weights)
    update = shard.cohort.weights - shard.cohort.initial
    score = cosines(update, update, torch.arange(N).expand(N, N))
    shard.cohort.weights = shard.cohort.initial.expand(N, -1).clone()
    candidates = shard.peers.sample(1, 8)
    engine.step(1, False)
    changed = 0
    for i in range(N):
        near = sorted(candidates[i].tolist(), key=lambda j: -float(score[i, j]))[:4]
        kept = sorted(near, key=lambda j: float(losses[i, j]))[:2]
        assert shard.state.neighbors[i].tolist() == kept
        changed += set(kept) != set(near[:2])
    assert changed > 0
    assert received(engine) == [8] * N  # confirming costs no message


def test_updates_may_propose_but_only_a_loss_puts_an_old_neighbor_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(neighbors=2, candidates=8, preset="robust")
    engine.step(1, False)
    shard = engine.shards[0]
    old = shard.state.neighbors.clone()
    among = lambda ids: contains(old, ids)  # noqa: E731
    unlike = lambda self, cohort, pool, ids, update: torch.where(among(ids), -1.0, 1.0).double()  # noqa: E731
    monkeypatch.setattr(PANM, "_similarity", unlike)
    monkeypatch.setattr(Cohort, "losses", lambda self, pool, ids: torch.where(among(ids), 0.1, 1.0).double())
    engine.step(2, False)
    assert rows(shard.state.neighbors) == rows(old)
    monkeypatch.setattr(Cohort, "losses", lambda self, pool, ids: torch.where(among(ids), 1.0, 0.1).double())
    engine.step(3, False)
    assert all(not a & b for a, b in zip(rows(shard.state.neighbors), rows(old)))


@pytest.mark.parametrize("preset", ["paper", "robust"])
@pytest.mark.parametrize("similarity", ["loss", "gradient"])
def test_stage_one_receives_l_models_and_then_l_plus_k(preset: str, similarity: str) -> None:
    engine = engine_of(neighbors=3, candidates=6, preset=preset, similarity=similarity)
    engine.step(1, False)
    assert received(engine) == [6] * N
    engine.step(2, False)
    assert received(engine) == [6 + 9] * N
    engine.step(3, False)
    assert received(engine) == [6 + 9 + 9] * N
    shard = engine.shards[0]
    assert all(len(mine) == 3 for mine in rows(shard.state.neighbors))
    assert shard.peers.peak_received.tolist() == [9] * N
    vectors = 2 if similarity == "gradient" else 1  # the update travels too
    assert shard.peers.bytes_received.tolist() == [24 * vectors * shard.cohort.layout.size * 8] * N


# -- stage two -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_between_matchings_the_list_stays_and_k_of_it_are_averaged_with(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_perfectly(monkeypatch)
    engine = engine_of(neighbors=3, candidates=6, discover_rounds=4, match_every=5, preset=preset)
    for t in range(1, 6):  # a matching in round 5 makes the lists longer than k
        engine.step(t, False)
    shard = engine.shards[0]
    listed = shard.state.neighbors
    assert max(len(mine) for mine in rows(listed)) > 3
    previous = None
    for t in range(6, 10):
        before, count = shard.cohort.weights, shard.peers.models_received.clone()
        shard.cohort.begin()
        shard.cohort.train(t)
        trained = shard.cohort.weights
        shard.cohort.weights = before
        engine.step(t, False)
        assert torch.equal(shard.state.neighbors, listed)
        now = mixed_with(engine)
        assert all(chosen <= mine and len(chosen) == min(3, len(mine)) for chosen, mine in zip(now, rows(listed)))
        assert (shard.peers.models_received - count).tolist() == [len(chosen) for chosen in now]
        for i, chosen in enumerate(now):
            mean = trained[[i, *chosen]].mean(dim=0)
            torch.testing.assert_close(shard.cohort.weights[i], mean, rtol=1e-12, atol=1e-12)
        assert now != previous
        previous = now
    engine.step(10, False)
    assert not torch.equal(shard.state.neighbors, listed)


def test_a_matching_averages_with_those_just_judged_and_receives_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    see_perfectly(monkeypatch)
    few, many = 2, 4
    engine = engine_of(neighbors=few, candidates=many, discover_rounds=8, preset="paper")
    shard = engine.shards[0]
    for t in range(1, 9):
        engine.step(t, False)
    full = 0
    for t in range(9, 33):
        listed, count = rows(shard.state.neighbors), shard.peers.models_received.clone()
        known = rows(choose(SEED, "listed", t, torch.arange(N), shard.state.neighbors, many))
        strangers = rows(shard.peers.sample(t, many, exclude=shard.state.neighbors))
        engine.step(t, False)
        judged = [(s | c) & kin for s, c, kin in zip(known, strangers, KIN)]
        assert rows(shard.state.neighbors) == [(b - s) | h for b, s, h in zip(listed, known, judged)]
        assert all(len(m) == few and m <= h for m, h in zip(mixed_with(engine), judged))
        spent = (shard.peers.models_received - count).tolist()
        assert spent == [min(many, len(b)) + many for b in listed]
        full += sum(models == 2 * many for models in spent)
    assert full > 5 * N
    assert rows(shard.state.neighbors) == KIN


def test_who_is_missing_to_k_comes_from_the_rest_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    see_perfectly(monkeypatch)
    engine = engine_of(neighbors=5, candidates=2, discover_rounds=30, preset="paper")  # k > l
    shard = engine.shards[0]
    for t in range(1, 31):
        engine.step(t, False)
    assert all(len(mine) == 5 and mine <= kin for mine, kin in zip(rows(shard.state.neighbors), KIN))
    before, count = rows(shard.state.neighbors), shard.peers.models_received.clone()
    engine.step(31, False)
    known = rows(choose(SEED, "listed", 31, torch.arange(N), torch.tensor([sorted(b) for b in before]), 2))
    now = mixed_with(engine)
    assert all(s <= chosen <= mine for s, chosen, mine in zip(known, now, rows(shard.state.neighbors)))
    assert all(len(chosen) == 5 for chosen in now)
    spent = (shard.peers.models_received - count).tolist()
    new = [len(mine - b) for mine, b in zip(rows(shard.state.neighbors), before)]
    assert spent == [4 + 3 - fresh for fresh in new]  # 2l, and what 2 of the list and the new kin leave open of k


@pytest.mark.parametrize("preset", ["paper", "robust"])
@pytest.mark.parametrize("n", [6, 7])
def test_when_everybody_is_listed_nobody_is_listed_twice(preset: str, n: int) -> None:
    engine = engine_of(n=n, neighbors=n - 1, candidates=n - 1, discover_rounds=1, preset=preset)
    shard = engine.shards[0]
    for t in range(1, 8):
        engine.step(t, False)
        for i, row in enumerate(shard.state.neighbors.tolist()):
            mine = [j for j in row if j >= 0]
            assert len(mine) == len(set(mine))
            assert i not in mine
        if preset == "paper":  # no candidates: nothing to compare the list with
            assert all(len(mine) == n - 1 for mine in rows(shard.state.neighbors))


def test_a_list_of_one_can_grow() -> None:
    settings = ["method.name=panm", "method.neighbors=1", "method.candidates=8", "method.discover_rounds=15"]
    run = ["run.rounds=35", "run.evaluate_every=35", "run.device=cpu"]
    found = kinfolk.run(read("digits", [*settings, *run]), out="a").summary
    assert found["neighbor_precision"] > 0.95
    assert found["neighbor_recall"] > 0.8  # one of nine is 0.11


# -- trouble -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["paper", "robust"])
@pytest.mark.parametrize("stage", ["one", "two", "between matchings"])
def test_when_nobody_answers_the_list_stays(preset: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    discover, every = {"one": (9, 1), "two": (3, 1), "between matchings": (3, 4)}[stage]
    engine = engine_of(neighbors=3, candidates=6, discover_rounds=discover, match_every=every, preset=preset)
    for t in range(1, 6):
        engine.step(t, False)
    shard = engine.shards[0]
    lists, count = rows(shard.state.neighbors), received(engine)
    assert all(lists)
    silence(monkeypatch)
    shard.cohort.begin()
    shard.cohort.weights, before = shard.cohort.weights.clone(), shard.cohort.weights
    shard.cohort.train(6)
    trained, shard.cohort.weights = shard.cohort.weights, before
    engine.step(6, False)
    assert rows(shard.state.neighbors) == lists
    assert torch.equal(shard.cohort.weights, trained)  # alone
    assert received(engine) == count


@pytest.mark.parametrize("preset", ["paper", "robust"])
@pytest.mark.parametrize("similarity", ["loss", "gradient"])
def test_a_quarantined_client_is_nobodys_neighbor(preset: str, similarity: str) -> None:
    engine = engine_of(neighbors=3, candidates=6, discover_rounds=4, preset=preset, similarity=similarity)
    shard = engine.shards[0]
    for t in range(1, 9):
        if t in (3, 6):  # in each stage: whoever had it on the list lets it go when it has looked
            bad = max(range(N), key=lambda j: sum(j in mine for mine in rows(shard.state.neighbors)))
            listed_by = [i for i, mine in enumerate(rows(shard.state.neighbors)) if bad in mine]
            assert listed_by
            clean = shard.cohort.data.train.x[shard.cohort.data.train.starts[bad]].clone()
            shard.cohort.data.train.x[shard.cohort.data.train.starts[bad]] = torch.inf
            engine.step(t, False)
            shard.cohort.data.train.x[shard.cohort.data.train.starts[bad]] = clean
            assert shard.cohort.round.quarantined.nonzero().flatten().tolist() == [bad]
            assert bad not in last_edges(engine).neighbor
            if t == 3:
                assert not any(bad in mine for mine in rows(shard.state.neighbors))
        else:
            engine.step(t, False)
    assert torch.isfinite(shard.cohort.weights).all()


@pytest.mark.parametrize("preset", ["paper", "robust"])
@pytest.mark.parametrize("similarity", ["loss", "gradient"])
def test_both_stages_are_the_same_over_shards(preset: str, similarity: str) -> None:
    found = []
    for shards in (1, 3):
        faults = Faults(loss=0.2, absent=0.2)
        settings = {"neighbors": 3, "candidates": 5, "discover_rounds": 3, "match_every": 2}
        engine = engine_of(shards, faults, preset=preset, similarity=similarity, **settings)
        for t in range(1, 9):
            engine.step(t, False)
        lists = engines.results(engine).neighbors
        assert lists is not None
        found.append((engines.snapshot(engine)["weights"], rows(torch.from_numpy(lists)), received(engine)))
    assert (found[0][0] - found[1][0]).abs().max() <= 1e-10
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize("preset", ["paper", "robust"])
@pytest.mark.parametrize("stop", [3, 4, 5])
def test_it_resumes_bit_exactly_before_at_and_after_the_change_of_stages(preset: str, stop: int) -> None:
    method = {"name": "panm", "candidates": 3, "neighbors": 2, "discover_rounds": 4, "preset": preset}
    whole = kinfolk.run(tiny_experiment(method=method, run={"rounds": 8}), out="whole")
    kinfolk.run(tiny_experiment(method=method, run={"rounds": stop}), out="cut")
    assert torch.equal(whole.weights(), kinfolk.resume("cut", rounds=8).weights())
