"""Clients that never train: who they are, what they hold, and how the server's model is tested on them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import kinfolk
from conftest import make_cohort, make_federation, tiny_experiment
from kinfolk import UserError
from kinfolk.assembly import load_split
from kinfolk.cohort import newcomers
from kinfolk.cohort.layout import Layout
from kinfolk.config import read
from kinfolk.data.partition import SPLITS, Labels, set_apart
from kinfolk.runs import checkpoint
from kinfolk.runs.folder import RunFolder

OUTSIDE = {"new_clients": 3, "validation_clients": 2}


def experiment(method: str = "fedavg", **sections: Any) -> dict[str, Any]:
    data = {**OUTSIDE, **sections.pop("data", {})}
    return tiny_experiment(method={"name": method}, data=data, **sections)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def users(count: int = 10, each: int = 12) -> Labels:
    """`count` users with `each` samples in the train part, and as many others in the test part."""
    y = np.arange(count * each) % 5
    owner = np.repeat(np.arange(count), each)
    return Labels(y, y, 5, owner, owner + count)


# -- who they are ------------------------------------------------------------------------------------------------


def test_of_users_some_train_some_validate_and_some_are_new_and_none_is_two_of_these() -> None:
    split = SPLITS["by-user"](min_samples=2, part="train").divide(users(), 10, None, None, seed=5)
    apart = set_apart(split, 2, 3, seed=5)
    assert apart.validation is not None and apart.newcomers is not None  # noqa: PT018
    groups = [set(some.users.tolist()) for some in (apart, apart.validation, apart.newcomers) if some.users is not None]
    assert [len(group) for group in groups] == [5, 2, 3]
    assert set.union(*groups) == set(range(10))
    for some in (apart.validation, apart.newcomers):
        assert all(part.size == 0 for part in some.train)
        assert all(part.tolist() == list(range(12 * user, 12 * user + 12)) for part, user in zip(some.test, some.users))
    assert "of 10 clients 2 for validation and 3 new at the test never train" in apart.notes


def test_the_part_of_a_set_limits_users_and_their_samples() -> None:
    for part, first in (("train", 0), ("test", 10)):
        split = SPLITS["by-user"](min_samples=2, part=part).divide(users(), 10, None, None, seed=5)
        assert sorted(split.users) == list(range(first, first + 10))
    both = SPLITS["by-user"](min_samples=2).divide(users(), 20, None, None, seed=5)
    assert sorted(both.users) == list(range(20))
    with pytest.raises(UserError, match="10 of 10 users"):
        SPLITS["by-user"](min_samples=2, part="train").divide(users(), 11, None, None, seed=5)


@pytest.mark.parametrize("kind", ["iid", "rotation", "label-swap", "dirichlet", "pathological", "shards", "alpha"])
def test_in_any_split_no_sample_of_theirs_is_trained_on(kind: str) -> None:
    config = read(experiment(data={"split": {"kind": kind}}))
    _, split = load_split(config)
    assert len(split.train) == 8
    trained = set(np.concatenate(split.train).tolist())
    for some, count in ((split.validation, 2), (split.newcomers, 3)):
        assert some is not None
        assert len(some.test) == count
        for part in some.test:
            assert part.size
            assert not trained & set(part.tolist())


def test_they_see_their_images_as_their_own_cluster_does() -> None:
    config = read(experiment())
    dataset, split = load_split(config)
    data = kinfolk.load_federation(config)
    assert split.newcomers is not None and data.newcomers is not None  # noqa: PT018
    assert split.newcomers.quarter_turns is not None
    images = np.concatenate([dataset.train.x, dataset.test.x])
    plain = torch.from_numpy(images[split.newcomers.test[1]]).float()
    turned = torch.rot90(plain, int(split.newcomers.quarter_turns[1]), (2, 3))
    mine = data.newcomers.x[data.newcomers.starts[1] : data.newcomers.starts[2]]
    found = torch.corrcoef(torch.stack([turned.flatten(), mine.flatten()]))[0, 1]
    assert float(found) == pytest.approx(1, abs=1e-5)


def test_another_seed_sets_others_apart() -> None:
    splits = [load_split(read(experiment(run={"seed": seed})))[1].newcomers for seed in (0, 0, 1)]
    tests = [np.concatenate(some.test).tolist() for some in splits if some is not None]
    assert tests[0] == tests[1] != tests[2]


# -- how they are tested -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold"])
def test_the_servers_model_is_tested_on_all_their_samples(method: str) -> None:
    result = kinfolk.run(experiment(method), out="a")
    data = kinfolk.load_federation(result.config)
    module = result.load_into(net(), 0)
    rows = RunFolder.open(Path("a")).new_clients()
    assert [row["role"] for row in rows] == ["new"] * 3 + ["validation"] * 2
    for role, part in (("new", data.newcomers), ("validation", data.validation)):
        assert part is not None
        right = (module(part.x).argmax(1) == part.y).double()
        assert result.summary[f"{role}_accuracy"] == pytest.approx(float(right.mean()))
        each = [float(own.mean()) for own in right.split(part.sizes.tolist())]
        assert [row["accuracy"] for row in rows if row["role"] == role] == pytest.approx(each)
        assert [row["samples"] for row in rows if row["role"] == role] == part.sizes.tolist()
        assert result.summary[f"{role}_accuracy_clients"] == pytest.approx(np.mean(each))
        assert result.summary[f"{role}_worst10"] == pytest.approx(min(each))
    assert all("new_accuracy" in row for row in result.metrics)


@pytest.mark.parametrize("shards", [1, 3])
def test_ifcas_models_are_offered_to_them_and_each_takes_the_one_of_lowest_loss(shards: int) -> None:
    changes = {"engine": "sharded", "shards": shards, "rounds": 3}
    config = read({**experiment("ifca", run=changes), "method": {"name": "ifca", "models": 3}})
    result = kinfolk.run(config, out="a")
    data, models = kinfolk.load_federation(config), checkpoint.load(Path("a/checkpoint")).tensors["shared/models"]
    assert data.newcomers is not None
    expected, chosen = [], []
    for start, size in zip(data.newcomers.starts.tolist(), data.newcomers.sizes.tolist()):
        x, y = data.newcomers.x[start : start + size], data.newcomers.y[start : start + size]
        scores = []
        for row in models:
            module = net()
            Layout.of(module).load(row, module)
            scores.append(module(x))
        chosen.append(int(torch.stack([nn.functional.cross_entropy(each, y) for each in scores]).argmin()))
        expected.append(float((scores[chosen[-1]].argmax(1) == y).double().mean()))
    rows = [row for row in RunFolder.open(Path("a")).new_clients() if row["role"] == "new"]
    assert [row["accuracy"] for row in rows] == pytest.approx(expected)
    weights = data.newcomers.sizes.double()
    assert result.summary["new_accuracy"] == pytest.approx(
        float((weights @ torch.tensor(expected).double()) / weights.sum())
    )


def test_of_models_that_are_no_numbers_none_is_chosen() -> None:
    cohort = make_cohort(make_federation([4, 4]), lambda: nn.Linear(6, 3))
    part = cohort.data.test
    broken = torch.full_like(cohort.initial, torch.nan)
    found = newcomers.best_of(cohort, torch.stack([broken, cohort.initial, cohort.initial]), part)
    assert found.loss == pytest.approx(newcomers.tested(cohort, cohort.initial, part).loss)
    assert np.isfinite(found.accuracy).all()


def test_pooled_and_mean_differ_where_clients_hold_unequal_numbers() -> None:
    config = read(experiment(data={"split": {"kind": "dirichlet", "alpha": 0.3}, "train": None, "test": None}))
    result = kinfolk.run(config, out="a")
    rows = [row for row in RunFolder.open(Path("a")).new_clients() if row["role"] == "new"]
    weights = np.array([row["samples"] for row in rows])
    assert len(set(weights.tolist())) > 1
    pooled = (weights * [row["accuracy"] for row in rows]).sum() / weights.sum()
    assert result.summary["new_accuracy"] == pytest.approx(pooled)
    assert result.summary["new_accuracy"] != result.summary["new_accuracy_clients"]


def test_shards_and_a_resumed_run_find_the_same() -> None:
    whole = kinfolk.run(experiment(), out="whole")
    kinfolk.run(experiment(run={"engine": "sharded", "shards": 3}), out="shards")
    kinfolk.run(experiment(run={"rounds": 2}), out="short")
    kinfolk.resume("short", rounds=4)
    one, three, resumed = (RunFolder.open(Path(name)) for name in ("whole", "shards", "short"))
    assert resumed.new_clients() == one.new_clients()
    assert [row["accuracy"] for row in three.new_clients()] == [row["accuracy"] for row in one.new_clients()]
    assert whole.metrics[-1]["new_accuracy"] == resumed.summary()["new_accuracy"]


def test_they_change_nothing_for_those_who_train() -> None:
    """The same training clients with and without a test on others give the same models."""
    config = read(experiment())
    data = kinfolk.load_federation(config)
    alone = kinfolk.run(tiny_experiment(method={"name": "fedavg"}), data=_without(data), out="alone")
    assert torch.equal(kinfolk.run(config, out="both").weights(), alone.weights())
    assert not any("new" in key for key in alone.summary)
    assert not Path("alone/new_clients.csv").exists()


def _without(data: kinfolk.Federation) -> kinfolk.Federation:
    import dataclasses

    return dataclasses.replace(data, newcomers=None, validation=None)


def test_old_runs_are_still_found() -> None:
    sections = read(tiny_experiment()).sections()
    assert "new_clients" not in sections["data"]
    assert "part" not in read(tiny_experiment(data={"split": {"kind": "by-user"}})).sections()["data"]["split"]


# -- what cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-scaffold"])
def test_the_private_servers_model_is_tested_on_them(method: str) -> None:
    result = kinfolk.run(experiment(method), out="a")
    folder = RunFolder.open(Path("a"))
    found = [row["accuracy"] for row in folder.new_clients() if row["role"] == "new"]
    assert result.summary["new_accuracy_clients"] == pytest.approx(np.mean(found))
    assert torch.equal(result.weights()[0], result.weights()[-1])  # all use the model that is tested


def test_a_method_without_one_model_says_so_and_runs() -> None:
    said: list[str] = []

    class Listener(kinfolk.Observer):
        def notice(self, text: str) -> None:
            said.append(text)

    result = kinfolk.run(experiment("local"), out="a", observer=Listener())
    assert "method 'local' has no model for clients that never train: they are left out" in said
    assert "new_accuracy" not in result.summary


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.new_clients=0"], "data.new_clients"),
        (["data.new_clients=100000"], "clients that never train among them"),
        (["data.norm=per-client"], "clients that never train have none"),
    ],
)
def test_what_is_wrong_is_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        kinfolk.run(experiment(), overrides, out="a")
    assert "\n" not in str(caught.value)


def test_your_own_data_bring_them_along() -> None:
    with pytest.raises(UserError, match="your own data bring such clients along"):
        kinfolk.run(experiment(), data=kinfolk.load_federation(read(tiny_experiment())), out="a")
    data = kinfolk.load_federation(read(experiment()))
    result = kinfolk.run(tiny_experiment(method={"name": "fedavg"}), data=data, out="b")
    assert 0 <= result.summary["new_accuracy"] <= 1
