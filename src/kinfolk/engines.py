"""Places to run: the same method over one cohort, or over several that only see each other through their peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kinfolk import findings, visits
from kinfolk.aggregation import Rule
from kinfolk.aggregation.combiner import Combiner
from kinfolk.cohort import judging, visit
from kinfolk.cohort.account import Account
from kinfolk.cohort.cohort import Cohort, Mixed
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.newcomers import Outsiders, meets_others, met
from kinfolk.cohort.room import current
from kinfolk.cohort.watch import Seen, Watch, Watching
from kinfolk.data.federation import Federation
from kinfolk.errors import UserError
from kinfolk.findings import Later, Results
from kinfolk.metrics import Edges
from kinfolk.parcel import Parcel
from kinfolk.peers.attacks import Attack, Plan
from kinfolk.peers.base import LEDGER, Exchange, Peers
from kinfolk.peers.faults import Faults
from kinfolk.peers.inprocess import InProcess
from kinfolk.peers.reach import Network
from kinfolk.peers.sharded import Board, Stuck

MANY = 2**28  # numbers in all clients' models, 1 GiB of float32, beyond which only those of a round are kept


class Shard:
    """A cohort with its peers, its method and its state: all that one process of a run holds."""

    def __init__(self, cohort: Cohort, peers: Peers, method: Any, watching: Watching, lean: bool = False) -> None:
        """lean: clients have models of their own only in rounds that they take part in."""
        self.cohort = cohort
        self.peers = peers
        self.method = method
        self.state: Any = method.start(cohort)
        self.lean = lean
        self._everybody = cohort.ids.cpu() if lean else None  # where no GPU has to be asked
        self.quarantined = torch.zeros_like(cohort.ids)
        self.mixed: list[tuple[int, list[Mixed]]] = []  # rounds whose edges have not been fetched yet
        self.noted: list[tuple[int, Tensor]] = []  # and what the method has noted in them
        self.watching = watching
        watched = torch.tensor(watching.clients, dtype=torch.int64, device=cohort.device)
        self.watched = torch.nonzero(torch.isin(cohort.ids, watched)).flatten()  # rows

    def step(self, t: int, evaluate: bool) -> None:
        """One round of the method."""
        faults = self.peers.faults
        absent = faults.away(self.cohort.seed, t, self.cohort.ids) if faults.absent else None
        self.cohort.begin(absent, evaluate, self._watch(t, evaluate), t)
        attack = self.peers.attack
        if attack is not None:
            attack.begin(self.cohort.weights)
        for take in (visits.asked, visits.stepped):
            self.state = take(t, self.method, self.cohort, self.state, self.peers, self._everybody)
        if hasattr(self.method, "notes"):
            self.noted.append((t, self.method.notes(self.state)))
        self.quarantined += self.cohort.round.quarantined
        if attack is not None:
            attack.end(t, self.cohort.round.edges, self.peers.exchange)
            self.quarantined += attack.refused & ~self.cohort.round.quarantined
        self.mixed.append((t, self.cohort.round.edges))

    def edges(self, parcel: Parcel) -> Later[list[tuple[int, Edges]]]:
        """Who of this cohort mixed with whom, in each round since the last call.

        Sent for many rounds at a time: each parcel costs a GPU a little.
        """
        rounds, self.mixed = self.mixed, []
        return findings.edges(rounds, parcel)

    def _watch(self, t: int, evaluate: bool) -> Watch | None:
        """Where to note what the watched clients see in round t, if it is one in which they are watched."""
        if not self.watched.numel() or not self.watching.due(t, evaluate):
            return None
        everybody = partial(self.peers.observe, t, self.watched) if self.watching.everybody else None
        return Watch(self.watched, everybody)

    def seen(self) -> list[Seen]:
        """What watched clients of this cohort saw in the round just done."""
        return [] if self.cohort.round.watch is None else self.cohort.round.watch.seen

    def results(self, parcel: Parcel) -> Later[Results]:
        """Evaluate every client of the cohort."""
        scores = visit.evaluate(self.cohort, self.state.model) if self.lean else self.cohort.evaluate()
        before = self.cohort.round.before_mixing
        some = {name: getattr(self.state, name, None) for name in ("neighbors", "clusters", "apart")}
        some |= {"global_accuracy": scores.common, "proxy_accuracy": judging.proxy_accuracy(self.cohort)}
        some["unusual"], names = self._unusual()
        columns = {
            "accuracy": scores.accuracy,
            "loss": scores.loss,
            "before_mixing": scores.accuracy if before is None else before,
            "quarantined": self.quarantined,
            **{name: getattr(self.peers, name) for name in LEDGER},
            **{name: column for name, column in some.items() if column is not None},
        }
        places = {name: parcel.add(column) for name, column in columns.items()}
        account = self.cohort.account  # on the CPU, and of now: it will have been charged for the next round
        figures = {} if account is None else {name: column.numpy() for name, column in account.figures().items()}

        def found() -> Results:
            here: dict[str, Any] = {name: parcel[place].numpy() for name, place in places.items()}
            return Results(**{**dict.fromkeys(some), **here, **figures}, unusual_names=names)

        return found

    def _unusual(self) -> tuple[Tensor | None, tuple[str, ...]]:
        """What the state counts of the out of the ordinary, [m, q], and its names; None if nothing."""
        field, names = _counted(self.state)
        return None if field is None else getattr(self.state, field).view(len(self.cohort), -1), names

    def snapshot(self) -> dict[str, Tensor]:
        """Everything that a later process needs to go on, by name; rows are clients except under `shared/`."""
        tensors = {
            **({} if self.lean else {"weights": self.cohort.weights}),
            "quarantined": self.quarantined,
            **{name: getattr(self.peers, name) for name in LEDGER},
        }
        if self.peers.attack is not None:
            tensors["turned"] = self.peers.attack.turned
        if self.cohort.account is not None:
            tensors["privacy"] = self.cohort.account.state()
        if self.cohort.round.before_mixing is not None:
            tensors["before_mixing"] = self.cohort.round.before_mixing
        if self.state is not None:
            for field in dataclasses.fields(self.state):
                place = "shared" if field.metadata.get("shared") else "state"
                tensors[f"{place}/{field.name}"] = getattr(self.state, field.name)
        return tensors

    def restore(self, tensors: dict[str, Tensor], t: int) -> None:
        """Take up a snapshot of just these clients after round t."""
        device = self.cohort.device
        self.peers.ledger = torch.stack([tensors[name] for name in LEDGER]).to(device)
        self.quarantined = tensors["quarantined"].to(device, copy=True)
        if self.cohort.account is not None:
            self.cohort.account.restore(tensors["privacy"])
        if self.peers.attack is not None:
            self.peers.attack.turned = tensors["turned"].to(device)
        if self.state is not None:
            fields = {key.split("/")[1]: value.to(device) for key, value in tensors.items() if "/" in key}
            count, _ = _counted(self.state)
            if count is not None and count not in fields:  # of a version that did not count: nothing hangs on it
                fields[count] = getattr(self.state, count)
            if fields.keys() != {field.name for field in dataclasses.fields(self.state)}:
                raise UserError("its checkpoint is of another version of the method: remove the folder to start anew")
            self.state = type(self.state)(**fields)
        if "weights" in tensors and not self.lean:
            self.cohort.weights = tensors["weights"].to(device)
        else:
            state: Any = self.state
            alike = state.model.expand(len(self.cohort), -1)
            self.cohort.weights = alike if self.lean else alike.clone()
        if hasattr(self.method, "tell"):
            self.state = self.method.tell(self.cohort, self.state)
        self.cohort.begin(t=t)  # there may be nothing left to do but to test
        self.cohort.personal = getattr(self.state, "personal", None)
        if "before_mixing" in tensors:
            self.cohort.round.before_mixing = tensors["before_mixing"].to(device)


def _counted(state: Any) -> tuple[str | None, tuple[str, ...]]:
    """The field in which a state counts what is out of the ordinary, and the names of that; None if it does not."""
    field, names = getattr(type(state), "counted", (None, ()))
    return field, names


@dataclass(frozen=True)
class Parts:
    """What every shard is made from."""

    federation: Federation
    model: Callable[[], nn.Module]  # makes the module with the run's own initial weights
    method: Any
    faults: Faults
    cohort: dict[str, Any]  # training, seed, device, precision, chunk
    watching: Watching = dataclasses.field(default_factory=Watching)
    network: Network | None = None  # who can reach whom; None: everybody
    rule: Rule | None = None  # how models are combined; None: the weighted mean
    attack: Plan | None = None  # who lies, and how; None: nobody
    resident: str = "auto"  # whose models are in memory: those of "all", or of a "round"

    def lean(self, module: nn.Module) -> bool:
        """Whether clients have models only in rounds that they take part in."""
        visitors = getattr(self.method, "visitors", None)
        n, size = self.federation.clients, Layout.of(module).size
        if self.resident == "all" or not getattr(self.method, "one_model", False) or self.attack is not None:
            return False
        if visitors is None or visitors(1, self.cohort["seed"], n, torch.device("cpu")) is None:
            return False
        return self.resident == "round" or n * size > MANY

    def shard(self, ids: Tensor, exchange: Exchange) -> Shard:
        """The shard that hosts the clients `ids`."""
        data, module = self.federation.select(ids), self.model()
        n, clusters, lean = self.federation.clients, self.federation.clusters, self.lean(module)
        cohort = Cohort(data, module, ids=ids, n=n, clusters=clusters, shared=lean, **self.cohort)
        reach = None if self.network is None else self.network.reach(cohort.ids)
        peers = Peers(self.federation.clients, cohort, exchange, self.faults, reach)
        if self.rule is not None:
            combiner = Combiner(self.rule, cohort)
            cohort.combine, peers.combine = combiner.peers, combiner.server
        if self.attack is not None:
            peers.attack = Attack(self.attack, cohort.ids, cohort.layout.size)
        return Shard(cohort, peers, self.method, self.watching, lean)


class InProcessEngine:
    """One cohort holds all clients: the reference."""

    def __init__(self, parts: Parts) -> None:
        self.exchange = InProcess()
        self.shards = [parts.shard(torch.arange(parts.federation.clients), self.exchange)]

    def step(self, t: int, evaluate: bool) -> None:
        self.shards[0].step(t, evaluate)
        self.exchange.clear()


class ShardedEngine:
    """Several cohorts in one process, each seeing the others only through what they publish."""

    def __init__(self, parts: Parts, shards: int) -> None:
        blocks = torch.arange(parts.federation.clients).tensor_split(min(shards, parts.federation.clients))
        self.board = Board(len(blocks))
        self.shards = [parts.shard(ids, self.board.exchange(number)) for number, ids in enumerate(blocks)]
        self.threads = ThreadPoolExecutor(len(blocks), thread_name_prefix="shard")

    def step(self, t: int, evaluate: bool) -> None:
        def take(shard: Shard) -> None:
            with self.board.turn(), current(shard.cohort.device):
                shard.step(t, evaluate)

        self.board.expect(len(self.shards))
        futures = [self.threads.submit(take, shard) for shard in self.shards]
        failures = [error for error in (future.exception() for future in futures) if error is not None]
        self.board.clear()
        if failures:  # the cause, not the shards that then waited for it in vain
            raise next((error for error in failures if not isinstance(error, Stuck)), failures[0])


Engine = InProcessEngine | ShardedEngine


def accounts(engine: Engine) -> list[Account]:
    """What each shard's clients have released of their data; [] if the method is not private."""
    return [shard.cohort.account for shard in engine.shards if shard.cohort.account is not None]


@contextmanager
def accounted(engine: Engine, path: Path, about: str) -> Iterator[None]:
    """While a private method runs, every charge is written into a file before anything is released.

    about: the data, which a file that exists has to agree with.
    """
    found = accounts(engine)
    if found:
        found[0].keep(path, about, found)
    try:
        yield
    finally:
        for account in found:
            account.close()


def edges(engine: Engine, parcel: Parcel) -> Later[list[tuple[int, Edges]]]:
    """Who mixed with whom in each round since the last call, over all shards."""
    shards = [shard.edges(parcel) for shard in engine.shards]

    def found() -> list[tuple[int, Edges]]:
        rounds = zip(*(later() for later in shards))
        return [(parts[0][0], findings.joined([edges for _, edges in parts])) for parts in rounds]

    return found


def notes(engine: Engine, parcel: Parcel) -> Later[list[dict[str, Any]]]:
    """What the method has noted in each round since the last call, a row for each; [] if it notes nothing.

    Notes are the same on all shards, and sent for many rounds at a time like edges.
    """
    method, rounds = engine.shards[0].method, engine.shards[0].noted
    for shard in engine.shards:
        shard.noted = []
    if not rounds:
        return list
    place = parcel.add(torch.stack([row for _, row in rounds]))

    def found() -> list[dict[str, Any]]:
        columns = {name: column.tolist() for name, column in method.noted(parcel[place]).items()}
        return [
            {"round": t} | {name: float(column[i]) for name, column in columns.items()}
            for i, (t, _) in enumerate(rounds)
        ]

    return found


def seen(engine: Engine) -> dict[str, np.ndarray]:
    """What watched clients saw in the round just done: columns [s], sorted by client and peer; {} if nothing."""
    parts = [part for shard in engine.shards for part in shard.seen()]
    if not parts:
        return {}
    names = [field.name for field in dataclasses.fields(Seen)]
    columns = {name: np.concatenate([getattr(part, name).cpu().numpy() for part in parts]) for name in names}
    order = np.lexsort((columns["peer"], columns["client"]))
    columns = {name: column[order] for name, column in columns.items()}
    clusters = engine.shards[0].cohort.clusters
    columns["kin"] = np.full(order.size, -1)  # unknown
    if clusters is not None:
        true = clusters.cpu().numpy()
        columns["kin"] = (true[columns["client"]] == true[columns["peer"]]).astype(np.int64)
    return columns


def evaluated(engine: Engine, parcel: Parcel) -> Later[Results]:
    """The evaluation of all shards together."""
    shards = [shard.results(parcel) for shard in engine.shards]
    return lambda: findings.together([later() for later in shards])


def results(engine: Engine) -> Results:
    """The same at once."""
    return evaluated(engine, Parcel())()


def outsiders(engine: Engine) -> dict[str, Outsiders]:
    """How the method's model, or models, do for clients that never train, by role; {} without either."""
    shard = engine.shards[0]
    if not meets_others(shard.method):
        return {}
    data = shard.cohort.data
    parts = {"new": data.newcomers, "validation": data.validation}
    found = {role: part for role, part in parts.items() if part is not None}
    return {role: met(shard.method, shard.cohort, shard.state, part) for role, part in found.items()}


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """All shards' snapshots as one, in the order of the clients' ids."""
    parts = [shard.snapshot() for shard in engine.shards]
    return {
        name: tensor
        if name.startswith("shared/") or len(parts) == 1
        else torch.cat(_same_width([p[name] for p in parts]))
        for name, tensor in parts[0].items()
    }


def restore(engine: Engine, tensors: dict[str, Tensor], t: int) -> None:
    """Hand every shard its clients' rows of a snapshot of round t; the number of shards may have changed since."""
    for shard in engine.shards:
        ids = shard.cohort.ids.cpu()
        own = {name: value if name.startswith("shared/") else value[ids] for name, value in tensors.items()}
        shard.restore(own, t)


def _same_width(lists: list[Tensor]) -> list[Tensor]:
    """Lists of ids [m, *] may be longer on one shard than on another: pad with -1."""
    if lists[0].ndim != 2 or len({part.shape[1] for part in lists}) == 1:
        return lists
    width = max(part.shape[1] for part in lists)
    return [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in lists]
