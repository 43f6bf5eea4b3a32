"""Progress: redrawn in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conftest import tiny_experiment
from kinfolk import progress
from kinfolk.config import read
from kinfolk.progress import DownloadBar, Reporter, clock


class Clock:
    """Time that passes only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def reporter(terminal: bool) -> tuple[Reporter, io.StringIO]:
    text = io.StringIO()
    return Reporter(Console(file=text, force_terminal=terminal, width=80, highlight=False)), text


def row(accuracy: float) -> dict[str, Any]:
    return {"accuracy": accuracy}


def start(watching: Reporter, rounds: int, first: int = 0, folder: str = "runs/tiny") -> None:
    watching.started(read(tiny_experiment(), [f"run.rounds={rounds}"]), Path(folder), first, "cpu")


def test_a_terminal_shows_round_accuracy_and_time_left_in_one_line() -> None:
    watching, text = reporter(terminal=True)
    start(watching, rounds=3)
    watching.round(1, row(0.25))
    watching.live.refresh()  # type: ignore[union-attr]
    shown = text.getvalue().splitlines()[-1]
    for words in ("random seed 0", "round", "1/3", "accuracy  25.0 %", "0 s left"):
        assert words in shown
    watching.round(2, None)
    watching.round(3, row(0.5))
    assert watching.live is None
    last = text.getvalue().splitlines()[-2]  # before the cursor is given back
    assert "3/3" in last
    assert "accuracy  50.0 %" in last
    assert "in 0 s" in last


def test_closing_gives_the_terminal_its_cursor_back() -> None:
    watching, text = reporter(terminal=True)
    start(watching, rounds=3)
    hide, unhide = "\x1b[?25l", "\x1b[?25h"
    assert hide in text.getvalue()
    assert unhide not in text.getvalue()
    watching.close()
    assert unhide in text.getvalue()
    watching.close()  # once more is harmless


def test_elsewhere_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock(monkeypatch)
    watching, text = reporter(terminal=False)
    start(watching, rounds=3)
    for t in (1, 2, 3):
        time.now += 2.0
        watching.round(t, row(t / 4))
    assert text.getvalue().splitlines() == [
        "random seed 0: 3 rounds on cpu, runs/tiny",
        "random seed 0: round 1/3  accuracy  25.0 %  4 s left",
        "random seed 0: round 2/3  accuracy  50.0 %  2 s left",
        "random seed 0: round 3/3  accuracy  75.0 %  in 6 s",
    ]
    assert "\x1b" not in text.getvalue()


def test_quick_evaluations_do_not_flood_a_log_and_slow_rounds_do_not_leave_it_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = Clock(monkeypatch)
    watching, text = reporter(terminal=False)
    start(watching, rounds=1000)
    for t in range(1, 501):
        time.now += 0.01
        watching.round(t, row(0.5))
    assert 5 <= len(text.getvalue().splitlines()) <= 7  # 5 seconds
    before = text.getvalue()
    time.now += 30.0
    watching.round(501, None)
    assert text.getvalue() != before


def test_a_resumed_run_says_where_it_goes_on_and_counts_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock(monkeypatch)
    watching, text = reporter(terminal=False)
    start(watching, rounds=10, first=6)
    time.now += 3.0
    watching.round(7, row(0.5))
    assert text.getvalue().splitlines() == [
        "random seed 0: 10 rounds on cpu, runs/tiny, going on after round 6",
        "random seed 0: round 7/10  accuracy  50.0 %  9 s left",
    ]


def test_brackets_in_a_notice_or_a_path_are_no_markup() -> None:
    watching, text = reporter(terminal=False)
    start(watching, rounds=3, folder="runs/[bold]x")
    watching.notice("[data.split] is odd")
    assert "runs/[bold]x" in text.getvalue()
    assert "note: [data.split] is odd" in text.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (180, "3 min"), (5940, "99 min"), (7500, "2 h 05 min")]
)
def test_time_is_told_in_the_unit_that_people_would_use(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_downloads_are_told_by_the_quarter_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bar = DownloadBar()
    for done in range(101):
        bar("set [1]", done * 10**5, 10**7)
    bar.close()
    printed = capsys.readouterr()
    assert printed.out == ""
    told = [f"set [1]: {done:.1f} of 10.0 MB" for done in (2.5, 5, 7.5, 10)]
    assert printed.err.splitlines() == ["set [1] …", *told]
