"""Ctrl-C while the command line starts: one line, whatever is being imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
# As an import that is interrupted does: it makes another exception of it, or swallows it.
CTRL_C = """
import os, signal, sys
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException:
    {then}
sys.exit(7)
"""
STARTS = {
    "python -m kinfolk": ["-m", "kinfolk"],
    "kinfolk": ["-c", "import sys; sys.argv[0] = 'kinfolk'; from kinfolk.__main__ import main; main()"],
}


def start(module: str, text: str, words: list[str], ignored: bool = False) -> subprocess.CompletedProcess[str]:
    """Start Python with a module of this name and text in the place of the real one."""
    Path("fake").mkdir()
    Path("fake", f"{module}.py").write_text(text, encoding="utf-8")
    found = [str(Path("fake").resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        return subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("begin", STARTS.values(), ids=STARTS.keys())
@pytest.mark.parametrize("module", ["typer", "torch"])
@pytest.mark.parametrize("then", ["raise ImportError('of another kind') from None", "sys.exit(0)"])
def test_ctrl_c_during_an_import_is_one_line(begin: list[str], module: str, then: str) -> None:
    ended = start(module, CTRL_C.format(then=then), [*begin, "run", "digits"])
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "kinfolk: stopped\n")


def test_ctrl_c_is_ignored_where_the_parent_has_it_ignored() -> None:
    ended = start("torch", CTRL_C.format(then="pass"), ["-m", "kinfolk", "run", "digits"], ignored=True)
    assert (ended.returncode, ended.stderr) == (7, "")


def test_ctrl_c_between_imports_is_one_line() -> None:
    code = "import os, signal; from kinfolk import __main__, cli; cli.main = lambda: os.kill(os.getpid(), 2); "
    ended = start("nothing", "", ["-c", code + "__main__.main()"])
    assert (ended.returncode, ended.stderr) == (130, "kinfolk: stopped\n")


def test_the_installed_command_begins_there() -> None:
    module, _, name = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["scripts"]["kinfolk"].partition(":")
    assert module == "kinfolk.__main__"
    assert callable(getattr(import_module(module), name))
