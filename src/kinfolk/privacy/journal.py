"""An append-only file of lines that verify themselves, for what must not be forgotten.

Each line is JSON, a tab and a checksum, which covers the line and the checksum of the line before it: lines cannot be
lost, changed or exchanged unnoticed. A last line without its end was being written when the process died; it is cut
off. One process at a time may open the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kinfolk.errors import UserError

FORMAT = "kinfolk privacy ledger"
VERSION = 1


class Journal:
    """The lines of a privacy ledger, and a way to add some."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._broken = False
        self.listed: list[int] = []  # the clients that the last line with clients in full gave
        is_new = not path.exists()
        try:
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise UserError(f"cannot open the privacy ledger {path}: {error.strerror}") from error
        try:
            self._lock()
            self.lines, self._last, end = self._read()
            if end < os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, end)
            os.fsync(self._descriptor)
            if is_new:
                _sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._open(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"the privacy ledger {self.path} is in use by another process") from None

    def _open(self) -> int:
        if self._descriptor is None:
            raise UserError(f"the privacy ledger {self.path} is closed")
        return self._descriptor

    def _read(self) -> tuple[list[dict[str, Any]], str, int]:
        """All lines, the last checksum, and where the last whole line ends."""
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        lines, last = [], ""
        for number, text in enumerate(content[:end].split(b"\n")[:-1], start=1):
            body, _, checksum = text.rpartition(b"\t")
            if checksum.decode(errors="replace") != _checksum(last, body):
                raise UserError(
                    f"the privacy ledger {self.path} is damaged in line {number}: what was released can no longer be "
                    f"counted, so nothing more may be"
                )
            line = json.loads(body)
            if number == 1 and (line.get("format") != FORMAT or line.get("version") != VERSION):
                raise UserError(f"{self.path} is not a privacy ledger of version {VERSION}")
            lines.append(line)
            last = checksum.decode()
        return lines, last, end

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append lines and wait for the disk. After an error nothing more is written."""
        if self._broken:
            raise UserError(f"the privacy ledger {self.path} could not be written before: nothing more may be released")
        content, last = b"", self._last
        for line in lines:
            body = json.dumps(line, separators=(",", ":")).encode()
            last = _checksum(last, body)
            content += body + b"\t" + last.encode() + b"\n"
        descriptor = self._open()
        start = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(content):
                written += os.write(descriptor, content[written:])
            os.fsync(descriptor)
        except BaseException as error:
            self._broken = True
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, start)
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
                raise UserError(
                    f"cannot write the privacy ledger {self.path}: {reason}; nothing was released"
                ) from error
            raise
        self._last = last


def _checksum(before: str, body: bytes) -> str:
    return hashlib.blake2b(before.encode() + b"\n" + body, digest_size=8).hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
