"""Many clients at once: job M (MLP 784-200-200-10, 200 samples each, batch 128, 3 epochs) with random gossip.

10,000 clients on a GPU, 2,000 on a CPU: some rounds and an evaluation, and how much memory that takes at most.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from machine import RESULTS, keep, peak_memory, reset_peak, resident

from kinfolk import bench, engines
from kinfolk.experiment import find_device
from kinfolk.methods import find
from kinfolk.peers.faults import Faults

CLIENTS = {"cuda": 10_000, "cpu": 2_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args()
    device = find_device(options.device)
    job = replace(bench.JOBS["M"], clients=options.clients or CLIENTS[device.type])
    reset_peak(device)
    settings = {"training": job.training, "seed": 0, "device": device, "precision": options.precision}
    parts = engines.Parts(job.federation(), job.module, find("random")(), Faults(), settings)
    engine = engines.InProcessEngine(parts)
    times = []
    for t in range(1, options.rounds + 1):
        begin = time.perf_counter()
        engine.step(t, t == options.rounds)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(round(time.perf_counter() - begin, 3))
        print(f"round {t} of {options.rounds}: {times[-1]:.2f} s", flush=True)
    results = engines.results(engine)
    cohort = engine.shards[0].cohort
    row = {
        "clients": job.clients,
        "precision": options.precision,
        "round_s": times,
        "us_per_client_round": round(1e6 * min(times) / job.clients, 2),
        "models_GB": round(job.clients * cohort.layout.size * 4 / 1e9, 2),
        "data_GB": round(cohort.data.train.x.numel() * 4 / 1e9, 2),
        "peak_GB": round(peak_memory(device) / 1e9, 2),
        "host_peak_GB": round(resident("VmHWM") / 1e9, 2),
        "quarantined": int(results.quarantined.sum()),
    }
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    print(keep("large", device, [row], options.out))


if __name__ == "__main__":
    main()
