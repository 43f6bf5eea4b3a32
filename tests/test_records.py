"""Rows of metrics: what a method costs by its formula, and how many vectors of a model's size really travelled."""

from pathlib import Path
from typing import Any

import pytest

import kinfolk
from conftest import tiny_experiment
from kinfolk import methods
from kinfolk.matching import cost
from kinfolk.records import nominal
from tiny_study import Ran


def make(name: str, **settings: Any) -> Any:
    return methods.find(name)(**settings)


@pytest.mark.parametrize(
    ("method", "total", "peak"),
    [
        (make("fedavg"), 600, 1),
        (make("ifca", models=2), 900, 2),
        (make("ifca", models=3), 1200, 3),
        (make("ifca", models=4), 1500, 4),
        (make("panm", candidates=4, neighbors=2, match_every=10, discover_rounds=100), 1118, 0.06),
        (make("panm", candidates=4, neighbors=3, match_every=10, discover_rounds=100), 1397, 0.07),
    ],
)
def test_the_published_totals_and_peaks_of_a_hundred_clients(method: Any, total: int, peak: float) -> None:
    assert nominal(method, 300, 100) == {"nominal_models": 100 * total, "nominal_peak": round(100 * peak)}


@pytest.mark.parametrize(
    ("method", "total", "peak"),
    [
        (make("local"), 0, 0),
        (make("random", neighbors=4), 6 * 4, 4),
        (make("fixed", neighbors=4), 6 * 4, 4),
        (make("oracle", neighbors=4), 6 * 4, 4),
        (make("pens", candidates=5, neighbors=3, discover_rounds=2), 2 * 5 + 4 * 3, 5),
        (make("fedsem"), 6 * 2, 10),
        (make("cfl"), 6 * 2, 10),
    ],
)
def test_the_simple_methods_cost_what_they_say(method: Any, total: int, peak: int) -> None:
    assert nominal(method, 6, 10) == {"nominal_models": 10 * total, "nominal_peak": peak}


def test_partial_participation_costs_its_share() -> None:
    assert nominal(make("fedavg", participation=0.25), 3, 10) == {"nominal_models": 3 * 2 * 2, "nominal_peak": 2}
    assert nominal(make("ifca", models=3, participation=0.5), 3, 10) == {"nominal_models": 60, "nominal_peak": 15}


def test_a_method_without_a_formula_has_no_nominal_cost() -> None:
    nothing = {"nominal_models": None, "nominal_peak": None}
    assert nominal(make("centralized"), 3, 10) == nothing
    result = kinfolk.run(tiny_experiment(method={"name": "centralized"}), out="a")
    assert {key: result.summary[key] for key in nothing} == nothing


def run(method: dict[str, Any], rounds: int = 7, **settings: Any) -> kinfolk.Result:
    options = {"rounds": rounds, "evaluate_every": 1, **settings}
    return kinfolk.run(tiny_experiment(method=method, run=options), out=f"run-{len(settings)}")


def test_a_run_of_panm_logs_the_formula_round_by_round() -> None:
    method = {"name": "panm", "candidates": 3, "neighbors": 2, "match_every": 3, "discover_rounds": 2}
    result = run(method)
    # Stage one: l, then l + k; stage two: k, but 2l in rounds 3 and 6. For each of eight clients.
    expected = [3, 8, 8 + 6, 16, 18, 24, 26]
    assert [row["nominal_models"] for row in result.metrics] == [8 * models for models in expected]
    assert result.summary["nominal_models"] == 8 * cost.panm(8, 3, 2, 3, 2, 5).total
    assert result.summary["nominal_peak"] == 5
    sharded = run(method, engine="sharded", shards=3)
    for key in ("nominal_models", "nominal_peak", "vectors_received"):
        assert [row[key] for row in sharded.metrics] == [row[key] for row in result.metrics]


def test_runs_of_fedavg_and_ifca_receive_exactly_the_formula() -> None:
    for method, each in (({"name": "fedavg"}, 2), ({"name": "ifca", "models": 3}, 4), ({"name": "random"}, 5)):
        summary = kinfolk.run(tiny_experiment(method=method), out=str(method["name"])).summary
        assert summary["nominal_models"] == summary["models_received"] == summary["vectors_received"] == 4 * 8 * each


def test_pens_receives_its_formula_in_stage_one() -> None:
    method = {"name": "pens", "candidates": 4, "neighbors": 2, "discover_rounds": 7}
    assert [row["models_received"] for row in run(method).metrics] == [8 * 4 * t for t in range(1, 8)]


def test_a_comparison_of_updates_brings_two_vectors_and_one_of_losses_brings_one() -> None:
    method = {"name": "panm", "candidates": 3, "neighbors": 2, "discover_rounds": 3, "preset": "robust"}
    gradient = kinfolk.run(
        tiny_experiment(method={**method, "similarity": "gradient"}, run={"rounds": 5, "evaluate_every": 1}), out="g"
    )
    first, last = gradient.metrics[2], gradient.metrics[-1]
    assert first["vectors_received"] == 2 * first["models_received"]
    # Stage two of this preset looks at models only.
    assert last["vectors_received"] - first["vectors_received"] == last["models_received"] - first["models_received"]
    loss = kinfolk.run(tiny_experiment(method={**method, "similarity": "loss"}), out="l").summary
    assert loss["vectors_received"] == loss["models_received"]


def test_the_vectors_outlive_a_resume() -> None:
    method = {"name": "panm", "candidates": 3, "neighbors": 2, "discover_rounds": 6}
    kinfolk.run(tiny_experiment(method=method, run={"rounds": 2}), out="short")
    assert (
        kinfolk.resume("short", rounds=4).summary["vectors_received"]
        == (kinfolk.run(tiny_experiment(method=method), out="whole").summary["vectors_received"])
    )


def test_always_answering_the_most_frequent_label_is_a_line_beside_accuracy() -> None:
    split = {"kind": "alpha", "gamma": 0.5}
    settings = tiny_experiment(data={"split": split}, method={"name": "local"})
    data = kinfolk.load_federation(kinfolk.config.read(settings))  # type: ignore[attr-defined]
    result = kinfolk.run(settings, out="a")
    scores = []
    for i in range(data.clients):
        labels = [
            part.y[int(part.starts[i]) : int(part.starts[i] + part.sizes[i])].tolist()
            for part in (data.train, data.test)
        ]
        main = min(set(labels[0]), key=lambda label: (-labels[0].count(label), label))
        scores.append(labels[1].count(main) / len(labels[1]))
    assert result.summary["constant_accuracy"] == pytest.approx(sum(scores) / len(scores))
    assert 0.3 < result.summary["constant_accuracy"] < 0.8
    pooled = kinfolk.run({**settings, "method": {"name": "centralized"}}, out="b")
    assert "constant_accuracy" not in pooled.summary  # all records are in one place


def told(**sections: Any) -> list[str]:
    """What a run has to say of models that went astray."""
    seen = Ran()
    kinfolk.run(tiny_experiment(**sections), out="a", observer=seen)
    return [text for text in seen.notices if "finite" in text]


def test_models_that_went_astray_are_counted_at_the_end() -> None:
    put_back = "a: models were not finite in 32 of 32 client-rounds and were put back: a smaller training.lr may help"
    assert told(training={"lr": 1e30}) == [put_back]


def test_where_no_model_goes_astray_nothing_is_said() -> None:
    assert told() == []


def test_attackers_whose_models_are_refused_are_not_counted() -> None:
    assert told(faults={"attackers": 0.25, "attack": "nan"}) == []
    row = kinfolk.experiment.read_result(Path("a")).summary  # type: ignore[attr-defined]
    assert row["quarantined"] == 2 * 4


def test_honest_clients_that_go_astray_among_attackers_are_counted() -> None:
    (said,) = told(faults={"attackers": 0.25, "attack": "nan"}, training={"lr": 1e30})
    assert said.startswith("a: honest clients' models were not finite in 24 of 24 client-rounds")
