"""Seconds per round of local training: the vectorised cohort against a plain loop over clients.

The plain loop is what people write: one `nn.Module` and one `torch.optim.SGD` per client, on data that already lie on
the device. Both do the same steps on the same sizes, in the same process, taking turns, so that a busy machine hurts
both. Jobs: `mlp`, 784-200-200-10, batch 128, 3 epochs; `linear`, 784-10, batch 20, 1 epoch; 100 clients × 200 samples.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import RESULTS, keep
from torch import nn

from kinfolk import Cohort, Federation, Training
from kinfolk.cohort.cohort import initial_model
from kinfolk.experiment import find_device
from kinfolk.models import NETS

CLIENTS, SAMPLES = 100, 200
JOBS = {
    "mlp": (NETS["mlp"], Training(epochs=3, batch_size=128, lr=0.08)),
    "linear": (NETS["linear"], Training(epochs=1, batch_size=20, lr=0.08)),
}
TARGETS = {("mlp", "cpu"): 1.0, ("linear", "cpu"): 5.0, ("mlp", "cuda"): 50.0}


def federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(SAMPLES, 784, generator=generator), torch.randint(10, (SAMPLES,), generator=generator))
        for _ in range(CLIENTS)
    ]
    return Federation.from_arrays(pairs, [(x[:1], y[:1]) for x, y in pairs], classes=10)


def plain_loop(cohort: Cohort, modules: list[nn.Module], t: int) -> None:
    """One round of every client, one after the other."""
    settings, part = cohort.training, cohort.data.train
    for i, module in enumerate(modules):
        start, size = i * SAMPLES, SAMPLES
        optimizer = torch.optim.SGD(module.parameters(), lr=settings.rate(t), momentum=settings.momentum)
        for _ in range(settings.epochs):
            order = torch.randperm(size, device=cohort.device) + start
            for first in range(0, size, settings.batch_size):
                rows = order[first : first + settings.batch_size]
                optimizer.zero_grad()
                F.cross_entropy(module(part.x[rows]), part.y[rows]).backward()
                optimizer.step()


def seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(job: str, device: torch.device, rounds: int, chunk: int | None) -> dict[str, Any]:
    net, settings = JOBS[job]
    cohort = Cohort(federation(), initial_model(lambda: net((784,), 10), 0), settings, device=device, chunk=chunk)
    modules = [initial_model(lambda: net((784,), 10), 0).to(device) for _ in range(CLIENTS)]
    plain, vectorised = [], []
    for t in range(1, rounds + 2):  # the first round warms up and is not counted
        plain.append(seconds(lambda t=t: plain_loop(cohort, modules, t), device))
        vectorised.append(seconds(lambda t=t: cohort.train(t), device))
    loop, ours = statistics.median(plain[1:]), statistics.median(vectorised[1:])
    return {
        "job": job,
        "plain_loop_s": round(loop, 5),
        "kinfolk_s": round(ours, 5),
        "ratio": round(loop / ours, 2),
        "target": TARGETS.get((job, device.type)),
        "rounds": rounds,
        "all_plain_s": [round(s, 5) for s in plain[1:]],
        "all_kinfolk_s": [round(s, 5) for s in vectorised[1:]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk", type=int, default=None, help="clients at once; default: kinfolk's own choice")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args()
    device = find_device(options.device)
    rows = []
    for job in JOBS:
        row = measure(job, device, options.rounds, options.chunk)
        rows.append(row)
        target = f", target {row['target']}×" if row["target"] else ""
        print(
            f"{job:>7}: loop {row['plain_loop_s']:.4f} s, kinfolk {row['kinfolk_s']:.4f} s, {row['ratio']}×{target}",
            flush=True,
        )
    print(keep("training", device, rows, options.out))


if __name__ == "__main__":
    main()
