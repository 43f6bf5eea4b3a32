"""Gossip with its backbones and choices, and the two methods that tune a copy for the test."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import last_edges, make_federation, tiny_experiment
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.methods import companions, find
from kinfolk.peers.faults import Faults

SIZES = [12, 6, 9, 20, 8, 8, 16, 1]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def engine_of(name: str, **settings: Any) -> engines.InProcessEngine:
    cohort = {"training": Training(epochs=2, batch_size=5, lr=0.1), "seed": 4, "device": "cpu", "precision": "float64"}
    model = lambda: initial_model(net, 4)  # noqa: E731
    return engines.InProcessEngine(
        engines.Parts(make_federation(SIZES), model, find(name)(**settings), Faults(), cohort)
    )


def friends_of(engine: engines.InProcessEngine) -> list[list[int]]:
    edges = last_edges(engine)
    return [sorted(edges.neighbor[edges.client == i].tolist()) for i in range(len(SIZES))]


def trained_by_hand(backbone: str) -> tuple[Tensor, slice]:
    """Models after the first round's training, and the columns that are shared."""
    cohort = engine_of("local").shards[0].cohort
    if backbone != "alt":
        return cohort.trained(cohort.weights, 1)[0], slice(0, cohort.layout.size)
    heads = cohort.trained(cohort.weights, 1, part=cohort.division.head, epochs=3, purpose="head")[0]
    return cohort.trained(heads, 1, part=cohort.division.body)[0], cohort.division.body


@pytest.mark.parametrize("backbone", ["full", "alt", "ft"])
def test_what_is_shared_is_averaged_with_ten_random_peers(backbone: str) -> None:
    engine = engine_of("gossip", neighbors=3, backbone=backbone, tune_epochs=3)
    engine.step(1, False)
    trained, shared = trained_by_hand(backbone)
    chosen, cohort = friends_of(engine), engine.shards[0].cohort
    assert all(len(peers) == 3 and i not in peers for i, peers in enumerate(chosen))
    expected = trained.clone()
    for i, peers in enumerate(chosen):
        expected[i, shared] = trained[[i, *peers]].mean(dim=0)[shared]
    torch.testing.assert_close(cohort.weights, expected, rtol=1e-12, atol=1e-12)
    assert cohort.tuning == (3 if backbone == "ft" else 0)
    assert engine.shards[0].state.neighbors.sort(dim=1).values.tolist() == chosen


def test_with_afinds_choice_and_tuning_it_is_afind_plus() -> None:
    sections = {"run": {"rounds": 5}, "faults": {"loss": 0.1}}
    ours = tiny_experiment(method={"name": "gossip", "choice": "afind", "backbone": "ft"}, **sections)
    theirs = tiny_experiment(method={"name": "afind+", "backbone": "ft"}, **sections)
    one, other = kinfolk.run(ours, out="one"), kinfolk.run(theirs, out="other")
    assert torch.equal(one.weights(), other.weights())
    for a, b in zip(one.metrics, other.metrics):
        assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}


def chosen_by_afind(before: Any, after: Any) -> None:
    """That clients took all who passed their thresholds, and at most one besides."""
    passed = (before.probability >= before.threshold[:, None]) & ~torch.eye(len(SIZES), dtype=torch.bool)
    for i, row in enumerate(after.neighbors.tolist()):
        friends = set(torch.nonzero(passed[i]).flatten().tolist())
        taken = {j for j in row if j >= 0}
        assert friends <= taken
        assert len(taken - friends) == (len(friends) < 7)


@pytest.mark.parametrize("name", ["gossip", "ditto", "fomo", "dispfl"])
def test_with_afinds_choice_whoever_passes_the_threshold_is_taken(name: str) -> None:
    engine = engine_of(name, choice="afind")
    fewer = False
    for t in range(1, 5):
        before = engine.shards[0].state
        engine.step(t, False)
        after = engine.shards[0].state
        if t > 1:
            chosen_by_afind(before, after)
            fewer |= bool((after.neighbors >= 0).sum() < 7 * len(SIZES))
        else:
            assert [sorted(row) for row in after.neighbors.tolist()] == [
                [j for j in range(len(SIZES)) if j != i] for i in range(len(SIZES))
            ]
    assert fewer


def test_with_afinds_choice_the_common_model_of_ditto_is_that_of_gossip() -> None:
    ours, theirs = engine_of("ditto", choice="afind"), engine_of("gossip", choice="afind", backbone="full")
    for t in range(1, 5):
        ours.step(t, False)
        theirs.step(t, False)
        assert torch.equal(ours.shards[0].cohort.weights, theirs.shards[0].cohort.weights)
        assert torch.equal(ours.shards[0].state.neighbors, theirs.shards[0].state.neighbors)
    assert not torch.equal(ours.shards[0].state.personal, ours.shards[0].cohort.weights)


def test_with_afinds_choice_and_all_weights_held_dispfl_mixes_as_gossip_does() -> None:
    ours = engine_of("dispfl", choice="afind", density=1.0, longest=1e9)
    theirs = engine_of("gossip", choice="afind", backbone="full")
    for t in range(1, 5):
        ours.step(t, False)
        theirs.step(t, False)
        torch.testing.assert_close(
            ours.shards[0].cohort.weights, theirs.shards[0].cohort.weights, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("name", ["gossip", "ditto", "fomo", "dispfl"])
def test_afinds_choice_is_the_same_over_shards_where_links_are_few_and_peers_come_and_go(name: str) -> None:
    sections: dict[str, Any] = {
        "peers": {"topology": "random", "probability": 0.3, "away": 0.3},
        "faults": {"loss": 0.1, "absent": 0.1},
        "run": {"precision": "float64", "rounds": 5, "evaluate_every": 5},
    }
    one = kinfolk.run(tiny_experiment(method={"name": name, "choice": "afind"}, **sections), out="one")
    sections["run"] |= {"engine": "sharded", "shards": 3}
    many = kinfolk.run(tiny_experiment(method={"name": name, "choice": "afind"}, **sections), out="many")
    assert torch.isfinite(one.weights()).all()
    assert (one.weights() - many.weights()).abs().max() <= 1e-10
    assert one.summary["models_received"] == many.summary["models_received"] > 0


@pytest.mark.parametrize("name", ["gossip", "ditto", "fomo", "dispfl"])
def test_afinds_choice_finds_nobody_where_nobody_is_in_reach(name: str) -> None:
    found = []
    for choice in ("afind", "random"):
        settings = tiny_experiment(method={"name": name, "choice": choice}, peers={"reachable": 0})
        found.append(kinfolk.run(settings, out=choice))
    assert torch.equal(found[0].weights(), found[1].weights())
    assert found[0].summary["models_received"] == 0


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("afind", {"backbone": "alt", "tune_epochs": 1, "threshold": "calibrated", "proxy": "grad", "tau": 0.5}),
        ("afind+", {"backbone": "alt", "tune_epochs": 1, "threshold": "calibrated", "proxy": "grad", "nu": 0.1}),
        ("afind+", {"gamma": 0.9, "temperature": 1.0, "loss_smoothing": "two-point", "self_in_agg": True, "count": 10}),
        ("gossip", {"neighbors": 10, "choice": "random", "backbone": "alt", "tune_epochs": 1}),
        ("fedavg-ft", {"participation": 0.1, "tune_epochs": 1}),
        ("pens", {"candidates": 10, "neighbors": 5, "discover_rounds": 100, "rule": "expected"}),
        ("federico", {"form": "sampler", "neighbors": 10, "components": 3, "explore": 0.3, "memory": 0.6}),
        ("ditto", {"consensus": "gossip", "neighbors": 10, "penalty": 0.5, "personal_epochs": 5}),
        ("fomo", {"neighbors": 10, "explore": 0.5, "explore_decay": 0.0, "validation": 0.2}),
        ("dispfl", {"neighbors": 10, "density": 0.5, "prune": 0.5, "longest": 10.0, "regrow": "gradient"}),
    ],
)
def test_what_is_not_named_is_as_the_papers_tables_have_it(name: str, defaults: dict[str, Any]) -> None:
    method = find(name)()
    assert {key: getattr(method, key) for key in defaults} == defaults


def test_pens_judges_by_its_own_head_and_averages_bodies() -> None:
    engine = engine_of("pens", candidates=5, neighbors=2, backbone="alt", tune_epochs=3)
    shard = engine.shards[0]
    trained, body = trained_by_hand("alt")
    candidates = shard.peers.sample(1, 5)
    head = shard.cohort.division.head
    engine.step(1, False)
    for i, row in enumerate(candidates.tolist()):
        models = trained[row].clone()
        models[:, head] = trained[i, head]
        losses = shard.cohort.train_losses(models)[i].tolist()
        best = [j for _, j in sorted(zip(losses, row))[:2]]
        assert set(shard.state.neighbors[i].tolist()) == set(best)
        torch.testing.assert_close(
            shard.cohort.weights[i, body], trained[[i, *best]].mean(dim=0)[body], rtol=1e-12, atol=1e-12
        )
        assert torch.equal(shard.cohort.weights[i, head], trained[i, head])


def test_fedavg_ft_is_fedavg_tested_with_a_tuned_copy() -> None:
    settings = {"participation": 0.5}
    plain = kinfolk.run(tiny_experiment(method={"name": "fedavg", **settings}), out="plain")
    tuned = kinfolk.run(tiny_experiment(method={"name": "fedavg-ft", **settings, "tune_epochs": 4}), out="tuned")
    assert torch.equal(plain.weights(), tuned.weights())
    assert plain.summary["models_received"] == tuned.summary["models_received"]
    assert tuned.summary["loss"] < plain.summary["loss"]
    assert find("fedavg-ft")().count(100) == 10


def test_lists_are_filled_up_with_strangers_each_as_likely_as_the_others() -> None:
    shard = engine_of("local").shards[0]
    known = torch.full((8, 3), -1)
    known[0, :2], known[1, 0], known[2] = torch.tensor([3, 5]), 7, torch.tensor([0, 1, 7])
    counts = torch.zeros(8, 8)
    for t in range(1, 400):
        found = companions.fill(t, shard.cohort, shard.peers, known, 3)
        assert found[0, :2].tolist() == [3, 5]
        assert found[2].tolist() == [0, 1, 7]
        for i, row in enumerate(found.tolist()):
            assert len(set(row)) == 3
            assert i not in row
            counts[i, row] += 1
    share = counts / 399
    assert (share[0][[1, 2, 4, 6, 7]] - 1 / 5).abs().max() < 0.08
    assert (share[1][[0, 2, 3, 4, 5, 6]] - 2 / 6).abs().max() < 0.08
    assert (share[4][[0, 1, 2, 3, 5, 6, 7]] - 3 / 7).abs().max() < 0.08
    assert companions.fill(1, shard.cohort, shard.peers, known[:, :0], 9)[0].tolist().count(-1) == 2  # only 7 others


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"name": "gossip", "neighbors": 0}, "'method.neighbors' = 0: must be at least 1"),
        ({"name": "gossip", "choice": "best"}, "'method.choice' = 'best'"),
        ({"name": "gossip", "backbone": "half"}, "'method.backbone' = 'half'"),
        ({"name": "pens", "backbone": "half"}, "'method.backbone' = 'half'"),
        ({"name": "fedavg-ft", "tune_epochs": 0}, "'method.tune_epochs' = 0"),
        ({"name": "ditto", "penalty": -1.0}, "'method.penalty' = -1.0"),
        ({"name": "ditto", "consensus": "vote"}, "'method.consensus' = 'vote'"),
        ({"name": "fomo", "validation": 1.0}, "'method.validation' = 1.0: must be less than 1"),
        ({"name": "dispfl", "density": 0.0}, "'method.density' = 0.0: must be greater than 0"),
        ({"name": "federico", "form": "em", "backbone": "alt"}, "needs backbone = 'full'"),
        ({"name": "federico", "explore": 1.5}, "'method.explore' = 1.5"),
    ],
)
def test_wrong_settings_are_told_in_one_line(method: dict[str, Any], words: str) -> None:
    with pytest.raises(kinfolk.UserError) as error:
        kinfolk.run(tiny_experiment(method=method))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [{"backbone": "alt"}, {"backbone": "full", "choice": "afind"}])
def test_a_model_without_a_body_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(kinfolk.UserError, match="no body to share"):
        kinfolk.run({**tiny_experiment(method={"name": "gossip", **settings}), "model": {"name": "linear"}})
