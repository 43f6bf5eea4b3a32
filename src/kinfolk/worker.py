"""A process that completes cells for `kinfolk reproduce --workers N`, one after another: see `parallel.py`.

Jobs come in and events go out as JSON, an object a line, through two pipes of their own: whatever a library prints
goes to standard output or error and cannot be taken for an event. When the pipe of jobs closes, the study is over or
the process that asked has died: the worker ends, if need be in the middle of a round, which a run folder survives.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from kinfolk.cohort.room import Room
from kinfolk.comparison import complete
from kinfolk.config import Config, resolve
from kinfolk.errors import UserError, known_failure
from kinfolk.experiment import Interrupted, Observer

GRACE = 3.0  # seconds for the round that goes on, once nobody waits for it any more
OFTEN = 0.2  # seconds between two events of rounds that are not evaluated
LONGEST = 800  # characters of a text: a line then goes through a pipe in one piece, whoever interrupts


class Worker(Observer):
    """Takes jobs until there are no more, or until it is told to stop."""

    def __init__(self, jobs: int, events: int) -> None:
        self.events = events
        self.pipe = os.fdopen(jobs, "rb")
        self.waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.stopping = threading.Event()
        self.busy = False
        self.told = 0.0

    def work(self) -> None:
        """Set up as the first line says, then complete what the others name."""
        try:
            setup = json.loads(self.pipe.readline())
        except ValueError:  # it has closed already
            return
        sys.argv[:] = setup["argv"]  # what a run notes as the command that made it
        torch.set_num_threads(setup["threads"])
        Room.among = setup["workers"]
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGTERM, self._on_term)
        threading.Thread(target=self._listen, daemon=True).start()
        self._tell("ready")
        while (job := self.waiting.get()) is not None:
            if not self._complete(job["sections"], Path(job["path"])):
                return

    # -- told by the run -----------------------------------------------------------------------------------------

    def started(self, config: Config, folder: Path, first: int, device: str) -> None:
        self._tell("started", round=first)

    def round(self, t: int, row: dict[str, Any] | None) -> None:
        if row is not None or time.monotonic() - self.told > OFTEN:
            self.told = time.monotonic()
            self._tell("round", round=t, accuracy=None if row is None else row["accuracy"])

    def notice(self, text: str) -> None:
        if not self.stopping.is_set():  # that it stops is said by who asked for it
            self._tell("notice", text=text[:LONGEST])

    # -- one cell ------------------------------------------------------------------------------------------------

    def _complete(self, sections: dict[str, Any], path: Path) -> bool:
        """Complete a cell, tell how it ended, and say whether this process is good for another."""
        try:
            self.busy = True  # first: from here on a stop raises, before it is seen below
            if self.stopping.is_set():
                raise KeyboardInterrupt
            complete(resolve(sections), path, observer=self)
            self.busy = False
        except (Interrupted, KeyboardInterrupt) as stopped:
            self.busy = False
            self._tell("stopped", round=stopped.round if isinstance(stopped, Interrupted) else None)
            return False
        except Exception as error:
            self.busy = False
            stays = isinstance(error, UserError)  # after anything else memory may be lost, or worse
            self._tell("failed", text=_reason(error)[:LONGEST], stays=stays)
            return stays
        self._tell("finished")
        torch.cuda.empty_cache()  # what is kept for reuse would look taken to the others; without a GPU it does nothing
        return True

    def _tell(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, **facts}, ensure_ascii=False) + "\n"
        with contextlib.suppress(OSError):  # nobody listens: `_listen` sees to the rest, and the round is saved
            os.write(self.events, line.encode(errors="replace"))

    # -- told from outside ---------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Jobs, and the word to stop; in a thread of its own, to hear it while a cell goes on."""
        for line in self.pipe:
            job = json.loads(line)
            if "stop" in job:
                self._stop()
            else:
                self.waiting.put(job)
        self.waiting.put(None)
        self._stop()
        time.sleep(GRACE)
        os._exit(1)

    def _stop(self) -> None:
        """As Ctrl-C does in a single run, and only once: a second one would not finish the round."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        if self.busy:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _on_stop(self, number: int, frame: Any) -> None:
        """Before the first round and after the last; in between `stopping.interruptible` has a handler of its own."""
        self.stopping.set()
        if self.busy:
            raise KeyboardInterrupt

    def _on_term(self, number: int, frame: Any) -> None:
        self._stop()


def _reason(error: Exception) -> str:
    told = known_failure(error)
    if told is None:
        traceback.print_exception(error)
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]} (the traceback was printed above)"
    return f"{told}; or use fewer --workers" if "out of memory" in told else told


def main() -> None:
    jobs, events = (int(word) for word in sys.argv[1:])
    for each in (jobs, events):
        os.set_inheritable(each, False)  # a process that a library starts must not keep them open
    Worker(jobs, events).work()


if __name__ == "__main__":
    main()
