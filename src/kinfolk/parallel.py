"""Several cells of a study at a time, each in a process of its own (`worker.py`), on one CPU or one GPU.

A small run leaves most of a GPU idle. Processes that know nothing of each other are the plainest way to fill it: each
completes a cell as a single process would, in the same folder, with the same numbers. They share cores and memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kinfolk.data import catalog
from kinfolk.errors import UserError
from kinfolk.experiment import Interrupted, Observer, Result, read_result
from kinfolk.stopping import interruptible
from kinfolk.studies import Cell

PATIENCE = 10.0  # seconds for workers to end by themselves; they have 3 for their round (`worker.GRACE`)
TICK = 0.2  # seconds between two looks at whether to stop


@dataclass
class Lane:
    """A cell that a worker is at, and how far it is."""

    cell: Cell
    folder: Path
    round: int = 0
    accuracy: float | None = None


class Overview(Observer):
    """An observer that can follow several cells at a time.

    Others are told only of cells that are handed out (`cell`) or finished, and of notices.
    """

    def working(self, done: int, of: int, lanes: Mapping[int, Lane]) -> None:
        """`done` of the `of` cells are done; lanes: number of a worker -> its cell."""

    def said(self, text: str) -> None:
        """A line that a worker wrote to its standard output or error."""


class Stopped(Interrupted):
    """The user stopped all workers; what they had done is in the folders of their cells."""

    def __init__(self, folder: Path, round: int, done: int, of: int) -> None:
        super().__init__(folder, round)
        self.args = (f"stopped after the rounds that were going on, with {done} of {of} cells done",)


def complete_all(
    jobs: Sequence[tuple[Cell, Path]], workers: int, observer: Observer, keep: Callable[[Path, Result], None]
) -> dict[str, str]:
    """Complete each cell in its folder, `workers` at a time and in order; `keep` is called for each that is finished.

    A cell that fails does not hold up the others: what comes back is name -> reason of those that did.
    """
    if not jobs:
        return {}
    _decode({cell.config.data.name for cell, _ in jobs})
    with interruptible(observer.notice, [signal.SIGTERM]) as stop, _Crew(jobs, workers, observer, keep, stop) as crew:
        crew.work()
        if stop.is_set() and (crew.halted or crew.waiting):
            raise Stopped(crew.folder, crew.saved, crew.done, len(jobs))
    return crew.failed


def _decode(names: Iterable[str]) -> None:
    """Have raw files that a user brought decoded and kept once, before several processes find them at a time."""
    for name in names:
        with contextlib.suppress(UserError):  # the worker that needs it says so
            if not catalog.entry(name).embedded:
                catalog.load(name)


class _Worker:
    """One of the processes, seen from here."""

    def __init__(self, number: int, setup: dict[str, Any], events: queue.SimpleQueue[_Event]) -> None:
        self.number = number
        self.state = "starting"  # then free, busy, free, …, leaving
        self.last = ""  # line that it wrote to standard error
        jobs, self.jobs = os.pipe()
        answers, told = os.pipe()
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)  # modules of the user's own are found too
        # Sessions of their own: Ctrl-C in a terminal goes to this process alone, which then tells them.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kinfolk.worker", str(jobs), str(told)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(jobs, told),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(setup["threads"])},
        )
        os.close(jobs)
        os.close(told)
        self.threads = [
            threading.Thread(target=self._listen, args=(answers, events), daemon=True),
            threading.Thread(target=self._overhear, args=(events,), daemon=True),
        ]
        for thread in self.threads:
            thread.start()
        self.send(setup)

    def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has gone, as `_listen` will tell
            while line:
                line = line[os.write(self.jobs, line) :]

    def dismiss(self) -> None:
        """No more jobs: it ends, at the latest some seconds from now."""
        if self.jobs >= 0:
            os.close(self.jobs)
            self.jobs = -1

    def end(self) -> None:
        """Wait for a worker that is ending; one that does not is killed."""
        self.dismiss()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for thread in self.threads:
            thread.join(1.0)  # longer only if a process that it started goes on writing
        if self.process.stdout is not None and not self.threads[1].is_alive():
            self.process.stdout.close()

    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code < 0:
            hint = " (out of memory? use fewer --workers)" if -code == signal.SIGKILL else ""
            return f"its process was ended by {signal.Signals(-code).name}{hint}"
        return f"its process ended with status {code}: {self.last or 'it said nothing'}"

    def _listen(self, answers: int, events: queue.SimpleQueue[_Event]) -> None:
        with os.fdopen(answers, "rb") as pipe, contextlib.suppress(ValueError):  # killed while it wrote
            for line in pipe:
                events.put((self, json.loads(line)))
        events.put((self, {"event": "gone"}))

    def _overhear(self, events: queue.SimpleQueue[_Event]) -> None:
        for line in self.process.stdout or ():
            if text := line.decode(errors="replace").rstrip():
                self.last = text
                events.put((self, {"event": "said", "text": text}))


_Event = tuple[_Worker, dict[str, Any]]


class _Crew:
    """The workers, what they are at, and what is left to do."""

    def __init__(
        self,
        jobs: Sequence[tuple[Cell, Path]],
        workers: int,
        observer: Observer,
        keep: Callable[[Path, Result], None],
        stop: threading.Event,
    ) -> None:
        self.waiting = deque(jobs)
        self.of, self.folder = len(jobs), jobs[0][1]
        self.count = min(workers, len(jobs))
        self.setup = {
            "argv": sys.argv,
            "threads": max(1, torch.get_num_threads() // self.count),
            "workers": self.count,
        }
        self.observer, self.keep, self.stop = observer, keep, stop
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self.crew: dict[int, _Worker] = {}
        self.lanes: dict[int, Lane] = {}
        self.failed: dict[str, str] = {}
        self.done = self.handed = self.halted = self.saved = 0

    def __enter__(self) -> Self:
        try:
            for number in range(self.count):
                self.crew[number] = _Worker(number, self.setup, self.events)
        except BaseException:
            self._leave(at_once=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave(at_once=kind is KeyboardInterrupt)

    def work(self) -> None:
        """Until everything is done, or all that was going on has stopped."""
        told = False
        while self.lanes or (self.waiting and not self.stop.is_set()):
            for worker in self.crew.values():
                if worker.state == "free" and self.waiting and not self.stop.is_set():
                    self._hand_out(worker)
            if self.stop.is_set() and not told:
                told = True
                for number in self.lanes:
                    self.crew[number].send({"stop": True})
            with contextlib.suppress(queue.Empty):
                self._take(*self.events.get(timeout=TICK))

    def _hand_out(self, worker: _Worker) -> None:
        cell, path = self.waiting.popleft()
        self.handed += 1
        self.observer.cell(self.handed, self.of, cell.name)
        worker.state = "busy"
        self.lanes[worker.number] = Lane(cell, path)
        worker.send({"sections": cell.config.sections(), "path": str(path)})

    def _take(self, worker: _Worker, event: dict[str, Any]) -> None:
        lane = self.lanes.get(worker.number)
        match event["event"]:
            case "ready":
                worker.state = "free"
            case "notice":
                self.observer.notice(event["text"])
            case "said":
                self._pass_on(event["text"])
            case "gone":
                self._replace(worker)
            case "started" | "round" if lane is not None:
                lane.round = event["round"]
                if event.get("accuracy") is not None:
                    lane.accuracy = event["accuracy"]
            case "finished" if lane is not None:
                worker.state = "free"
                del self.lanes[worker.number]
                result = read_result(lane.folder)
                self.keep(lane.folder, result)
                self.done += 1
                self.observer.finished(result)
            case "failed":
                worker.state = "free" if event["stays"] else "leaving"
                self._fail(worker, event["text"])
            case "stopped" if lane is not None:
                worker.state = "leaving"
                self.saved = max(self.saved, event["round"] or 0)
                self._fail(worker, "its process was told to stop")
        if isinstance(self.observer, Overview) and event["event"] != "said":
            self.observer.working(self.done, self.of, self.lanes)

    def _fail(self, worker: _Worker, reason: str) -> None:
        lane = self.lanes.pop(worker.number)
        if self.stop.is_set():  # whatever it says, it is to be gone on with
            self.halted += 1
            return
        self.failed[lane.cell.name] = reason
        self.observer.notice(f"{lane.cell.name} failed: {reason}")

    def _pass_on(self, text: str) -> None:
        if isinstance(self.observer, Overview):
            self.observer.said(text)
        else:
            print(text, file=sys.stderr)

    def _replace(self, worker: _Worker) -> None:
        """A worker has gone: there is another in its place, as long as there is work."""
        del self.crew[worker.number]
        worker.end()
        if worker.state == "starting":
            raise UserError(f"a worker could not start: {worker.how_it_ended()}")
        if worker.number in self.lanes:
            self._fail(worker, worker.how_it_ended())
        if self.waiting and not self.stop.is_set():
            self.crew[worker.number] = _Worker(worker.number, self.setup, self.events)

    def _leave(self, at_once: bool) -> None:
        for worker in self.crew.values():
            if at_once:
                worker.process.kill()
            worker.dismiss()
        for worker in self.crew.values():
            worker.end()
        while not self.events.empty():  # the last words
            worker, event = self.events.get()
            if event["event"] == "said":
                self._pass_on(event["text"])
