"""Ctrl-C without loss."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruptible(notice: Callable[[str], None]) -> Iterator[threading.Event]:
    """Ctrl-C finishes the round and saves it; a second one stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        notice("stopping after this round (press Ctrl-C again to stop at once)")

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)  # None: not set from Python
