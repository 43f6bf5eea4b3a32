"""Private gradients of many clients at once, against Opacus client by client.

Opacus is used as its users do: one `GradSampleModule` and one `DPOptimizer` per client, on data that already lie on the
device. Both take all samples of every client, clip each sample's gradient, add noise to the sum, divide and step; both
take turns in one process. Before anything is timed one step is done both ways without noise: *difference* is the norm
of the difference of a client's update over the norm of Opacus's, the largest of all clients.

kinfolk draws its noise in float64 as a function of seed, round and client; Opacus draws float32 from torch's generator.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # before kinfolk: its threads then wait as torch lets them, which Opacus is fastest with
import torch.nn.functional as F
from machine import RESULTS, in_turns, keep
from torch import Tensor, nn

from kinfolk.cohort.layout import Layout
from kinfolk.experiment import find_device
from kinfolk.privacy.dpsgd import PrivateGradients
from kinfolk.privacy.sampling import draw
from kinfolk.privacy.source import Seeded

RATE, CLIP, SIGMA, CLASSES = 0.05, 1.0, 2.0, 10  # SIGMA: noise on the sum in clipping norms
WARM_UP = 2  # steps
TARGETS = {"cpu": 5, "cuda": 20}
NETS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "linear": ((15_552,), lambda: nn.Sequential(nn.Linear(15_552, CLASSES))),
    "cnn": (
        (243, 8, 8),
        lambda: nn.Sequential(
            nn.Conv2d(243, 64, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.Tanh(),
            nn.Flatten(), nn.Linear(1024, CLASSES),
        ),
    ),
}  # fmt: skip


class Ours:
    """All clients in one matrix."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...], x: Tensor, y: Tensor, sigma: float) -> None:
        clients, size = y.shape
        self.layout = Layout.of(module)
        self.gradients = PrivateGradients(module, self.layout, shape, CLIP)
        self.models = self.layout.flatten(module).expand(clients, -1).clone()
        self.x, self.y, self.ids = x.flatten(0, 1), y, torch.arange(clients, device=x.device)
        self.starts, self.sizes = self.ids * size, torch.full((clients,), size)
        self.deviation = torch.full((clients,), sigma * CLIP)

    def step(self, t: int) -> None:
        batches = draw(Seeded(0), t, self.ids, self.sizes, "none")
        found, _ = self.gradients(
            self.models, self.x, self.starts, batches, (self.y,), self.deviation, Seeded(0), t, self.ids
        )
        self.models = self.models.sub_(found, alpha=RATE)

    def rows(self) -> Tensor:
        return self.models


class Opacus:
    """One module and one optimizer per client."""

    def __init__(self, modules: list[nn.Module], x: Tensor, y: Tensor, sigma: float) -> None:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        self.x, self.y = x, y
        self.modules = [GradSampleModule(module, loss_reduction="mean") for module in modules]
        self.optimizers = [
            DPOptimizer(
                torch.optim.SGD(module.parameters(), lr=RATE), noise_multiplier=sigma, max_grad_norm=CLIP,
                expected_batch_size=y.shape[1],
            )
            for module in self.modules
        ]  # fmt: skip

    def step(self, t: int) -> None:
        for module, optimizer, x, y in zip(self.modules, self.optimizers, self.x, self.y):
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()  # or every client keeps its samples' gradients, 100 MB each, until its next turn

    def rows(self) -> Tensor:
        return torch.stack([nn.utils.parameters_to_vector(module.parameters()).detach() for module in self.modules])


def pair(name: str, clients: int, samples: int, device: torch.device, sigma: float) -> tuple[Ours, Opacus]:
    torch.manual_seed(0)
    shape, factory = NETS[name]
    module = factory().to(device)
    x = torch.randn(clients, samples, *shape, device=device)
    y = torch.randint(CLASSES, (clients, samples), device=device)
    copies = [factory().to(device) for _ in range(clients)]
    for copy in copies:
        copy.load_state_dict(module.state_dict())
    return Ours(module, shape, x, y, sigma), Opacus(copies, x, y, sigma)


def difference(name: str, clients: int, samples: int, device: torch.device) -> float:
    """The largest relative difference of a client's update without noise."""
    ours, opacus = pair(name, clients, samples, device, 0.0)
    start = opacus.rows()
    for one in (ours, opacus):
        one.step(1)
    updates = opacus.rows() - start
    return float(((ours.rows() - opacus.rows()).norm(dim=1) / updates.norm(dim=1)).max())


def measure(name: str, clients: int, samples: int, rounds: int, device: torch.device) -> dict[str, Any]:
    off = difference(name, min(clients, 10), samples, device)
    both = pair(name, clients, samples, device, SIGMA)
    times = in_turns([one.step for one in both], WARM_UP + rounds, device)
    ours, opacus = (statistics.median(seconds[WARM_UP:]) for seconds in times)
    target = TARGETS[device.type] if name == "linear" else None
    return {
        "net": name, "clients": clients, "samples": samples, "opacus_s": opacus, "kinfolk_s": ours,
        "ratio": round(opacus / ours, 2), "target": target, "difference": off,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--nets", default="linear", help="linear, cnn, with commas")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # Opacus warns that a backward hook may not fire, at every step
    device = find_device(options.device)
    rows = []
    for name in options.nets.split(","):
        row = measure(name, options.clients, options.samples, options.rounds, device)
        rows.append(row)
        print(
            f"{name}: Opacus {row['opacus_s']:.4f} s, kinfolk {row['kinfolk_s']:.4f} s, {row['ratio']}× "
            f"(target {row['target']}×), difference {row['difference']:.0e}",
            flush=True,
        )
    print(keep("dp", device, rows, options.out))
    if any(row["difference"] > 1e-3 for row in rows):
        raise SystemExit("some results are not those of Opacus")


if __name__ == "__main__":
    main()
