"""Standard output that is closed, or that lacks characters: what can be said is said, without a traceback."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from kinfolk import cli
from kinfolk.commands import terminal


def call(monkeypatch: pytest.MonkeyPatch, encoding: str, *words: str) -> str:
    """What a command writes to a standard output of this encoding."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    monkeypatch.setattr(sys, "argv", ["kinfolk", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    return written.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_an_encoding_lacks_is_a_question_mark(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    times = "×" if encoding == "cp1252" else "?"
    assert f"1{times}28{times}28" in call(monkeypatch, encoding, "data", "ls")
    assert "270" in call(monkeypatch, encoding, "data", "split", "digits")


def test_json_says_the_same_in_every_encoding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value = {"folder": "runs/é–×"}
    terminal.print_json(value)
    assert capsys.readouterr().out == '{"folder": "runs/é–×"}\n'
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252", errors="replace"))
    terminal.print_json({"bars": "█"})
    sys.stdout.flush()
    assert json.loads(written.getvalue().decode("cp1252")) == {"bars": "█"}


def test_a_closed_standard_output_gets_nothing_and_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "argv", ["kinfolk", "data", "split", "digits"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    assert Path("digits-split.png").is_file()
    sys.stdout.close()


def test_what_was_not_yet_written_when_the_reader_left_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stdout:
        os.close(reader)
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(cli, "app", lambda **options: print("a line"))  # stays in Python's buffer
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 1


def test_a_standard_output_that_can_do_no_more_than_write_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None:
            pass

    plain = Plain()
    monkeypatch.setattr(sys, "stdout", plain)
    terminal.accept_streams()
    terminal.print_json({"bars": "█"})
    assert json.loads(plain.text) == {"bars": "█"}
