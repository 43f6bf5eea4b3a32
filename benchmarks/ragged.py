"""Clients of very different sizes against clients of equal sizes: time per training sample.

The sizes are those of a Dirichlet split that cuts every class up (alpha 0.1): from a handful of samples to many times
the mean. The equal federation has the same number of clients and of samples in all. Both train the same net on made-up
data, in the same process and in turns, so a busy machine hurts both; medians over rounds after a warm-up. A job that a
CPU would take too long for has fewer clients there, taken evenly from the smallest to the largest.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import RESULTS, in_turns, keep
from torch import nn

from kinfolk import Cohort, Federation, Training
from kinfolk.cohort.cohort import initial_model
from kinfolk.data.partition.base import Labels
from kinfolk.data.partition.skew import Dirichlet
from kinfolk.experiment import find_device
from kinfolk.models import NETS

CLASSES = 10
MEAN = 200  # samples of a client
TARGET = 1.5
WARM_UP = 3  # rounds: a GPU's are recorded in the second and replayed from the third on


@dataclass(frozen=True)
class Job:
    net: str
    shape: tuple[int, ...]
    batch: int
    options: dict[str, Any]
    epochs: int = 2
    few: int | None = None  # clients on a CPU; none: all

    def model(self) -> nn.Module:
        return initial_model(lambda: NETS[self.net](self.shape, CLASSES, **self.options), 0)

    def clients(self, sizes: list[int], device: torch.device) -> list[int]:
        """The sizes, of all clients or of those that a CPU is given."""
        if self.few is None or self.few >= len(sizes) or device.type != "cpu":
            return sizes
        places = np.linspace(0, len(sizes) - 1, self.few).round().astype(int)
        return [sorted(sizes)[place] for place in places]


JOBS = {
    "MLP, batch 128": Job("mlp", (784,), 128, {}),
    "MLP, batch 20": Job("mlp", (784,), 20, {}),
    "small MLP, batch 20": Job("mlp", (64,), 20, {"hidden": 64, "layers": 1}),
    "CNN, batch 128": Job("cnn2", (1, 14, 14), 128, {}),
    "CNN, batch 20": Job("cnn2", (1, 14, 14), 20, {}),
    "AFIND+'s CNN, batch 128": Job("cnn4", (3, 32, 32), 128, {}, epochs=1, few=20),
}


def ragged_sizes(clients: int) -> list[int]:
    """Sizes [n] of the split, MEAN on average."""
    labels = np.repeat(np.arange(CLASSES), clients * MEAN // CLASSES)
    split = Dirichlet(alpha=0.1, mode="class-split", min_size=1).divide(
        Labels(labels, labels, CLASSES), clients, MEAN, None, seed=0
    )
    return [len(rows) for rows in split.train]


def federation(sizes: list[int], shape: tuple[int, ...]) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), *shape, generator=generator)
    y = torch.randint(CLASSES, (sum(sizes),), generator=generator)
    pairs = list(zip(torch.split(x, sizes), torch.split(y, sizes)))
    return Federation.from_arrays(pairs, [(a[:1], b[:1]) for a, b in pairs], classes=CLASSES)


def measure(name: str, sizes: list[int], rounds: int, device: torch.device) -> dict[str, Any]:
    job = JOBS[name]
    sizes = job.clients(sizes, device)
    training = Training(epochs=job.epochs, batch_size=job.batch, lr=0.01)
    mean, rest = divmod(sum(sizes), len(sizes))
    equal = [mean + (place < rest) for place in range(len(sizes))]
    cohorts = [Cohort(federation(s, job.shape), job.model(), training, device=device) for s in (equal, sizes)]
    times = in_turns([cohort.train for cohort in cohorts], WARM_UP + rounds, device)
    seconds = [statistics.median(found[WARM_UP:]) for found in times]
    each = [1e6 * s / (sum(sizes) * job.epochs) for s in seconds]
    row = {
        "job": name,
        "clients": len(sizes),
        "smallest": min(sizes),
        "largest": max(sizes),
        "equal_us_per_sample": round(each[0], 3),
        "ragged_us_per_sample": round(each[1], 3),
        "ratio": round(each[1] / each[0], 2),
        "target": TARGET,
    }
    print(f"{name}: {each[0]:8.2f} µs a sample equal, {each[1]:8.2f} ragged, {row['ratio']:.2f}×", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, metavar="JOB", help="only these; needs --out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args()
    if options.jobs and options.out == RESULTS:
        parser.error("--jobs needs --out: the result that is kept has all jobs")
    device = find_device(options.device)
    sizes = ragged_sizes(options.clients)
    rows = [measure(name, sizes, options.rounds, device) for name in options.jobs or JOBS]
    print(f"target: at most {TARGET}× the time per sample of equal sizes")
    print(keep("ragged", device, rows, options.out))


if __name__ == "__main__":
    main()
