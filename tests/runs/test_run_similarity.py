"""The file of similarities: there and back, cut off, damaged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinfolk.errors import UserError
from kinfolk.runs.similarity import FILE, SimilarityLog, read_similarity


def columns(**changes: Any) -> dict[str, Any]:
    rows = {
        "client": [0, 0, 4],
        "peer": [1, 7, 2],
        "similarity": [0.123456789012, -1e-12, np.inf],
        "listed": [True, False, False],
        "kin": [1, 0, -1],
        "chosen": [False, True, False],
        "looked_at": [True, True, False],
    }
    return {name: np.array(value) for name, value in (rows | changes).items()}


def test_rows_come_back(tmp_path: Path) -> None:
    log = SimilarityLog(tmp_path)
    log.add(3, columns())
    log.add(5, columns())
    seen = read_similarity(tmp_path)
    assert seen.round.tolist() == [3, 3, 3, 5, 5, 5]
    assert seen.client[:3].tolist() == [0, 0, 4]
    assert seen.peer[:3].tolist() == [1, 7, 2]
    assert seen.similarity[:2].tolist() == [0.123456789, -1e-12]
    assert np.isnan(seen.similarity[2])
    assert seen.listed[:3].tolist() == [True, False, False]
    assert seen.kin[:3].tolist() == [1, 0, -1]
    assert seen.chosen[:3].tolist() == [False, True, False]
    assert seen.looked_at[:3].tolist() == [True, True, False]


def test_no_file_means_no_rows(tmp_path: Path) -> None:
    seen = read_similarity(tmp_path)
    assert seen.round.shape == seen.similarity.shape == (0,)
    assert seen.kin.dtype == np.int8
    SimilarityLog(tmp_path).add(1, {name: value[:0] for name, value in columns().items()})
    assert not (tmp_path / FILE).exists()


def test_later_rounds_are_forgotten_and_can_be_added_again(tmp_path: Path) -> None:
    log = SimilarityLog(tmp_path)
    for t in (1, 2, 3):
        log.add(t, columns())
    whole = (tmp_path / FILE).read_bytes()
    log.truncate(2)
    assert set(read_similarity(tmp_path).round.tolist()) == {1, 2}
    log.add(3, columns())
    assert (tmp_path / FILE).read_bytes() == whole
    log.truncate(0)
    assert not read_similarity(tmp_path).round.size
    for t in (1, 2, 3):
        log.add(t, columns())
    assert (tmp_path / FILE).read_bytes() == whole


@pytest.mark.parametrize("cut", [3, 40, 70, 100, -1])
def test_a_line_that_was_cut_off_is_left_out_and_removed(tmp_path: Path, cut: int) -> None:
    log = SimilarityLog(tmp_path)
    log.add(1, columns())
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:cut])
    assert len(read_similarity(tmp_path).round) < 3
    log.repair()
    log.truncate(0)
    log.add(1, columns())
    assert (tmp_path / FILE).read_bytes() == whole


@pytest.mark.parametrize("line", ["1,2,3", "1,2,x,0.5,true,true,true,true", "1,2,3,0.5,maybe,true,true,true"])
def test_damage_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    SimilarityLog(tmp_path).add(1, columns())
    with open(tmp_path / FILE, "a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"similarity.csv is damaged in line 5"):
        read_similarity(tmp_path)
