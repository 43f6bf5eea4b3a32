"""Comparisons from the outside: rows by name, data without tests."""

from __future__ import annotations

import json
import math
from pathlib import Path

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
