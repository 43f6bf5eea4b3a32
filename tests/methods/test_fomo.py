"""FedFOMO against its definition."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kinfolk
from conftest import last_edges, make_cohort, make_federation, tiny_experiment
from kinfolk import Cohort, Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.methods.fomo import MOST, FedFOMO, _worth
from kinfolk.methods.holdout import hold_out
from kinfolk.peers.faults import Faults

SIZES = [12, 6, 9, 20, 8, 8, 16, 1]


def engine_of(lr: float = 0.1, faults: Faults | None = None, **settings: Any) -> engines.InProcessEngine:
    training = Training(epochs=2, batch_size=5, lr=lr)
    cohort = {"training": training, "seed": 4, "device": "cpu", "precision": "float64"}
    return engines.InProcessEngine(
        engines.Parts(
            make_federation(SIZES),
            lambda: initial_model(lambda: nn.Linear(6, 3), 4),
            FedFOMO(**settings),
            faults or Faults(),
            cohort,
        )
    )


def set_aside(cohort: Cohort, client: int) -> tuple[Tensor, Tensor]:
    part = cohort.validation
    assert part is not None
    rows = slice(int(part.starts[client]), int(part.starts[client] + part.sizes[client]))
    return part.x[rows], part.y[rows]


def loss_of(cohort: Cohort, client: int, model: Tensor) -> float:
    module = nn.Linear(6, 3).double()
    cohort.layout.load(model, module)
    x, y = set_aside(cohort, client)
    with torch.no_grad():
        return F.cross_entropy(module(x), y).item()


def test_a_model_is_worth_its_drop_in_loss_over_its_distance() -> None:
    engine = engine_of(neighbors=3)
    shard = engine.shards[0]
    cohort, trust = shard.cohort, torch.zeros(8, 8, dtype=torch.float64)
    for t in (1, 2, 3, 4):
        before = cohort.weights
        engine.step(t, False)
        after, trained = cohort.weights, cohort.trained(before, t)[0]
        for i, looked_at in enumerate(shard.state.neighbors.tolist()):
            assert len({*looked_at} - {i, -1}) == 3
            base, worth = loss_of(cohort, i, before[i]), {}
            for j in (i, *looked_at):
                drop = base - loss_of(cohort, i, trained[j])
                worth[j] = max(0.0, drop / float((trained[j] - before[i]).norm()))
            total = sum(worth.values())
            expected = trained[i]
            if total > 0:
                expected = before[i] + sum(a / total * (trained[j] - before[i]) for j, a in worth.items())
                for j in looked_at:
                    trust[i, j] += worth[j] / total
            torch.testing.assert_close(after[i], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(shard.state.trust, trust, rtol=1e-9, atol=1e-12)
    assert (trust > 0).any(dim=1).sum() >= 6


def test_if_nothing_does_better_the_trained_model_is_kept() -> None:
    engine = engine_of(lr=300.0, neighbors=3)
    cohort = engine.shards[0].cohort
    before = cohort.weights
    engine.step(1, False)
    after, trained = cohort.weights, cohort.trained(before, 1)[0]
    worse = [
        i for i in range(8) if all(loss_of(cohort, i, trained[j]) >= loss_of(cohort, i, before[i]) for j in range(8))
    ]
    assert worse
    assert torch.equal(after[worse], trained[worse])
    assert not set(worse) & set(last_edges(engine).client.tolist())


def test_worth_is_zero_for_a_rise_for_the_same_model_and_for_what_is_not_finite() -> None:
    drop = torch.tensor([0.5, -0.5, 0.5, torch.nan, torch.inf, -torch.inf, 0.5, 0.0], dtype=torch.float64)
    distance = torch.tensor([2.0, 2.0, 1e-13, 2.0, 2.0, 2.0, torch.inf, 2.0], dtype=torch.float64)
    assert _worth(drop, distance).tolist() == [0.25, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_fifth_of_the_samples_is_set_aside_and_nobody_trains_on_it(precision: str) -> None:
    data = make_federation([1, 2, 3, 7, 20, 42])
    cohort = make_cohort(data, lambda: nn.Linear(6, 3), precision=precision)
    whole = cohort.data.train
    hold_out(cohort, 0.2)
    part = cohort.validation
    assert part is not None
    assert part.sizes.tolist() == [1, 1, 1, 1, 4, 8]
    assert cohort.data.train.sizes.tolist() == [1, 1, 2, 6, 16, 34]
    assert cohort.train_x.shape[0] == 60
    for i, size in enumerate(whole.sizes.tolist()):

        def samples(of: Any, i: int = i) -> list[tuple[float, ...]]:
            rows = range(int(of.starts[i]), int(of.starts[i] + of.sizes[i]))
            return [(*of.x[row].tolist(), int(of.y[row])) for row in rows]

        kept, aside = samples(cohort.data.train), samples(part)
        if size == 1:  # it has to serve for both
            assert kept == aside == samples(whole)
        else:
            assert sorted(kept + aside) == sorted(samples(whole))
    assert sorted(samples(part)) != sorted(samples(whole)[-8:])  # not just the last ones, which may be of one class


def test_what_is_set_aside_does_not_depend_on_shards() -> None:
    data = make_federation(SIZES)
    whole = make_cohort(data, lambda: nn.Linear(6, 3))
    some = torch.tensor([2, 3, 6])
    part = make_cohort(data.select(some), lambda: nn.Linear(6, 3), ids=some, n=8)
    for cohort in (whole, part):
        hold_out(cohort, 0.2)
    for place, client in enumerate(some.tolist()):
        assert torch.equal(set_aside(part, place)[0], set_aside(whole, client)[0])


def test_whom_to_look_at_follows_trust_or_chance() -> None:
    shard = engine_of(neighbors=2, explore=0.5).shards[0]
    trust = torch.zeros(8, 8, dtype=torch.float64)
    trust[:, 3], trust[:, 4], trust[:, 5] = 1.0, 2.0, 1.5
    trust.fill_diagonal_(0.0)
    best = [{4, 5}, {4, 5}, {4, 5}, {4, 5}, {3, 5}, {3, 4}, {4, 5}, {4, 5}]
    for explore, decay, t, low, high in (
        (0.0, 0.0, 1, 1.0, 1.0),
        (0.5, 0.0, 1, 0.45, 0.62),
        (1.0, 0.0, 1, 0.0, 0.12),
        (0.3, 0.05, 2, 0.68, 0.85),  # the original's: 0.25 in round 2, nothing from round 7 on
        (0.3, 0.05, 7, 1.0, 1.0),
        (1.0, 1.0, 1, 0.0, 0.12),
        (1.0, 1.0, 2, 1.0, 1.0),
    ):
        method, trusted = FedFOMO(neighbors=2, explore=explore, explore_decay=decay), 0
        for seed in range(100):
            shard.cohort.seed = seed
            found = method._candidates(t, shard.cohort, trust, shard.peers).tolist()
            trusted += sum(set(row) == best[i] for i, row in enumerate(found))
        assert low <= trusted / 800 <= high, (explore, decay, t)


def test_who_trusts_too_few_looks_at_others_beside_them() -> None:
    shard = engine_of(neighbors=3, explore=0.0).shards[0]
    trust = torch.zeros(8, 8, dtype=torch.float64)
    trust[0, 6] = 0.1
    found = shard.method._candidates(1, shard.cohort, trust, shard.peers)
    assert found[0, 0] == 6
    assert all(len({*row} - {i, -1}) == 3 for i, row in enumerate(found.tolist()))


def test_with_afinds_choice_its_friends_are_weighed_by_worth() -> None:
    settings = tiny_experiment(method={"name": "fomo", "choice": "afind"}, run={"rounds": 3})
    one = kinfolk.run(settings, out="one")
    assert one.summary["models_received"] > 3 * 7 * 8  # everybody in round 1, and bodies before training
    settings["run"] |= {"engine": "sharded", "shards": 3}
    assert (one.weights() - kinfolk.run(settings, out="many").weights()).abs().max() <= 1e-5


def test_one_sample_or_one_class_each_is_enough() -> None:
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    single = [(x[i : i + 1], torch.tensor([i % 3])) for i in range(4)] + [(x[4:], torch.tensor([2, 2]))]
    data = kinfolk.Federation.from_arrays(single, single, classes=3)
    settings = {**tiny_experiment(method={"name": "fomo"}), "model": {"name": "linear"}}
    assert torch.isfinite(kinfolk.run(settings, data=data, out="a").weights()).all()


def test_watching_tells_what_each_peer_was_worth() -> None:
    settings = tiny_experiment(method={"name": "fomo", "neighbors": 2}, run={"watch": [5], "watch_all": True})
    seen = kinfolk.run(settings, out="a").folder / "similarity.csv"
    rows = [line.split(",") for line in seen.read_text().splitlines()]
    place = {name: i for i, name in enumerate(rows[0])}
    worth = [float(row[place["similarity"]]) for row in rows[1:]]
    assert len(worth) == 3 * 7
    assert min(worth) >= 0 < max(worth)


def test_too_many_clients_are_refused_with_the_number() -> None:
    cohort = engine_of().shards[0].cohort
    cohort.n = MOST + 1
    with pytest.raises(kinfolk.UserError, match=f"{MOST + 1} clients"):
        FedFOMO().start(cohort)
