"""Where the command line begins, as `kinfolk` and as `python -m kinfolk`: Ctrl-C is heard before anything is imported.

Importing torch takes seconds, and an exception thrown into it comes out as another one, or not at all.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> None:
    """The command line; Ctrl-C is one line and exit code 130 from the first moment on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, _on_ctrl_c)
    try:
        from kinfolk import cli

        cli.main()
    except KeyboardInterrupt:
        _leave()


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Leave at once where something is being imported: nothing is lost, as a run's rounds have a handler of their own.

    Anywhere else it is Python's usual exception.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _leave() -> NoReturn:
    try:
        cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar may have hidden it
        os.write(2, cursor + b"kinfolk: stopped\n")  # a print may be what was interrupted
    finally:
        os._exit(130)


if __name__ == "__main__":
    sys.argv[0] = "kinfolk"  # what a run notes as the command that made it
    main()
