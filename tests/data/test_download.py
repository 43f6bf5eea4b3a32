"""Downloads against a loopback server that can be made to misbehave."""

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from kinfolk.data import download as module
from kinfolk.data.download import download
from kinfolk.errors import UserError

BODY = np.random.default_rng(0).integers(0, 256, 1_000_000).astype(np.uint8).tobytes()
SHA = hashlib.sha256(BODY).hexdigest()


@dataclass
class Server:
    """One file, and how it is served."""

    body: bytes = BODY
    etag: str | None = '"one"'
    ranges: bool = True
    die_after: list[int] = field(default_factory=list)  # bytes sent before hanging up, one per request
    statuses: list[int] = field(default_factory=list)  # answered first
    length: int | None = None  # a Content-Length to claim
    chunked: bool = False  # no Content-Length at all
    respect_if_range: bool = True
    skip: int = 0  # bytes by which a range starts too late
    silence: float = 0.0  # before the answer
    requests: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(dict(handler.headers))
        time.sleep(self.silence)
        if self.statuses:
            handler.send_response(self.statuses.pop(0))
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        start = self.first_byte(handler)
        if start >= len(self.body):
            handler.send_response(416)
            handler.end_headers()
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(self.body) - 1}/{len(self.body)}")
        if not self.chunked:
            handler.send_header("Content-Length", str(self.length or len(self.body) - start))
        if self.etag:
            handler.send_header("ETag", self.etag)
        handler.end_headers()
        rest = self.body[start:]
        with suppress(OSError):  # the client may have had enough
            handler.wfile.write(rest[: self.die_after.pop(0)] if self.die_after else rest)

    def first_byte(self, handler: BaseHTTPRequestHandler) -> int:
        wanted = handler.headers.get("Range")
        stale = self.respect_if_range and handler.headers.get("If-Range", self.etag) != self.etag
        if not wanted or not self.ranges or stale:
            return 0
        return int(wanted.removeprefix("bytes=").removesuffix("-")) + self.skip


@pytest.fixture
def server() -> Iterator[Server]:
    behaviour = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            behaviour.answer(self)

        def log_message(self, *arguments: object) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    behaviour.url = f"http://127.0.0.1:{http.server_address[1]}/file"
    thread = threading.Thread(target=lambda: http.serve_forever(poll_interval=0.01))
    thread.start()
    yield behaviour
    http.shutdown()
    http.server_close()
    thread.join()


def fetch(server, target, **options):
    return download(server.url, target, **{"pause": 0.0, "read_seconds": 5.0, **options})


def refusal(server, target, **options) -> str:
    with pytest.raises(UserError) as caught:
        fetch(server, target, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def asked_from(server) -> list[str]:
    return [request.get("Range", "start") for request in server.requests]


def leave_a_part(server, target, size: int) -> None:
    """What a call leaves that was broken off after `size` bytes."""
    server.die_after = [size]
    refusal(server, target, attempts=1)
    assert target.with_name("file.part").stat().st_size == size
    server.requests.clear()


def test_a_file_arrives_whole_and_progress_runs_from_nothing_to_all(server, tmp_path):
    seen = []
    target = tmp_path / "new" / "file"
    fetch(server, target, sha256=SHA, label="the file", progress=lambda *now: seen.append(now))
    assert target.read_bytes() == BODY
    assert seen[0] == ("the file", 0, len(BODY))
    assert seen[-1] == ("the file", len(BODY), len(BODY))
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_a_server_that_tells_no_length_is_believed(server, tmp_path):
    server.chunked, server.etag = True, None
    totals = set()
    fetch(server, tmp_path / "file", sha256=SHA, progress=lambda label, done, total: totals.add(total))
    assert (tmp_path / "file").read_bytes() == BODY
    assert totals == {None}


def test_a_transfer_that_dies_is_resumed_from_where_it_was(server, tmp_path):
    server.die_after = [400_000, 300_000]
    fetch(server, tmp_path / "file", sha256=SHA)
    assert (tmp_path / "file").read_bytes() == BODY
    assert asked_from(server) == ["start", "bytes=400000-", "bytes=700000-"]


def test_a_later_call_goes_on_with_the_part_of_an_earlier_one(server, tmp_path):
    leave_a_part(server, tmp_path / "file", 250_000)
    fetch(server, tmp_path / "file", sha256=SHA)
    assert asked_from(server) == ["bytes=250000-"]
    assert server.requests[0]["If-Range"] == '"one"'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_server_without_ranges_is_read_from_the_start_again(server, tmp_path):
    leave_a_part(server, tmp_path / "file", 250_000)
    server.ranges = False
    fetch(server, tmp_path / "file", sha256=SHA)
    assert (tmp_path / "file").read_bytes() == BODY
    assert len(server.requests) == 1


@pytest.mark.parametrize("respect_if_range", [True, False])
def test_a_file_whose_etag_changed_is_read_from_the_start(server, tmp_path, respect_if_range):
    leave_a_part(server, tmp_path / "file", 250_000)
    server.body, server.etag = BODY[::-1], '"two"'
    server.respect_if_range = respect_if_range
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY[::-1]


@pytest.mark.parametrize("size", [100_000, 900_000])
def test_without_an_etag_a_file_whose_size_changed_is_read_from_the_start(server, tmp_path, size):
    server.etag = None
    leave_a_part(server, tmp_path / "file", 250_000)
    server.body = BODY[::-1][:size]
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY[::-1][:size]


def test_a_range_that_starts_elsewhere_is_not_joined_on(server, tmp_path):
    leave_a_part(server, tmp_path / "file", 250_000)
    server.skip = 10
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert asked_from(server) == ["bytes=250000-", "start"]


def test_a_part_without_notes_is_not_trusted(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"something else")
    fetch(server, tmp_path / "file", sha256=SHA)
    assert asked_from(server) == ["start"]


def test_a_wrong_checksum_names_both_and_leaves_nothing(server, tmp_path):
    message = refusal(server, tmp_path / "file", sha256="0" * 64)
    assert SHA in message
    assert "0" * 64 in message
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_keeps_dying_is_given_up_and_the_part_kept(server, tmp_path):
    server.die_after = [1000, 1000, 1000]
    message = refusal(server, tmp_path / "file", attempts=3)
    assert "broke off after 3000 of 1000000 bytes (attempt 3 of 3)" in message
    assert not (tmp_path / "file").exists()
    assert (tmp_path / "file.part").stat().st_size == 3000


def test_a_file_that_claims_to_be_huge_is_not_begun(server, tmp_path):
    server.length = 10**15
    message = refusal(server, tmp_path / "file", limit=10**9)
    assert "1000000000000000 bytes, more than the 1000000000 allowed" in message
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_grows_past_the_limit_is_dropped(server, tmp_path):
    server.chunked = True
    assert "more than the 500000 bytes allowed" in refusal(server, tmp_path / "file", limit=500_000)
    assert list(tmp_path.iterdir()) == []


def test_a_busy_server_is_asked_again_and_a_missing_file_is_not(server, tmp_path):
    server.statuses = [503]
    fetch(server, tmp_path / "file", sha256=SHA)
    assert len(server.requests) == 2
    server.statuses = [404]
    assert "the server answered 404" in refusal(server, tmp_path / "other")
    assert len(server.requests) == 3


def test_a_host_that_does_not_answer_is_given_up_in_time_and_once(server, tmp_path):
    server.silence = 1.0
    began = time.monotonic()
    message = refusal(server, tmp_path / "file", open_seconds=0.2)
    assert time.monotonic() - began < 0.8
    assert "cannot be reached: no answer within 0.2 s" in message
    assert list(tmp_path.iterdir()) == []


def test_a_silence_in_the_middle_ends_the_attempt(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def stall() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello")
                peer.recv(1000)  # until the other side gives up

        thread = threading.Thread(target=stall)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/file"
        with pytest.raises(UserError, match="timed out"):
            download(url, tmp_path / "file", attempts=1, read_seconds=0.2)
        thread.join()
    assert not (tmp_path / "file").exists()


def test_a_closed_port_is_unreachable_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UserError, match="cannot be reached: Connection refused"):
        download(f"http://127.0.0.1:{port}/file", tmp_path / "file")


def test_only_web_addresses_are_fetched(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    with pytest.raises(UserError, match="only http and https"):
        download(secret.as_uri(), tmp_path / "file")


def test_a_disk_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "folder").write_text("a file in the way")
    message = refusal(server, tmp_path / "folder" / "file")
    assert f"{tmp_path / 'folder' / 'file'}: cannot be written" in message


def test_the_default_time_limits_keep_an_unreachable_host_short():
    assert module.OPEN_SECONDS <= 5
