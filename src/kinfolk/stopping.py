"""Ctrl-C without loss."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_waiting: list[threading.Event] = []  # of the main thread, the innermost last


@contextmanager
def interruptible(notice: Callable[[str], None], also: Sequence[signal.Signals] = ()) -> Iterator[threading.Event]:
    """Ctrl-C finishes the round and saves it; a second one stops at once. `also`: signals that do the same.

    One inside another: whoever goes on from run to run hears it too, should it come in the last round of one, and the
    next run hears of one that came before its rounds had begun.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        for each in _waiting:
            each.set()
        notice("stopping after this round (press Ctrl-C again to stop at once)")

    if any(each.is_set() for each in _waiting):
        stop.set()
    _waiting.append(stop)
    before = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, *also)}
    try:
        yield stop
    finally:
        _waiting.remove(stop)
        for each, handler in before.items():
            usual = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
            signal.signal(each, usual if handler is None else handler)  # None: not set from Python
