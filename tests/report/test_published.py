"""Published beside ours: differences, flags, Markdown and CSV rows."""

import math

import pytest

from kinfolk.report.published import Entry, csv_rows, table


def entry(ours: tuple[float, ...], mean: float | None = 50.0, std: float | None = 1.0, row: str = "A") -> Entry:
    printed = "" if mean is None else f"{mean}" if std is None else f"{mean}±{std}"
    return Entry("accuracy", row, "CIFAR", ours, mean, std, printed)


def test_mean_and_deviation_are_over_seeds_with_n_minus_one() -> None:
    found = entry((40.0, 42.0, 44.0))
    assert found.mean == 42
    assert found.std == 2
    assert found.difference == -8


def test_the_pooled_deviation_is_the_root_of_the_mean_variance() -> None:
    found = entry((40.0, 42.0, 44.0), std=1.0)
    assert found.pooled == pytest.approx(math.sqrt((1 + 4) / 2))  # 1.5811: three of them are 4.74
    assert found.flagged
    assert not entry((43.3, 45.3, 47.3)).flagged  # 4.7 below
    assert entry((43.2, 45.2, 47.2)).flagged  # 4.8 below


def test_with_one_seed_the_published_deviation_stands_alone() -> None:
    assert entry((47.1,)).pooled == 1
    assert not entry((47.1,)).flagged
    assert entry((46.9,)).flagged
    assert entry((53.1,)).flagged


def test_nothing_is_flagged_that_cannot_be_compared() -> None:
    assert not entry((0.0, 1.0), std=None).flagged
    assert not entry((0.0, 1.0), mean=None, std=None).flagged
    assert not entry(()).flagged
    assert not entry((50.0, 50.0), std=0.0).flagged
    assert entry((50.1, 50.1), std=0.0).flagged


def test_the_table_has_published_ours_and_difference_side_by_side() -> None:
    entries = [entry((40.0, 42.0, 44.0)), entry((49.5,), mean=None, std=None, row="B"), entry((), row="C")]
    assert table(entries).splitlines() == [
        "| method | CIFAR: published |           ours | difference |",
        "|--------|-----------------:|---------------:|-----------:|",
        "| A      |         50.0±1.0 | 42.00±2.00 (3) |  -8.00 (!) |",
        "| B      |                – |      49.50 (1) |          – |",
        "| C      |         50.0±1.0 |              – |          – |",
    ]


def test_where_nothing_is_published_there_is_one_column_each() -> None:
    entries = [Entry("accuracy", "A", name, (1.0,)) for name in ("x", "y", "z", "u")]
    assert table(entries).splitlines()[0].split() == ["|", "method", "|", "x", "|", "y", "|", "z", "|", "u", "|"]


def test_a_wide_table_goes_on_below() -> None:
    entries = [Entry("accuracy", "A", f"c{i}", (1.0,), 1.0, 0.1, "1±0.1") for i in range(5)]
    first, second = table(entries).split("\n\n")
    assert "c2: published" in first
    assert "c3" not in first
    assert "c4: published" in second


def test_a_row_that_is_not_run_in_a_column_leaves_a_gap() -> None:
    entries = [
        Entry("accuracy", "A", "x", (1.0,)),
        Entry("accuracy", "A", "y", (2.0,)),
        Entry("accuracy", "B", "y", ()),
    ]
    assert table(entries).splitlines()[-1] == "| B      |          |        – |"


def test_csv_rows_have_the_numbers() -> None:
    flagged, alone = csv_rows([entry((40.0, 42.0, 44.0)), entry((49.5,), mean=None, std=None, row="B")])
    assert flagged["published"] == 50
    assert (flagged["ours"], flagged["ours_std"], flagged["seeds"]) == (42, 2, 3)
    assert (flagged["difference"], flagged["flagged"]) == (-8, True)
    assert flagged["pooled_std"] == pytest.approx(1.5811, abs=1e-4)
    assert (alone["ours"], alone["difference"], alone["flagged"], alone["pooled_std"]) == (49.5, None, None, None)
