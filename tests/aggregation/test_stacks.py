"""A thousand random stacks of vectors: our rules against NumPy, what ByzFL found, and ByzFL if it is there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kinfolk.aggregation import Clipping, Inbox, Krum, Mean, Median, MKrum, TrimmedMean

SHAPES, EACH = 40, 25  # a thousand
RADIUS = 1.5
Stack = np.ndarray  # [n, d]


def drawn(number: int) -> tuple[np.ndarray, int]:
    """Stacks [25, n, d] with some vectors far out, and how many bad ones to reckon with."""
    source = np.random.default_rng(number)
    n, d = int(source.integers(3, 16)), int(source.integers(1, 60))
    f = int(source.integers(0, (n - 1) // 2 + 1))
    stacks = source.standard_normal((EACH, n, d))
    far = source.random((EACH, n, 1)) < 0.2
    return stacks + np.where(far, 10.0 * source.standard_normal((EACH, n, 1)), 0.0), f


def squares(stack: Stack) -> np.ndarray:
    return np.asarray(((stack[:, None] - stack[None]) ** 2).sum(axis=2))


def nearest(stack: Stack, f: int) -> np.ndarray:
    """Places in the order of Krum's scores: sums over the n - f smallest squares, the 0 to oneself among them."""
    return np.argsort(np.sort(squares(stack), axis=1)[:, : len(stack) - f].sum(axis=1), kind="stable")


def trimmed(stack: Stack, f: int) -> np.ndarray:
    return np.asarray(np.sort(stack, axis=0)[f : len(stack) - f].mean(axis=0))


def clipped(stack: Stack, f: int) -> np.ndarray:
    """One step of centered clipping from the origin."""
    lengths = np.linalg.norm(stack, axis=1, keepdims=True)
    return np.asarray((stack * np.minimum(1.0, RADIUS / lengths)).mean(axis=0))


PLAIN: dict[str, Callable[[Stack, int], np.ndarray]] = {
    "mean": lambda stack, f: stack.mean(axis=0),
    "median": lambda stack, f: np.median(stack, axis=0),
    "trimmed-mean": trimmed,
    "krum": lambda stack, f: stack[nearest(stack, f)[0]],
    "m-krum": lambda stack, f: stack[nearest(stack, f)[: len(stack) - f]].mean(axis=0),
    "clipping": clipped,
}


def ours(name: str, stacks: np.ndarray, f: int) -> np.ndarray:
    """All stacks at once: each is a client with its own model, the first, and those of peers."""
    models = torch.from_numpy(stacks)
    count, d = models.shape[0], models.shape[2]
    if name == "clipping":  # around a model that takes no part, as a server's does
        own, theirs, mine = torch.zeros(count, d, dtype=torch.float64), models, 0.0
    else:
        own, theirs, mine = models[:, 0], models[:, 1:], 1.0
    rows = torch.arange(count * theirs.shape[1]).view(count, -1)
    rule: Any = {
        "mean": Mean(), "median": Median(), "trimmed-mean": TrimmedMean(f), "krum": Krum(f), "m-krum": MKrum(f),
        "clipping": Clipping(RADIUS),
    }[name]  # fmt: skip
    mixed, _ = rule.combine(Inbox(own, theirs.reshape(-1, d), rows, mine=mine))
    return np.asarray(mixed.numpy())


@pytest.mark.parametrize("name", PLAIN)
def test_a_thousand_stacks_come_out_as_in_numpy(name: str) -> None:
    for number in range(SHAPES):
        stacks, f = drawn(number)
        wanted = np.stack([PLAIN[name](stack, f) for stack in stacks])
        np.testing.assert_allclose(ours(name, stacks, f), wanted, rtol=0, atol=1e-9)


# -- against ByzFL -----------------------------------------------------------------------------------------------


def direction(number: int, d: int) -> np.ndarray:
    """[d] of length one: along it results are compared with what was written down."""
    vector = np.random.default_rng(1000 + number).standard_normal(d)
    return np.asarray(vector / np.linalg.norm(vector))


@pytest.mark.parametrize("name", PLAIN)
def test_a_thousand_stacks_come_out_as_byzfl_found_them(name: str) -> None:
    """What ByzFL gave is in byzfl.json: one number for each stack, its result along a random direction."""
    written = json.loads(Path(__file__).with_name("byzfl.json").read_text(encoding="utf-8"))
    for number in range(SHAPES):
        stacks, f = drawn(number)
        along = direction(number, stacks.shape[2])
        assert np.allclose(stacks.mean(axis=1) @ along, written["mean"][number], atol=1e-8), "NumPy draws other stacks"
        np.testing.assert_allclose(ours(name, stacks, f) @ along, written[name][number], rtol=0, atol=1e-6)


def byzfl_result(name: str, stack: Stack, f: int) -> np.ndarray:
    """By ByzFL's aggregators, without the rest of that package, which needs torchvision and more."""
    found = importlib.util.find_spec("byzfl")
    if found is None:
        pytest.skip("ByzFL is not here: pip install --no-deps byzfl==0.0.11")
    sys.modules.setdefault("byzfl", importlib.util.module_from_spec(found))  # the package, with nothing run of it
    theirs = importlib.import_module("byzfl.aggregators")
    rules: dict[str, Any] = {
        "mean": theirs.Average(), "median": theirs.Median(), "trimmed-mean": theirs.TrMean(f), "krum": theirs.Krum(f),
        "m-krum": theirs.MultiKrum(f), "clipping": theirs.CenteredClipping(L=1, tau=RADIUS),
    }  # fmt: skip
    return np.asarray(rules[name](stack))  # made anew each time: clipping remembers


@pytest.mark.parametrize("name", PLAIN)
def test_a_thousand_stacks_come_out_as_in_byzfl(name: str) -> None:
    for number in range(SHAPES):
        stacks, f = drawn(number)
        theirs = [byzfl_result(name, stack, f) for stack in stacks]
        np.testing.assert_allclose(ours(name, stacks, f), theirs, rtol=0, atol=1e-6)


def write_down() -> None:
    """`python tests/aggregation/test_stacks.py` where ByzFL is installed: write byzfl.json anew."""
    found: dict[str, Any] = {"byzfl": importlib.metadata.version("byzfl")}
    for name in PLAIN:
        found[name] = []
        for number in range(SHAPES):
            stacks, f = drawn(number)
            along = direction(number, stacks.shape[2])
            found[name].append([round(float(byzfl_result(name, stack, f) @ along), 9) for stack in stacks])
    text = json.dumps(found, separators=(",", ":")).replace("],[", "],\n[")
    Path(__file__).with_name("byzfl.json").write_text(text + "\n", encoding="utf-8")


def test_the_comparison_can_fail() -> None:
    stacks, f = drawn(3)
    assert np.abs(ours("median", stacks, f) - np.stack([stack.mean(axis=0) for stack in stacks])).max() > 1e-3


if __name__ == "__main__":
    write_down()
