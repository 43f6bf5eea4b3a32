"""Live progress in a terminal, plain lines elsewhere; always on standard error, so that results can be piped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kinfolk.config import Config
from kinfolk.experiment import Result
from kinfolk.parallel import Lane, Overview

# Between two lines where nothing can be redrawn: at least this, however often is evaluated, and at most that.
SHORTEST, LONGEST = 1.0, 10.0


class Reporter(Overview):
    """Shows how runs go on: one after another in a comparison, several at a time where a study has workers."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.live: Progress | None = None
        self.done: int | None = None  # cells, when they were last shown; None: not yet
        self.begun: set[str] = set()  # and those that were at a round
        self.title = self.label = ""
        self.folder: Path | None = None  # of the run that goes on
        self.total = self.first = 0
        self.accuracy = ""
        self.told: set[str] = set()
        self.began = self.spoke = 0.0

    def started(self, config: Config, folder: Path, first: int, device: str) -> None:
        self.label = self.title or f"{config.method_name} seed {config.run.seed}"
        self.folder = folder
        self.total, self.first, self.accuracy = config.run.rounds, first, ""
        self.began = self.spoke = time.monotonic()
        if self.console.is_terminal:
            self.live = Progress(
                TextColumn("{task.description:<20}"),
                BarColumn(),
                TextColumn("round"),
                MofNCompleteColumn(),
                TextColumn("{task.fields[accuracy]}"),
                TextColumn("{task.fields[left]}"),
                console=self.console,
            )
            self.live.add_task(self.label, total=self.total, completed=first, accuracy="", left="")
            self.live.start()
        else:
            go_on = f", going on after round {first}" if first else ""
            self._say(f"{self.label}: {self.total} rounds on {device}, {folder}{go_on}")

    def round(self, t: int, row: dict[str, Any] | None) -> None:
        if row is not None and row["accuracy"] == row["accuracy"]:
            self.accuracy = f"accuracy {100 * row['accuracy']:5.1f} %"
        if self.live is not None:
            self.live.update(self.live.task_ids[0], completed=t, accuracy=self.accuracy, left=self._time(t))
            if t == self.total:
                self._end()
            return
        now = time.monotonic()
        silence = now - self.spoke
        ends = t in (self.first + 1, self.total)
        if ends or silence > LONGEST or (row is not None and silence > SHORTEST):
            self.spoke = now
            self._say(f"{self.label}: round {t}/{self.total}  {self.accuracy}  {self._time(t)}")

    def cell(self, number: int, of: int, name: str) -> None:
        self.title = f"{number}/{of} {name}"

    def notice(self, text: str) -> None:
        if text in self.told:  # the runs of a comparison or a study mostly have the same to say
            return
        self.told.add(text)
        self.console.print(f"[yellow]note:[/yellow] {escape(text)}", soft_wrap=True)

    def working(self, done: int, of: int, lanes: Mapping[int, Lane]) -> None:
        for lane in lanes.values():
            self.folder = lane.folder
        if self.console.is_terminal:
            self._draw(done, of, lanes)
            return
        now = time.monotonic()
        begun = {lane.cell.name for lane in lanes.values() if lane.round}
        if done != self.done or begun - self.begun or now - self.spoke > LONGEST:
            self.done, self.begun, self.spoke = done, begun, now
            self._say("; ".join([f"{done}/{of} cells done", *(_at(lanes[number]) for number in sorted(lanes))]))

    def said(self, text: str) -> None:
        self._say(text)

    def finished(self, result: Result) -> None:
        if self.done is None:
            self._end()

    def close(self) -> None:
        """Leave the terminal as it was, whatever happened."""
        self._end()

    def _draw(self, done: int, of: int, lanes: Mapping[int, Lane]) -> None:
        """A line for all cells, and one for each worker."""
        self.done = done
        if self.live is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self.live = Progress(*columns, TextColumn("{task.fields[accuracy]}"), console=self.console)
            self.live.add_task("cells", total=of, accuracy="")
            self.live.start()
        self.live.update(self.live.task_ids[0], completed=done)
        for number, task in enumerate(self.live.task_ids[1:]):
            self.live.update(task, visible=number in lanes)
        for number in sorted(lanes):
            lane = lanes[number]
            while len(self.live.task_ids) < number + 2:
                self.live.add_task("", total=1, visible=False, accuracy="")
            self.live.update(
                self.live.task_ids[number + 1],
                description=lane.cell.name,
                total=lane.cell.config.run.rounds,
                completed=lane.round,
                accuracy=_accuracy(lane),
                visible=True,
            )

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def _time(self, t: int) -> str:
        """How long the rounds after t will take if they are like those so far; after the last, how long they took."""
        taken = time.monotonic() - self.began
        return f"{clock(taken / (t - self.first) * (self.total - t))} left" if t < self.total else f"in {clock(taken)}"

    def _end(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


def _at(lane: Lane) -> str:
    return f"{lane.cell.name}: round {lane.round}/{lane.cell.config.run.rounds}{_accuracy(lane, '  ')}"


def _accuracy(lane: Lane, before: str = "") -> str:
    known = lane.accuracy is not None and lane.accuracy == lane.accuracy
    return f"{before}accuracy {100 * (lane.accuracy or 0):5.1f} %" if known else ""


def clock(seconds: float) -> str:
    """12 s, 3 min, 2 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


class DownloadBar:
    """Progress of downloads: call it with (label, done, total)."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.live: Progress | None = None
        self.tasks: dict[str, Any] = {}
        self.said: dict[str, int] = {}

    def __call__(self, label: str, done: int, total: int | None) -> None:
        if not self.console.is_terminal:
            step = done * 4 // total if total else 0
            if self.said.get(label) != step:
                self.said[label] = step
                self.console.print(f"{label}{': ' if done else ' …'}{_size(done, total)}", soft_wrap=True, markup=False)
            return
        if self.live is None:
            self.live = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"), console=self.console
            )
            self.live.start()
        if label not in self.tasks:
            self.tasks[label] = self.live.add_task(label, total=total, size="")
        self.live.update(self.tasks[label], completed=done, total=total, size=_size(done, total))

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()


def _size(done: int, total: int | None) -> str:
    """How much has come; nothing to say where a package client does the download and does not tell."""
    if not done:
        return ""
    return f"{done / 1e6:.1f} MB" if total is None else f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"
