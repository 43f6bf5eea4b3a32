"""Study files: what they say, what is refused, and that those shipped are the paper's tables."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import kinfolk
from kinfolk import pictures
from kinfolk.assembly import load_split
from kinfolk.config import is_study, read, shipped
from kinfolk.data.partition.tasks import Alpha
from kinfolk.errors import UserError
from kinfolk.reproduce import cell_name, look
from kinfolk.studies import Study, read_study, shipped_studies

the_study: Callable[[str], Study] = cache(read_study)  # for shipped ones, which do not change


def tiny_study(**changes: Any) -> dict[str, Any]:
    """Two methods on two splits of a tiny experiment."""
    base: dict[str, Any] = {
        "study": "tiny",
        "experiment": "tiny.toml",
        "seeds": 2,
        "columns": {"two": ["data.split.clusters=2"], "four": ["data.split.clusters=4"]},
        "rows": {"Alone": ["method.name=local", "data.split.clusters=2"], "Gossip": ["method.name=random"]},
        "published": {"accuracy": {"Gossip": ["50.0±1.0", ""]}},
    }
    return {**base, **changes}


def refusal(**changes: Any) -> str:
    Path("mine.toml").write_text(tomli_w.dumps(tiny_study(**changes)), encoding="utf-8")
    with pytest.raises(UserError) as error:
        look("mine.toml")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(autouse=True)
def _a_tiny_experiment() -> None:
    from conftest import tiny_experiment

    Path("tiny.toml").write_text(tomli_w.dumps(tiny_experiment()), encoding="utf-8")


# -- the file ----------------------------------------------------------------------------------------------------


def test_a_study_may_begin_with_the_mark_of_a_windows_editor() -> None:
    Path("mine.toml").write_bytes(b"\xef\xbb\xbf" + tomli_w.dumps(tiny_study()).encode())
    assert is_study(Path("mine.toml"))
    assert read_study("mine.toml").study == "tiny"


def test_a_cell_has_the_settings_of_the_study_then_its_column_then_its_row_then_the_command_line() -> None:
    Path("mine.toml").write_text(
        tomli_w.dumps(
            tiny_study(
                set=["run.rounds=2", "training.lr=0.5"],
                columns={"a": ["run.rounds=3", "method.neighbors=1", "method.candidates=4"]},
                rows={"PENS": ["method.name=pens"], "Gossip": ["method.name=random"], "Long": ["run.rounds=9"]},
                published={},
                experiment="panm/digits",
            )
        )
    )
    cells = {cell.row: cell.config for cell in read_study("mine.toml").cells(["training.lr=0.25"], [7])}
    assert {config.training.lr for config in cells.values()} == {0.25}
    assert {config.run.seed for config in cells.values()} == {7}
    assert (cells["Gossip"].run.rounds, cells["Long"].run.rounds) == (3, 9)
    # A row's method takes over what it knows of the column's settings: k and l for PENS, k alone for gossip.
    assert (cells["PENS"].method.neighbors, cells["PENS"].method.candidates) == (1, 4)
    assert cells["Gossip"].method.neighbors == 1


def test_a_row_may_have_settings_for_single_columns() -> None:
    rows = {"Gossip": {"set": ["method.name=random", "training.lr=0.5"], "within": {"four": ["training.lr=0.125"]}}}
    Path("mine.toml").write_text(tomli_w.dumps(tiny_study(rows=rows, published={})))
    cells = read_study("mine.toml").cells([], [0])
    assert {cell.column: cell.config.training.lr for cell in cells} == {"two": 0.5, "four": 0.125}


def test_equal_cells_have_one_name_and_different_ones_do_not() -> None:
    Path("mine.toml").write_text(tomli_w.dumps(tiny_study()))
    study = read_study("mine.toml")
    names = {(cell.row, cell.column, cell.seed): cell_name(cell.config) for cell in study.cells([], [0, 1])}
    assert names["Alone", "two", 0] == names["Alone", "four", 0]
    assert names["Gossip", "two", 0] != names["Gossip", "four", 0]
    assert names["Gossip", "two", 0] != names["Gossip", "two", 1]
    on_device = [cell_name(cell.config) for cell in study.cells(["run.device=cuda", "run.evaluate_every=1"], [0, 1])]
    assert set(on_device) == set(names.values())
    longer = [cell_name(cell.config) for cell in study.cells(["run.rounds=9"], [0])]
    assert not set(longer) & set(names.values())
    assert names["Gossip", "two", 0].startswith("digits-8x20-rotation-random-4rounds-seed0-")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sedes": 3}, "mine.toml: unknown key 'sedes': did you mean 'seeds'?"),
        ({"seeds": "three"}, "mine.toml: 'seeds' = 'three': input should be a valid integer"),
        ({"seeds": 0}, "'seeds' = 0: must be at least 1"),
        ({"columns": {}}, "'columns' is missing"),
        ({"rows": ["a"]}, "'rows' = ['a'] must be a section"),
        ({"rows": {"A": "method.name=local"}, "published": {}}, "'rows.A' = 'method.name=local': a list of"),
        ({"rows": {"A, B": []}, "published": {}}, "'A, B': no comma"),
        ({"rows": {"A": {"sets": []}}, "published": {}}, "unknown key 'rows.A.sets': did you mean 'set'?"),
        ({"rows": {"A": {"within": {"tow": []}}}, "published": {}}, "'rows.A.within' names 'tow': did you mean 'two'?"),
        ({"rows": {"A": {"columns": ["tow"]}}, "published": {}}, "'rows.A.columns' names 'tow': did you mean 'two'?"),
        ({"rows": {"A": ["method.nam=x"]}, "published": {}}, "row 'A', column 'two': unknown key 'method.nam'"),
        ({"columns": {"two": {"experiment": "nope"}}, "published": {}}, "no shipped experiment 'nope'"),
        ({"experiment": "none.toml"}, "no experiment file 'none.toml'"),
        ({"measures": ["acuracy"]}, "unknown measure 'acuracy': did you mean 'accuracy'?"),
        ({"published": {"loss": {}}}, "'published' names 'loss'"),
        ({"published": {"accuracy": {"Gosip": ["", ""]}}}, "names 'Gosip': did you mean 'Gossip'?"),
        ({"published": {"accuracy": {"Gossip": ["1"]}}}, "'published.accuracy.Gossip' has 1 values for 2 columns"),
        ({"published": {"accuracy": {"Gossip": ["1+-2", ""]}}}, "'1+-2' must look like \"49.19±0.79\""),
        ({"figure": {"kind": "curve"}}, "'figure.kind' = 'curve': did you mean 'curves'?"),
        ({"figure": {"kind": "curves", "metrics": ["accurcy"]}}, "unknown metric 'accurcy': did you mean 'accuracy'?"),
        ({"figure": {"kind": "sweep", "panels": {"a": {"x": "data.train"}}}}, "panel 'a' needs x and columns"),
        ({"figure": {"kind": "sweep", "panels": {"a": {"x": "y", "columns": ["z"]}}}}, "'figure.panels' names 'z'"),
        ({"like": "panm/tabel2"}, "no shipped study 'panm/tabel2': did you mean 'panm/table2'?"),
        ({"like": "panm/small/table2"}, "which is itself like 'panm/table2'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes)


def test_what_is_no_study_says_what_it_is() -> None:
    for source, words in {
        "tiny.toml": "tiny.toml is not a study: it has no key 'study'; an experiment runs with: kinfolk run tiny.toml",
        "panm/cifar10": "panm/cifar10 is one experiment, not a study: kinfolk run panm/cifar10",
        "panm/tabel2": "no file and no shipped study 'panm/tabel2': did you mean 'panm/table2'?",
        "none.toml": "no study file 'none.toml'",
    }.items():
        with pytest.raises(UserError, match=words.replace("?", r"\?")):
            read_study(source)
    Path("broken.toml").write_text("study = [")
    with pytest.raises(UserError, match=r"broken.toml is not valid TOML: "):
        read_study("broken.toml")


def test_a_study_is_no_experiment() -> None:
    assert not set(shipped()) & set(shipped_studies())
    with pytest.raises(UserError) as error:
        read("panm/table2")
    assert str(error.value) == "panm/table2 is a study of many runs, not one experiment: kinfolk reproduce panm/table2"


def test_a_study_like_another_has_its_rows_and_nothing_published() -> None:
    small, large = the_study("panm/small/table5"), the_study("panm/table5")
    assert list(small.rows) == list(large.rows)
    assert (small.seeds, small.published, small.unstated, small.notes) == (1, {}, [], [])
    assert small.rows["IFCA c=3"].columns == ["digits (4)"]
    assert large.rows["IFCA c=3"].columns == ["CIFAR-10 (4)", "FMNIST (4)"]


# -- what is shipped ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_studies())
def test_every_shipped_study_is_sound(name: str) -> None:
    study = the_study(name)
    cells = study.cells([], range(1))  # other seeds have the same settings
    assert cells
    if study.figure is not None:
        pictures.figure_of(study)
    for cell in cells:
        usual = {"panm": {5}, "fedcg": {10, 20, 100}}.get(name.partition("/")[0], {2, 5, 10})
        assert cell.config.run.evaluate_every in usual
        if "/small/" in name:
            assert cell.config.data.name == ("fashion-mnist" if "fmnist" in name else "digits")
        if cell.config.data.name == "digits":  # there are samples enough for it
            assert len(load_split(cell.config)[1].train) == cell.config.data.clients
    if "/small/" not in name:
        assert study.unstated


def test_every_table_and_figure_of_the_paper_is_there_in_full_and_in_small() -> None:
    names = [f"table{i}" for i in range(2, 7)] + [f"figure{i}" for i in range(2, 9)] + ["tau"]
    assert set(shipped_studies()) >= {f"panm/{name}" for name in names} | {f"panm/small/{name}" for name in names}
    names = [f"table{i}" for i in range(1, 5)] + [f"figure{i}" for i in (2, 4, 5, 8)] + ["absent"]
    assert set(shipped_studies()) >= {f"afind/{name}" for name in names} | {f"afind/small/{name}" for name in names}
    names = ["table2", "table3", "table4", "table5", "rates", "domains", "small/domains"]
    assert set(shipped_studies()) >= {f"fedcg/{name}" for name in names}
    names = ["partitions", "budgets", "fmnist-budgets"]
    assert set(shipped_studies()) >= {f"p4/{name}" for name in names} | {f"p4/small/{name}" for name in names}


def test_p4s_budgets_stand_on_fashion_mnist_in_place_of_femnist() -> None:
    large, small = the_study("p4/fmnist-budgets"), the_study("p4/small/fmnist-budgets")
    assert "in place of FEMNIST" in large.study
    assert list(large.rows) == list(small.rows) == list(the_study("p4/budgets").rows)
    assert list(large.columns) == ["3", "5", "8", "12", "15", "20"]
    assert set(small.columns) < set(large.columns)
    for study, clients in ((large, 208), (small, 52)):
        cells = study.cells([], range(3))
        for cell in cells:
            data = cell.config.data
            assert (data.name, data.clients, data.train, data.test) == ("fashion-mnist", clients, 160, 40)
            assert (data.features, data.norm, cell.config.split) == ("scattering", "group", Alpha(gamma=0.5))
            assert cell.row == "Local" or cell.config.method.epsilon == float(cell.column)
        alone = {cell_name(cell.config) for cell in cells if cell.row == "Local"}
        assert len(alone) == 3  # without a budget: the same runs in every column
        steps = {(cell.row, getattr(cell.config.method, "lr", None)) for cell in cells}
        assert len(steps) == len(study.rows)  # one step size at every budget


SETS = ["MNIST", "FMNIST", "CIFAR-10"]
PEERS = ["Local", "FixTopology", "Random", "Oracle", "PENS", "PANMLoss", "PANMGrad"]
SERVER = ["FedAvg", "IFCA c=2", "IFCA c=3", "IFCA c=4"]
PANM = ["PANMLoss k=2", "PANMGrad k=2", "PANMLoss k=3", "PANMGrad k=3"]


@pytest.mark.parametrize(
    ("name", "columns", "rows"),
    [
        ("table2", [*SETS, *(f"{name} (0 to 1)" for name in SETS)], PEERS),
        ("table3", ["Label-swap (2)", "Label-swap (4)", "Rotation (4)"], PEERS),
        ("table4", ["l=10 k=5", "l=10 k=3", "l=20 k=10", "l=20 k=5", "l=30 k=15", "l=30 k=10"], PEERS),
        (
            "table5",
            ["CIFAR-10 (4)", "FMNIST (4)", "FMNIST (2)"],
            ["Local", *SERVER, "Oracle", "PENS", "PANMLoss", "PANMGrad"],
        ),
        ("table6", ["CIFAR-10 (4)"], [*SERVER, *PANM]),
    ],
)
def test_the_tables_have_every_row_and_column_of_the_paper(name: str, columns: list[str], rows: list[str]) -> None:
    study = the_study(f"panm/{name}")
    assert list(study.columns) == columns
    assert set(study.published["accuracy"]) == set(rows)
    extra = set(study.rows) - set(rows)
    ours = {"PENS (printed rule)", "Oracle (all kin)", "PANMLoss (held out)", "PANMLoss (fresh samples)"}
    assert extra == ours & set(study.rows) | {f"{row} robust" for row in rows if row.startswith("PANM")}
    for cell in study.cells([], [0]):
        if cell.row.startswith("PANM"):
            assert cell.config.method.preset == ("robust" if cell.row.endswith("robust") else "paper")
        assert cell.config.run.rounds == 300


def test_published_values_are_those_of_the_paper() -> None:
    """Typed from the paper's tables once more."""
    spots: dict[tuple[str, str, str, str], tuple[float, float | None]] = {
        ("table2", "accuracy", "Local", "MNIST"): (82.57, 0.28),
        ("table2", "accuracy", "PENS", "CIFAR-10"): (44.78, 1.12),
        ("table2", "accuracy", "PANMLoss", "FMNIST"): (87.33, 0.17),
        ("table2", "accuracy", "PANMGrad", "CIFAR-10"): (48.83, 0.39),
        ("table3", "accuracy", "FixTopology", "Label-swap (4)"): (35.08, 2.70),
        ("table3", "accuracy", "PANMGrad", "Rotation (4)"): (43.99, 1.26),
        ("table3", "neighbor_precision", "PANMGrad", "Label-swap (4)"): (83.33, 28.87),
        ("table3", "neighbor_precision", "PENS", "Label-swap (2)"): (100, 0),
        ("table3", "neighbor_recall", "PANMLoss", "Label-swap (2)"): (74.15, 32.42),
        ("table3", "neighbor_recall", "PENS", "Rotation (4)"): (52.78, 8.67),
        ("table4", "accuracy", "Random", "l=20 k=5"): (37.34, 0.80),
        ("table4", "accuracy", "PANMGrad", "l=20 k=10"): (38.24, 4.26),
        ("table4", "accuracy", "Oracle", "l=30 k=10"): (44.16, 1.32),
        ("table5", "accuracy", "FedAvg", "FMNIST (2)"): (86.86, 0.16),
        ("table5", "accuracy", "IFCA c=4", "CIFAR-10 (4)"): (43.65, 0.77),
        ("table6", "nominal_total", "PANMGrad k=3", "CIFAR-10 (4)"): (1397, None),
        ("table6", "nominal_peak", "PANMLoss k=2", "CIFAR-10 (4)"): (0.06, None),
        ("table6", "accuracy", "PANMGrad k=2", "CIFAR-10 (4)"): (42.78, 1.68),
    }
    for (name, measure, row, column), expected in spots.items():
        value = the_study(f"panm/{name}").value(measure, row, column)
        assert value is not None
        assert (value.mean, value.std) == expected
    assert the_study("panm/table5").value("accuracy", "IFCA c=3", "FMNIST (2)") is None
    assert the_study("panm/table3").value("neighbor_recall", "Local", "Rotation (4)") is None


def test_settings_are_those_of_the_paper() -> None:
    def one(name: str, row: str, column: str) -> Any:
        study = the_study(f"panm/{name}")
        return next(cell.config for cell in study.cells([], [0]) if (cell.row, cell.column) == (row, column))

    mnist = one("table2", "PANMGrad", "MNIST")
    assert (mnist.data.clients, mnist.data.train, mnist.method.candidates, mnist.method.neighbors) == (200, 200, 10, 5)
    assert (mnist.training.lr, mnist.training.lr_decay, mnist.training.epochs) == (0.08, 0.99, 3)
    pens = one("table4", "PENS", "l=30 k=15")
    assert (pens.data.train, pens.method.candidates, pens.method.neighbors, pens.method.rule) == (
        100,
        30,
        15,
        "expected",
    )
    low = one("table6", "PANMLoss k=3", "CIFAR-10 (4)")
    assert (low.method.match_every, low.method.candidates, low.split.clusters) == (10, 4, 4)
    assert one("table2", "PANMLoss", "CIFAR-10").method.match_every == 1
    assert one("figure2", "theta1", "CIFAR-10 (2)").method.alpha == 1
    assert one("figure2", "theta2", "CIFAR-10 (2)").data.train == 400


def test_tables_and_figures_of_the_paper_share_their_runs() -> None:
    def names(study: str) -> dict[tuple[str, str], str]:
        return {(c.row, c.column): cell_name(c.config) for c in the_study(f"panm/{study}").cells([], [0])}

    two, three, five, six = (names(study) for study in ("table2", "table3", "table5", "table6"))
    assert two["Local", "CIFAR-10"] == three["Local", "Label-swap (4)"] == five["Local", "CIFAR-10 (4)"]
    assert three["PANMGrad", "Rotation (4)"] == five["PANMGrad", "CIFAR-10 (4)"]
    assert five["IFCA c=3", "CIFAR-10 (4)"] == six["IFCA c=3", "CIFAR-10 (4)"]
    assert names("figure3")["PANMLoss", "CIFAR-10 (2)"] == two["PANMLoss", "CIFAR-10"]
    assert names("figure7")["PENS", "CIFAR-10 (4)"] == three["PENS", "Rotation (4)"]
    assert names("figure8")["Oracle", "200 samples"] == two["Oracle", "CIFAR-10"]
    four = names("table4")
    assert four["Random", "l=10 k=5"] == four["Random", "l=20 k=5"] != four["Random", "l=10 k=3"]
    assert four["PENS", "l=10 k=5"] != four["PENS", "l=20 k=5"]


@pytest.mark.slow
def test_every_cell_on_digits_can_be_run() -> None:
    """One round of each, those with the same settings once: who cannot begin says so here and not to a user."""
    seen: set[str] = set()
    for name in shipped_studies():
        for cell in the_study(name).cells([], range(1)):
            config = cell.config.with_run(rounds=1)
            if config.data.name == "digits" and (known := cell_name(config)) not in seen:
                seen.add(known)
                with tempfile.TemporaryDirectory() as place:
                    assert kinfolk.run(config, out=Path(place, "run")).metrics, (name, cell.row, cell.column)
    assert len(seen) > 300
