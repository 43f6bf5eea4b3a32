"""One experiment with one seed: build the parts, go through the rounds, measure, keep everything in a run folder."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kinfolk import engines, origins, records
from kinfolk.assembly import engine_of, prepare
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.memory import kept
from kinfolk.cohort.room import current
from kinfolk.config import Config, fingerprint, read, resolve
from kinfolk.data.federation import Federation
from kinfolk.errors import UserError
from kinfolk.logbook import Logbook
from kinfolk.models import Factory
from kinfolk.runs import checkpoint
from kinfolk.runs.folder import RunFolder, free_path
from kinfolk.runs.graph import MERGED
from kinfolk.stopping import interruptible
from kinfolk.warmup import WarmUp

# Between checkpoints when no number of rounds is given: so many seconds, or, where saving takes longer than this share
# of them, more, but never so many that much would be lost.
CHECKPOINT_SECONDS, CHECKPOINT_SHARE, CHECKPOINT_LONGEST = 30.0, 0.02, 600.0
PRIVACY = "privacy.jsonl"  # what private clients have released


class Observer:
    """Told how a run goes on. This one says nothing; the command line has its own."""

    def started(self, config: Config, folder: Path, first: int, device: str) -> None: ...

    def round(self, t: int, row: dict[str, Any] | None) -> None:
        """Round t is done, on a GPU perhaps later ones too; `row` holds the metrics if it was evaluated."""

    def notice(self, text: str) -> None: ...

    def cell(self, number: int, of: int, name: str) -> None:
        """Of the `of` runs of a study, number `number` comes next."""

    def finished(self, result: Result) -> None: ...


class Interrupted(Exception):
    """The user stopped the run; everything up to `round` is in `folder`."""

    def __init__(self, folder: Path, round: int) -> None:
        super().__init__(f"stopped after round {round}; go on with: kinfolk resume {folder}")
        self.folder = folder
        self.round = round


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    config: Config
    summary: dict[str, Any]  # the last evaluation, the best round, seconds
    metrics: list[dict[str, Any]]  # one dict per evaluation
    clients: list[dict[str, Any]]  # one dict per client

    @property
    def accuracy(self) -> float:
        """Mean over clients of each client's own model on its own test set, after the last round; NaN without tests."""
        found = self.summary["accuracy"]
        return math.nan if found is None else float(found)

    def weights(self) -> Tensor:
        """The models that the clients use after the last round, not yet tuned where a method does so: [n, d]."""
        return origins.of_clients(self._saved().tensors)

    def load_into(self, module: nn.Module, client: int) -> nn.Module:
        """Write a client's trained weights into a module of the same kind."""
        if not 0 <= client < len(self.clients):
            raise UserError(f"client {client}: {self.folder} has clients 0 to {len(self.clients) - 1}")
        saved, layout = self._saved(), Layout.of(module)
        hint = "a module of the same kind is needed"
        if hasattr(self.config.method, "wrap"):
            hint = f"{self.config.method_name} adds layers to yours: `kinfolk export {self.folder}` knows them"
        origins.refuse_other_net(self.folder, saved, layout, hint)
        layout.load(origins.of_clients(saved.tensors)[client], module)
        return module

    def _saved(self) -> checkpoint.Checkpoint:
        if not checkpoint.rounds(self.folder / "checkpoint"):
            raise UserError(f"{self.folder} holds no models: it has no checkpoint, like a run that came in a pack")
        return checkpoint.load(self.folder / "checkpoint")


def run(
    experiment: str | Path | dict[str, Any] | Config,
    overrides: Sequence[str] = (),
    *,
    data: Federation | None = None,
    model: Factory | None = None,
    out: str | Path | None = None,
    observer: Observer | None = None,
) -> Result:
    """Run an experiment: a file, the name of a shipped one, a dict of sections, or a Config.

    `data` and `model` replace what the experiment names by your own federation and module factory. The run is kept in
    `out`, by default a new folder under `runs/`.
    """
    config = experiment if isinstance(experiment, Config) else read(experiment, overrides)
    observer = observer or Observer()
    device = find_device(config.run.device)
    if data is not None:
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, name=data.name, clients=data.clients)
        )
    with current(device):
        parts, config = prepare(config, device, data, model, observer.notice)
        engine = engine_of(parts, config)
        path = free_path(default_folder(config)) if out is None else Path(out)
        facts = {"device": device_name(device), **origins.facts(data, model)}
        with RunFolder.create(path, config.sections(), facts) as folder:
            if parts.network is not None:
                folder.keep(parts.network.files())
            with engines.accounted(engine, folder.path / PRIVACY, config.about()):
                return _rounds(config, engine, folder, 0, 0.0, observer)


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    data: Federation | None = None,
    model: Factory | None = None,
    device: str | None = None,
    observer: Observer | None = None,
) -> Result:
    """Go on with a run where its last checkpoint left it, or make a finished one longer with `rounds`."""
    observer = observer or Observer()
    with RunFolder.open(Path(folder), write=True) as opened:
        config = resolve(opened.config())
        origins.refuse_others(opened, config, data, model)
        finished = opened.status().state == "finished"
        if rounds is None and finished:
            observer.notice(f"{folder} is finished; `--rounds N` makes it longer")
            return read_result(Path(folder))
        if finished and not checkpoint.rounds(opened.checkpoints):
            raise UserError(f"{folder} is finished and has no checkpoint: it can be shown but not made longer")
        if checkpoint.rounds(opened.checkpoints) and (setting := config.newly_on(opened.config())) is not None:
            raise UserError(f"{folder} is from before '{setting}', which its preset turns on now: start it anew")
        if rounds is not None:
            if rounds < config.run.rounds:
                raise UserError(f"{folder} already asks for {config.run.rounds} rounds: {rounds} would shorten it")
            config = config.with_run(rounds=rounds)
        where = find_device(device or config.run.device)
        with current(where):
            parts, config = prepare(config, where, data, model, observer.notice, opened.path)
            engine = engine_of(parts, config)
            with engines.accounted(engine, opened.path / PRIVACY, config.about()):
                return _go_on(config, engine, opened, observer)


def _go_on(config: Config, engine: engines.Engine, opened: RunFolder, observer: Observer) -> Result:
    """The rounds after the last checkpoint."""
    done, seconds = 0, 0.0
    if checkpoint.rounds(opened.checkpoints):
        saved = checkpoint.load(opened.checkpoints, expect={"config": fingerprint(opened.config())})
        for notice in saved.notices:
            observer.notice(notice)
        hint = "the model, or what it is made for, is not that of the run"
        origins.refuse_other_net(opened.path, saved, engine.shards[0].cohort.layout, hint)
        try:
            engines.restore(engine, saved.tensors, saved.round)
        except UserError as error:
            raise UserError(f"{opened.path}: {error}") from None
        done, seconds = saved.round, float(saved.facts["seconds"])
    accounts = engines.accounts(engine)
    for account in accounts if done < config.run.rounds else ():
        account.refuse(done + 1, accounts)
    if opened.status().state == "finished" and not (opened.path / MERGED).is_file():
        observer.notice(f"{opened.path} has no {MERGED}: who mixed with whom up to round {done} is lost")
    opened.extend(config.run.rounds)  # only now: a finished run that cannot go on stays finished
    opened.rewind(done)
    return _rounds(config, engine, opened, done, seconds, observer)


def read_result(path: Path) -> Result:
    """A finished run, from its folder."""
    folder = RunFolder.open(path)
    return Result(path, resolve(folder.config()), folder.summary(), folder.metrics(), folder.clients())


def default_folder(config: Config) -> Path:
    return Path("runs") / f"{config.name}-{config.method_name}-seed{config.run.seed}"


def find_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N as a device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"'run.device' = '{name}': auto, cpu, cuda or cuda:N is needed") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"'run.device' = '{name}': auto, cpu, cuda or cuda:N is needed")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"{count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device"
        raise UserError(f"'run.device' = '{name}', but this machine has {found}; use device=auto or cpu")
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


# -- the rounds --------------------------------------------------------------------------------------------------


def _rounds(
    config: Config, engine: engines.Engine, folder: RunFolder, done: int, seconds: float, observer: Observer
) -> Result:
    """Rounds done+1 .. T. `seconds` is what the rounds so far took."""
    total = config.run.rounds
    observer.started(config, folder.path, done, str(engine.shards[0].cohort.device))
    if (notice := engine.shards[0].cohort.notice) is not None:
        observer.notice(notice)
    known = records.Truth.of(engine)
    begin = time.perf_counter() - seconds
    saved_at, saved, pause = time.perf_counter(), done, CHECKPOINT_SECONDS
    warm_up = WarmUp(engine.shards[0].cohort.device, done)
    shard = engine.shards[0]
    log = Logbook(engine, folder, known, config.method, observer.round, lambda: time.perf_counter() - begin)
    with interruptible(observer.notice) as stop, kept(shard.cohort.device, spare=shard.lean), log:
        for t in range(done + 1, total + 1):
            evaluate = t % config.run.evaluate_every == 0 or t in (1, total)
            engine.step(t, evaluate)
            log.catch_up()  # a GPU has something to do meanwhile
            if warm_up.over(t) and (trouble := engine.shards[0].cohort.trouble()) is not None:
                observer.notice(trouble)
            log.add(t, evaluate)
            every = config.run.checkpoint_every
            due = t % every == 0 if every else time.perf_counter() - saved_at > pause
            if t == total or due or stop.is_set():
                log.flush()
                saving = time.perf_counter()
                _save(folder, t, engine, saving - begin)
                saved_at, saved = time.perf_counter(), t
                pause = checkpoint_pause(saved_at - saving)
            if stop.is_set() and saved == t < total:  # if it came after the look above, the next round is the last
                raise Interrupted(folder.path, saved)
    if config.run.watch and not folder.has_similarity():
        observer.notice("run.watch: in the rounds watched the method compared no models: there is no similarity.csv")
    results = log.results or engines.results(engine)  # nothing may have been left to do but to test
    folder.write_clients(records.clients(results, known, engine))
    if strangers := records.strangers(engine):
        folder.write_new_clients(strangers)
    folder.keep(records.files(engine))
    if (astray := records.diverged(results, known, total)) is not None:
        observer.notice(f"{folder.path}: {astray}")
    promise = records.privacy(engine)
    if promise:
        observer.notice(promise["privacy"]["statement"])
    summary = records.summary(folder.evaluations(), config)
    folder.finish({**summary, **promise, "warm_up_seconds": warm_up.seconds(total)})
    result = read_result(folder.path)
    observer.finished(result)
    return result


def checkpoint_pause(seconds: float) -> float:
    """Seconds from one checkpoint to the next if saving takes so many."""
    return min(max(CHECKPOINT_SECONDS, seconds / CHECKPOINT_SHARE), CHECKPOINT_LONGEST)


def _save(folder: RunFolder, t: int, engine: engines.Engine, seconds: float) -> None:
    folder.graph.flush()
    # Of the sections as they were kept, not as this version fills them in: a later one may know more settings.
    facts = {"config": fingerprint(folder.config()), "seconds": seconds}
    facts["net"] = engine.shards[0].cohort.layout.described()
    checkpoint.save(folder.checkpoints, t, engines.snapshot(engine), facts)
