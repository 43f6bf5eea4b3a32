"""What attackers publish, against plain loops over clients; who they are; and what nobody but them may notice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from conftest import make_federation
from kinfolk import Training, UserError, engines, randomness
from kinfolk.cohort.cohort import initial_model
from kinfolk.peers.attacks import ATTACKS, KNOWING, flipped, hidden, plan
from kinfolk.peers.faults import Faults, Kind

CLIENTS, ATTACKERS, SEED = 9, [1, 4, 8], 5


@dataclass(frozen=True)
class Show:
    """Trains, publishes its model and its update, and notes what came from whom; averages with the next two."""

    true: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # start, model, update
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # of a client in a round
    mixes: bool = True

    def start(self, cohort: Any) -> None:
        return None

    def step(self, t: int, cohort: Any, state: None, peers: Any) -> None:
        start = cohort.weights
        cohort.train(t)
        update = cohort.weights - start
        peers.publish(t, weights=cohort.weights, update=update)
        ids = torch.arange(peers.n).expand(len(cohort), -1)
        pool = peers.pull(t, ids, ("weights", "update"))
        rows = pool.rows(ids)[0]
        for client, row in enumerate(rows.tolist()):
            if row >= 0:
                self.seen[t, client] = (pool["weights"][row].clone(), pool["update"][row].clone())
        for i, client in enumerate(cohort.ids.tolist()):
            self.true[t, client] = (start[i].clone(), cohort.weights[i].clone(), update[i].clone())
        if self.mixes:
            chosen = torch.stack([(cohort.ids + step) % peers.n for step in (1, 2)], dim=1)
            cohort.mix(pool, chosen)


def run(faults: Faults, shards: int = 1, rounds: int = 3, method: Any = None) -> tuple[Any, engines.Engine]:
    method = method or Show()
    found = plan(faults, CLIENTS, SEED)
    settings = {
        "training": Training(epochs=1, batch_size=5),
        "seed": SEED,
        "device": "cpu",
        "precision": "float64",
        "chunk": 1,
    }
    parts = engines.Parts(
        make_federation([10] * CLIENTS), lambda: initial_model(lambda: nn.Linear(6, 3), SEED), method, faults, settings,
        attack=found,
    )  # fmt: skip
    engine = engines.ShardedEngine(parts, shards) if shards > 1 else engines.InProcessEngine(parts)
    for t in range(1, rounds + 1):
        engine.step(t, False)
    return method, engine


def attacked(kind: Any, **more: Any) -> Faults:
    return Faults(**{"attackers": ATTACKERS, "attack": kind} | more)


def expected(kind: str, shown: Show, t: int, client: int, scale: float, victims: Tensor) -> tuple[Tensor, Tensor]:
    """Model and update that an attacker should have published."""
    start, model, update = shown.true[t, client]
    honest = [shown.true[t, i] for i in range(CLIENTS) if i not in ATTACKERS]
    starts, models, updates = (torch.stack(list(column)) for column in zip(*honest))
    if kind == "sign-flip":
        return start - scale * update, -scale * update
    if kind == "free-rider":
        return start, torch.zeros_like(start)
    if kind == "gaussian":
        noise = scale * randomness.normal(SEED, "attack", t, torch.tensor([client]), start.numel())[0]
        return model + noise, update + noise
    if kind == "ipm":
        return starts.mean(0) - scale * (models - starts).mean(0), -scale * updates.mean(0)
    if kind == "alie":
        return tuple(x.mean(0) - scale * x.std(0, unbiased=False) for x in (models, updates))  # type: ignore[return-value]
    _, model, update = shown.true[t, int(victims[client])]
    return model, update


@pytest.mark.parametrize(("kind", "scale"), [
    ("sign-flip", 1.0), ("sign-flip", 4.0), ("gaussian", 0.5), ("ipm", 2.0), ("alie", 1.5), ("free-rider", 1.0),
    ("mimic", 1.0),
])  # fmt: skip
def test_an_attacker_publishes_what_a_plain_loop_says_and_nobody_else_does(kind: Any, scale: float) -> None:
    strength = {"attack_scale": scale} if kind not in ("free-rider", "mimic") else {}
    shown, _ = run(attacked(kind, **strength))
    for t in (1, 2, 3):
        for client in range(CLIENTS):
            seen = shown.seen[t, client]
            if client not in ATTACKERS:
                assert torch.equal(seen[0], shown.true[t, client][1])
                assert torch.equal(seen[1], shown.true[t, client][2])
                continue
            wanted = expected(kind, shown, t, client, scale, torch.zeros(CLIENTS))
            for found, right in zip(seen, wanted):
                torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
            assert kind == "mimic" or not torch.equal(seen[0], shown.true[t, client][1])


def test_nothing_is_false_before_the_first_round_of_the_attack() -> None:
    shown, _ = run(attacked("sign-flip", attack_start=3))
    for client in range(CLIENTS):
        assert all(torch.equal(shown.seen[t, client][0], shown.true[t, client][1]) for t in (1, 2))
        assert torch.equal(shown.seen[3, client][0], shown.true[3, client][1]) == (client not in ATTACKERS)


def test_what_is_not_finite_is_refused_by_all_and_counted() -> None:
    for kind, more in (("nan", {}), ("sign-flip", {"attack_scale": 1e308}), ("gaussian", {"attack_scale": 1e18})):
        shown, engine = run(attacked(kind, **more))
        assert {client for _, client in shown.seen} == set(range(CLIENTS)) - set(ATTACKERS)
        counted = torch.cat([shard.quarantined for shard in engine.shards])
        assert [int(count) for count in counted] == [3 if client in ATTACKERS else 0 for client in range(CLIENTS)]
        assert all(torch.isfinite(shard.cohort.weights).all() for shard in engine.shards)


def test_who_games_copies_its_victim_until_that_averages_with_it_and_then_turns() -> None:
    # Client 0 averages with 1 and 2: attacker 1 pursues it and is chosen at once; 4 and 8 never are.
    shown, engine = run(attacked("gaming", attack_victim=0, attack_scale=3.0))
    for client in ATTACKERS:
        assert torch.equal(shown.seen[1, client][0], shown.true[1, 0][1])
        for t in (2, 3):
            start, _, update = shown.true[t, client]
            wanted = (start - 3 * update, -3 * update) if client == 1 else shown.true[t, 0][1:]
            for found, right in zip(shown.seen[t, client], wanted):
                torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
    assert engines.snapshot(engine)["turned"].tolist() == [client == 1 for client in range(CLIENTS)]
    never, _ = run(attacked("gaming", attack_victim=0), method=Show(mixes=False))
    assert all(torch.equal(never.seen[t, 1][0], never.true[t, 0][1]) for t in (1, 2, 3))


def test_whoever_copies_a_silent_victim_publishes_its_own() -> None:
    faults = attacked("mimic", attack_victim=0, absent=0.4)
    shown, _ = run(faults, rounds=8)
    away = [bool(faults.away(SEED, t, torch.tensor([0]))[0]) for t in range(1, 9)]
    assert any(away)
    assert not all(away)
    for (t, client), (model, _) in shown.seen.items():
        if client in ATTACKERS:
            owner = client if away[t - 1] else 0
            assert torch.equal(model, shown.true[t, owner][1])


@pytest.mark.parametrize("kind", ATTACKS)
def test_the_number_of_shards_changes_no_bit(kind: Any) -> None:
    faults = attacked(kind, loss=0.2, absent=0.2)
    one, engine = run(faults)
    whole = engines.snapshot(engine)
    for shards in (2, 4):
        many, engine = run(faults, shards)
        for name, tensor in engines.snapshot(engine).items():
            assert torch.equal(tensor, whole[name]), name
        common = set(one.seen) & set(many.seen)
        assert common
        assert all(torch.equal(a, b) for key in common for a, b in zip(one.seen[key], many.seen[key]))


def test_without_attackers_nothing_changes() -> None:
    plain, engine = run(Faults())
    none, other = run(Faults(attackers=0.0, attack="sign-flip"))
    assert torch.equal(engine.shards[0].cohort.weights, other.shards[0].cohort.weights)
    assert plain.seen.keys() == none.seen.keys()
    assert plan(Faults(), 10, 0) is plan(Faults(attackers=[], attack="nan"), 10, 0) is None


def test_a_share_of_attackers_is_drawn_by_the_seed_and_of_the_right_number() -> None:
    for n, share, count in ((10, 0.2, 2), (40, 0.3, 12), (7, 0.5, 4), (3, 0.1, 0)):
        found = plan(Faults(attackers=share, attack="nan"), n, 1)
        assert (0 if found is None else int(found.attackers.sum())) == count
    first, again, other = (plan(Faults(attackers=0.3, attack="nan"), 40, seed) for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first.attackers, again.attackers)
    assert not torch.equal(first.attackers, other.attackers)
    times = sum(plan(Faults(attackers=0.25, attack="nan"), 8, seed).attackers.double() for seed in range(400))  # type: ignore[union-attr]
    assert bool(((times > 60) & (times < 140)).all())  # 100 each on average


def test_victims_of_gaming_are_honest_and_not_all_the_same() -> None:
    found = plan(Faults(attackers=0.3, attack="gaming"), 60, 3)
    assert found is not None
    victims = found.victims(torch.arange(60))
    assert not bool(found.attackers[victims].any())
    assert victims.unique().numel() > 20
    mimic = plan(Faults(attackers=[0, 1], attack="mimic"), 5, 3)
    assert mimic is not None
    assert mimic.victims(torch.arange(5)).tolist() == [2] * 5


def test_labels_are_flipped_for_attackers_alone() -> None:
    y, sizes = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 3]), torch.tensor([3, 0, 4, 2])
    found = flipped(y, sizes, torch.tensor([False, True, True, False]), classes=4)
    wanted = []
    start = 0
    for client, size in enumerate(sizes.tolist()):
        wanted += [3 - int(label) if client in (1, 2) else int(label) for label in y[start : start + size]]
        start += size
    assert found.tolist() == wanted


def test_how_far_alie_goes_is_the_published_formula() -> None:
    # 50 workers, 12 of them bad: 14 more make a majority of 26, and 24 of the 38 honest ones may lie below.
    assert hidden(50, 12) == pytest.approx(0.3360, abs=1e-4)
    for n, f in ((20, 4), (41, 8), (100, 30)):
        z, supporters = hidden(n, f), n // 2 + 1 - f
        assert 0.5 * (1 + math.erf(z / math.sqrt(2))) == pytest.approx((n - f - supporters) / (n - f))
    assert hidden(10, 0) == 0.0


def test_every_attack_is_described_and_those_that_know_others_are_named() -> None:
    assert set(ATTACKS) == set(get_args(Kind)) > set(KNOWING)
    assert all(len(text) > 15 for text in ATTACKS.values())
    for kind in ATTACKS:
        Faults(attackers=0.1, attack=kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attackers": 0.1}, "'attackers' goes with 'attack'"),
        ({"attack": "nan"}, "'attack' goes with 'attackers'"),
        ({"attack_scale": 2.0}, "'attack_scale' goes with 'attack'"),
        ({"attackers": 1.0, "attack": "nan"}, "less than 1"),
        ({"attackers": [2, 2], "attack": "nan"}, "different numbers"),
        ({"attackers": [-1], "attack": "nan"}, "from 0 on"),
        ({"attackers": 0.1, "attack": "nan", "attack_scale": 2.0}, "nan has no scale"),
        ({"attackers": 0.1, "attack": "ipm", "attack_victim": 2}, "ipm has no victim"),
        ({"attackers": 0.1, "attack": "label-flip", "attack_start": 2}, "before round 1"),
    ],
)
def test_settings_that_do_not_fit_are_explained(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        Faults(**values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attackers": [10], "attack": "nan"}, "there is no client 10, only 0 to 9"),
        ({"attackers": 0.97, "attack": "nan"}, "none would be honest"),
        ({"attackers": [3], "attack": "mimic", "attack_victim": 3}, "'faults.attack_victim' = 3 is an attacker"),
        ({"attackers": [3], "attack": "mimic", "attack_victim": 30}, "not among the clients 0 to 9"),
    ],
)
def test_clients_that_are_not_there_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        plan(Faults(**values), 10, 0)
    assert message in str(error.value)
