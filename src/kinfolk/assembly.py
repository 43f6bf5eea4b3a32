"""What a run is built from: the clients' data, their nets, whom they can reach, and the engine for all that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from kinfolk import engines, models, threats
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.newcomers import meets_others
from kinfolk.cohort.watch import Watching
from kinfolk.config import Config
from kinfolk.data import catalog, inputs
from kinfolk.data.federation import Federation
from kinfolk.data.formats import Dataset
from kinfolk.data.partition import Labels, Split, set_apart, turned, with_common_test
from kinfolk.errors import UserError
from kinfolk.models import Factory
from kinfolk.peers.reach import Network
from kinfolk.settings import among, peer_counts


def load_split(config: Config) -> tuple[Dataset, Split]:
    """The data set of an experiment and who holds which of its samples."""
    dataset = catalog.shared(config.data.name)
    labels = Labels(dataset.train.y, dataset.test.y, dataset.classes, dataset.train.user, dataset.test.user)
    data = config.data
    outside = (data.validation_clients or 0, data.new_clients or 0)
    try:
        split = config.split.divide(labels, data.clients + sum(outside), data.train, data.test, config.run.seed)
    except UserError as error:
        if not sum(outside):
            raise
        raise UserError(f"{error} (with {sum(outside)} clients that never train among them)") from None
    split = turned(split, data.rotate, labels.pool.size, config.run.seed)
    if sum(outside):
        split = set_apart(split, *outside, config.run.seed)
    if data.global_test is not None:
        split = with_common_test(split, labels, data.global_test, config.run.seed)
    return dataset, split


def load_federation(config: Config, notice: Callable[[str], None] = lambda text: None) -> Federation:
    """The clients' data of an experiment; `notice` hears of what will take long."""
    dataset, split = load_split(config)
    return inputs.federation(dataset, split, config.data.scale, config.data.features, config.data.norm, notice)


def prepare(
    config: Config,
    device: torch.device,
    data: Federation | None,
    model: Factory | None,
    notice: Callable[[str], None],
    kept: Path | None = None,
) -> tuple[engines.Parts, Config]:
    """What the engine is built from, and the config as it is used; `kept` is the run folder, once there is one, with
    its copies of files."""
    federation = load_federation(config, notice) if data is None else data
    if config.data.global_test is not None and federation.common is None:
        raise UserError("data.global_test: your own data need `common`, test samples for all (Federation.from_arrays)")
    if (config.data.new_clients or config.data.validation_clients) and data is not None:
        raise UserError("data.new_clients: your own data bring such clients along: dataclasses.replace(newcomers=...)")
    for note in federation.notes:
        notice(note)
    config, notices = clip(config, federation.clients)
    network, more = _network(config, federation.clients, kept)
    notices += more
    federation, rule, attack, more = threats.prepare(config, federation)
    notices += more + config.run.notices(federation.clients)
    if hasattr(config.method, "notices"):
        notices += config.method.notices(config.run.rounds)
    if federation.newcomers is not None and not meets_others(config.method):
        notices.append(f"method '{config.method_name}' has no model for clients that never train: they are left out")
    for text in notices:
        notice(text)
    shape = federation.input_shape
    if hasattr(config.method, "arrange"):
        federation = config.method.arrange(federation, device)
    factory = models.find(config.model) if model is None else model
    options = config.model_options if model is None else {}
    seed = config.run.seed

    def make() -> nn.Module:
        if not hasattr(config.method, "wrap"):
            return models.make(factory, federation.input_shape, federation.classes, options)
        wrapped: nn.Module = config.method.wrap(models.make(factory, shape, federation.classes, options), shape)
        return wrapped

    def build() -> nn.Module:
        return initial_model(make, seed)

    settings = {
        "training": config.training,
        "seed": seed,
        "device": device,
        "precision": config.run.precision,
        "chunk": config.run.chunk,
        "rounds": config.run.rounds,
    }
    watching = Watching(tuple(config.run.watch), tuple(config.run.watch_rounds), config.run.watch_all)
    watching.check(federation.clients)
    method, faults = config.method, config.faults
    resident = config.run.resident
    parts = engines.Parts(federation, build, method, faults, settings, watching, network, rule, attack, resident)
    if resident == "round" and not parts.lean(build()):
        why = "in this run all clients have models" if attack is None else "attackers have models of their own"
        notice(f"run.resident = 'round' is ignored: {why}")
    return parts, config


def _network(config: Config, n: int, kept: Path | None) -> tuple[Network | None, list[str]]:
    """Who can reach whom (None: everybody), and what the user should know of it."""
    network, notices = config.peers.network(n, config.run.seed, kept)
    if network is not None and getattr(config.method, "server", False):
        return None, [f"method '{config.method_name}' has a server that reaches everybody: [peers] is ignored"]
    return network, notices


def clip(config: Config, n: int) -> tuple[Config, list[str]]:
    """Nobody has more than n - 1 peers, or can reach more: settings that ask for more are lowered, with a notice."""
    notices, method, others = list[str](), among(config.method, n), config.peers.most(n)
    most = max(1, others)  # alone, a client asks for one peer and gets none
    has = f"only {others} peers: using {most}" if others else "no peer: it trains alone"
    for name, value in peer_counts(method).items():
        if value > most:
            notices.append(f"method.{name} = {value}, but a client has {has}")
            method = dataclasses.replace(method, **{name: most})
    return dataclasses.replace(config, method=method), notices


def engine_of(parts: engines.Parts, config: Config) -> engines.Engine:
    """Where it runs."""
    if config.run.engine == "sharded":
        return engines.ShardedEngine(parts, config.run.shards)
    return engines.InProcessEngine(parts)
