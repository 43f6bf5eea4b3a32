"""Random gossip with 10 to 10,000 clients: time per client and round, and peak memory.

Every size runs in its own process. Memory is the peak of the resident set above what the process had after a small
warm-up, less the clients' data, in units of n·d·4 bytes (one float32 model per client). The reference is a plain loop
over clients that does the same: one `nn.Module` and one `torch.optim.SGD` each, then a mean with five others. With
`--method panm` it is PANM by gradient, as printed, in its second stage; there is no plain loop for that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import RESULTS, keep, peak_memory, reset_peak, resident
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from kinfolk import Federation, Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.memory import kept
from kinfolk.experiment import find_device
from kinfolk.methods import find
from kinfolk.models import NETS
from kinfolk.peers.faults import Faults

SIZES = (10, 30, 100, 300, 1_000, 3_000, 10_000)
BASE = 100  # the size that others are compared with
WARM_UP = 3  # rounds: a GPU's are recorded in the second and replayed from the third on
SAMPLES, FEATURES, HIDDEN, NEIGHBORS = 20, 784, 64, 5
TRAINING = Training(epochs=1, batch_size=10, lr=0.05)
METHODS: dict[str, dict[str, Any]] = {"random": {}, "panm": {"preset": "paper", "discover_rounds": WARM_UP}}


def federation(n: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n * SAMPLES, FEATURES, generator=generator)
    y = torch.randint(10, (n * SAMPLES,), generator=generator)
    pairs = list(zip(torch.split(x, SAMPLES), torch.split(y, SAMPLES)))
    return Federation.from_arrays(pairs, [(a[:1], b[:1]) for a, b in pairs], classes=10)


def model() -> nn.Module:
    return initial_model(lambda: NETS["mlp"]((FEATURES,), 10, hidden=HIDDEN, layers=1), 0)


def engine_of(n: int, device: torch.device, method: str) -> engines.InProcessEngine:
    settings = {"training": TRAINING, "seed": 0, "device": device, "precision": "float32"}
    chosen = find(method)(neighbors=NEIGHBORS, **METHODS[method])
    return engines.InProcessEngine(engines.Parts(federation(n), model, chosen, Faults(), settings))


def timed(work: Any, rounds: int, device: torch.device) -> float:
    """Median seconds of work(t), after some rounds to warm up."""
    times = []
    for t in range(1, rounds + WARM_UP + 1):
        begin = time.perf_counter()
        work(t)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])


def measure(n: int, rounds: int, device: torch.device, method: str = "random") -> dict[str, Any]:
    """Run in a process of its own."""
    warm = engine_of(min(n, 20), device, method)
    warm.step(1, False)
    before = resident()
    engine = engine_of(n, device, method)
    cohort = engine.shards[0].cohort
    reset_peak(device)
    with kept(device):  # as in a run
        seconds = timed(lambda t: engine.step(t, False), rounds, device)
    part = cohort.data.train
    data = part.x.numel() * part.x.element_size() + part.y.numel() * part.y.element_size()
    peak = peak_memory(device) - (before if device.type == "cpu" else 0)
    models = n * cohort.layout.size * 4
    return {
        "clients": n,
        "parameters": cohort.layout.size,
        "round_s": round(seconds, 5),
        "us_per_client_round": round(1e6 * seconds / n, 2),
        "data_MB": round(data / 1e6, 1),
        "peak_MB": round(peak / 1e6, 1),
        "peak_in_models": round((peak - data) / models, 2),
    }


def plain_loop(n: int, rounds: int, device: torch.device) -> float:
    """Microseconds per client and round of a plain loop that does the same."""
    data = federation(n).train
    samples = [(x.to(device), y.to(device)) for x, y in zip(torch.split(data.x, SAMPLES), torch.split(data.y, SAMPLES))]
    modules = [model().to(device) for _ in range(n)]

    def gossip(t: int) -> None:
        for module, (x, y) in zip(modules, samples):
            optimizer = torch.optim.SGD(module.parameters(), lr=TRAINING.rate(t), momentum=TRAINING.momentum)
            for rows in torch.split(torch.randperm(SAMPLES, device=device), TRAINING.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(module(x[rows]), y[rows]).backward()
                optimizer.step()
        with torch.no_grad():
            published = torch.stack([parameters_to_vector(module.parameters()) for module in modules])
            for i, module in enumerate(modules):
                chosen = [i, *torch.randperm(n)[:NEIGHBORS].tolist()]
                vector_to_parameters(published[chosen].mean(dim=0), module.parameters())

    return 1e6 * timed(gossip, rounds, device) / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="leave out sizes above this")
    parser.add_argument("--only", type=int, help="measure one size and print it as JSON (used by the parent process)")
    parser.add_argument("--method", choices=METHODS, default="random")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args()
    device = find_device(options.device)
    if options.only:
        print(json.dumps(measure(options.only, options.rounds, device, options.method)))
        return
    rows = [_in_a_process(n, options.rounds, device, options.method) for n in SIZES if n <= options.largest]
    base = next((row for row in rows if row["clients"] == BASE), rows[0])
    for row in rows:
        row["time_ratio"] = round(row["us_per_client_round"] / base["us_per_client_round"], 2)
    print(f"targets: at most 1.3× of n = {BASE} above it, at most 5 × n·d·4 bytes plus data")
    if options.method != "random":
        print(keep(f"{options.method}-scale", device, rows, options.out))
        return
    loop = plain_loop(BASE, min(options.rounds, 3), device)
    print(f"plain loop, n = {BASE}: {loop:8.1f} µs per client and round")
    print(keep("scale", device, rows, options.out, plain_loop_us_per_client_round=round(loop, 2)))


def _in_a_process(n: int, rounds: int, device: torch.device, method: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only", str(n), "--rounds", str(rounds), "--device", str(device)]
    command += ["--method", method]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"n = {n} failed:\n{ended.stderr}")
    row: dict[str, Any] = json.loads(ended.stdout)
    speed = f"{row['us_per_client_round']:8.1f} µs per client and round"
    print(f"n = {n:>6}: {speed}; peak {row['peak_in_models']:.2f} × n·d·4 bytes plus data", flush=True)
    return row


if __name__ == "__main__":
    main()
