"""The shipped studies of AFIND+: the paper's tables, with the printed threshold beside ours."""

from __future__ import annotations

from typing import Any

import pytest

from kinfolk.reproduce import cell_name
from test_studies import the_study

AFIND = ["table1", "table2", "table3", "table4", "figure4", "figure5", "figure8", "absent", "peers", "robust"]


def settings_of(config: Any) -> tuple[str, dict[str, Any]]:
    return config.method_name, {key: value for key, value in vars(config.method).items() if key != "threshold"}


@pytest.mark.parametrize("name", [f"{where}{name}" for name in AFIND for where in ("", "small/")])
def test_the_printed_threshold_stands_beside_ours(name: str) -> None:
    """Row by row; a study that leaves some out at full size says so, and has at least the ends of tau and noise."""
    found: dict[str, list[tuple[str, tuple[str, dict[str, Any]]]]] = {"calibrated": [], "literal": []}
    for cell in the_study(f"afind/{name}").cells([], [0]):
        method: Any = cell.config.method
        if getattr(method, "preset", None) == "paper" and method.threshold in found:
            assert ("literal" in cell.row) == (method.threshold == "literal")
            found[method.threshold].append((cell.column, settings_of(cell.config)))
    ours, printed = found["calibrated"], found["literal"]
    assert printed
    assert all(one in ours for one in printed)  # nothing else differs
    # At full size some rows are left out where they would show nothing more: the notes say where they are.
    left_out = [one for one in ours if one not in printed]
    if "small/" in name or name in ("table1", "table2", "table3", "figure5", "peers", "robust"):
        assert not left_out
    else:
        assert f"`afind/small/{name}`" in " ".join(the_study(f"afind/{name}").notes)
        taus = {kind: {settings["tau"] for _, (_, settings) in rows} for kind, rows in found.items()}
        assert (min(taus["calibrated"]), max(taus["calibrated"])) == (min(taus["literal"]), max(taus["literal"]))
        assert {settings["noise"] > 0 for _, (_, settings) in printed} == {
            settings["noise"] > 0 for _, (_, settings) in ours
        }


@pytest.mark.parametrize("name", [name for name in AFIND if name != "figure4"])  # real writers: no Dirichlet draw
def test_dirichlet_columns_of_afind_have_both_tests(name: str) -> None:
    study = the_study(f"afind/{name}")
    assert {"best_accuracy", "best_global_accuracy"} <= set(study.measures)
    assert all(cell.config.data.global_test == 1000 for cell in study.cells([], [0]))


@pytest.mark.parametrize(
    ("name", "columns", "rows"),
    [
        (
            "table1",
            ["Dirichlet .1", "Dirichlet .5", "c=2", "c=5"],
            ["Local", "FedAvg", "Gossip", "PENS", "FedeRiCo", "AFIND+"],
        ),
        ("table2", ["Dirichlet .1", "c=5"], ["FedAvg-FT", "+i", "+i+ii", "+i+ii+iii"]),
        ("table3", ["Dirichlet .1", "c=5"], ["Gossip", "PENS", "FedeRiCo", "AFIND+"]),
        ("table4", ["Dirichlet .1", "c=5"], [f"noise {level}" for level in (0, 2, 5, 10, 50)]),
    ],
)
def test_afinds_tables_have_every_row_of_the_paper(name: str, columns: list[str], rows: list[str]) -> None:
    study = the_study(f"afind/{name}")
    assert list(study.columns) == columns
    assert set(study.published["best_accuracy"]) == set(rows)
    for cell in study.cells([], [0]):
        data, run, training = cell.config.data, cell.config.run, cell.config.training
        assert (data.clients, run.rounds, training.epochs, training.batch_size) == (100, 500, 5, 128)
        assert (training.lr, training.momentum, training.lr_decay) == (0.01, 0.9, 1.0)


def test_afinds_published_values_are_those_of_the_paper() -> None:
    """Typed from the paper's tables once more."""
    spots: dict[tuple[str, str, str], tuple[float, float]] = {
        ("table1", "Local", "Dirichlet .5"): (62.36, 0.51),
        ("table1", "FedAvg", "c=2"): (59.81, 0.41),
        ("table1", "FedeRiCo", "c=5"): (76.82, 0.14),
        ("table1", "AFIND+", "Dirichlet .1"): (71.89, 0.06),
        ("table2", "+i", "c=5"): (76.96, 0.53),
        ("table2", "+i+ii", "Dirichlet .1"): (68.89, 0.08),
        ("table3", "PENS", "Dirichlet .1"): (53.78, 1.32),
        ("table3", "AFIND+", "c=5"): (76.21, 2.12),
        ("table4", "noise 10", "Dirichlet .1"): (67.07, 0.42),
        ("table4", "noise 50", "c=5"): (73.92, 1.08),
    }
    for (name, row, column), expected in spots.items():
        value = the_study(f"afind/{name}").value("best_accuracy", row, column)
        assert value is not None
        assert (value.mean, value.std) == expected


def test_afinds_tables_and_figures_share_their_runs() -> None:
    def names(study: str) -> dict[tuple[str, str], str]:
        return {(c.row, c.column): cell_name(c.config) for c in the_study(f"afind/{study}").cells([], [0])}

    one = names("table1")
    printed, ours = one["AFIND+ literal", "Dirichlet .1"], one["AFIND+", "Dirichlet .1"]
    assert printed != ours
    for study, row, column in (
        ("table2", "+i+ii+iii literal", "Dirichlet .1"),
        ("table4", "noise 0 literal", "Dirichlet .1"),
        ("figure5", "FT with AFIND+ literal", "Dirichlet .1"),
        ("figure8", "tau=0.5 literal", "Dirichlet .1"),
        ("absent", "AFIND+ literal", "nobody away"),
        ("peers", "AFIND+ literal", "Dirichlet .1"),
        ("robust", "AFIND+ literal", "Dirichlet .1"),
    ):
        assert names(study)[row, column] == printed
    assert names("table2")["FedAvg-FT", "c=5"] == one["Gossip", "c=5"] == names("figure5")["FT", "c=5"]
    assert set(names("peers").values()) <= set(one.values())
