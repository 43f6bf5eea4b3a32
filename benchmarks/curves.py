"""Learning curves of the fast programs beside those of the plain way, with the same seeds.

Random gossip with the CIFAR-10 net. Fast: explicit passes and our own programs, in each precision. Plain: `vmap` and
autograd over the user's module in float32, nothing compiled. Every batch, every peer and every initial weight is the
same, so the curves part only by rounding; how far is set beside how far seeds are apart. Where CIFAR-10 is not on this
machine, made-up images take its place.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from experiments import made_up
from machine import RESULTS, keep

import kinfolk
from kinfolk import Federation, bench
from kinfolk.assembly import load_federation
from kinfolk.cohort import cohort as cohorts
from kinfolk.cohort.program import Derived
from kinfolk.config import read
from kinfolk.errors import UserError
from kinfolk.experiment import find_device

SIZES = {"cuda": (100, 100), "cpu": (10, 12)}  # clients, rounds


@contextmanager
def plainly() -> Iterator[None]:
    """Cohorts made in here compute through vmap and autograd."""
    fast = cohorts.program_for

    def plain(module: Any, layout: Any, shape: Any, device: Any, precision: str, *hints: Any) -> Any:
        return Derived(module, layout, precision, device), None

    cohorts.program_for = plain  # type: ignore[assignment]
    try:
        yield
    finally:
        cohorts.program_for = fast


def curve(settings: list[str], data: Federation | None) -> tuple[list[float], float]:
    """Accuracy in % at each evaluation, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        result = kinfolk.run("panm/cifar10", settings, data=data, out=Path(folder) / "run")
        seconds = time.perf_counter() - begin
        return [round(100 * float(row["accuracy"]), 3) for row in result.metrics if "accuracy" in row], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args()
    device = find_device(options.device)
    clients, rounds = options.clients or SIZES[device.type][0], options.rounds or SIZES[device.type][1]
    common = ["method.name=random", f"data.clients={clients}", f"run.rounds={rounds}", "run.evaluate_every=4",
              f'run.device="{device}"']  # fmt: skip
    data = None
    try:
        load_federation(read("panm/cifar10", common))
    except UserError as error:
        print(f"made-up images ({error})", flush=True)
        data = made_up((3, 32, 32), clients, 200, 100, device)
    rows = []
    for seed in range(options.seeds):
        chosen = [*common, f"run.seed={seed}"]
        with plainly():
            plain, seconds = curve([*chosen, "run.precision=float32"], data)
        print(f"seed {seed}, plain: {plain[-1]:.2f} % in {seconds:.1f} s", flush=True)
        rows.append({"seed": seed, "way": "plain", "precision": "float32", "seconds": seconds, "accuracy": plain})
        for precision in bench.precisions(device):
            fast, seconds = curve([*chosen, f"run.precision={precision}"], data)
            print(f"seed {seed}, fast, {precision}: {fast[-1]:.2f} % in {seconds:.1f} s", flush=True)
            rows.append({"seed": seed, "way": "fast", "precision": precision, "seconds": seconds, "accuracy": fast})
    print(keep("curves", device, rows, options.out, clients=clients, rounds=rounds, compared=compare(rows)))


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By precision: how far fast is from plain, mean over seeds at each evaluation, beside the deviation of seeds."""
    curves = {(row["way"], row["precision"], row["seed"]): torch.tensor(row["accuracy"]) for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    plain = torch.stack([curves["plain", "float32", seed] for seed in seeds])
    found = []
    for precision in dict.fromkeys(row["precision"] for row in rows if row["way"] == "fast"):
        fast = torch.stack([curves["fast", precision, seed] for seed in seeds])
        apart = (fast.mean(dim=0) - plain.mean(dim=0)).abs()
        row = {"precision": precision, "apart_mean": float(apart.mean()), "apart_most": float(apart.max()),
               "last": float((fast - plain).mean(dim=0)[-1])}  # fmt: skip
        if len(seeds) > 1:
            row["seeds_deviation"] = float(plain.std(dim=0).mean())
        found.append({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    return found


if __name__ == "__main__":
    main()
