"""What many tests need: small federations, a plain per-client loop to compare with, and a quick experiment."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk import Cohort, Federation, Training, cli, engines, findings
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.training import local_steps, plan
from kinfolk.metrics import Edges
from kinfolk.parcel import Parcel

torch.set_num_threads(1)  # small tensors: threads that wait for each other cost more than they bring
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C, and so do its tests


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs land in ./runs by default: never in the source tree."""
    monkeypatch.chdir(tmp_path)


def make_federation(
    sizes: list[int], shape: tuple[int, ...] = (6,), classes: int = 3, tests: int = 7, clusters: list[int] | None = None
) -> Federation:
    """Random samples with a bit of structure: the class shifts the inputs."""
    generator = torch.Generator().manual_seed(sum(sizes) + len(sizes))

    def samples(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(classes, (count,), generator=generator)
        x = torch.randn(count, *shape, generator=generator, dtype=torch.float64).float()
        return x + y.view(-1, *[1] * len(shape)) * 0.7, y

    return Federation.from_arrays(
        [samples(size) for size in sizes], [samples(tests) for _ in sizes], clusters=clusters, classes=classes
    )


def make_cohort(
    data: Federation,
    factory: Callable[[], nn.Module],
    training: Training | None = None,
    precision: str = "float64",
    seed: int = 3,
    **options: Any,
) -> Cohort:
    training = training or Training(epochs=2, batch_size=8, lr=0.1)
    return Cohort(data, initial_model(factory, seed), training, seed=seed, precision=precision, **options)


def train_plainly(cohort: Cohort, factory: Callable[[], nn.Module], rounds: int) -> Tensor:
    """What the cohort should compute, as anybody would write it: one module and one SGD per client. [m, d]"""
    settings, part = cohort.training, cohort.data.train
    rows = []
    for i, client in enumerate(cohort.ids.tolist()):
        module = initial_model(factory, cohort.seed).to(cohort.dtype)
        for t in range(1, rounds + 1):
            optimizer = torch.optim.SGD(
                module.parameters(), lr=settings.rate(t), momentum=settings.momentum, weight_decay=settings.weight_decay
            )
            ids, start, size = torch.tensor([client]), part.starts[i : i + 1], part.sizes[i : i + 1]
            batches = plan(cohort.seed, t, ids, start, size, settings)
            for step in range(int(local_steps(size, settings)[0])):
                index = batches.index[0, step, : int(batches.counts[0, step])]
                optimizer.zero_grad()
                F.cross_entropy(module(part.x[index]), part.y[index]).backward()
                optimizer.step()
        rows.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
    return torch.stack(rows)


def tiny_experiment(**sections: Any) -> dict[str, Any]:
    """Eight clients in two clusters on the embedded digits, a second or less."""
    base: dict[str, Any] = {
        "name": "tiny",
        "data": {
            "name": "digits",
            "clients": 8,
            "train": 20,
            "test": 20,
            "split": {"kind": "rotation", "clusters": 2},
        },
        "model": {"name": "mlp", "hidden": 16, "layers": 1},
        "training": {"epochs": 1, "batch_size": 8, "lr": 0.1},
        "method": {"name": "random", "neighbors": 2},
        "run": {"rounds": 4, "evaluate_every": 2, "device": "cpu"},
    }
    for name, values in sections.items():
        base[name] = values if name == "method" else {**base.get(name, {}), **values}
    return base


def last_edges(engine: engines.Engine) -> Edges:
    """Who mixed with whom in the round just done."""
    found = [findings.edges([(0, shard.cohort.round.edges)], Parcel())() for shard in engine.shards]
    return findings.joined([edges for ((_, edges),) in found])


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The one line that says what is wrong; progress may stand before it."""
        lines = self.err.splitlines()
        assert [line for line in lines if line.startswith("kinfolk: ")] == lines[-1:]
        assert "Traceback" not in self.err
        return lines[-1].removeprefix("kinfolk: ")

    @property
    def json(self) -> dict[str, Any]:
        """Standard output, which has to be one JSON object in one line."""
        assert self.out.count("\n") == 1
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Command = Callable[..., Outcome]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Call the command line in this process, where torch is imported already."""

    def call(*words: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["kinfolk", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return Outcome(int(end.value.code or 0), *capsys.readouterr())

    return call
