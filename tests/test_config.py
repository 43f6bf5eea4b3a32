"""An experiment as data: there and back, who wins, and what makes two runs the same."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import kinfolk
from conftest import tiny_experiment
from kinfolk import methods
from kinfolk.config import Config, locate, read, resolve, shipped
from kinfolk.data.partition import SPLITS
from kinfolk.errors import UserError
from tiny_study import Ran


def write(path: Path, **sections: Any) -> Path:
    path.write_text(tomli_w.dumps(tiny_experiment(**sections)), encoding="utf-8")
    return path


# -- there and back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", sorted(SPLITS))
def test_a_resolved_experiment_comes_back_from_toml_as_it_was(split: str) -> None:
    config = read(tiny_experiment(), [f"data.split.kind={split}", "training.steps=4", "run.chunk=3"])
    assert resolve(tomllib.loads(tomli_w.dumps(config.sections()))) == config


@pytest.mark.parametrize("method", methods.names())
def test_every_method_comes_back_with_all_its_settings(method: str) -> None:
    config = read(tiny_experiment(), [f"method.name={method}"])
    assert config.method_name == method
    assert resolve(config.sections()) == config


def test_a_resolved_experiment_leaves_nothing_to_a_default() -> None:
    sections = Config().sections()
    assert sections["run"]["rounds"] == 50
    assert sections["faults"] == {"loss": 0.0, "absent": 0.0, "absent_rounds": 1}
    assert sections["data"]["split"]["kind"] == "iid"
    assert "steps" not in sections["training"]  # not set, and TOML has no word for that


def test_every_shipped_experiment_is_sound() -> None:
    assert "digits" in shipped()
    for name, path in shipped().items():
        assert read(name) == read(path)
        assert read(name).name == path.stem


def test_an_experiment_is_called_after_its_file_unless_it_has_a_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[run]\nrounds = 3\n", encoding="utf-8")
    assert read(path).name == "mine"
    path.write_text('name = "other"\n', encoding="utf-8")
    assert read(path).name == "other"


# -- who wins ----------------------------------------------------------------------------------------------------


def test_an_override_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.toml")
    assert read(path).run.rounds == 4
    assert read(path, ["run.rounds=7"]).run.rounds == 7
    assert read(path, ["run.rounds=7", "run.rounds=8"]).run.rounds == 8
    assert read(path).training.momentum == 0.9


def test_overrides_are_toml_values_or_bare_words() -> None:
    config = read(
        tiny_experiment(), ["name=mine", "training.lr=1e-2", 'data.scale="unit"', "run.device=cuda", "faults.loss=0.5"]
    )
    assert config.name == "mine"
    assert config.training.lr == 0.01
    assert config.data.scale == "unit"
    assert config.run.device == "cuda"
    assert config.faults.loss == 0.5
    assert read(tiny_experiment(), ["data.split={kind='iid'}"]) == read(tiny_experiment(), ["data.split.kind=iid"])


def test_an_override_can_take_back_what_the_file_sets() -> None:
    assert read(tiny_experiment()).data.train == 20
    assert read(tiny_experiment(), ["data.train=none"]).data.train is None


def test_another_method_leaves_behind_the_settings_that_it_does_not_have() -> None:
    assert read(tiny_experiment(), ["method.name=fedavg"]).method == methods.find("fedavg")()
    assert read(tiny_experiment(), ["method.name=fixed"]).method.neighbors == 2


def test_another_model_leaves_behind_the_options_that_it_does_not_have() -> None:
    assert read(tiny_experiment(), ["model.name=linear"]).model_options == {}


def test_another_split_leaves_behind_the_settings_that_it_does_not_have() -> None:
    assert read(tiny_experiment(), ["data.split.kind=iid"]).split == SPLITS["iid"]()
    assert read(tiny_experiment(), ["data.split.kind=label-swap"]).split == SPLITS["label-swap"](clusters=2)


@pytest.mark.parametrize(
    ("choice", "setting"),
    [
        ("method.name=fedavg", "method.participation=0.25"),
        ("data.split.kind=dirichlet", "data.split.alpha=0.7"),
    ],
)
def test_a_setting_of_the_new_kind_may_stand_before_or_after_it(choice: str, setting: str) -> None:
    after = read(tiny_experiment(), [choice, setting])
    assert read(tiny_experiment(), [setting, choice]) == after
    assert read(tiny_experiment(), [choice]) != after


def test_an_override_that_the_new_kind_does_not_have_is_refused_wherever_it_stands() -> None:
    for overrides in (["method.neighbors=1", "method.name=fedavg"], ["method.name=fedavg", "method.neighbors=1"]):
        with pytest.raises(UserError, match=r"unknown key 'method.neighbors'"):
            read(tiny_experiment(), overrides)


def test_the_file_is_blamed_for_its_own_mistakes_only(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.toml")
    with pytest.raises(UserError, match=r"^unknown key 'run.round': did you mean 'rounds'\?$"):
        read(path, ["run.round=3"])
    write(path, run={"round": 3})
    with pytest.raises(UserError, match=r"tiny.toml: unknown key 'run.round'"):
        read(path, ["run.rounds=3"])


def test_reading_does_not_change_the_dict_it_is_given() -> None:
    sections = tiny_experiment()
    read(sections, ["run.rounds=9", "method.name=local"])
    assert sections == tiny_experiment()


def test_a_file_is_found_by_path_or_by_the_name_it_is_shipped_under(tmp_path: Path) -> None:
    path = tmp_path / "noext"
    path.write_text("", encoding="utf-8")
    assert locate(path) == path
    assert locate("digits").name == "digits.toml"


# -- the same run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "run.rounds=9",
        "run.evaluate_every=3",
        "run.checkpoint_every=1",
        "run.engine=sharded",
        "run.shards=3",
        "run.device=auto",
        "run.chunk=2",
        "run.watch=[0]",
        "run.watch_rounds=[1]",
        "run.watch_all=true",
    ],
)
def test_identity_does_not_change_with_how_long_or_where(override: str) -> None:
    assert read(tiny_experiment(), [override]).identity() == read(tiny_experiment()).identity()


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=1",
        "run.precision=float64",
        "data.train=19",
        "data.scale=unit",
        "data.split.clusters=4",
        "model.hidden=15",
        "model.name=linear",
        "training.lr=0.2",
        "training.steps=3",
        "method.neighbors=3",
        "method.name=fixed",
        "faults.loss=0.1",
        "peers.reachable=3",
        "peers.reachable_from=links.csv",
    ],
)
def test_identity_changes_with_everything_that_changes_the_numbers(override: str) -> None:
    assert read(tiny_experiment(), [override]).identity() != read(tiny_experiment()).identity()


def test_identity_does_not_depend_on_whether_a_default_was_written_out() -> None:
    assert resolve(read(tiny_experiment()).sections()).identity() == read(tiny_experiment()).identity()


# -- variants ----------------------------------------------------------------------------------------------------


def test_another_method_keeps_the_settings_that_both_have() -> None:
    config = read(tiny_experiment())
    assert config.with_method("fixed").method == methods.find("fixed")(neighbors=2)
    assert config.with_method("fixed", neighbors=3).method.neighbors == 3
    assert config.with_method("fedavg").method == methods.find("fedavg")()
    assert config.with_method("fedavg").data == config.data


def test_another_run_section_keeps_the_rest_and_is_checked() -> None:
    config = read(tiny_experiment(), ["run.checkpoint_every=2"])
    assert config.with_run(seed=5).run.seed == 5
    assert config.with_run(seed=5).run.checkpoint_every == 2
    with pytest.raises(UserError, match=r"'run.seed' = -1: must be at least 0"):
        config.with_run(seed=-1)


def test_a_file_may_begin_with_the_mark_of_a_windows_editor() -> None:
    plain, marked = write(Path("plain.toml")), Path("marked.toml")
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert read(marked).sections() == read(plain).sections()


# -- settings that do nothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "notices"),
    [
        ({}, []),
        ({"engine": "sharded", "shards": 4}, []),
        ({"watch": [0], "watch_all": True, "watch_rounds": [1]}, []),
        ({"shards": 4}, ["run.shards = 4 is ignored: run.engine = 'sharded' is what uses it"]),
        ({"engine": "sharded", "shards": 9}, ["run.shards = 9, but there are only 8 clients: using 8"]),
        ({"watch_all": True}, ["run.watch_all is ignored: run.watch names no client"]),
        ({"watch_rounds": [1]}, ["run.watch_rounds is ignored: run.watch names no client"]),
    ],
)
def test_settings_of_the_run_that_do_nothing_are_told_of(run: dict[str, Any], notices: list[str]) -> None:
    seen = Ran()
    kinfolk.run(tiny_experiment(run={"rounds": 1, **run}, method={"name": "panm"}), observer=seen)
    assert [text for text in seen.notices if "run." in text] == notices
