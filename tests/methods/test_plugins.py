"""Methods that installed packages add, and packages that fail to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conftest import Command
from kinfolk.methods import registry

GOOD = """
from dataclasses import dataclass
import kinfolk

@kinfolk.register("polite")
@dataclass(frozen=True)
class Polite:
    "Says nothing."

    def start(self, cohort): ...
    def step(self, t, cohort, state, peers): ...
"""


def install(monkeypatch: pytest.MonkeyPatch, package: str, text: str) -> None:
    """A package with one module of this text, which is its entry point."""
    home, module = Path(package).resolve(), package.replace("-", "_")
    about = home / f"{module}-1.0.dist-info"
    about.mkdir(parents=True)
    (home / f"{module}.py").write_text(text, encoding="utf-8")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[kinfolk.methods]\nof-{package} = {module}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(home))


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.setattr(registry, "_plugins_loaded", False)
    if hasattr(registry, "_broken"):
        monkeypatch.setattr(registry, "_broken", [])


BROKEN = {
    "a module that it needs": ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
    "a bug of several lines": ("raise ValueError('one\\n\\n two')\n", "ValueError: one two"),
    "a way out": ("import sys\nsys.exit('sorry')\n", "SystemExit: sorry"),
    "a name that is taken": (GOOD.replace("polite", "random"), "ValueError: the method name 'random' is taken by"),
}


@pytest.mark.parametrize(("text", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_plugin_that_cannot_be_loaded_is_told_of_and_the_rest_works(
    command: Command, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    install(monkeypatch, "kinfolk-broken", text)
    install(monkeypatch, "kinfolk-good", GOOD)
    monkeypatch.delitem(sys.modules, "kinfolk_good", raising=False)  # of another of these tests
    told = f"the plugin 'of-kinfolk-broken' of package kinfolk-broken cannot be loaded: {reason}"
    listed = command("list", "--json")
    assert listed.code == 0
    assert {"random", "polite"} <= listed.json.keys()
    assert (listed.err.count("\n"), listed.err[: len(told) + 6]) == (1, f"note: {told}")
    ended = command("run", "digits", "method.name=zzz")
    assert ended.code == 2
    assert ended.message.startswith("unknown method 'zzz': known: ")
    assert told in ended.message
    assert "note:" not in ended.err  # it has been said


def test_without_plugins_an_unknown_method_is_all_there_is_to_say(command: Command) -> None:
    assert "plugin" not in command("run", "digits", "method.name=zzz").err
