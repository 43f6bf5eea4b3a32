"""What a study's picture shows: the numbers behind it, and each kind drawn from real small runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from PIL import Image

from conftest import tiny_experiment
from kinfolk import pictures
from kinfolk.experiment import Observer
from kinfolk.matching import theory
from kinfolk.pictures import Curves, _mixed_with_kin, _weights, looks, two_groups
from kinfolk.reproduce import Reproduction, reproduce
from kinfolk.runs.graph import Graph
from kinfolk.studies import Row
from tiny_study import Ran

ROWS = {
    "PENS": ["method.name=pens", "method.discover_rounds=2"],
    "PANM": ["method.name=panm", "method.discover_rounds=2", "method.candidates=3"],
    "PANM robust": {"set": ["method.name=panm", "method.discover_rounds=2", "method.candidates=3"], "beside": "PANM"},
}


def study(figure: dict[str, Any], observer: Observer | None = None, **changes: Any) -> Reproduction:
    """Run a tiny study with this figure."""
    Path("tiny.toml").write_text(
        tomli_w.dumps(tiny_experiment(data={"train": 10, "test": 10}, run={"rounds": 3, "evaluate_every": 1}))
    )
    sections = {"study": "Tiny", "experiment": "tiny.toml", "seeds": 1, "columns": {"all": []}, "rows": ROWS}
    Path("mine.toml").write_text(tomli_w.dumps({**sections, "figure": figure, **changes}))
    return reproduce("mine.toml", observer=observer)


def drawn(monkeypatch: pytest.MonkeyPatch, name: str, figure: dict[str, Any], **changes: Any) -> tuple[Any, ...]:
    """What is handed to a drawing function, which still draws."""
    seen: list[tuple[Any, ...]] = []
    draw = getattr(pictures.figures, name)
    monkeypatch.setattr(pictures.figures, name, lambda *args, **more: (seen.append(args), draw(*args, **more)))
    found = study(figure, **changes)
    with Image.open(found.folder / "mine.png") as picture:
        assert picture.format == "PNG"
    return seen[0]


GRAPH = Graph(
    round=np.array([1, 1, 1, 2, 2, 2], np.int32),
    client=np.array([0, 0, 2, 0, 1, 2], np.int32),
    neighbor=np.array([1, 2, 2, 1, 0, 0], np.int32),
    weight=np.array([0.25, 0.25, 0.5, 0.5, 0.5, 0.5], np.float32),
)
CLUSTERS = np.array([0, 0, 1])


def test_kin_among_those_averaged_with_is_a_mean_over_clients_round_by_round() -> None:
    # Round 1: client 0 has one kin of two; client 2 averages with itself only, which does not count.
    assert _mixed_with_kin(GRAPH, CLUSTERS, "mixing_precision") == {1: 0.5, 2: pytest.approx(2 / 3)}
    assert _mixed_with_kin(GRAPH, CLUSTERS, "only_kin") == {1: 0.0, 2: pytest.approx(2 / 3)}


def test_weights_are_summed_over_rounds_without_oneself() -> None:
    assert _weights(GRAPH, 3, 1).tolist() == [[0, 0.25, 0.25], [0, 0, 0], [0, 0, 0]]
    assert _weights(GRAPH, 3, 2).tolist() == [[0, 0.75, 0.25], [0.5, 0, 0], [0.5, 0, 0]]


def test_a_row_beside_another_has_its_colour_dashed() -> None:
    found = looks({"A": Row(), "B": Row(), "B robust": Row(beside="B")})
    assert found["B robust"] == (found["B"][0], "--")
    assert found["A"][0] != found["B"][0]
    three = looks({"A": Row(), "A robust": Row(beside="A"), "A literal": Row(beside="A")})
    assert {colour for colour, _ in three.values()} == {found["A"][0]}
    assert len({style for _, style in three.values()}) == 3
    many = looks({str(i): Row() for i in range(20)})
    assert len(set(many.values())) == 20


def test_two_groups_are_found_whatever_their_sizes() -> None:
    generator = np.random.default_rng(0)
    values = np.concatenate([generator.normal(0.3, 0.03, 70), generator.normal(0.6, 0.05, 20)])
    assert two_groups(values).tolist() == [False] * 70 + [True] * 20


def test_curves_show_every_row_over_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    (grid, _, title) = drawn(monkeypatch, "line_picture", {"kind": "curves", "metrics": ["accuracy", "loss"]}, seeds=2)
    assert title == "Tiny"
    assert [[panel.ylabel for panel in row] for row in grid] == [["accuracy, %", "test loss"]]
    accuracy = grid[0][0]
    assert [line.label for line in accuracy.lines] == list(ROWS)
    assert accuracy.lines[0].x.tolist() == [1, 2, 3]
    assert accuracy.lines[0].y.shape == (2, 3)


def test_columns_of_a_study_stand_side_by_side_and_metrics_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"two": ["data.split.clusters=2"], "four": ["data.split.clusters=4"]}
    figure = {"kind": "curves", "metrics": ["accuracy", "mixing_precision"], "until": 2}
    grid, _, _ = drawn(monkeypatch, "line_picture", figure, columns=columns, rows={"PENS": ROWS["PENS"]})
    assert [[panel.title for panel in row] for row in grid] == [["two", "four"], ["two", "four"]]
    assert grid[1][0].lines[0].x.tolist() == [1, 2]


def test_the_theory_is_that_of_the_theorem(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = {"kind": "curves", "metrics": ["only_kin"], "theory": True, "until": 2}
    rows = {"PANM": ["method.name=panm", "method.discover_rounds=2", "method.candidates=3", "method.neighbors=2"]}
    grid, _, _ = drawn(monkeypatch, "line_picture", figure, rows=rows)
    _, remembers, forgets = grid[0][0].lines
    assert remembers.y[0] == pytest.approx(100 * theory.confident(8, 4, 3, 2, 2))
    assert forgets.y[0] == pytest.approx([100 * theory.pens(8, 4, 3, 2)] * 2)


def test_the_paper_s_own_overlay_has_the_golden_values() -> None:
    assert theory.confident(100, 50, 10, 5, 3) == pytest.approx([0.6167, 0.99529, 0.999983], abs=1e-6)


def test_a_sweep_has_a_point_for_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = {
        "kind": "sweep",
        "panels": {
            "samples": {"x": "data.train", "columns": ["5 samples", "10 samples"]},
            "clients": {"x": "data.clients", "columns": ["4 clients", "10 samples"]},
        },
    }
    columns = {"5 samples": ["data.train=5"], "10 samples": [], "4 clients": ["data.clients=4"]}
    grid, _, _ = drawn(
        monkeypatch, "line_picture", figure, columns=columns, rows={"Alone": ["method.name=local"]}, seeds=2
    )
    left, right = grid[0]
    assert left.lines[0].x.tolist() == [5, 10]
    assert right.lines[0].x.tolist() == [4, 8]
    assert left.lines[0].y.shape == (2, 2)
    assert left.lines[0].y[0, 1] == right.lines[0].y[0, 1]


def test_the_mixing_picture_is_of_stage_one(monkeypatch: pytest.MonkeyPatch) -> None:
    panels, _, _, _ = drawn(monkeypatch, "heat_picture", {"kind": "mixing"})
    assert [name.partition(":")[0] for name, _, _ in panels] == list(ROWS)
    _, weights, clusters = panels[0]
    # Two rounds in which a client keeps 1/3 and gives 1/3 to each of two peers.
    assert weights.sum(axis=1) == pytest.approx(np.full(8, 4 / 3), abs=1e-6)
    assert clusters.tolist() == [0] * 4 + [1] * 4


def test_the_topology_is_of_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"Oracle": ["method.name=oracle", "method.neighbors=3"]}
    panels, _, _ = drawn(monkeypatch, "topology_picture", {"kind": "topology"}, rows=rows)
    _, client, neighbor, clusters = panels[0]
    assert client.size == 8 * 3
    assert (clusters[client] == clusters[neighbor]).all()


def test_similarities_are_of_the_watched_client(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ["run.watch=[1]", "run.watch_rounds=[3]", "run.watch_all=true"]
    panels, _, _, _ = drawn(
        monkeypatch, "similarity_picture", {"kind": "similarities"}, set=watch, rows={"PANM": ROWS["PANM"]}
    )
    _, values, is_kin, group = panels[0]
    assert values.shape == is_kin.shape == group.shape == (7,)
    assert is_kin.sum() == 3


def test_a_picture_is_drawn_of_what_is_there() -> None:
    """Nothing finished, or only some rows: no error."""
    found = study({"kind": "curves"}, rows={"Alone": ["method.name=local"]})
    assert [path.suffix for path in found.files] == [".md", ".csv", ".png"]
    settings = {"study": "Tiny", "experiment": "tiny.toml", "seeds": 1, "columns": {"all": []},
                "figure": {"kind": "curves", "metrics": ["neighbor_precision"]}}  # fmt: skip
    Path("mine.toml").write_text(tomli_w.dumps({**settings, "rows": {"Alone": ["method.name=local"], **ROWS}}))
    reproduce("mine.toml", rows=["Alone"])
    assert Curves(["neighbor_precision"])._line("neighbor_precision", []) is None


@pytest.mark.parametrize(
    ("watched", "why"),
    [
        ({"watch": [0], "watch_rounds": [5]}, "run.watch_rounds begins at round 5, but there are only 3"),
        ({}, "run.watch names no client"),
        ({"watch": [0]}, "in the rounds watched the method compared no models"),
    ],
)
def test_a_picture_without_anything_to_show_is_told_of_and_is_not_in_the_page(
    watched: dict[str, Any], why: str
) -> None:
    rows = {"Alone": ["method.name=local"]}
    overrides = [f"run.{key}={value}" for key, value in watched.items()]
    seen = Ran()
    found = study({"kind": "similarities"}, seen, rows=rows, set=overrides)
    assert [path.suffix for path in found.files] == [".md", ".csv"]
    assert f"no picture: no run of this study has a similarity.csv: {why}" in seen.notices
    assert "![" not in (found.folder / "mine.md").read_text(encoding="utf-8")


def test_a_page_shows_the_picture_that_is_there() -> None:
    found = study({"kind": "curves"}, rows={"Alone": ["method.name=local"]})
    assert "![Tiny](mine.png)" in (found.folder / "mine.md").read_text(encoding="utf-8")
