"""The one exception a user sees: what is wrong, where, and what would be right, in one line."""

import errno
import os
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Something the user can mend. The command line prints it without a traceback and exits with code 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt `word`: the nearest known one, or the list when nothing is near."""
    known = sorted(known)
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return "known: " + (", ".join(known) or "none")


def known_failure(error: Exception) -> str | None:
    """A failure that is no bug, in one line with what can be done about it; None if it may be one."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk is full{f' while writing {error.filename}' if error.filename else ''}"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename:
        return f"{error.filename}: {os.strerror(error.errno)}"
    torch = sys.modules.get("torch")  # not imported for this: without it nothing of its kind has happened
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return "the GPU is out of memory: train fewer clients at once (run.chunk=8), or use a smaller batch"
    if isinstance(error, RuntimeError) and (asked := re.search(r"allocate memory.*?(\d+) bytes", str(error))):
        size = f"{int(asked[1]) / 2**30:,.0f} GiB for one tensor"
        return f"out of memory: {size}; is a size of the model set too large?"
    return "out of memory" if isinstance(error, MemoryError) else None
