"""The table and the picture of a split."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from kinfolk.errors import UserError
from kinfolk.report.split import CLUSTER_COLOURS, split_picture, split_table


def printed(table) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def sizes(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return counts.sum(1), np.full(len(counts), 7)


def test_a_small_table_shows_every_client() -> None:
    counts = np.array([[8, 4, 0], [1, 0, 8]])
    text = printed(split_table(counts, np.array([0, 1]), *sizes(counts), cluster_names=["0°", "90°"]))
    rows = [line for line in text.splitlines() if "°" in line]
    assert len(rows) == 2
    assert rows[0].replace("│", " ").split() == ["0", "0°", "12", "7", "█▅·"]
    assert "▂·█" in rows[1]
    assert "+" not in text


def test_a_long_table_shows_every_cluster_and_sums_up_the_rest() -> None:
    counts = np.full((100, 10), 5)
    counts[90:, 3] = 0
    table = split_table(counts, np.repeat(np.arange(4), 25), *sizes(counts))
    text = printed(table)
    assert table.row_count == 41
    for first_of_cluster in ("  0 ", " 25 ", " 50 ", " 75 "):
        assert first_of_cluster in text
    assert "+ 60" in text
    assert "45 to 50" in text
    assert "9 to 10 classes each" in text


def test_a_table_without_clusters_has_no_cluster_column() -> None:
    counts = np.full((50, 10), 5)
    table = split_table(counts, None, *sizes(counts))
    assert table.row_count == 41
    assert [column.header for column in table.columns][:3] == ["client", "train", "test"]
    assert "+ 10" in printed(table)


def test_many_classes_are_named_instead_of_drawn() -> None:
    counts = np.zeros((1, 100), dtype=int)
    counts[0, [4, 50, 7, 8, 9, 10, 11]] = [9, 30, 1, 1, 1, 1, 1]
    assert "50×30 4×9 7×1 8×1 9×1 and 2 more" in printed(split_table(counts, None, *sizes(counts)))


def pixels(path: Path) -> set[tuple[int, int, int]]:
    with Image.open(path) as image:
        return {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}


def rgb(code: str) -> tuple[int, int, int]:
    return int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16)


@pytest.mark.parametrize("clients", [1, 10, 100, 1000])
def test_the_picture_shows_each_cluster_in_its_colour(tmp_path: Path, clients: int) -> None:
    clusters = np.sort(np.arange(clients) % 4)
    path = tmp_path / "split.png"
    split_picture(np.full((clients, 10), 5), clusters, path, "a split", ["0°", "90°", "180°", "270°"])
    seen = pixels(path)
    for cluster in range(min(4, clients)):
        assert rgb(CLUSTER_COLOURS[cluster]) in seen
    assert rgb(CLUSTER_COLOURS[4]) not in seen


def test_a_thousand_clients_get_the_same_whole_number_of_pixels(tmp_path: Path) -> None:
    counts = np.zeros((1000, 2), dtype=int)
    counts[::2, 0] = counts[1::2, 1] = 5  # a comb: every other client holds class 0
    split_picture(counts, None, tmp_path / "comb.png", "comb")
    with Image.open(tmp_path / "comb.png") as image:
        picture = np.asarray(image.convert("RGB")).astype(int)
    dark = (picture.sum(2) < 250)[:, 120:2120]  # the heat map: 1000 clients of 2 pixels, behind the margin
    edges = np.flatnonzero(np.diff(dark[np.argmax(dark.sum(1))]))
    assert np.array_equal(edges, np.arange(1, 1999, 2))


def test_interleaved_clusters_stand_together(tmp_path: Path) -> None:
    counts = np.repeat(np.eye(10, dtype=int)[np.arange(50) % 10] * 5, 1, axis=0)
    split_picture(counts, np.arange(50) % 10, tmp_path / "mixed.png", "t")
    order = np.argsort(np.arange(50) % 10, kind="stable")
    split_picture(counts[order], np.repeat(np.arange(10), 5), tmp_path / "sorted.png", "t")
    mixed, ordered = (np.asarray(Image.open(tmp_path / f"{name}.png")) for name in ("mixed", "sorted"))
    height = mixed.shape[0] - 120  # below it are the axis labels, which rightly differ
    assert np.array_equal(mixed[:height], ordered[:height])


def test_uneven_sizes_are_drawn_above(tmp_path: Path) -> None:
    even, uneven = np.full((20, 5), 5), np.full((20, 5), 5)
    uneven[3] = 50
    split_picture(even, None, tmp_path / "even.png", "t")
    split_picture(uneven, None, tmp_path / "uneven.png", "t")
    with Image.open(tmp_path / "even.png") as a, Image.open(tmp_path / "uneven.png") as b:
        assert b.height > a.height
    assert rgb("#7a8fa6") in pixels(tmp_path / "uneven.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'kinfolk\[plot\]'"):
        split_picture(np.ones((2, 2), dtype=int), None, tmp_path / "x.png", "t")
