"""`kinfolk list` and `kinfolk data` from the command line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from PIL import Image

from conftest import Command, tiny_experiment
from kinfolk import aggregation, methods
from kinfolk.peers.attacks import ATTACKS


@pytest.fixture(autouse=True)
def _a_tiny_experiment_file() -> None:
    text = tomli_w.dumps(
        tiny_experiment(data={"clients": 6, "train": 10, "test": 10}, run={"rounds": 2, "evaluate_every": 1})
    )
    Path("tiny.toml").write_text(text, encoding="utf-8")


def test_list_shows_methods_with_their_settings_and_the_shipped_experiments(command: Command) -> None:
    shown = command("list").out
    for name in methods.names():
        assert re.search(rf"^{name}  \w", shown, flags=re.MULTILINE)
    assert "neighbors = 5  int  peers averaged with each round (k)" in shown
    assert re.search(r"shipped experiments: .*\bdigits\b", shown)


def test_list_takes_a_pattern(command: Command) -> None:
    assert list(command("list", "f*", "--json").json) == [name for name in methods.names() if name.startswith("f")]
    assert command("list", "fix*").out.startswith("fixed  Every client")
    assert "shipped" not in command("list", "fix*").out


def test_list_knows_rules_and_attacks(command: Command) -> None:
    listed = command("list", "rules", "--json").json
    assert list(listed) == aggregation.names()
    assert [setting["name"] for setting in listed["m-krum"]["settings"]] == ["byzantine", "printed", "keep"]
    assert all(entry["description"] for entry in listed.values())
    assert "byzantine = 1  int  bad peers that a client's list may hold (f)" in command("list", "rules").out
    lying = command("list", "attacks", "--json").json
    assert list(lying) == list(ATTACKS)
    assert [setting["name"] for setting in lying["nan"]["settings"]] == ["attackers", "attack_start"]
    assert {setting["name"] for setting in lying["gaming"]["settings"]} >= {"attack_scale", "attack_victim"}
    assert "aggregation rules (`kinfolk list rules`): balance, " in command("list").out


def test_list_as_json_has_every_setting(command: Command) -> None:
    listed = command("list", "random", "--json").json["random"]
    assert listed["description"].startswith("Each round every client")
    setting = {"name": "neighbors", "type": "int", "default": "5", "help": "peers averaged with each round (k)"}
    assert listed["settings"] == [setting]


def test_data_ls_shows_what_is_here_and_how_to_get_the_rest(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KINFOLK_DATA", str(tmp_path / "data"))
    shown = command("data", "ls").out
    assert re.search(r"^digits +1,797 +10 +1×8×8 +embedded +\S", shown, flags=re.MULTILINE)
    assert re.search(r"^mnist +70,000 +10 +1×28×28 +not here +\S", shown, flags=re.MULTILINE)
    assert "kinfolk data get NAME" in shown
    assert f"put the official files in {tmp_path / 'data'}/NAME" in shown
    listed = command("data", "ls", "--json").json
    assert listed["digits"]["state"] == "embedded"
    assert listed["cifar10"]["shape"] == [3, 32, 32]


def test_data_get_needs_nothing_for_the_embedded_digits(command: Command) -> None:
    ended = command("data", "get", "digits")
    assert ended.code == 0
    assert ended.out == "digits: comes with scikit-learn, nothing to get\n"


def test_data_split_shows_a_table_and_writes_a_picture(command: Command) -> None:
    ended = command("data", "split", "tiny.toml", "--png", "who.png")
    assert ended.code == 0
    assert "90°" in ended.out or "180°" in ended.out
    assert ended.out.splitlines()[-1] == "picture: who.png"
    with Image.open("who.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 100


def test_data_split_names_its_picture_after_the_experiment(command: Command) -> None:
    command("data", "split", "tiny.toml", "data.split.kind=iid")
    assert Path("tiny-split.png").is_file()


def test_data_split_as_json_counts_and_writes_no_picture(command: Command) -> None:
    counts = command("data", "split", "tiny.toml", "--json", "--seed", "1").json
    assert (counts["clients"], counts["classes"]) == (6, 10)
    assert np.array(counts["train"]).sum(axis=1).tolist() == [10] * 6
    assert counts["clusters"] == [0, 0, 0, 1, 1, 1]
    assert not list(Path().glob("*.png"))
