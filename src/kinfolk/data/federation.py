"""Federation: who holds which samples.

All clients' samples lie in two flat tensors, one for training and one for testing, each client's in one run of rows.
Ragged clients therefore cost no padding, and a batch of many clients is one gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfolk.data import arrays
from kinfolk.data.formats import Dataset
from kinfolk.data.partition import Split, exchange, rotate
from kinfolk.errors import UserError

MANY_CLASSES = 100_000  # a label beyond is taken for a number of another kind unless `classes` says so


@dataclass(frozen=True)
class Part:
    """Samples of all clients: x [N, ...], y [N]; client i holds rows starts[i] .. starts[i] + sizes[i].

    `domains` [N] are for measuring, and for methods that are allowed to know them; -1 or None: not known.
    """

    x: Tensor
    y: Tensor
    starts: Tensor  # [n] int64
    sizes: Tensor  # [n] int64, always on the CPU: shapes of batches are decided there
    domains: Tensor | None = None  # [N] int64 the true domain of each sample: its own, or its client's cluster

    def select(self, rows: Tensor) -> Part:
        """The part that holds only the clients `rows`, in that order."""
        if torch.equal(rows, torch.arange(self.sizes.numel())):
            return self
        sizes = self.sizes[rows]
        index = torch.cat([torch.arange(s, s + c) for s, c in zip(self.starts[rows].tolist(), sizes.tolist())])
        domains = None if self.domains is None else self.domains[index]
        return Part(self.x[index], self.y[index], _starts(sizes), sizes, domains)

    def to(self, device: torch.device, dtype: torch.dtype) -> Part:
        x = self.x.to(device, dtype) if self.x.is_floating_point() else self.x.to(device)
        domains = None if self.domains is None else self.domains.to(device)
        return Part(x, self.y.to(device), self.starts.to(device), self.sizes, domains)

    def owners(self) -> Tensor:
        """[N] on the CPU: whose each sample is, where all samples are some client's and lie in their order."""
        return torch.repeat_interleave(torch.arange(self.sizes.numel()), self.sizes)

    def places(self, clients: Tensor) -> Tensor:
        """[*] on the CPU: where all samples of some clients [k] lie, one client after another."""
        starts, sizes = self.starts.cpu()[clients], self.sizes[clients]
        first = torch.repeat_interleave(starts - sizes.cumsum(0) + sizes, sizes)
        return first + torch.arange(first.numel())


@dataclass(frozen=True)
class Federation:
    """The clients' data, and what is known of them for measuring (true clusters), never for training."""

    train: Part
    test: Part
    classes: int
    clusters: Tensor | None = None  # [n] true cluster of each client
    name: str = "custom"
    notes: list[str] = field(default_factory=list)
    common: Part | None = None  # test samples for everybody, as if one client held them
    validation: Part | None = None  # samples of clients that never train, to choose settings by
    newcomers: Part | None = None  # samples of clients that never train, to be tested on
    outside: dict[str, Tensor] = field(default_factory=dict)  # true clusters [k] of "validation" and "newcomers"
    gaps: tuple[str, ...] = ()  # what of the samples' making differential privacy does not cover

    @property
    def domains(self) -> int:
        """How many true domains are known of: the largest number of any sample, and one; 0 if none is known."""
        known = [part.domains for part in self.parts().values() if part.domains is not None and part.domains.numel()]
        return max((int(some.max()) + 1 for some in known), default=0)

    @property
    def clients(self) -> int:
        """n"""
        return self.train.sizes.numel()

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])

    def select(self, rows: Tensor) -> Federation:
        """The federation of some of the clients: what a shard holds."""
        clusters = None if self.clusters is None else self.clusters[rows]
        return replace(self, train=self.train.select(rows), test=self.test.select(rows), clusters=clusters)

    def to(self, device: torch.device, dtype: torch.dtype) -> Federation:
        return self.mapped(lambda part: part.to(device, dtype))

    def parts(self) -> dict[str, Part]:
        """All samples that there are, by what they are for."""
        names = ("train", "test", "common", "validation", "newcomers")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def mapped(self, change: Callable[[Part], Part]) -> Federation:
        """The federation with all its samples changed alike."""
        changed: dict[str, Any] = {name: change(part) for name, part in self.parts().items()}
        return replace(self, **changed)

    def pooled(self) -> Federation:
        """The same clients and tests with all training samples in the hands of client 0."""
        sizes = torch.zeros_like(self.train.sizes)
        sizes[0] = self.train.y.numel()
        return replace(self, train=replace(self.train, starts=torch.zeros_like(self.train.starts), sizes=sizes))

    def class_counts(self, part: Part | None = None) -> np.ndarray:
        """Samples per client and class, [n, C]: of training, or of another part."""
        part = part or self.train
        flat = torch.bincount(part.owners() * self.classes + part.y.cpu(), minlength=self.clients * self.classes)
        return flat.view(self.clients, self.classes).numpy()

    @classmethod
    def from_split(cls, dataset: Dataset, split: Split, scale: str) -> Federation:
        """Hand out a data set's samples as `split` says, turned and relabelled where it says so."""
        y = np.concatenate([dataset.train.y, dataset.test.y])
        shift, spread = scaling(dataset, scale)

        def part(indices: list[np.ndarray], split: Split) -> Part:
            sizes = torch.tensor([len(i) for i in indices])
            rows = np.concatenate(indices) if len(indices) else np.zeros(0, dtype=np.int64)
            owner = np.repeat(np.arange(len(indices)), sizes.numpy())
            pixels = _turned(_samples(dataset, rows), _turns(split, rows, owner))
            scaled = torch.from_numpy(pixels).to(torch.float32).sub_(shift).div_(spread)  # in place: it may be large
            labels = y[rows] if split.swaps is None else exchange(y[rows], split.swaps[owner])
            return Part(scaled, torch.from_numpy(labels), _starts(sizes), sizes, _domains(dataset, split, rows, owner))

        everybodys = replace(split, clusters=None)  # with a common test nobody's images are turned or labels exchanged
        common = None if split.common is None else part([split.common], everybodys)
        outside = [None if some is None else part(some.test, some) for some in (split.validation, split.newcomers)]
        clusters = None if split.clusters is None else torch.as_tensor(split.clusters, dtype=torch.int64)
        train, test = part(split.train, split), part(split.test, split)
        made = cls(train, test, dataset.classes, clusters, dataset.name, list(split.notes), common)
        groups = {"validation": split.validation, "newcomers": split.newcomers}
        known = {name: some.clusters for name, some in groups.items() if some is not None}
        labels = {name: torch.as_tensor(each, dtype=torch.int64) for name, each in known.items() if each is not None}
        return replace(made, validation=outside[0], newcomers=outside[1], outside=labels)

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[tuple[Any, Any]],
        test: Sequence[tuple[Any, Any]],
        clusters: Sequence[int | str] | None = None,
        classes: int | None = None,
        name: str = "custom",
        common: tuple[Any, Any] | None = None,
    ) -> Federation:
        """Your own data: one (x, y) pair of arrays or tensors per client, for training and for testing.

        x are numbers of any type, which become float32 as they are; y are whole numbers from 0 on. `clusters` are
        numbers or names. `common` is one more pair, on which every client's model is tested too.
        """
        if len(train) != len(test) or not len(train):
            raise UserError(f"{len(train)} training sets and {len(test)} test sets: one of each per client is needed")
        known, notes = (None, []) if clusters is None else arrays.numbered(clusters, len(train))
        classes = None if classes is None else arrays.whole(classes, "classes")
        parts = [_stack(train, "train")]
        parts.append(_stack(test, "test", tuple(parts[0].x.shape[1:])))
        if common is not None:
            parts.append(_stack([common], "common"))
            if parts[2].x.shape[1:] != parts[0].x.shape[1:] or not parts[2].y.numel():
                raise UserError(f"common test: inputs {list(parts[2].x.shape)}, clients have {list(parts[0].x.shape)}")
        if not parts[1].y.numel():
            notes.append("no client has test samples of its own: its accuracy is not known")
        labels = torch.cat([part.y for part in parts])
        found = int(labels.max()) + 1 if labels.numel() else 0
        if (labels.numel() and int(labels.min()) < 0) or (classes is not None and found > classes):
            bound = found if classes is None else classes
            raise UserError(f"labels run from {int(labels.min())} to {int(labels.max())}; 0 to {bound - 1} are allowed")
        if classes is None and found > MANY_CLASSES:
            raise UserError(f"labels run up to {found - 1:,}: number them from 0 on, or say classes={found}")
        if known is not None:
            parts[:2] = [replace(part, domains=torch.repeat_interleave(known, part.sizes)) for part in parts[:2]]
        everybodys = parts[2] if common is not None else None
        return cls(parts[0], parts[1], classes or found, known, name, notes, everybodys)

    @classmethod
    def from_datasets(
        cls,
        train: Sequence[Any],
        test: Sequence[Any],
        clusters: Sequence[int | str] | None = None,
        classes: int | None = None,
        name: str = "custom",
        common: Any = None,
    ) -> Federation:
        """Your own data as map-style torch Datasets of (x, label), one per client, for training and for testing."""
        everybodys = None if common is None else arrays.samples(common, "common")
        sets = ((train, "train"), (test, "test"))
        trains, tests = ([arrays.samples(d, f"client {i} {kind}") for i, d in enumerate(each)] for each, kind in sets)
        return cls.from_arrays(trains, tests, clusters, classes, name, everybodys)


def _starts(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes


def _samples(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """The samples in `rows`, which count on from the training set into the test set; only these are read."""
    count = len(dataset.train)
    x = np.empty((len(rows), *dataset.shape), dtype=np.result_type(dataset.train.x, dataset.test.x))
    x[rows < count] = dataset.train.x[rows[rows < count]]
    x[rows >= count] = dataset.test.x[rows[rows >= count] - count]
    return x


def scaling(dataset: Dataset, scale: str) -> tuple[Tensor, Tensor]:
    """(shift, spread) per channel, so that (pixel - shift) / spread is what the models see."""
    x = dataset.train.x
    if scale == "unit":
        return torch.tensor(0.0), torch.tensor(255.0 if x.dtype == np.uint8 else 1.0)
    shape = (-1,) + (1,) * (x.ndim - 2) if x.ndim > 2 else ()
    as_tensor = [torch.as_tensor(value, dtype=torch.float32).reshape(shape) for value in dataset.moments]
    return as_tensor[0], as_tensor[1].clamp(min=1e-8)


def _turns(split: Split, rows: np.ndarray, owner: np.ndarray) -> np.ndarray | None:
    """[N] quarter turns of the images in `rows` of the set: their own, or their owners'."""
    whose, index = (split.quarter_turns, owner) if split.sample_turns is None else (split.sample_turns, rows)
    return None if whose is None else np.asarray(whose[index])


def _domains(dataset: Dataset, split: Split, rows: np.ndarray, owner: np.ndarray) -> Tensor | None:
    """[N] the true domain of the samples in `rows`: their own angle, their owners' cluster, or what the set knows."""
    whose, index = (split.clusters, owner) if split.sample_turns is None else (split.sample_turns, rows)
    if whose is None and dataset.train.domain is not None and dataset.test.domain is not None:
        whose, index = np.concatenate([dataset.train.domain, dataset.test.domain]), rows
    return None if whose is None else torch.as_tensor(whose[index], dtype=torch.int64)


def _turned(x: np.ndarray, quarter_turns: np.ndarray | None) -> np.ndarray:
    if quarter_turns is None:
        return x
    if x.ndim < 3:
        raise UserError(f"samples of shape {list(x.shape[1:])} cannot be rotated: images are needed")
    turns = quarter_turns % 4
    turned = x.copy()
    for turn in (1, 2, 3):
        turned[turns == turn] = rotate(x[turns == turn], turn)
    return turned


def _stack(pairs: Sequence[Any], kind: str, shape: tuple[int, ...] | None = None) -> Part:
    x, y, sizes = arrays.stacked(pairs, kind, shape)
    return Part(x, y, _starts(sizes), sizes)
