"""Rules and attacks on a GPU give what they give on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kinfolk
from conftest import tiny_experiment
from kinfolk import aggregation
from kinfolk.peers.attacks import ATTACKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def both(method: str, faults: dict[str, Any], rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The models after a run on a CPU and on a GPU."""
    found = []
    for device in ("cpu", "cuda"):
        config = tiny_experiment(
            method={"name": method}, faults=faults, aggregation={"rule": rule},
            run={"device": device, "precision": "float64", "engine": "inprocess"},
        )  # fmt: skip
        found.append(kinfolk.run(config, out=device).weights())
    return found[0], found[1]


@pytest.mark.parametrize("method", ["random", "panm", "fedavg"])
@pytest.mark.parametrize("rule", aggregation.names())
def test_rules(rule: str, method: str) -> None:
    if rule == "ubar" and method == "fedavg":
        return
    cpu, cuda = both(method, {"attackers": 0.2, "attack": "sign-flip", "loss": 0.1, "absent": 0.1}, rule)
    torch.testing.assert_close(cuda, cpu, rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", ["random", "afind+", "fedavg"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(attack: str, method: str) -> None:
    if attack == "gaming" and method == "fedavg":
        return
    cpu, cuda = both(method, {"attackers": 0.3, "attack": attack, "loss": 0.1, "absent": 0.1}, "mean")
    torch.testing.assert_close(cuda, cpu, rtol=0, atol=1e-8)
