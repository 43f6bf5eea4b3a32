"""Which domain each training sample belongs to: FedCG's rows of samples are written here.

A row is a sample's pixels and behind them omega [D]. What a classifier says, what teacher and student by sums say, and
clients that are of one domain as a whole.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import pad

from kinfolk import randomness
from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.newcomers import Outsiders, tested
from kinfolk.cohort.visit import visit
from kinfolk.data.federation import Part
from kinfolk.matching.lists import look_up
from kinfolk.methods import discovery
from kinfolk.models.bundle import apart
from kinfolk.models.coarse import Teacher, look, width
from kinfolk.models.domains import assigned
from kinfolk.peers.base import Peers

AT_ONCE = 1024  # samples that are looked at
CLIENTS_AT_ONCE = 64
RESTARTS = 10  # of k-means
NUMBERS, FEWEST = 2**22, 8  # in the models of clients that train at a time, or so many clients
WHOLE = 2**24  # numbers in all clients' models up to which k-means has them whole, though few may be in memory
SKETCH = 512  # numbers that stand for a client's model beyond that


def write(x: Tensor, index: Tensor, omega: Tensor) -> None:
    """Put omega [p, D] into the rows index [p] of x [N, pixels + D]."""
    x[index, -omega.shape[1] :] = omega.to(x.dtype)


def label(cohort: Cohort, source: str, teacher: Tensor, rows: Tensor) -> None:
    """The opinion of a teacher [q] about the samples of the clients rows [k], on the CPU, becomes their domain."""
    few = cohort.room.threads(0) if source == "sums" else contextlib.nullcontext()  # a second thread costs more
    with few:
        for index, omega in opinions(cohort, source, teacher, rows):
            write(cohort.train_x, index, omega)


def opinions(cohort: Cohort, source: str, teacher: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Places [p] of training samples of the clients rows [k], some at a time, and their domains, one of [p, D] each."""
    rows = rows[cohort.data.train.sizes[rows] > 0]
    return (_by_sums if source == "sums" else _by_classifier)(cohort, teacher, rows)


def _by_classifier(cohort: Cohort, teacher: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    x, module = cohort.train_x, cohort.model.teacher
    weights = _named(module, teacher)  # type: ignore[arg-type]
    index = cohort.data.train.places(rows).to(x.device)
    for some in torch.split(index, AT_ONCE) if len(rows) else ():
        with torch.no_grad():
            scores = functional_call(module, weights, (x[some],))  # type: ignore[arg-type]
        yield some, assigned(scores, soft=False)


def _by_sums(cohort: Cohort, teacher: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Where the teacher knows classes, and every client its proportions of domains."""
    part, module = cohort.data.train, cohort.model.teacher
    assert isinstance(module, Teacher)
    for some in torch.split(rows, CLIENTS_AT_ONCE) if len(rows) else ():
        index, inside = padded(part, some)
        with torch.no_grad():
            looks = _looks(cohort, index).to(teacher)
            scores = functional_call(module, _named(module, teacher), (looks, part.y[index]))
            share = discovery.settled(scores.double(), inside)
        share = torch.where(inside[..., None] > 0, share, share[:, :1])  # padding is the client's first sample
        yield index.flatten(), assigned(share.flatten(0, 1), soft=False)


def found_by_sums(t: int, cohort: Cohort, asked: Tensor, domains: int, peers: Peers) -> Tensor:
    """Student and teacher [q] by what the clients asked [m] tell of their samples."""
    part, rows = cohort.data.train, torch.nonzero(asked.cpu()).flatten()
    module = cohort.model.teacher
    assert isinstance(module, Teacher)
    kinds = module.offset.shape[0]
    index, inside = padded(part, rows)
    features = _looks(cohort, index) * inside[..., None]
    classes = (part.y[index][..., None] == torch.arange(kinds, device=cohort.device)) * inside[..., None]
    sight = discovery.Sight(features, classes, rows.to(cohort.device), len(cohort), peers, t)
    found = discovery.find(sight, domains, cohort.seed)
    pieces = [found.student_weight, found.student_bias, found.weight, found.offset]
    return torch.cat([piece.flatten() for piece in pieces]).to(cohort.dtype)


def _named(module: torch.nn.Module, row: Tensor) -> dict[str, Tensor]:
    return {name: view[0] for name, view in Layout.of(module).views(row[None]).items()}


def padded(part: Part, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Places [k, w] of the samples of clients rows [k], given on the CPU, and [k, w] float64 which of them are there.

    Where they are not it is the client's first sample. Nothing waits for a GPU.
    """
    device, sizes = part.y.device, part.sizes[rows]
    position = torch.arange(max(1, int(sizes.max())) if len(rows) else 1, device=device)
    inside = position < sizes.to(device, non_blocking=True)[:, None]
    starts = part.starts[rows.to(device, non_blocking=True)]
    index = starts[:, None] + torch.where(inside, position, 0)
    return index.clamp(max=len(part.y) - 1), inside.to(torch.float64)


def shares(part: Part, x: Tensor, domains: int) -> Tensor:
    """[m, D] of each client's samples, whose rows are x [N, pixels + D]."""
    found = [x.new_zeros(0 if len(x) else part.sizes.numel(), domains, dtype=torch.float64)]
    for some in torch.split(torch.arange(part.sizes.numel()), CLIENTS_AT_ONCE) if len(x) else ():
        index, inside = padded(part, some)
        found.append((x[index, -domains:] * inside[..., None]).sum(dim=1))
    return torch.cat(found) / part.sizes.to(x.device).clamp(min=1)[:, None]


def _looks(cohort: Cohort, index: Tensor) -> Tensor:
    """The looks [..., F] float64 of the training samples index [...]."""
    shape = cohort.model.input_shape
    module = look(shape)  # type: ignore[arg-type]
    if not index.numel():
        return torch.zeros(*index.shape, width(shape), dtype=torch.float64, device=index.device)  # type: ignore[arg-type]
    some = [module(apart(cohort.train_x[flat], shape)[0]) for flat in torch.split(index.flatten(), AT_ONCE)]  # type: ignore[arg-type]
    found: Tensor = torch.cat(some).double()
    return found.view(*index.shape, -1)


# -- clients of one domain each ----------------------------------------------------------------------------------


def grouped(
    t: int, cohort: Cohort, peers: Peers, part: slice, domains: int, own: Tensor, centers: Tensor, few: bool = False
) -> tuple[Tensor, Tensor]:
    """Every client trains one epoch from the common start; k-means on the results: (domain [m], centers [D, q]).

    As they were before, own [m] and centers, where fewer than D clients are heard. few: a few clients train at a time,
    and where all models together would be large their sketches are compared.
    """
    large = peers.n * (part.stop - part.start) > WHOLE
    trained = _by_turns(t, cohort, part, sketched=large) if few else _trained(t, cohort, part)
    ids, models, _ = peers.gather(t, trained)
    if ids.numel() < domains:
        return own, centers
    groups, centers = k_means(models, domains, cohort.seed)
    return look_up(cohort.ids, ids, groups, own), centers


def k_means(points: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Groups [p] of points [p, q] and their centers [c, q], numbered in the order of their first members."""
    from sklearn.cluster import KMeans  # slow to import, and few runs need it
    from sklearn.exceptions import ConvergenceWarning

    settings = {"n_init": RESTARTS, "random_state": randomness.torch_seed(seed, "domains") % 2**32}
    search = KMeans(count, copy_x=False, **settings)
    own = points.to("cpu", torch.float64, copy=True).numpy()  # one copy of as many points as there are clients
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different points than centers
        labels = search.fit(own).labels_.tolist()
    first = list(dict.fromkeys([*labels, *range(count)]))
    place = {label: number for number, label in enumerate(first)}
    centers = torch.as_tensor(search.cluster_centers_[first])
    return torch.tensor([place[label] for label in labels], device=points.device), centers.to(points)


def _trained(t: int, cohort: Cohort, part: slice) -> Tensor:
    """[m, q] what becomes of the net, the columns `part`, in one epoch of each client: no row has a domain yet."""
    start = cohort.initial.expand(len(cohort), -1)
    models, _ = cohort.trained(start, t, part=part, epochs=1, purpose="k-means")
    return models[:, part].contiguous()


def _by_turns(t: int, cohort: Cohort, part: slice, sketched: bool) -> Tensor:
    """As `_trained`, with models for a few clients at a time; sketched: [m, SKETCH] where q is more than that."""
    at_once = max(FEWEST, NUMBERS // cohort.layout.size)
    sketch = Sketch.of(part.stop - part.start, cohort.seed, cohort.device) if sketched else None
    found = []
    for rows in torch.split(torch.arange(len(cohort)), at_once):
        here = rows.to(cohort.device)
        guests = visit(cohort, rows, here, models=False)
        guests.begin(cohort.round.absent[here], t=t)
        trained = _trained(t, guests, part)
        cohort.round.quarantined[here] |= guests.round.quarantined
        found.append(trained if sketch is None else sketch(trained))
    return torch.cat(found)


@dataclass(frozen=True)
class Sketch:
    """Rows [k, q] as rows [k, SKETCH] that are about as far from each other.

    Columns get a random order and random signs and are added up in heaps of equal size. The square of a distance stays
    what it is in the mean over such orders and signs, give or take a share of sqrt(2 / SKETCH), 6 %, or less.
    """

    order: Tensor  # [q]
    sign: Tensor  # [q] 1 or -1

    @classmethod
    def of(cls, width: int, seed: int, device: torch.device) -> Sketch | None:
        """None: rows are short enough as they are."""
        if width <= SKETCH:
            return None
        place, server = torch.arange(width, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        order = randomness.bits(seed, "sketch", 0, server, place).argsort(stable=True)
        return cls(order, 1 - 2 * (randomness.bits(seed, "sketch/sign", 0, server, place) & 1))

    def __call__(self, rows: Tensor) -> Tensor:
        mixed = rows[:, self.order] * self.sign.to(rows.dtype)
        heaps = pad(mixed, (0, -mixed.shape[1] % SKETCH)).view(len(rows), SKETCH, -1)
        return heaps.sum(dim=2, dtype=torch.float64).to(rows.dtype)


def write_clients(cohort: Cohort, own: Tensor, domains: int) -> None:
    """All samples of each client get its own [m] domain, -1 for none."""
    for part, x in ((cohort.data.train, cohort.train_x), (cohort.data.test, cohort.test_x)):
        owner = part.owners().to(own.device)
        index = part.places(torch.arange(len(cohort))).to(x.device)
        write(x, index, own[owner][:, None] == torch.arange(domains, device=own.device))


def meet(cohort: Cohort, model: Tensor, part: Part, columns: slice, centers: Tensor) -> Outsiders:
    """The model [d] on clients that never train: each trains an epoch on its own, labels and all, to find its domain.

    That is the nearest of the centers [D, q], or [D, SKETCH] of sketches. part: their samples, as rows.
    """
    if not centers.numel():
        return tested(cohort, model, part)
    guests = copy.copy(cohort)
    guests.ids = cohort.n + torch.arange(part.sizes.numel(), device=cohort.device)
    rows = replace(part, x=part.x.clone())
    guests.data = replace(cohort.data, train=rows, test=rows)
    guests.train_x = guests.test_x = cohort.program.samples(rows.x)
    guests._replay = None
    guests.begin()
    sketched = centers.shape[1] < columns.stop - columns.start
    nearest = torch.cdist(_by_turns(1, guests, columns, sketched).double(), centers.double()).argmin(dim=1)
    write_clients(guests, nearest, centers.shape[0])
    return tested(cohort, model, replace(part, x=guests.train_x))
