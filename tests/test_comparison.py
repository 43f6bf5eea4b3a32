"""Comparisons from the outside: rows by name, data without tests."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kinfolk
from conftest import Command, make_federation, tiny_experiment
from kinfolk.errors import UserError

SHORT = tiny_experiment(run={"rounds": 2})


def test_a_row_of_a_method_that_was_not_compared_is_one_line() -> None:
    comparison = kinfolk.compare(SHORT, ["random"], out="c")
    with pytest.raises(UserError, match="c does not compare 'randm': did you mean 'random'"):
        comparison.row("randm")


# -- nothing to test on ------------------------------------------------------------------------------------------


def test_a_run_without_test_samples_says_so_and_keeps_what_it_trained() -> None:
    heard: list[str] = []

    class Listen(kinfolk.Observer):
        def notice(self, text: str) -> None:
            heard.append(text)

    data = make_federation([10] * 4, tests=0)
    result = kinfolk.run(SHORT, data=data, out="a", observer=Listen())
    assert heard == ["no client has test samples of its own: its accuracy is not known"]
    assert math.isnan(result.accuracy)
    assert result.clients[0]["accuracy"] is None
    tested = kinfolk.run(SHORT, data=make_federation([10] * 4), out="b")
    assert result.weights().shape == tested.weights().shape


def test_a_comparison_without_test_samples_keeps_its_table(command: Command) -> None:
    data = make_federation([10] * 4, tests=0)
    comparison = kinfolk.compare(SHORT, ["random"], seeds=2, data=data, out="c")
    row = comparison.row("random")
    assert np.isnan([row.accuracy, row.best_accuracy, row.worst10, row.helped, row.hurt]).all()  # type: ignore[list-item]
    assert row.models_received == 16
    kept = json.loads(Path("c/comparison.json").read_text(encoding="utf-8"))
    assert [each["accuracy"] for each in kept["rows"]] == [None, None]
    shown = command("show", "c")
    assert shown.code == 0
    assert "random" in shown.out


@pytest.mark.parametrize("tests", [0, 7])
def test_only_data_without_tests_bring_the_notice(tests: int) -> None:
    assert len(make_federation([5] * 2, tests=tests).notes) == (tests == 0)


# -- the folder --------------------------------------------------------------------------------------------------


def paths_of(shown: dict[str, Any]) -> list[str]:
    return [path for paths in shown["runs"].values() for path in paths]


def test_a_comparison_is_found_from_elsewhere_and_after_it_was_moved(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinfolk.compare(SHORT, ["random"], out="here/c")
    assert paths_of(command("show", "here/c", "--json").json)[0] == "here/c/local-seed0"
    monkeypatch.chdir("here")
    assert paths_of(command("show", "c", "--json").json)[0] == "c/local-seed0"
    Path("c").rename("moved")
    shown = command("show", "moved", "--png", "curves.png", "--json")
    assert shown.err == ""
    assert shown.json["folder"] == "moved"
    assert paths_of(shown.json) == ["moved/local-seed0", "moved/random-seed0", "moved/oracle-seed0"]
    assert Path("curves.png").is_file()


def test_a_table_of_an_earlier_version_is_read(command: Command) -> None:
    made = kinfolk.compare(SHORT, ["random"], out="c").as_dict()
    earlier = {**made, "folder": "/other/c", "runs": {"local": ["/other/c/local-seed0"]}}
    Path("c/comparison.json").write_text(json.dumps(earlier), encoding="utf-8")
    shown = command("show", "c", "--json")
    assert (paths_of(shown.json), shown.err) == (["c/local-seed0"], "")
    assert shown.json["rows"] == made["rows"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"rows": []}'])
def test_a_table_that_is_none_is_damaged(command: Command, text: str) -> None:
    Path("c").mkdir()
    Path("c/comparison.json").write_text(text, encoding="utf-8")
    assert "c/comparison.json is damaged: it has no rows or no runs" in command("show", "c").message


def test_a_run_that_was_made_longer_is_noticed_where_its_table_is_shown(command: Command) -> None:
    kinfolk.compare(SHORT, ["random"], out="c")
    assert command("show", "c").err == ""
    kinfolk.resume("c/random-seed0", rounds=3)
    ended = command("show", "c")
    assert ended.code == 0
    assert ended.err.startswith("note: c/random-seed0 is 3 rounds long now, this table is of 2 rounds")
    with pytest.raises(UserError, match="c/random-seed0 holds another experiment, of 3 rounds where 2 are asked for"):
        kinfolk.compare(SHORT, ["random"], out="c")
    for name in ("local", "oracle"):
        kinfolk.resume(f"c/{name}-seed0", rounds=3)
    kinfolk.compare(SHORT, ["random"], overrides=["run.rounds=3"], out="c")
    assert command("show", "c").err == ""


def test_a_run_that_is_unfinished_again_or_gone_is_noticed(command: Command) -> None:
    kinfolk.compare(SHORT, ["random"], out="c")
    Path("c/random-seed0/summary.json").unlink()
    assert "c/random-seed0 is unfinished, 2 of 2 rounds now" in command("show", "c").err
    shutil.rmtree("c/local-seed0")
    assert "c/local-seed0, which this table is made of, is not there" in command("show", "c").err


def test_a_comparison_that_was_not_completed_says_how_to_go_on(command: Command) -> None:
    kinfolk.compare(SHORT, ["random"], out="c")
    Path("c/comparison.json").unlink()
    for words in (("show", "c"), ("resume", "c"), ("export", "c", "--to", "m")):
        told = command(*words).message
        assert told.startswith("c is a comparison that was not completed: to go on, ask for it again with --out c (")


def test_a_comparison_is_not_resumed_like_a_run(command: Command) -> None:
    kinfolk.compare(SHORT, ["random"], out="c")
    told = command("resume", "c").message
    assert (
        told == "c is a comparison and no run: name one of its runs, as c/local-seed0, or ask for it again with --out c"
    )


def test_a_folder_of_single_runs_is_no_comparison(command: Command) -> None:
    kinfolk.run(SHORT)
    assert command("show", "runs").message == "runs is not a run folder: it has no config.toml"


def test_one_run_in_a_folder_of_its_own_makes_no_comparison_of_that_folder(command: Command) -> None:
    assert command("run", "digits", "run.rounds=1", "--out", "some/random-seed0").code == 0
    told = command("show", "some").message
    assert told == "some is not a run folder: it has no config.toml; there is a run in some/random-seed0"
    command("compare", "digits", "run.rounds=1", "--methods", "random", "--out", "c")
    for path in ("comparison.json", "local-seed0/config.toml", "oracle-seed0/config.toml"):
        Path("c", path).unlink()
    assert "c is a comparison that was not completed" in command("show", "c").message


def test_a_neighbouring_folder_of_any_kind_does_not_hide_what_a_folder_is_not(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("words", 'method = "x"\nrun = 3\n'), ("none", ""), ("odd", "x = [")):
        Path("some", name).mkdir(parents=True)
        Path("some", name, "config.toml").write_text(f'{text}[kinfolk]\nversion = "0.1.0"\n', encoding="utf-8")
    Path("some/closed").mkdir()
    real = Path.is_file

    def refused(self: Path) -> bool:
        if self.parent.name == "closed":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self)

    monkeypatch.setattr(Path, "is_file", refused)
    assert command("show", "some").message == "some is not a run folder: it has no config.toml"
    kinfolk.run(SHORT, out="some/random-seed0")  # what comes after those is still found
    assert command("show", "some").message.endswith("; there is a run in some/random-seed0")
    with pytest.raises(UserError, match="some is not a run folder"):
        kinfolk.resume("some")


def test_a_damaged_run_leaves_its_comparisons_table_readable(command: Command) -> None:
    kinfolk.compare(SHORT, ["random"], out="c")
    Path("c/random-seed0/config.toml").write_text("x = [", encoding="utf-8")
    ended = command("show", "c")
    assert ended.code == 0
    assert "random" in ended.out
    assert ended.err.startswith("note: c/random-seed0/config.toml is not TOML")


@pytest.mark.parametrize("change", [{"runs": []}, {"runs": {"local": "a"}}, {"runs": {"local": [3]}}, {"rows": {}}])
def test_a_table_of_another_form_is_damaged(command: Command, change: dict[str, Any]) -> None:
    made = kinfolk.compare(SHORT, ["random"], out="c").as_dict()
    Path("c/comparison.json").write_text(json.dumps({**made, **change}), encoding="utf-8")
    assert "c/comparison.json is damaged: 'rows' must be" in command("show", "c").message
