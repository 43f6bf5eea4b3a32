"""What a device can do at best, measured: large matrix products, and copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from kinfolk.cohort.program import rounding

SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices
COPY = {"cpu": 2**28, "cuda": 2**30}  # bytes
AT_ONCE = {"cpu": 1, "cuda": 10}  # calls in one measurement: starting one must not count


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long the work takes until the device has finished it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def peaks(device: torch.device, precisions: Sequence[str], scale: float = 1.0) -> dict[str, float]:
    """FLOP/s of a large matrix product in each precision, and bytes/s read and written by a copy ("copy").

    scale: factor on the sizes, for tests.
    """
    side = max(1, int(SIDE[device.type] * scale))
    found = {precision: 2 * side**3 / _product(device, precision, side) for precision in precisions}
    size = max(1, int(COPY[device.type] * scale))
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    found["copy"] = 2 * size / _fastest(lambda: target.copy_(source), device)
    return found


def _product(device: torch.device, precision: str, side: int) -> float:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    into = torch.empty_like(a)
    with rounding(device, precision):
        return _fastest(lambda: torch.mm(a, b, out=into), device)


def _fastest(call: Callable[[], object], device: torch.device, least: int = 3, budget: float = 0.4) -> float:
    """Seconds of one call, the best of several, after one to warm up."""
    many = AT_ONCE[device.type]

    def work() -> None:
        for _ in range(many):
            call()

    taken = [seconds(work, device)]
    while len(taken) < 2 or (sum(taken[1:]) < budget and len(taken) < 50) or (len(taken) <= least and taken[-1] < 1):
        taken.append(seconds(work, device))
    return min(taken[1:]) / many
