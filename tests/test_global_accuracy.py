"""Every client's model on test samples common to all, beside its own test set."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import kinfolk
from conftest import make_cohort, make_federation, tiny_experiment
from kinfolk import Federation, UserError
from kinfolk.cohort.layout import Layout
from kinfolk.config import read
from kinfolk.records import summary
from kinfolk.reproduce import cell_name

SKEWED = {"split": {"kind": "pathological", "classes_per_client": 2}, "global_test": 100}


def experiment(**run: Any) -> dict[str, Any]:
    return tiny_experiment(data=SKEWED, run=run)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def test_it_is_the_accuracy_of_each_model_on_the_common_samples() -> None:
    result = kinfolk.run(experiment(), out="a")
    data = kinfolk.load_federation(result.config)
    assert data.common is not None
    assert data.common.y.bincount().tolist() == [10] * 10
    for client, row in enumerate(result.clients):
        module = result.load_into(net(), client)
        right = module(data.common.x).argmax(1) == data.common.y
        assert right.double().mean().item() == pytest.approx(row["global_accuracy"])
    mean = np.mean([row["global_accuracy"] for row in result.clients])
    assert result.metrics[-1]["global_accuracy"] == result.summary["global_accuracy"] == pytest.approx(mean)
    assert result.summary["best_global_accuracy"] == max(row["global_accuracy"] for row in result.metrics)
    assert result.summary["global_accuracy"] < result.summary["accuracy"]  # clients know two of ten classes


def test_samples_are_scaled_like_all_others() -> None:
    config = read(experiment())
    whole = kinfolk.load_federation(read(experiment(), ["data.global_test=10000", "data.scale=unit"]))
    assert whole.common is not None
    assert whole.common.y.numel() == 445
    assert float(whole.common.x.max()) == 1.0
    standard = kinfolk.load_federation(config).common
    assert standard is not None
    assert abs(float(standard.x.mean())) < 0.1


def test_shards_and_a_resumed_run_find_the_same() -> None:
    whole = kinfolk.run(experiment(), out="whole")
    shards = kinfolk.run(experiment(engine="sharded", shards=3), out="shards")
    kinfolk.run(experiment(rounds=2), out="short")
    resumed = kinfolk.resume("short", rounds=4)
    for other in (shards, resumed):
        assert [row["global_accuracy"] for row in other.clients] == [row["global_accuracy"] for row in whole.clients]
    assert [r["global_accuracy"] for r in shards.metrics] == [r["global_accuracy"] for r in whole.metrics]


def test_it_changes_nothing_else_and_is_absent_where_it_is_not_wanted() -> None:
    with_it = kinfolk.run(experiment(), out="with")
    without = kinfolk.run(experiment(), ["data.global_test=none"], out="without")
    assert torch.equal(with_it.weights(), without.weights())
    timed = ("seconds", "warm_up_seconds")
    for both in zip(with_it.metrics, without.metrics):
        more, less = ({k: v for k, v in row.items() if k not in timed} for row in both)
        assert more.pop("global_accuracy") is not None
        assert more == less
    assert not any("global" in key for key in (*without.summary, *without.clients[0]))


def test_old_runs_are_still_found_and_new_ones_are_others() -> None:
    off = read(tiny_experiment(data={"split": SKEWED["split"]}))
    assert "global_test" not in off.sections()["data"]  # as before there was such a setting
    on = read(experiment())
    assert on.identity() != off.identity()
    assert cell_name(on) != cell_name(off)
    assert read(experiment(), ["data.global_test=none"]).identity() == off.identity()


def test_the_best_round_of_each_accuracy_is_its_own() -> None:
    rows: list[dict[str, Any]] = [
        {"round": 1, "accuracy": 0.5, "global_accuracy": 0.3},
        {"round": 2, "accuracy": 0.4, "global_accuracy": 0.6},
        {"round": 3, "accuracy": None, "global_accuracy": None},
    ]
    found = summary(rows, read(tiny_experiment()))
    assert (found["best_accuracy"], found["best_round"]) == (0.5, 1)
    assert (found["best_global_accuracy"], found["best_global_round"]) == (0.6, 2)


def test_before_mixing_only_the_own_test_set_is_looked_at() -> None:
    data = make_federation([9, 5])
    common = (torch.randn(11, 6), torch.arange(11) % 3)
    pairs = [(data.train.x[:9], data.train.y[:9]), (data.train.x[9:], data.train.y[9:])]
    own = Federation.from_arrays(pairs, pairs, classes=3, common=common)
    cohort = make_cohort(own, lambda: nn.Linear(6, 3))
    assert cohort.evaluate(common=False).common is None
    scores = cohort.evaluate()
    assert scores.common is not None
    module = nn.Linear(6, 3).double()
    Layout.of(module).load(cohort.weights[0], module)
    expected = (module(common[0].double()).argmax(1) == common[1]).double().mean()
    assert scores.common.tolist() == pytest.approx([expected.item()] * 2)
    assert own.select(torch.tensor([1])).common is own.common
    assert own.pooled().common is own.common


# -- your own data -----------------------------------------------------------------------------------------------


def own_data(common: bool) -> Federation:
    pair = (torch.randn(20, 1, 8, 8), torch.arange(20) % 10)
    if not common:
        return Federation.from_arrays([pair] * 3, [pair] * 3)
    sets = [TensorDataset(*pair)] * 3
    return Federation.from_datasets(sets, sets, common=TensorDataset(*pair))


def test_your_own_common_samples_are_used_without_being_asked_for() -> None:
    result = kinfolk.run(tiny_experiment(), data=own_data(True), out="a")
    assert result.clients[0]["global_accuracy"] == result.clients[0]["accuracy"]  # the same samples


def test_your_own_data_without_them_are_refused_if_they_are_asked_for() -> None:
    with pytest.raises(UserError, match=r"data\.global_test: your own data need `common`"):
        kinfolk.run(tiny_experiment(), ["data.global_test=5"], data=own_data(False))


@pytest.mark.parametrize(
    ("common", "words"),
    [
        ((torch.zeros(4, 5), torch.zeros(4)), r"common test: inputs \[4, 5\], clients have \[3, 2\]"),
        ((torch.zeros(0, 2), torch.zeros(0)), r"common test: inputs \[0, 2\]"),
        ((torch.zeros(4, 2), torch.zeros(3)), r"client 0 common"),
        ((torch.zeros(4, 2), torch.full((4,), 7)), r"labels run from 0 to 7"),
    ],
)
def test_what_is_wrong_with_them_is_one_line(common: tuple[torch.Tensor, torch.Tensor], words: str) -> None:
    pair = (torch.zeros(3, 2), torch.arange(3))
    with pytest.raises(UserError, match=words):
        Federation.from_arrays([pair], [pair], classes=3, common=common)
