"""The jobs that are measured, done twice: by a plain loop over clients, and by a cohort.

The plain loop is what people write: one `nn.Module` and one `torch.optim.SGD` per client, on data that already lie on
the device, with PyTorch's own settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.cohort.cohort import Cohort, initial_model
from kinfolk.cohort.training import Training, plan
from kinfolk.data.federation import Federation
from kinfolk.models import NETS, Factory
from kinfolk.peers.base import Peers
from kinfolk.peers.inprocess import InProcess

CLASSES, SEED = 10, 0


@dataclass(frozen=True)
class Job:
    """Local training of many clients; with `candidates`, every client judges so many models of others instead."""

    name: str
    what: str
    net: Factory
    shape: tuple[int, ...]  # of a sample
    training: Training
    clients: int = 100
    samples: int = 200  # of each client
    candidates: int = 0

    def module(self) -> nn.Module:
        """The net with the common initial weights."""
        return initial_model(lambda: self.net(self.shape, CLASSES), SEED)

    def federation(self) -> Federation:
        """Random samples with random labels: how long it takes does not depend on what is learnt."""
        generator = torch.Generator().manual_seed(SEED)
        x = torch.randn(self.clients * self.samples, *self.shape, generator=generator)
        y = torch.randint(CLASSES, (x.shape[0],), generator=generator)
        pairs = list(zip(torch.split(x, self.samples), torch.split(y, self.samples)))
        return Federation.from_arrays(pairs, [(a[:1], b[:1]) for a, b in pairs], classes=CLASSES)

    def cohort(self, data: Federation, device: torch.device, precision: str, chunk: int | None = None) -> Cohort:
        """All clients of `data` as one cohort."""
        return Cohort(data, self.module(), self.training, SEED, device=device, precision=precision, chunk=chunk)


_LONG, _SHORT = Training(epochs=3, batch_size=128, lr=0.08), Training(epochs=1, batch_size=20, lr=0.08)
JOBS = {
    job.name: job
    for job in (
        Job("M", "train an MLP 784-200-200-10, batch 128, 3 epochs", NETS["mlp"], (784,), _LONG),
        Job("L", "train a linear model 784-10, batch 20, 1 epoch", NETS["linear"], (784,), _SHORT),
        Job("C", "train a CNN on 3×32×32 images, batch 128, 3 epochs", NETS["cnn"], (3, 32, 32), _LONG),
        Job("X", "the loss of 10 candidates' CNNs on own data", NETS["cnn"], (3, 32, 32), _LONG, candidates=10),
    )
}


class Side(Protocol):
    """One way to do a job."""

    def __call__(self, t: int) -> object:
        """Do round t: what is timed."""

    def first(self) -> Tensor:
        """Do the first round with the samples that the other side takes: a row of results for each client [m, *]."""


def sides(
    job: Job, data: Federation, device: torch.device, precisions: list[str], chunk: int | None = None
) -> tuple[Side, dict[str, Side]]:
    """The plain loop, and a cohort for each precision. `data` lie on the device."""
    cohorts = {precision: job.cohort(data, device, precision, chunk) for precision in precisions}
    one = next(iter(cohorts.values()))
    modules = [job.module().to(device) for _ in range(job.clients)]
    if not job.candidates:
        return TrainingLoop(modules, one), {precision: Trained(cohort) for precision, cohort in cohorts.items()}
    weights = different_models(one)
    for module, row in zip(modules, weights):
        one.layout.load(row, module)
    ids = Peers(job.clients, one, InProcess()).sample(1, job.candidates)
    return JudgingLoop(modules, one, ids), {name: Judged(cohort, weights, ids) for name, cohort in cohorts.items()}


def different_models(cohort: Cohort) -> Tensor:
    """A different model for each client, near the common one: [m, d]."""
    noise = torch.randn(cohort.weights.shape, generator=torch.Generator().manual_seed(SEED))
    return cohort.weights + 0.01 * noise.to(cohort.device)


class TrainingLoop:
    """Every client trains, one after the other."""

    def __init__(self, modules: list[nn.Module], cohort: Cohort) -> None:
        """`cohort` has the same clients, data and settings."""
        self.modules = modules
        self.cohort = cohort

    def __call__(self, t: int) -> None:
        self._round(t, self._shuffled)

    def first(self) -> Tensor:
        """The updates [m, d] of round 1 on the batches that the cohort draws."""
        cohort, part = self.cohort, self.cohort.data.train
        for module in self.modules:
            cohort.layout.load(cohort.initial, module)
        batches = plan(cohort.seed, 1, cohort.ids, part.starts, part.sizes, cohort.training)
        self._round(1, lambda i: (row[:count] for row, count in zip(batches.index[i], batches.counts[i].tolist())))
        return torch.stack([cohort.layout.flatten(module) for module in self.modules]) - cohort.initial

    def _round(self, t: int, batches: Callable[[int], Iterator[Tensor]]) -> None:
        settings, part = self.cohort.training, self.cohort.data.train
        for i, module in enumerate(self.modules):
            optimizer = torch.optim.SGD(module.parameters(), lr=settings.rate(t), momentum=settings.momentum)
            for rows in batches(i):
                optimizer.zero_grad()
                F.cross_entropy(module(part.x[rows]), part.y[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    def _shuffled(self, i: int) -> Iterator[Tensor]:
        settings, part = self.cohort.training, self.cohort.data.train
        size = int(part.sizes[i])
        for _ in range(settings.epochs):
            order = torch.randperm(size, device=self.cohort.device) + i * size
            yield from torch.split(order, settings.batch_size)


class JudgingLoop:
    """Every client runs each of its candidates over its own samples; the models are there, nothing is loaded."""

    def __init__(self, modules: list[nn.Module], cohort: Cohort, ids: Tensor) -> None:
        """ids [m, c]: whose models each client judges."""
        self.modules = modules
        self.ids = ids.tolist()
        part = cohort.data.train
        sizes = part.sizes.tolist()
        self.samples = list(zip(torch.split(part.x, sizes), torch.split(part.y, sizes)))

    def __call__(self, t: int) -> Tensor:
        return self.first()

    def first(self) -> Tensor:
        """Mean losses [m, c]."""
        with torch.no_grad():
            losses = [
                F.cross_entropy(self.modules[j](x), y) for (x, y), row in zip(self.samples, self.ids) for j in row
            ]
        return torch.stack(losses).view(len(self.ids), -1)


class Trained:
    """The cohort trains."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort

    def __call__(self, t: int) -> None:
        self.cohort.train(t)

    def first(self) -> Tensor:
        """The updates [m, d] of round 1."""
        self.cohort.train(1)
        return self.cohort.weights - self.cohort.initial


class Judged:
    """The cohort judges the models that its clients pulled."""

    def __init__(self, cohort: Cohort, weights: Tensor, ids: Tensor) -> None:
        """weights [m, d]: what the clients published; ids [m, c]: whom they pulled from."""
        self.cohort = cohort
        self.ids = ids
        cohort.weights = weights
        peers = Peers(len(cohort), cohort, InProcess())
        peers.publish(1, weights=weights)
        self.pool = peers.pull(1, ids)

    def __call__(self, t: int) -> Tensor:
        return self.first()

    def first(self) -> Tensor:
        """Mean losses [m, c]."""
        return self.cohort.losses(self.pool, self.ids)
