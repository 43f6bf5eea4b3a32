"""The four jobs: the vectorised cohort against a plain loop over clients, in every precision.

The plain loop is what people write: one `nn.Module` and one `torch.optim.SGD` per client, on data that already lie on
the device, with PyTorch's own settings. Both do the same steps on the same sizes, in the same process, taking turns,
so that a busy machine hurts both. Jobs, sizes and what is counted: `src/kinfolk/bench`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch  # before kinfolk: its threads then wait as torch lets them, which the plain loop is fastest with
from machine import RESULTS, keep

from kinfolk import bench
from kinfolk.experiment import find_device

# Ratios to reach, by device and job; a number of its own where a precision has one.
TARGETS: dict[str, dict[Any, float]] = {
    "cuda": {"M": 100, "C": 40, "L": 200, "X": 40},
    "cpu": {"M": 1.2, ("M", "bf16"): 1.8, "C": 1.2, "L": 10, "X": 1.5},
}


def target(device: torch.device, job: str, precision: str) -> float | None:
    known = TARGETS[device.type]
    return known.get((job, precision), known.get(job))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", default=",".join(bench.JOBS), help="some of them, with commas")
    parser.add_argument("--precisions", default="", help="some of them, with commas; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--chunk", type=int, default=None, help="clients at once; default: kinfolk's own choice")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args()
    device = find_device(options.device)
    precisions = options.precisions.split(",") if options.precisions else bench.precisions(device)
    peaks = bench.peaks(device, precisions)
    print("peaks:", ", ".join(f"{name} {value / 1e9:,.0f} G/s" for name, value in peaks.items()), flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.jobs.split(","):
        job = replace(bench.JOBS[name], clients=options.clients)
        for row in bench.measure(job, device, options.rounds, precisions, peaks, options.chunk):
            row["target"] = target(device, name, row["precision"])
            rows.append(row)
            print(_line(row), flush=True)
    print(keep("training", device, rows, options.out, peaks=peaks))
    if not all(row["agrees"] for row in rows):
        raise SystemExit("some results are not the plain loop's")


def _line(row: dict[str, Any]) -> str:
    wrong = "" if row["agrees"] else f"; WRONG: off by {row['difference']}, at worst {row['worst_difference']}"
    return (
        f"{row['job']} {row['precision']:>7}: loop {row['plain_loop_s']:.4f} s, kinfolk {row['kinfolk_s']:.5f} s, "
        f"{row['ratio']}× (target {row['target']}×), {100 * row['of_product_peak']:.2g} % of products, "
        f"{100 * row['of_copy_peak']:.2g} % of copies, warm-up {row['warm_up_s']:.2f} s{wrong}"
    )


if __name__ == "__main__":
    main()
