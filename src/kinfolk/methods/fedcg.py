"""FedCG: one net with layers for each of a few domains, which share through a graph and are found on the way.

Caldarola, Mancini, Galasso, Ciccone, Rodolà, Caputo: Cluster-driven Graph Federated Learning over Multiple Domains.
CVPR Workshops 2021.

The net is in `models/domains.py`. This is the paper's method as it is printed, with what it leaves open decided so: the
graph stays as it began for one period of the teacher and is computed anew after every average from then on; the teacher
begins as it was drawn, not as a copy of the student.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kinfolk import randomness
from kinfolk.cohort.beside import beside
from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.training import Training
from kinfolk.data.federation import Federation, Part
from kinfolk.errors import UserError
from kinfolk.matching import cost
from kinfolk.methods.fedavg import FedAvg
from kinfolk.methods.registry import register, shared
from kinfolk.models.bundle import Bundle
from kinfolk.models.domains import DomainNet, Sharing, adjacency, assigned, evenness, first_adjacency
from kinfolk.peers.base import Peers
from kinfolk.settings import setting

AT_ONCE = 1024  # samples that the teacher looks at


@dataclass(frozen=True)
class State:
    model: Tensor = shared()  # [d] graph, net, student and teacher, one behind another
    occupancy: Tensor = shared()  # [D] share of the last round's training samples in each domain


@dataclass(frozen=True)
class Columns:
    """Where in a model what lies."""

    graph: slice
    task: slice
    student: slice
    teacher: slice

    @classmethod
    def of(cls, layout: Layout) -> Columns:
        starts = {part: _first(layout, part) for part in ("net.layers.", "student.", "teacher.")}
        net, student, teacher = starts.values()
        return cls(slice(0, net), slice(net, student), slice(student, teacher), slice(teacher, layout.size))


@register("fedcg")
@dataclass(frozen=True)
class FedCG(Sharing):
    """FedAvg of a net some of whose layers have a branch for each of D domains; a teacher says which domain a sample
    trains, a student learns to say so, and every few rounds becomes the teacher.

    In a test the student weighs the branches. Branches share through a graph of the domains, near ones more.
    """

    participation: float = setting(1.0, "share of the clients that train in a round (C)", gt=0, le=1)
    source: Literal["classifier", "clusters", "random"] = setting(
        "classifier", "where domains come from: teacher and student, a client's true cluster, or chance"
    )
    assignment: Literal["soft", "hard"] = setting("soft", "in a test: the student's probabilities, or its best guess")
    own_weight: float = setting(0.5, "weight of a domain in its own row of the graph (beta)", ge=0, le=1)
    first_graph: Literal["eye", "rand", "uniform", "even", "hamming"] = setting(
        "eye", "the graph to begin with: each domain alone, random, even but for beta, 1/D, or by digits of its number"
    )
    learn_graph: bool = setting(True, "whether the graph follows the distances between domains, after one period")
    teacher_rounds: int = setting(10, "rounds after which the student becomes the teacher (T)", ge=1)
    student_lr: float = setting(1e-4, "step size of the student, without momentum", gt=0)
    server = True
    one_model = True
    needs_clusters = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_clusters", self.source == "clusters")

    @property
    def asks(self) -> bool:
        """Whether anybody has to be asked which domain a sample belongs to."""
        return self.source == "classifier" and self.domains > 1

    def notices(self) -> list[str]:
        """What the user should know of these settings."""
        if self.domains == 2 and self.own_weight == 0.5 and (self.learn_graph or self.first_graph == "uniform"):
            return ["method.own_weight = 0.5 with two domains makes both use the same parameters: try 0.75"]
        return []

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.fedavg(rounds, FedAvg(self.participation).count(n) / n)

    def visitors(self, t: int, seed: int, n: int, device: torch.device) -> Tensor | None:
        """[k] ids of those of n clients that train in round t; None: all."""
        return FedAvg(self.participation).visitors(t, seed, n, device)

    # -- what it makes of data and net -----------------------------------------------------------------------------

    def wrap(self, module: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        """The user's net with branches, graph and classifiers."""
        seed = int(torch.randint(2**31, ()))  # of the generator that the net is drawn with
        graph = first_adjacency(self.first_graph, self.domains, self.own_weight, torch.Generator().manual_seed(seed))
        net = DomainNet(module, self, graph)  # type: ignore[arg-type]
        return Bundle(net, input_shape, self.assignment == "soft", not self.asks)

    def arrange(self, federation: Federation) -> Federation:
        """Every sample as one row with D places for its domains behind the pixels, filled in where they are given."""
        if self.source == "clusters":
            known = federation.clusters
            if known is None:
                raise UserError("method.source = 'clusters' needs true clusters, which these data do not have")
            if int(known.max()) >= self.domains:
                raise UserError(f"method.domains = {self.domains}, but the data have {int(known.max()) + 1} clusters")
        groups = {"train": federation.clusters, "test": federation.clusters, **federation.outside}
        names = ("train", "test", "common", "validation", "newcomers")
        parts: dict[str, Part] = {name: part for name in names if (part := getattr(federation, name)) is not None}
        rows: dict[str, Any] = {name: self._rows(name, part, groups.get(name)) for name, part in parts.items()}
        return replace(federation, **rows)

    def _rows(self, name: str, part: Part, clusters: Tensor | None) -> Part:
        pixels = part.x.flatten(1)
        domain = torch.full((len(pixels),), 0 if self.domains == 1 else -1)
        if self.source == "clusters" and clusters is not None:
            domain = torch.repeat_interleave(clusters.cpu(), part.sizes)
        elif self.source == "random":
            places = torch.arange(len(pixels))
            domain = randomness.bits(0, f"domains/{name}", 0, places, torch.zeros_like(places)) % self.domains
        omega = (torch.arange(self.domains) == domain[:, None]).to(pixels)
        return replace(part, x=torch.cat([pixels, omega], dim=1))

    # -- rounds ----------------------------------------------------------------------------------------------------

    def start(self, cohort: Cohort) -> State:
        nobody = torch.full((self.domains,), torch.nan, dtype=torch.float64, device=cohort.device)
        return State(cohort.initial, nobody)

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        cohort.adopt(state.model)
        columns = Columns.of(cohort.layout)
        chosen = FedAvg(self.participation).participants(t, cohort, peers)
        sizes = torch.where(chosen, cohort.data.train.sizes.to(cohort.device), 0)
        if self.asks:
            self._label(cohort, state.model[columns.teacher], chosen)
            self._teach(t, cohort, columns, chosen)
        cohort.train(t, active=chosen, part=columns.task)
        mean = peers.mean(t, cohort.weights, sizes, before=state.model)
        used = peers.mean(t, self._shares(cohort), sizes, transfers=0)
        model = torch.where(torch.isfinite(mean).all(), self._moved(t, cohort, state.model, mean, columns), state.model)
        cohort.adopt(model)
        return State(model, torch.where(torch.isfinite(used).all(), used, state.occupancy))

    def _label(self, cohort: Cohort, teacher: Tensor, chosen: Tensor) -> None:
        """Write the teacher's opinion of the chosen clients' samples into their rows."""
        part, x = cohort.data.train, cohort.train_x
        module = cohort.model.teacher
        weights = {name: view[0] for name, view in Layout.of(module).views(teacher[None]).items()}  # type: ignore[arg-type]
        rows = torch.nonzero(chosen.cpu()).flatten()
        starts, counts = part.starts.cpu()[rows], part.sizes[rows]
        first = torch.repeat_interleave(starts - counts.cumsum(0) + counts, counts)
        index = (first + torch.arange(first.numel())).to(x.device)
        with torch.no_grad():
            for some in torch.split(index, AT_ONCE):
                scores = functional_call(module, weights, (x[some],))  # type: ignore[arg-type]
                x[some, -self.domains :] = assigned(scores, soft=False).to(x.dtype)

    def _teach(self, t: int, cohort: Cohort, columns: Columns, chosen: Tensor) -> None:
        """The students of the chosen clients learn what the teacher says."""
        settings: Training = replace(cohort.training, lr=self.student_lr, lr_decay=1.0, momentum=0.0, weight_decay=0.0)
        labels = cohort.train_x[:, -self.domains :].argmax(dim=1)
        side = beside(cohort, cohort.model.student, labels, self.domains, settings)  # type: ignore[arg-type]
        students, _ = side.trained(cohort.weights[:, columns.student].contiguous(), t, chosen, purpose="student")
        weights = cohort.weights.clone()
        weights[:, columns.student] = students
        cohort.weights = weights

    def _moved(self, t: int, cohort: Cohort, before: Tensor, mean: Tensor, columns: Columns) -> Tensor:
        """The server's new model [d] of the clients' mean: with the teacher and the graph that are due."""
        model = mean.clone()
        model[columns.teacher] = before[columns.teacher]
        model[columns.graph] = before[columns.graph]
        if t % self.teacher_rounds == 0:
            model[columns.teacher] = mean[columns.student]
        if self.learn_graph and t >= self.teacher_rounds:
            model[columns.graph] = adjacency(_domain_rows(cohort.layout, mean), self.own_weight).flatten()
        return model

    def _shares(self, cohort: Cohort) -> Tensor:
        """[m, D] of each client's training samples."""
        part = cohort.data.train
        client = torch.repeat_interleave(torch.arange(len(cohort)), part.sizes).to(cohort.device)
        first = torch.repeat_interleave(part.starts.cpu() - part.sizes.cumsum(0) + part.sizes, part.sizes)
        index = (first + torch.arange(first.numel())).to(cohort.device)
        totals = torch.zeros(len(cohort), self.domains, dtype=torch.float64, device=cohort.device)
        totals.index_add_(0, client, cohort.train_x[index, -self.domains :].double())
        return totals / part.sizes.to(cohort.device).clamp(min=1)[:, None]

    def report(self, cohort: Cohort, state: State) -> dict[str, Any]:
        """Which domains are in use, lambda of each layer, and the graph."""
        layout, views = cohort.layout, cohort.layout.views(state.model[None])
        graph = state.model[Columns.of(layout).graph].view(self.domains, self.domains)
        return {
            "domain_occupancy": state.occupancy.tolist(),
            "domain_entropy": float(evenness(state.occupancy)),
            "domain_share": [float(view) for name, view in views.items() if name.endswith(".share")],
            "domain_graph": graph.tolist(),
        }


def _first(layout: Layout, begins: str) -> int:
    """The first column of the parameters whose names begin so."""
    return next(start for name, start in zip(layout.names, layout.offsets) if name.startswith(begins))


def _domain_rows(layout: Layout, model: Tensor) -> Tensor:
    """The raw rows V of all layers that have them: [D, q]."""
    views = layout.views(model[None])
    found = [view[0].flatten(1) for name, view in views.items() if name.startswith("net.") and name.endswith(".rows")]
    return torch.cat(found, dim=1)
