"""A round of FedCG against a round of FedAvg: what four domains cost, with branches at the last convolution.

The same net, clients and made-up data, in the same process and in turns, so a busy machine hurts both; medians over
rounds after a warm-up. Domains are found by sums before the first round, which is timed by itself; in every round the
samples of its clients are told their domains, and the branches are trained.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, in_turns, keep
from torch import nn

from kinfolk import Federation, Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.experiment import find_device
from kinfolk.methods import find
from kinfolk.models import NETS
from kinfolk.peers.faults import Faults

CLASSES, DOMAINS = 10, 4
SAMPLES = 100  # of a client
TARGET = 1.5
WARM_UP = 3  # rounds


@dataclass(frozen=True)
class Job:
    net: str
    shape: tuple[int, ...]
    batch: int
    options: dict[str, Any]

    def model(self) -> nn.Module:
        return NETS[self.net](self.shape, CLASSES, **self.options)


JOBS = {
    "CNN of one convolution, batch 10": Job("cnn2", (1, 28, 28), 10, {}),
    "CNN of three convolutions, batch 10": Job("cnn", (1, 28, 28), 10, {}),
    "CNN of one convolution, batch 50": Job("cnn2", (1, 28, 28), 50, {}),
}


def federation(clients: int, shape: tuple[int, ...]) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, SAMPLES, *shape, generator=generator)
    y = torch.randint(CLASSES, (clients, SAMPLES), generator=generator)
    pairs = list(zip(x, y))
    return Federation.from_arrays(pairs, [(a[:1], b[:1]) for a, b in pairs], classes=CLASSES)


def engine(job: Job, name: str, clients: int, taking_part: int, device: torch.device, **settings: Any) -> Any:
    method = find(name)(participation=taking_part / clients, **settings)
    training = Training(epochs=1, batch_size=job.batch, lr=0.01, momentum=0.0)
    cohort = {"training": training, "seed": 0, "device": device, "precision": "float32"}
    data = federation(clients, job.shape)
    if name == "fedcg":
        data = method.arrange(data)

    def build() -> nn.Module:
        return initial_model(lambda: method.wrap(job.model(), job.shape) if name == "fedcg" else job.model(), 0)

    return engines.InProcessEngine(engines.Parts(data, build, method, Faults(), cohort, resident="round"))


def measure(name: str, clients: int, taking_part: int, rounds: int, device: torch.device) -> dict[str, Any]:
    plain, branches = (
        engine(JOBS[name], method, clients, taking_part, device, **settings)
        for method, settings in (("fedavg", {}), ("fedcg", {"domains": DOMAINS}))
    )
    works = [lambda t, engine=engine: engine.step(t, False) for engine in (plain, branches)]
    found = in_turns(works, WARM_UP + rounds, device)
    each = [statistics.median(times[WARM_UP:]) for times in found]
    row = {
        "job": name,
        "clients": clients,
        "in_a_round": taking_part,
        "domains": DOMAINS,
        "fedavg_ms": round(1e3 * each[0], 2),
        "fedcg_ms": round(1e3 * each[1], 2),
        "ratio": round(each[1] / each[0], 2),
        "finding_s": round(found[1][0], 2),
        "target": TARGET,
    }
    print(
        f"{name}: {1e3 * each[0]:.1f} ms a round of FedAvg, {1e3 * each[1]:.1f} ms of FedCG, {row['ratio']:.2f}×; "
        f"first round with finding domains {row['finding_s']:.1f} s",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--in-a-round", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args()
    device = find_device(options.device)
    rows = [measure(name, options.clients, options.in_a_round, options.rounds, device) for name in JOBS]
    print(f"target: at most {TARGET}× the time of a round of FedAvg")
    print(keep("domains", device, rows, options.out))


if __name__ == "__main__":
    main()
