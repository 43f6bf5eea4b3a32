"""PANM's settings: presets, ranges, what is refused and what is spoken of."""

from typing import Any

import pytest
import torch
from test_panm import N, engine_of, mixed_with, rows

import kinfolk
from conftest import tiny_experiment
from kinfolk.config import read
from kinfolk.errors import UserError
from kinfolk.methods.panm import PANM


def test_without_stage_one_matching_starts_from_random_lists_with_a_notice() -> None:
    assert PANM().notices(300) == []
    (notice,) = PANM(discover_rounds=0).notices(300)
    assert "random lists" in notice

    said = []

    class Listens(kinfolk.Observer):
        def notice(self, text: str) -> None:
            said.append(text)

    method = {"name": "panm", "neighbors": 2, "candidates": 3, "discover_rounds": 0}
    kinfolk.run(tiny_experiment(method=method), out="a", observer=Listens())
    assert notice in said

    engine = engine_of(neighbors=3, candidates=6, discover_rounds=0, match_every=3)
    engine.step(1, False)
    lists = rows(engine.shards[0].state.neighbors)
    assert all(len(mine) == 3 and i not in mine for i, mine in enumerate(lists))
    assert len({frozenset(mine) for mine in lists}) > N / 2
    assert mixed_with(engine) == lists
    engine.step(2, False)
    assert rows(engine.shards[0].state.neighbors) == lists
    engine.step(3, False)
    matched = rows(engine.shards[0].state.neighbors)
    assert matched != lists
    engine.step(4, False)
    assert rows(engine.shards[0].state.neighbors) == matched  # drawn once


@pytest.mark.parametrize(
    "bad",
    [
        *("alpha=1.01", "alpha=-0.01", "match_every=0", "neighbors=0", "candidates=0", "discover_rounds=-1"),
        "average=0",
        *("memory=0", "memory=1.1", "limit=0", "preset=best", "similarity=cosine", "matcher=both", "loss_score=linear"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(bad: str) -> None:
    with pytest.raises(UserError, match=bad.split("=")[0]):
        read(tiny_experiment(), ["method.name=panm", f"method.{bad}"])


def test_the_ends_of_the_ranges_and_k_above_l_are_fine() -> None:
    for good in (["alpha=0"], ["alpha=1"], ["neighbors=5", "candidates=2"], ["discover_rounds=0"], ["memory=1"]):
        read(tiny_experiment(), ["method.name=panm", *(f"method.{one}" for one in good)])
    method = {"name": "panm", "neighbors": 6, "candidates": 2, "discover_rounds": 2}
    assert torch.isfinite(kinfolk.run(tiny_experiment(method=method), out="a").weights()).all()


def test_a_run_that_ends_in_stage_one_and_a_share_that_is_not_used_are_spoken_of() -> None:
    (notice,) = PANM(discover_rounds=60).notices(60)
    assert "stage two never begins; try 20" in notice
    assert PANM(discover_rounds=59).notices(60) == []
    (notice,) = PANM(similarity="loss", alpha=1.0).notices(300)
    assert "method.alpha" in notice


def test_a_preset_fills_in_what_is_not_named() -> None:
    def resolved(*settings: str) -> tuple[Any, ...]:
        config = read(tiny_experiment(), ["method.name=panm", *(f"method.{one}" for one in settings)])
        method = config.sections()["method"]
        assert read(config.sections()) == config
        return tuple(method[key] for key in ("preset", "loss_score", "confirm", "matcher", "mingle", "company"))

    assert resolved() == ("robust", "log", True, "evidence", True, True)
    assert resolved("preset=paper") == ("paper", "inverse", False, "mixture", False, False)
    assert resolved("preset=paper", "loss_score=log") == ("paper", "log", False, "mixture", False, False)
    assert resolved("preset=paper", "matcher=evidence") == ("paper", "inverse", False, "evidence", False, False)
    assert resolved("confirm=false") == ("robust", "log", False, "evidence", True, True)
    assert resolved("mingle=false", "company=false") == ("robust", "log", True, "evidence", False, False)
    assert resolved("matcher=mixture", "loss_score=inverse") == ("robust", "inverse", True, "mixture", True, True)
