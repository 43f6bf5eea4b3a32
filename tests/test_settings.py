"""Settings: what a user may write, and what is said when it is wrong."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

import pytest

from kinfolk import methods
from kinfolk.cohort.training import Training
from kinfolk.config import Data, Run
from kinfolk.data.partition import SPLITS
from kinfolk.errors import UserError, nearest
from kinfolk.peers.access import Access
from kinfolk.peers.faults import Faults
from kinfolk.settings import build, describe, peer_counts, setting

ALL = [Data, Run, Training, Access, Faults, *SPLITS.values(), *(methods.find(name) for name in methods.names())]


@dataclass(frozen=True)
class Sample:
    count: int = setting(5, "how many", ge=1, le=9)
    rate: float = setting(0.5, "how fast", gt=0, lt=1)
    limit: int | None = setting(None, "at most; none: no limit", ge=1)
    kind: Literal["soft", "hard"] = setting("soft", "which kind")
    on: bool = setting(False, "whether")

    def __post_init__(self) -> None:
        if self.on and self.kind == "hard":
            raise UserError("on and hard do not go together")


@dataclass(frozen=True)
class Needed:
    path: str = setting(help="where the file is")


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_setting_of_every_section_has_a_help_line_and_a_default(cls: type) -> None:
    for name, kind, default, text in describe(cls):
        assert text, name
        assert "\n" not in text
        assert kind
        assert default, name


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_a_setting_that_may_be_unset_is_unset_by_default(cls: Any) -> None:
    """Or leaving it out of the config of a run, as TOML has no null, would not bring it back."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if type(None) in get_args(hints[field.name]):
            assert field.default is None, field.name


def test_values_become_an_instance_and_the_rest_keeps_its_default() -> None:
    assert build(Sample, {"count": 3, "kind": "hard"}, "sample") == Sample(count=3, kind="hard")


def test_a_whole_number_is_a_rate_too_but_a_rate_is_no_count() -> None:
    assert build(Faults, {"loss": 0}, "faults").loss == 0
    with pytest.raises(UserError, match=r"'sample.count' = 3.0: input should be a valid integer"):
        build(Sample, {"count": 3.0}, "sample")


def test_none_takes_a_value_back_where_that_is_allowed() -> None:
    assert build(Sample, {"limit": "none"}, "sample").limit is None
    with pytest.raises(UserError, match="valid integer"):
        build(Sample, {"count": "none"}, "sample")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cont": 3}, "unknown key 'sample.cont': did you mean 'count'?"),
        ({"zzz": 3}, "unknown key 'sample.zzz': known: count, kind, limit, on, rate"),
        ({"count": "3"}, "'sample.count' = '3': input should be a valid integer"),
        ({"count": True}, "'sample.count' = True: input should be a valid integer"),
        ({"count": 0}, "'sample.count' = 0: must be at least 1"),
        ({"count": 10}, "'sample.count' = 10: must be at most 9"),
        ({"rate": 0.0}, "'sample.rate' = 0.0: must be greater than 0"),
        ({"rate": 1}, "'sample.rate' = 1.0: must be less than 1"),
        ({"rate": float("nan")}, "'sample.rate' = nan: must be a finite number"),
        ({"rate": float("-inf")}, "'sample.rate' = -inf: must be a finite number"),
        ({"limit": 0}, "'sample.limit' = 0: must be at least 1"),
        ({"kind": "firm"}, "'sample.kind' = 'firm': input should be 'soft' or 'hard'"),
        ({"on": "yes"}, "'sample.on' = 'yes': input should be a valid boolean"),
        ({"on": True, "kind": "hard"}, "[sample] on and hard do not go together"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        build(Sample, values, "sample")
    assert str(caught.value) == words


def test_a_setting_without_a_default_is_asked_for_by_its_help_line() -> None:
    with pytest.raises(UserError, match=r"'needed.path' is missing: where the file is"):
        build(Needed, {}, "needed")


def test_settings_are_described_in_the_words_of_an_experiment_file() -> None:
    assert describe(Sample) == [
        ("count", "int", "5", "how many"),
        ("rate", "float", "0.5", "how fast"),
        ("limit", "int or none", "none", "at most; none: no limit"),
        ("kind", '"soft" or "hard"', '"soft"', "which kind"),
        ("on", "bool", "false", "whether"),
    ]


def test_the_nearest_word_is_offered_or_else_the_list() -> None:
    assert nearest("rotatoin", ["rotation", "iid"]) == "did you mean 'rotation'?"
    assert nearest("xyz", ["rotation", "iid"]) == "known: iid, rotation"


def test_a_setting_can_be_a_list_and_every_entry_is_checked() -> None:
    @dataclass(frozen=True)
    class Many:
        ids: list[int] = setting([], "which ones", ge=0)

    assert build(Many, {"ids": [3, 0]}, "many").ids == [3, 0]
    assert build(Many, {}, "many").ids == []
    assert Many().ids is not Many().ids
    assert describe(Many) == [("ids", "list of int", "[]", "which ones")]
    with pytest.raises(UserError, match=r"'many.ids' = \[1, -2\]: must be at least 0"):
        build(Many, {"ids": [1, -2]}, "many")
    with pytest.raises(UserError, match=r"'many.ids' = 3: input should be a valid list"):
        build(Many, {"ids": 3}, "many")


@dataclass(frozen=True)
class Counts:
    choice: str = setting("random", "how")
    always: int = setting(4, "peers", peers=True)
    sometimes: int = setting(5, "peers of random", peers={"choice": "random"})
    perhaps: int | None = setting(None, "peers, or as many as there are", peers=True)
    rounds: int = setting(6, "not peers")


def test_numbers_of_peers_are_those_in_use() -> None:
    assert peer_counts(Counts()) == {"always": 4, "sometimes": 5}
    assert peer_counts(Counts(choice="afind", perhaps=3)) == {"always": 4, "perhaps": 3}
