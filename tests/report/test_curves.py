"""Accuracy over rounds: every line can be told from the others, and is named at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from kinfolk.errors import UserError
from kinfolk.report.curves import _apart, curves_picture
from kinfolk.runs.folder import EVALUATED


def folder(name: str, accuracy: list[float | None]) -> list[Path]:
    """The folder of a run that has been evaluated in rounds 1, 2, ..."""
    path = Path(name)
    path.mkdir()
    (path / "config.toml").write_text("[kinfolk]\n", encoding="utf-8")
    rest = dict.fromkeys(EVALUATED)
    rows = [{**rest, "round": t, "accuracy": value} for t, value in enumerate(accuracy, start=1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [path]


def drawn(monkeypatch: pytest.MonkeyPatch, runs: dict[str, list[Path]]) -> Any:
    """The axes of the picture, after it has been written."""
    kept: list[Figure] = []
    real = Figure.savefig

    def savefig(self: Figure, *args: Any, **options: Any) -> None:
        kept.append(self)
        real(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    curves_picture(runs, Path("curves.png"), "curves")
    return kept[0].axes[0]


def looks(axes: Any, inside: bool) -> list[tuple[str, str]]:
    """Colour and style of the lines inside the axes, or of those beside the names."""
    return [(to_hex(line.get_color()), line.get_linestyle()) for line in axes.lines if line.get_clip_on() == inside]


def test_many_methods_have_a_colour_and_a_line_style_that_no_other_has(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {f"method {i}": folder(f"run{i}", [0.1, 0.5 + i / 100]) for i in range(26)}
    axes = drawn(monkeypatch, runs)
    curves, samples = looks(axes, inside=True), looks(axes, inside=False)
    assert len(curves) == len(set(curves)) == 26
    assert samples == curves  # beside the names, whose colour alone does not tell
    heights = [text.xy[1] for text in axes.texts]
    assert heights == sorted(heights)
    assert max(heights) <= axes.get_ylim()[1]


def test_few_methods_are_told_apart_by_colour_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(monkeypatch, {f"method {i}": folder(f"run{i}", [0.1, 0.5]) for i in range(7)})
    assert {line.get_linestyle() for line in axes.lines} == {"-"}
    assert len({line.get_color() for line in axes.lines}) == 7
    assert not looks(axes, inside=False)


def test_one_evaluation_is_a_point_at_a_whole_round(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(monkeypatch, {"method": folder("run", [0.4])})
    (line,) = axes.lines
    assert line.get_marker() == "o"
    assert [tick for tick in axes.get_xticks() if 0.9 < tick < 1.1] == [1]
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_several_evaluations_are_a_line_over_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(monkeypatch, {"method": folder("run", [0.4, 0.5, 0.6])})
    assert axes.lines[0].get_marker() in (None, "None", "")
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_nothing_evaluated_is_no_picture() -> None:
    with pytest.raises(UserError, match="nothing has been evaluated yet"):
        curves_picture({"method": folder("run", [])}, Path("curves.png"), "curves")
    assert not Path("curves.png").exists()


def test_it_is_a_png_whatever_its_name() -> None:
    curves_picture({"method": folder("run", [0.4, 0.5])}, Path("curves.txt"), "curves")
    with Image.open("curves.txt") as picture:
        assert picture.format == "PNG"


def test_names_are_pushed_apart_and_stay_below_the_top() -> None:
    assert _apart([1.0, 5.0, 9.0], 1.0, 10.0) == [1.0, 5.0, 9.0]
    assert _apart([9.8, 9.9, 10.0], 2.0, 10.0) == pytest.approx([6.0, 8.0, 10.0])
