"""One file over HTTP: resumed where it stopped, checked, and renamed into place only when it is whole.

While it arrives, the data is in `NAME.part` and what is known of the server's copy (ETag, date, size) in
`NAME.part.json`; a later call goes on from there if the server still has the same copy and serves ranges, and
starts again otherwise.
"""

import hashlib
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from kinfolk.errors import UserError
from kinfolk.version import __version__

Progress = Callable[[str, int, int | None], None]
"""progress(label, done, total): bytes so far, and the whole if the server told it."""

OPEN_SECONDS = 5.0  # from the name look-up to the first header; an unreachable host must not hold anybody up
READ_SECONDS = 30.0  # longest silence in the middle of a file
LIMIT = 2 * 2**30
CHUNK = 2**18


class _Broken(Exception):
    """The transfer stopped; another attempt may go on from where it is."""


@dataclass(frozen=True)
class _Copy:
    """What tells one version of a remote file from the next."""

    etag: str | None
    modified: str | None
    size: int | None

    def same(self, other: "_Copy") -> bool:
        """Whether `other` can be the same version. An answer to If-Range may leave the date out."""
        pairs = ((self.etag, other.etag), (self.modified, other.modified))
        return self.size == other.size and all(a == b for a, b in pairs if a and b)


def download(
    url: str,
    target: Path,
    *,
    sha256: str | None = None,
    label: str | None = None,
    progress: Progress | None = None,
    limit: int = LIMIT,
    open_seconds: float = OPEN_SECONDS,
    read_seconds: float = READ_SECONDS,
    attempts: int = 3,
    pause: float = 0.5,
) -> Path:
    """Fetch `url` into `target`.

    A host that cannot be reached fails at once. A transfer that breaks off is resumed, `attempts` times in
    all, waiting `pause` seconds longer each time. Of a file over `limit` bytes nothing is kept.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"{url}: only http and https addresses are fetched")
    label = label or target.name
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, attempts + 1):
            try:
                _fetch(url, part, label, progress, limit, open_seconds, read_seconds)
                break
            except _Broken as reason:
                if attempt == attempts:
                    raise UserError(f"{url}: {reason} (attempt {attempt} of {attempts})") from reason
                time.sleep(pause * attempt)
        if sha256 is not None and (found := file_sha256(part)) != sha256:
            _discard(part)
            raise UserError(f"{url}: SHA-256 is {found}, expected {sha256}; nothing was kept")
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
        _notes(part).unlink(missing_ok=True)
    except OSError as error:  # network errors have become _Broken or UserError by now: this is the disk
        raise UserError(f"{target}: cannot be written: {error.strerror or error}") from error
    return target


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(
    url: str,
    part: Path,
    label: str,
    progress: Progress | None,
    limit: int,
    open_seconds: float,
    read_seconds: float,
) -> None:
    """One attempt to make `part` whole."""
    before = _known(part)
    start = part.stat().st_size if before else 0
    headers = {"User-Agent": f"kinfolk/{__version__}", "Accept-Encoding": "identity"}
    if before and start:
        headers["Range"] = f"bytes={start}-"
        if validator := _strong(before.etag) or before.modified:
            headers["If-Range"] = validator
    try:
        response = _open(urllib.request.Request(url, headers=headers), open_seconds, read_seconds)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the remote file is now shorter than what we have
            _discard(part)
            raise _Broken("the file on the server has changed") from error
        if error.code in (408, 429) or error.code >= 500:
            raise _Broken(f"the server answered {error.code} {error.reason}") from error
        raise UserError(f"{url}: the server answered {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        raise UserError(f"{url}: cannot be reached: {_reason(error)}") from error
    with response:
        resumed = response.status == 206
        total = _total(response, start if resumed else 0)
        now = _Copy(response.headers.get("ETag"), response.headers.get("Last-Modified"), total)
        if resumed and not (before and now.same(before) and _first(response) == start):
            _discard(part)
            raise _Broken("the file on the server has changed")
        if total is not None and total > limit:
            _discard(part)
            raise UserError(f"{url}: {total} bytes, more than the {limit} allowed")
        if not resumed:
            start = 0
            part.write_bytes(b"")  # before the notes: old data must never lie beside new notes
            _notes(part).write_text(json.dumps(asdict(now)))
        _copy_body(response, part, start, total, url, label, progress, limit)


def _copy_body(
    response: HTTPResponse,
    part: Path,
    done: int,
    total: int | None,
    url: str,
    label: str,
    progress: Progress | None,
    limit: int,
) -> None:
    with part.open("ab" if done else "wb") as file:
        while True:
            if progress:
                progress(label, done, total)
            try:
                piece = response.read(CHUNK)
            except (OSError, HTTPException) as error:
                raise _Broken(f"broke off after {done} of {total or '?'} bytes: {error}") from error
            if not piece:
                break
            done += len(piece)
            if done > limit:
                file.close()
                _discard(part)
                raise UserError(f"{url}: more than the {limit} bytes allowed")
            file.write(piece)
    if total is not None and done != total:
        if done > total:
            _discard(part)
        raise _Broken(f"broke off after {done} of {total} bytes")


def _open(request: urllib.request.Request, open_seconds: float, read_seconds: float) -> HTTPResponse:
    """urlopen that answers within `open_seconds`.

    Its own timeout covers neither the name look-up, which can hang for half a minute, nor several addresses
    of one name; so it runs in a thread, which is left behind when it is late.
    """
    answers: queue.SimpleQueue[HTTPResponse | Exception] = queue.SimpleQueue()
    late = threading.Event()

    def connect() -> None:
        answer: Any
        try:
            answer = urllib.request.urlopen(request, timeout=read_seconds)
        except Exception as error:
            answer = error
        answers.put(answer)
        if late.is_set():
            _close_waiting(answers)

    threading.Thread(target=connect, daemon=True, name="kinfolk-download").start()
    try:
        answer = answers.get(timeout=open_seconds)
    except queue.Empty:
        late.set()
        _close_waiting(answers)
        raise TimeoutError(f"no answer within {open_seconds:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _close_waiting(answers: "queue.SimpleQueue[HTTPResponse | Exception]") -> None:
    """Close an answer nobody waits for any more; whichever side comes last finds it."""
    with suppress(queue.Empty):
        answer = answers.get_nowait()
        if not isinstance(answer, Exception) or isinstance(answer, urllib.error.HTTPError):
            answer.close()


def _total(response: HTTPResponse, start: int) -> int | None:
    """Size of the whole file, from Content-Range of a part or Content-Length of the whole."""
    whole = response.headers.get("Content-Range", "").rpartition("/")[2]
    if response.status == 206 and whole.isdecimal():
        return int(whole)
    length = response.headers.get("Content-Length", "")
    return start + int(length) if length.isdecimal() else None


def _first(response: HTTPResponse) -> int | None:
    first = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdecimal() else None


def _strong(etag: str | None) -> str | None:
    """Only a strong ETag promises the same bytes; If-Range must not carry a weak one."""
    return etag if etag and not etag.startswith("W/") else None


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner or type(inner).__name__)


def _notes(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _known(part: Path) -> _Copy | None:
    """What was noted about the copy in `part`; None, and nothing left, when it cannot be used."""
    try:
        notes = json.loads(_notes(part).read_bytes())
        copy = _Copy(notes["etag"], notes["modified"], notes["size"])
        size = part.stat().st_size
    except (OSError, ValueError, KeyError, TypeError):
        _discard(part)
        return None
    if copy.size is None or not 0 < size < copy.size:
        _discard(part)
        return None
    return copy


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _notes(part).unlink(missing_ok=True)
