"""The one exception a user sees: what is wrong, where, and what would be right, in one line."""

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
    return "known: " + ", ".join(known)
