"""A disk that fails at the k-th operation, to walk through every point of a write."""

import builtins
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from kinfolk.errors import UserError
from kinfolk.runs import files

FAULTS = ("full", "broken", "crash", "power")


class Crash(BaseException):
    """The process is gone. Not an Exception: nothing may handle it."""


class FaultyDisk:
    """Counts the operations that change the disk and strikes at number `at` (never, if None).

    full: no space from then on for anything that needs some (the write that met it got half of its bytes on).
    broken: this one operation gives an input/output error.
    crash: nothing happens to the disk any more, as after kill -9.
    power: a crash that loses what was written to files and not synced.
    """

    def __init__(self, at: int | None, fault: str) -> None:
        self.at, self.fault = at, fault
        self.operations: list[str] = []
        self.dead = False
        self.unsynced: dict[int, int] = {}  # inode -> a descriptor of its own
        self.patches: list[Any] = []

    @property
    def struck(self) -> bool:
        return self.at is not None and len(self.operations) > self.at

    def __enter__(self) -> "FaultyDisk":
        for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "truncate", "ftruncate"):
            self.patches.append(mock.patch.object(os, name, self._wrap(name, getattr(os, name))))
        self.patches.append(mock.patch.object(files, "open", self._open, create=True))
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in reversed(self.patches):
            patch.stop()
        for descriptor in self.unsynced.values():
            if self.dead and self.fault == "power":
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.close(descriptor)

    def operation(self, name: str) -> None:
        if self.dead:
            raise Crash
        number = len(self.operations)
        self.operations.append(name)
        needs_space = name in ("write", "fsync", "mkdir", "open")
        if self.fault == "full" and self.at is not None and number >= self.at and needs_space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.fault == "broken" and number == self.at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.fault in ("crash", "power") and number == self.at:
            self.dead = True
            raise Crash

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.operation(name)
            result = real(*arguments, **options)
            if name == "fsync":
                descriptor = self.unsynced.pop(os.fstat(arguments[0]).st_ino, None)
                if descriptor is not None:
                    os.close(descriptor)
            return result

        return call

    def _open(self, path: Path, mode: str, **options: Any) -> "_File":
        self.operation("open")
        return _File(builtins.open(path, mode, buffering=0), self)


class _File:
    def __init__(self, real: Any, disk: FaultyDisk) -> None:
        self.real, self.disk = real, disk

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *error: object) -> None:
        self.real.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        inode = os.fstat(self.real.fileno()).st_ino
        try:
            self.disk.operation("write")
        except BaseException:
            self.real.write(data[: len(data) // 2])
            raise
        finally:
            if inode not in self.disk.unsynced:
                self.disk.unsynced[inode] = os.dup(self.real.fileno())
        return int(self.real.write(data))

    def truncate(self, size: int) -> int:
        self.disk.operation("truncate")
        return int(self.real.truncate(size))


def strike_everywhere(
    fault: str, prepare: Callable[[int], Any], action: Callable[[Any], object]
) -> Iterator[tuple[Any, str]]:
    """`action(prepare(k))` with a fault at its k-th operation, for every k.

    Of writes in a row (a zip file is dozens) the first, the middle and the last are struck. Yields what `prepare`
    made, to be judged, and the name of the operation that was struck.
    """
    subject = prepare(-1)
    with FaultyDisk(None, fault) as disk:
        action(subject)
    for at in _points(disk.operations):
        subject = prepare(at)
        with FaultyDisk(at, fault) as disk:
            try:
                action(subject)
            except (UserError, OSError, Crash):
                assert disk.struck
        assert disk.struck, "the operations differ from one time to the next"
        yield subject, disk.operations[at]


def _points(operations: list[str]) -> Iterator[int]:
    assert "write" in operations, "the shim is not where the writing is"
    assert "fsync" in operations
    start = 0
    for name, group in itertools.groupby(operations):
        stretch = range(start, start + len(list(group)))
        start = stretch.stop
        if name == "write":
            yield from sorted({stretch[0], stretch[len(stretch) // 2], stretch[-1]})
        else:
            yield from stretch


REMOVALS = ("unlink", "rmdir")  # struck, they leave what they should have removed


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if files.is_temporary(path)]
