"""FedCG: one net with layers for each of a few domains, which share through a graph and are found on the way.

Caldarola, Mancini, Galasso, Ciccone, Rodolà, Caputo: Cluster-driven Graph Federated Learning over Multiple Domains.
CVPR Workshops 2021.

The net is in `models/domains.py`. Preset "paper" is the method as it is printed, with what it leaves open decided so:
the graph stays as it began for one period of the teacher and is computed anew after every average from then on; the
teacher begins as it was drawn, not as a copy of the student. One departure: a graph layer's matrix is shared by a
convolution's filters (`granularity`), because the printed one would have q² entries for q parameters.

Departures of preset "robust": the printed teacher and student put all samples into one domain. There domains are found
before the first round by sums that some clients tell of their samples (`methods/discovery.py`), and stay; parameters
are not cut off at zero; every domain keeps to itself in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kinfolk import randomness
from kinfolk.cohort.beside import beside
from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.newcomers import Outsiders, tested
from kinfolk.cohort.training import Training
from kinfolk.data.federation import Federation, Part
from kinfolk.data.projection import CPU
from kinfolk.errors import UserError
from kinfolk.matching import cost
from kinfolk.methods import domain_labels, domain_report
from kinfolk.methods.fedavg import FedAvg, moved
from kinfolk.methods.registry import register, shared
from kinfolk.models.bundle import Bundle
from kinfolk.models.domains import DomainNet, Sharing, adjacency, evenness, first_adjacency
from kinfolk.peers.base import Peers
from kinfolk.settings import setting

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"source": "classifier", "param_relu": True, "learn_graph": True},
    "robust": {"source": "sums", "param_relu": False, "learn_graph": False},
}
AGAIN = 10  # rounds in which domains are looked for, should nobody be heard in the first


@dataclass(frozen=True)
class State:
    own: Tensor  # [m] the domain of all of a client's samples where domains are clients' (source k-means), else -1
    shares: Tensor  # [m, D] of a client's training samples in each domain, as far as they are known
    model: Tensor = shared()  # [d] graph, net, student and teacher, one behind another
    occupancy: Tensor = shared()  # [D] share of the last round's training samples in each domain
    centers: Tensor = shared()  # [D, q] of k-means, or of sketches [D, s]; [0, q] without, or before


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

    preset: Literal["paper", "robust"] = setting("robust", "as printed, or with domains that are found")
    participation: float = setting(1.0, "share of the clients that train in a round (C)", gt=0, le=1)
    source: Literal["classifier", "sums", "k-means", "clusters", "random"] | None = setting(
        None,
        "where domains come from: teacher and student that learn, sums of coarse looks, k-means on the clients' first "
        "models, the truth, or chance; none: preset",
    )
    scouts: int = setting(200, "clients that tell sums of their samples before the first round (source sums)", ge=1)
    assignment: Literal["soft", "hard"] = setting("soft", "in a test: the student's probabilities, or its best guess")
    own_weight: float | None = setting(
        None,
        "weight of a domain in its own row of the graph (beta); none: 0.5, robust with two domains: 0.75",
        ge=0,
        le=1,
    )
    first_graph: Literal["eye", "rand", "uniform", "even", "hamming"] = setting(
        "eye", "the graph to begin with: each domain alone, random, even but for beta, 1/D, or by digits of its number"
    )
    learn_graph: bool | None = setting(
        None, "whether the graph follows the distances between domains, after one period; none: preset"
    )
    teacher_rounds: int = setting(10, "rounds after which the student becomes the teacher (T)", ge=1)
    student_lr: float = setting(1e-4, "step size of the student, without momentum", gt=0)
    server = True
    one_model = True

    def __post_init__(self) -> None:
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def beta(self) -> float:
        """The diagonal of the graph."""
        usual = 0.75 if self.preset == "robust" and self.domains == 2 else 0.5
        return usual if self.own_weight is None else self.own_weight

    @property
    def asks(self) -> bool:
        """Whether in a test the student has to be asked which domain a sample belongs to."""
        return self.source in ("classifier", "sums") and self.domains > 1

    @property
    def by_clients(self) -> bool:
        """Whether all samples of a client are in one domain, found by k-means."""
        return self.source == "k-means" and self.domains > 1

    def notices(self, rounds: int) -> list[str]:
        """What the user should know of these settings in a run of so many rounds."""
        said = []
        if self.domains == 2 and self.beta == 0.5 and (self.learn_graph or self.first_graph == "uniform"):
            said.append("method.own_weight = 0.5 with two domains makes both use the same parameters: try 0.75")
        if self.by_clients:
            said.append("method.source = 'k-means': clients that never train find their domain by their labels")
        return said

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.fedavg(rounds, FedAvg(self.participation).count(n) / n)

    def visitors(self, t: int, seed: int, n: int, device: torch.device) -> Tensor | None:
        """[k] ids of those of n clients that train in round t; None: all."""
        return FedAvg(self.participation).visitors(t, seed, n, device)

    def asked(self, t: int, state: State, seed: int, n: int, device: torch.device) -> Tensor | None:
        """[k] ids of those of n clients that `ask` needs before round t; None: all."""
        if self.by_clients and not len(state.centers):
            return None
        if not self._looks(t):
            return torch.zeros(0, dtype=torch.int64, device=device)
        drawn = self.visitors(t, seed, n, device)
        if drawn is None or t > 1:
            return drawn
        # Those who train count nothing, but with them sums are rounded as when everybody is in memory.
        both: Tensor = torch.unique(torch.cat([drawn, self._scouts(seed, n, device)]))
        return both

    def _looks(self, t: int) -> bool:
        """Whether domains may have to be found by sums before round t."""
        return self.source == "sums" and self.asks and t <= AGAIN

    def _scouts(self, seed: int, n: int, device: torch.device) -> Tensor:
        """[k] ids of the clients that tell sums."""
        server = torch.tensor([n], device=device)
        return randomness.positions(seed, "scouts", 0, server, server, min(self.scouts, n))[0]

    # -- what it makes of data and net -----------------------------------------------------------------------------

    def wrap(self, module: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        """The user's net with branches, graph and classifiers."""
        seed = int(torch.randint(2**31, ()))  # of the generator that the net is drawn with
        graph = first_adjacency(self.first_graph, self.domains, self.beta, torch.Generator().manual_seed(seed))
        net = DomainNet(module, self, graph)  # type: ignore[arg-type]
        return Bundle(net, input_shape, self.assignment == "soft", not self.asks, self.source == "sums")

    def arrange(self, federation: Federation, device: torch.device = CPU) -> Federation:
        """Every sample as one row with D places for its domains behind the pixels, filled in where they are given."""
        if self.source == "clusters":
            if not federation.domains:
                raise UserError("method.source = 'clusters' needs true clusters, which these data do not have")
            if federation.domains > self.domains:
                raise UserError(f"method.domains = {self.domains}, but the data have {federation.domains} clusters")
        rows: dict[str, Any] = {name: self._rows(name, part) for name, part in federation.parts().items()}
        return replace(federation, **rows)

    def _rows(self, name: str, part: Part) -> Part:
        pixels = part.x.flatten(1)
        domain = torch.full((len(pixels),), 0 if self.domains == 1 else -1)
        if self.source == "clusters" and part.domains is not None:
            domain = part.domains.cpu()
        elif self.source == "random":
            places = torch.arange(len(pixels))
            domain = randomness.bits(0, f"domains/{name}", 0, places, torch.zeros_like(places)) % self.domains
        omega = (torch.arange(self.domains) == domain[:, None]).to(pixels)
        return replace(part, x=torch.cat([pixels, omega], dim=1))

    # -- rounds ----------------------------------------------------------------------------------------------------

    def start(self, cohort: Cohort) -> State:
        nobody = torch.full((self.domains,), torch.nan, dtype=torch.float64, device=cohort.device)
        columns = Columns.of(cohort.layout).task
        centers = cohort.initial.new_zeros(0, columns.stop - columns.start)
        return State(torch.full_like(cohort.ids, -1), self._shares(cohort), cohort.initial, nobody, centers)

    def ask(self, t: int, cohort: Cohort, state: State, peers: Peers, few: bool = False) -> State:
        """Domains that are not learned are found before a round, as soon as anybody is heard, and stay.

        few: clients have no models of their own, and few may have one at a time.
        """
        columns = Columns.of(cohort.layout)
        if self.by_clients and not len(state.centers):
            own, centers = state.own, state.centers
            own, centers = domain_labels.grouped(t, cohort, peers, columns.task, self.domains, own, centers, few)
            return replace(state, own=own, centers=centers)
        if not self._looks(t) or bool(state.model[columns.teacher].any()):
            return state
        draw = self._scouts if t == 1 else partial(self.visitors, t)
        drawn = draw(cohort.seed, peers.n, cohort.device)
        asked = torch.ones_like(cohort.ids) if drawn is None else torch.isin(cohort.ids, drawn)
        found = domain_labels.found_by_sums(t, cohort, asked, self.domains, peers)
        model = state.model.clone()
        model[columns.student.start :] = torch.where(torch.isfinite(found).all(), found, 0.0)
        return replace(state, model=model)

    def tell(self, cohort: Cohort, state: State) -> State:
        """Domains that stay are written into the samples of all clients."""
        if self.by_clients:
            domain_labels.write_clients(cohort, state.own, self.domains)
        elif self.asks and self.source == "sums":
            teacher = state.model[Columns.of(cohort.layout).teacher]
            domain_labels.label(cohort, self.source, teacher, torch.arange(len(cohort)))
        return replace(state, shares=self._shares(cohort))

    def step(self, t: int, cohort: Cohort, state: State, peers: Peers) -> State:
        cohort.adopt(state.model)
        columns = Columns.of(cohort.layout)
        chosen = FedAvg(self.participation).participants(t, cohort, peers)
        shares = state.shares
        if self.asks and self.source == "classifier":
            rows = torch.nonzero(chosen.cpu()).flatten()
            domain_labels.label(cohort, self.source, state.model[columns.teacher], rows)
            shares = self._shares(cohort)
            self._teach(t, cohort, columns, chosen)
        cohort.train(t, active=chosen, part=columns.task)
        sizes = torch.where(chosen, cohort.data.train.sizes.to(cohort.device), 0)
        mean = peers.mean(t, cohort.weights, sizes, before=state.model)
        if self.layers == "whole":
            mean = self._apart(t, cohort, mean, state.model, shares * sizes[:, None], peers)
        used = peers.mean(t, shares, sizes, transfers=0)
        model = torch.where(torch.isfinite(mean).all(), self._moved(t, cohort, state.model, mean, columns), state.model)
        cohort.adopt(model)
        return replace(state, model=model, occupancy=torch.where(torch.isfinite(used).all(), used, state.occupancy))

    def _shares(self, cohort: Cohort) -> Tensor:
        with cohort.room.threads(0):  # a second thread costs more
            return domain_labels.shares(cohort.data.train, cohort.train_x, self.domains)

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
        if self.source == "sums":
            model[columns.student] = before[columns.student]
        elif t % self.teacher_rounds == 0:
            model[columns.teacher] = mean[columns.student]
        if self.learn_graph and self.layers != "whole" and t >= self.teacher_rounds:
            model[columns.graph] = adjacency(_domain_rows(cohort.layout, mean), self.beta).flatten()
        return model

    def _apart(self, t: int, cohort: Cohort, mean: Tensor, before: Tensor, counts: Tensor, peers: Peers) -> Tensor:
        """The mean [d] with each domain's model averaged by counts [m, D], the clients' samples in that domain."""
        means = [peers.mean(t, cohort.weights, counts[:, d], 0, before) for d in range(self.domains)]
        own = torch.stack([moved(before, each) for each in means])
        joined = mean.clone()
        into, views = cohort.layout.views(joined[None]), cohort.layout.views(own)
        for name in (name for name in cohort.layout.names if name.endswith(".rows")):
            into[name][0] = views[name].diagonal(dim1=0, dim2=1).movedim(-1, 0)
        return joined

    def meets(self, cohort: Cohort, state: State, part: Part) -> Outsiders:
        """How clients that never train fare."""
        if self.by_clients:
            task = Columns.of(cohort.layout).task
            return domain_labels.meet(cohort, state.model, part, task, state.centers)
        return tested(cohort, state.model, part)

    def report(self, cohort: Cohort, state: State) -> dict[str, Any]:
        """Which domains are in use and how they match the true ones, lambda of each layer, dead ones, the graph."""
        asked = self.source if self.asks else None
        return domain_report.report(cohort, state.model, state.occupancy, asked)

    def reported(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The reports of all cohorts as one."""
        return domain_report.joined(parts)

    def notes(self, state: State) -> Tensor:
        """[D] what is kept of every round."""
        return state.occupancy

    def noted(self, rows: Tensor) -> dict[str, Tensor]:
        """The notes [r, D] of r rounds as columns of a table, [r] each."""
        return {
            "domain_entropy": evenness(rows),
            **{f"domain_occupancy_{number}": column for number, column in enumerate(rows.unbind(dim=1))},
        }

    def files(self, cohort: Cohort, state: State) -> domain_report.Sums | None:
        """What to keep of a run that has ended: what the domains look like."""
        return domain_report.portraits(cohort, state.model, self.source if self.asks else None)

    def filed(self, parts: Sequence[domain_report.Sums | None]) -> dict[str, Any]:
        """The files of all cohorts together."""
        known = [part for part in parts if part is not None]
        return {"domains.json": domain_report.drawn(known)} if known else {}


def _first(layout: Layout, begins: str) -> int:
    """The first column of the parameters whose names begin so."""
    return next(start for name, start in zip(layout.names, layout.offsets) if name.startswith(begins))


def _domain_rows(layout: Layout, model: Tensor) -> Tensor:
    """The raw rows V of all layers that have them: [D, q]."""
    views = layout.views(model[None])
    found = [view[0].flatten(1) for name, view in views.items() if name.startswith("net.") and name.endswith(".rows")]
    return torch.cat(found, dim=1)
