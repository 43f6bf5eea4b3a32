"""One job, measured: the plain loop and the cohort take turns in one process, so that a busy machine hurts both."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kinfolk.bench.jobs import Job, Side, sides
from kinfolk.bench.machine import seconds
from kinfolk.bench.work import flops, traffic
from kinfolk.cohort.program import rounding

Row = dict[str, Any]

# How far the first round may be from the plain loop's in true float32: the norm of the difference over the norm, of a
# client's update or of the losses that it finds. CLOSE is for the median of the clients in float32. In a coarser
# precision it may be FACTOR times as far off as the plain loop itself when PyTorch computes it in that precision:
# rounding turns ReLUs and winners of pooling windows over, so how much it changes depends on the net. A single client
# may be much further off, but one that was trained wrongly or not at all is off by 1 or more.
CLOSE = 1e-4
FACTOR = 2.0
WORST = 0.5
WARM_UP = {"cpu": 1, "cuda": 3}  # rounds before it counts: a GPU's are recorded in the second and replayed in the third


def precisions(device: torch.device) -> list[str]:
    """What a cohort can compute in on this device, float64 aside."""
    return ["float32", "tf32", "bf16"] if device.type == "cuda" else ["float32", "bf16"]


def measure(
    job: Job,
    device: torch.device,
    rounds: int,
    wanted: list[str] | None = None,
    peaks: dict[str, float] | None = None,
    chunk: int | None = None,
    budget: float = math.inf,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """A row for each precision in `wanted` (default: all), with its share of the `peaks` if they are given.

    No further round is begun after `budget` seconds, but one is always counted. `tell` hears of every round, and of the
    warm-up before them.
    """
    began = time.perf_counter()
    data = job.federation().to(device, torch.float32)
    loop, ours = sides(job, data, device, wanted or precisions(device), chunk)
    tell("warming up")
    checks = _checked(loop, ours, device)
    warm = {name: [checks[name].seconds] for name in ours}
    for t in range(2, WARM_UP[device.type] + 1):
        if t == 2:  # the first was in true float32
            loop(t)
        for name, side in ours.items():
            warm[name].append(seconds(lambda t=t, side=side: side(t), device))  # type: ignore[misc]
    plain: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in ours}
    for number in range(rounds):
        if number and time.perf_counter() - began > budget:
            break
        tell(f"round {number + 1} of {rounds}")
        t = 1 + WARM_UP[device.type] + number
        plain.append(seconds(lambda t=t: loop(t), device))  # type: ignore[misc]
        for name, side in ours.items():
            times[name].append(seconds(lambda t=t, side=side: side(t), device))  # type: ignore[misc]
    return [_row(job, name, plain, times[name], warm[name], checks[name], peaks) for name in ours]


@dataclass(frozen=True)
class Check:
    """The first round done both ways."""

    seconds: float  # of ours
    off: Tensor  # [m] how far each client is off the plain loop in true float32
    bound: float  # for the median of them


def _checked(loop: Side, ours: dict[str, Side], device: torch.device) -> dict[str, Check]:
    """Do the first round both ways, in each precision."""
    with rounding(device, "float32"):  # PyTorch convolves in TF32 if left alone
        expected = loop.first()
    found = {}
    for name, side in ours.items():
        results: list[Tensor] = []
        taken = seconds(lambda side=side, results=results: results.append(side.first()), device)  # type: ignore[misc]
        bound = CLOSE
        if name != "float32":
            with rounding(device, name), torch.autocast(device.type, torch.bfloat16, name == "bf16"):
                bound = max(CLOSE, FACTOR * float(difference(loop.first(), expected).median()))
        found[name] = Check(taken, difference(results[0], expected), bound)
    return found


def difference(found: Tensor, expected: Tensor) -> Tensor:
    """Norm of the difference over the norm, of each row [m, *]: [m]; infinite where it is not finite."""
    expected = expected.to(torch.float64)
    norm = torch.linalg.vector_norm
    relative: Tensor = norm(found.to(torch.float64) - expected, dim=1) / norm(expected, dim=1)
    return relative.nan_to_num(nan=torch.inf)


def _row(
    job: Job,
    precision: str,
    plain: list[float],
    times: list[float],
    warm: list[float],
    check: Check,
    peaks: dict[str, float] | None,
) -> Row:
    loop, ours = statistics.median(plain), statistics.median(times)
    usual, worst = float(check.off.median()), float(check.off.max())
    row = {
        "job": job.name,
        "precision": precision,
        "clients": job.clients,
        "plain_loop_s": round(loop, 6),
        "kinfolk_s": round(ours, 6),
        "ratio": round(loop / ours, 2),
        "difference": float(f"{usual:.2e}"),
        "worst_difference": float(f"{worst:.2e}"),
        "bound": float(f"{check.bound:.2e}"),
        "agrees": usual <= check.bound and worst <= WORST,
        "first_call_s": round(warm[0], 4),
        "warm_up_s": round(max(0.0, sum(warm) - len(warm) * ours), 4),  # beyond what as many rounds take later
        "gflop": round(flops(job) / 1e9, 3),
        "traffic_MB": round(traffic(job) / 1e6, 2),
        "rounds": len(times),
        "all_plain_s": [round(s, 6) for s in plain],
        "all_kinfolk_s": [round(s, 6) for s in times],
    }
    if peaks is not None:
        row["of_product_peak"] = round(flops(job) / ours / peaks[precision], 5)
        row["of_copy_peak"] = round(traffic(job) / ours / peaks["copy"], 5)
    return row
