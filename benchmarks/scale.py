"""Random gossip with 100, 1,000 and 10,000 clients: time per client and round, and peak memory.

Every size runs in its own process. Memory is the peak of the resident set above what the process had after a small
warm-up, less the clients' data, in units of n·d·4 bytes (one float32 model per client).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, keep
from torch import nn

from kinfolk import Federation, Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.experiment import find_device
from kinfolk.methods import find
from kinfolk.models import NETS
from kinfolk.peers.faults import Faults

SIZES = (100, 1_000, 10_000)
SAMPLES, FEATURES, HIDDEN = 20, 784, 64
TRAINING = Training(epochs=1, batch_size=10, lr=0.05)


def federation(n: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n * SAMPLES, FEATURES, generator=generator)
    y = torch.randint(10, (n * SAMPLES,), generator=generator)
    pairs = list(zip(x.split(SAMPLES), y.split(SAMPLES)))
    return Federation.from_arrays(pairs, [(a[:1], b[:1]) for a, b in pairs], classes=10)


def engine_of(n: int, device: torch.device) -> engines.InProcessEngine:
    def model() -> nn.Module:
        return initial_model(lambda: NETS["mlp"]((FEATURES,), 10, hidden=HIDDEN, layers=1), 0)

    settings = {"training": TRAINING, "seed": 0, "device": device, "precision": "float32"}
    return engines.InProcessEngine(engines.Parts(federation(n), model, find("random")(), Faults(), settings))


def reset_peak() -> None:
    """Linux: let the high-water mark start from what is resident now."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(n: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Run in a process of its own."""
    warm = engine_of(20, device)
    warm.step(1, False)
    before = memory("VmRSS")
    engine = engine_of(n, device)
    cohort = engine.shards[0].cohort
    reset_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for t in range(1, rounds + 2):
        begin = time.perf_counter()
        engine.step(t, False)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    part = cohort.data.train
    data = part.x.numel() * part.x.element_size() + part.y.numel() * part.y.element_size()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else memory("VmHWM") - before
    models = n * cohort.layout.size * 4
    seconds = statistics.median(times[1:])
    return {
        "clients": n,
        "parameters": cohort.layout.size,
        "round_s": round(seconds, 4),
        "us_per_client_round": round(1e6 * seconds / n, 2),
        "data_MB": round(data / 1e6, 1),
        "peak_MB": round(peak / 1e6, 1),
        "peak_in_models": round((peak - data) / models, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", type=int, help="measure one size and print it as JSON (used by the parent process)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args()
    device = find_device(options.device)
    if options.only:
        print(json.dumps(measure(options.only, options.rounds, device)))
        return
    rows: list[dict[str, Any]] = []
    for n in SIZES:
        command = [sys.executable, __file__, "--only", str(n), "--rounds", str(options.rounds), "--device", str(device)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(row)
        row["time_ratio"] = round(row["us_per_client_round"] / rows[0]["us_per_client_round"], 2)
        speed = f"{row['us_per_client_round']:8.1f} µs per client and round, {row['time_ratio']}× of n = {SIZES[0]}"
        print(f"n = {n:>6}: {speed}; peak {row['peak_in_models']:.2f} × n·d·4 bytes plus data", flush=True)
    print("targets: at most 1.3× of n = 100, at most 5 × n·d·4 bytes plus data")
    print(keep("scale", device, rows, options.out))


if __name__ == "__main__":
    main()
