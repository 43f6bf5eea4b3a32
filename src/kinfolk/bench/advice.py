"""What to set on this machine, from what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from kinfolk.bench.jobs import Job, Trained
from kinfolk.bench.machine import seconds

Row = dict[str, Any]
WORTH_IT = 1.1  # a setting that brings less is not worth setting


def seconds_by_chunk(
    job: Job, device: torch.device, chunks: Sequence[int | None], rounds: int = 2, precision: str = "float32"
) -> dict[int | None, float]:
    """Seconds of a round of training with so many clients at once; None: kinfolk's own choice. They take turns."""
    data = job.federation().to(device, torch.float32)
    sides = {chunk: Trained(job.cohort(data, device, precision, chunk)) for chunk in chunks}
    times: dict[int | None, list[float]] = {chunk: [] for chunk in chunks}
    for t in range(1, rounds + 2):
        for chunk, side in sides.items():
            times[chunk].append(seconds(lambda t=t, side=side: side(t), device))  # type: ignore[misc]
    return {chunk: statistics.median(taken[1:]) for chunk, taken in times.items()}


def recommend(
    rows: Sequence[Row], device: str, chunks: dict[int | None, float] | None = None, cpu: float | None = None
) -> list[str]:
    """Plain sentences. device: "cpu" or "cuda"; chunks: of `seconds_by_chunk`; cpu: how many times as long as on the
    GPU job M takes on the CPU."""
    sentences = [_precision(rows, _device(device, cpu))]
    if chunks:
        sentences.append(_chunk(chunks))
    wrong = [f"{row['job']} in {row['precision']}" for row in rows if not row["agrees"]]
    if wrong:
        sentences.append(f"Results differ from the plain loop's by more than rounding explains: {', '.join(wrong)}.")
    return sentences


def _device(device: str, cpu: float | None) -> str:
    if cpu is None:
        return f"run.device={device}"
    if cpu > 1:
        return f"run.device=cuda (the MLP job takes {cpu:.3g} times as long on the CPU)"
    return f"run.device=cpu for models as small as the MLP (the GPU takes {1 / cpu:.3g} times as long), else cuda"


def _precision(rows: Sequence[Row], device: str) -> str:
    """The fastest precision that is right for every job measured, if it is much faster than float32."""
    gains = {name: _gain(rows, name) for name in dict.fromkeys(row["precision"] for row in rows)}
    right = {name: gain for name, gain in gains.items() if gain is not None}
    best = max(right, key=lambda name: right[name], default="float32")
    if right.get(best, 0) < WORTH_IT:
        return f"Use {device} and run.precision=float32: nothing coarser is much faster here."
    off = max(row["difference"] for row in rows if row["precision"] == best)
    return (
        f"Use {device} and run.precision={best}: {right[best]:.2g} times as fast as float32 over these jobs; "
        f"rounding changes a round's update by up to {100 * off:.1g} %."
    )


def _gain(rows: Sequence[Row], precision: str) -> float | None:
    """How many times faster than float32, geometric mean over jobs; None if it is wrong somewhere."""
    if not all(row["agrees"] for row in rows if row["precision"] == precision):
        return None
    exact = {row["job"]: row["kinfolk_s"] for row in rows if row["precision"] == "float32"}
    return statistics.geometric_mean(
        exact[row["job"]] / row["kinfolk_s"] for row in rows if row["precision"] == precision
    )


def _chunk(chunks: dict[int | None, float]) -> str:
    best = min(chunks, key=lambda chunk: chunks[chunk])
    gain = chunks[None] / chunks[best]
    if gain < WORTH_IT:
        return "Leave run.chunk unset: no other number of clients at once was much faster for the MLP job."
    return f"Set run.chunk={best} for models like the MLP: {gain:.2g} times as fast as kinfolk's own choice."
