"""The file of what a method notes in every round: there and back, cut off, damaged."""

import math
from pathlib import Path

import pytest

from kinfolk.errors import UserError
from kinfolk.runs.rounds import FILE, RoundLog, read_rounds

ROWS = [{"round": t, "entropy": 0.1 * t, "share": math.nan if t == 1 else 1 / 3} for t in (1, 2, 3)]


def test_rows_come_back_with_all_their_digits(tmp_path: Path) -> None:
    log = RoundLog(tmp_path)
    log.append(ROWS[:2])
    log.append(ROWS[2:])
    assert read_rounds(tmp_path) == [ROWS[0] | {"share": None}, *ROWS[1:]]
    assert (tmp_path / FILE).read_text().splitlines()[0] == "round,entropy,share"


def test_nothing_noted_means_no_file(tmp_path: Path) -> None:
    RoundLog(tmp_path).append([])
    RoundLog(tmp_path).truncate(3)
    assert not (tmp_path / FILE).exists()
    assert read_rounds(tmp_path) == []


def test_later_rounds_are_forgotten_and_can_be_added_again(tmp_path: Path) -> None:
    log = RoundLog(tmp_path)
    log.append(ROWS)
    whole = (tmp_path / FILE).read_bytes()
    for kept in (2, 0):
        log.truncate(kept)
        assert [row["round"] for row in read_rounds(tmp_path)] == list(range(1, kept + 1))
        log.append(ROWS[kept:])
        assert (tmp_path / FILE).read_bytes() == whole


def test_half_a_line_is_left_out_and_removed(tmp_path: Path) -> None:
    log = RoundLog(tmp_path)
    log.append(ROWS[:2])
    whole = (tmp_path / FILE).read_bytes()
    with open(tmp_path / FILE, "ab") as file:
        file.write(b"3,0.3")
    assert len(read_rounds(tmp_path)) == 2
    log.repair()
    assert (tmp_path / FILE).read_bytes() == whole


@pytest.mark.parametrize("line", ["x,0.1,0.2", "3,oops,0.2", "3,0.1,0.2,0.3", ",0.1,0.2"])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    RoundLog(tmp_path).append(ROWS)
    with open(tmp_path / FILE, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=r"rounds.csv is damaged in line 5"):
        read_rounds(tmp_path)
