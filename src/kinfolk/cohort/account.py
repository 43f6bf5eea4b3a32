"""The account that a private method keeps of what its clients let out of their data, as everybody else sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


class Account(Protocol):
    """Of the clients of one cohort. `kinfolk.methods.private` has the one that there is."""

    def keep(self, path: Path, data: str, accounts: Sequence[Any]) -> None:
        """From now on write every charge of these accounts, of all cohorts of a process, into one file.

        data: what the releases are about; a file that is about something else is refused.
        """

    def close(self) -> None:
        """Let another process have the file."""

    def state(self) -> Tensor:
        """[m, ...] for a checkpoint."""

    def restore(self, state: Tensor) -> None:
        """Take over a checkpoint's state; where it and the file differ, whatever is more holds."""

    def spent(self) -> bool:
        """Whether nobody can release anything more."""

    def refuse(self, t: int, accounts: Sequence[Any]) -> None:
        """An error if a run that goes on with round t has nothing left to spend; accounts: of all cohorts."""

    def figures(self) -> dict[str, Tensor]:
        """`epsilon`, `delta` and `releases` of each client so far: [m] each."""

    def guarantee(self) -> Any:
        """What is promised to the client that has spent most, with `as_dict()` and a line for people (`str`)."""
