"""A thousand random stacks of vectors: our rules against NumPy, stack by stack, and against ByzFL if it is there."""

from __future__ import annotations

from collections.abc import Callable
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


def byzfl_rule(byzfl: Any, name: str, f: int) -> Callable[[Stack], np.ndarray]:
    made: dict[str, Callable[[], Any]] = {
        "mean": lambda: byzfl.Average(), "median": lambda: byzfl.Median(), "trimmed-mean": lambda: byzfl.TrMean(f),
        "krum": lambda: byzfl.Krum(f), "m-krum": lambda: byzfl.MultiKrum(f),
        "clipping": lambda: byzfl.CenteredClipping(L=1, tau=RADIUS),
    }  # fmt: skip
    return lambda stack: np.asarray(made[name]()(stack))


@pytest.mark.parametrize("name", PLAIN)
def test_a_thousand_stacks_come_out_as_in_byzfl(name: str) -> None:
    byzfl = pytest.importorskip("byzfl", exc_type=ImportError)
    for number in range(SHAPES):
        stacks, f = drawn(number)
        theirs = byzfl_rule(byzfl, name, f)
        np.testing.assert_allclose(ours(name, stacks, f), [theirs(stack) for stack in stacks], rtol=0, atol=1e-6)


def test_the_comparison_can_fail() -> None:
    stacks, f = drawn(3)
    assert np.abs(ours("median", stacks, f) - np.stack([stack.mean(axis=0) for stack in stacks])).max() > 1e-3
