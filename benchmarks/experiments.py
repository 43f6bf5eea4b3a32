"""Whole experiments, everything included, and what a round's time goes into.

PANM by gradient on FashionMNIST and CIFAR-10, evaluated every 10 rounds. After a short run to warm up, one run is timed
undisturbed: seconds from calling `kinfolk.run` to its result, of these the seconds of the rounds with the last
checkpoint and the final files, and a round's own time between the first and the last of them. Then the same rounds with
nothing but training and evaluation: what a round took beyond that is what matching, mixing and logs cost; a checkpoint
is due every so many seconds, and its share is added. A last run is taken apart: timers around a few functions, each
waiting for the device, so nothing goes on side by side and its total is longer. Where a data set is not on this
machine, or is too small for so many clients, made-up images of the same shape take its place.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, keep

import kinfolk
from kinfolk import Federation, Observer
from kinfolk.assembly import load_federation
from kinfolk.cohort.cohort import SHORT, Cohort
from kinfolk.cohort.memory import kept
from kinfolk.config import Config, read
from kinfolk.engines import Shard
from kinfolk.errors import UserError
from kinfolk.experiment import checkpoint_pause, find_device
from kinfolk.runs import checkpoint

EXPERIMENTS = {"fmnist": (1, 28, 28), "cifar10": (3, 32, 32)}
ROUNDS = {"cuda": 300, "cpu": 20}
FEWER = {"fmnist": 1, "cifar10": 5}  # above 100 clients the rounds are divided by this
# What is timed, from the outside in: time inside one of them does not count for what called it.
PARTS: list[tuple[Any, str, str]] = [
    (Shard, "step", "match_mix"),
    (Cohort, "train", "train"),
    (Cohort, "losses", "judge"),
    (Cohort, "evaluate", "evaluate"),
    (checkpoint, "save", "checkpoint"),
]
REST = "log"  # the loop itself, the logs and the final files


class Watch:
    """Seconds by part; a part's time stops while another is called from within it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys([part for _, _, part in PARTS] + [REST], 0.0)
        self.running: list[str] = []
        self.since = 0.0

    def enter(self, part: str) -> None:
        self._charge()
        self.running.append(part)

    def leave(self) -> None:
        self._charge()
        self.running.pop()

    def _charge(self) -> None:
        _wait(self.device)
        now = time.perf_counter()
        if self.running:
            self.seconds[self.running[-1]] += now - self.since
        self.since = now

    def around(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            if not self.running:  # before the first round
                return function(*args, **options)
            self.enter(part)
            try:
                return function(*args, **options)
            finally:
                self.leave()

        return timed


class Loop(Observer):
    """Times the rounds, with logs, checkpoints and the final files, without what comes before them; and the rounds
    between the first and the last of them, `each` seconds long."""

    begin = seconds = each = since = 0.0

    def __init__(self, rounds: int, device: torch.device) -> None:
        self.first, self.last, self.where = max(1, rounds // 20), max(2, rounds - 1), device

    def started(self, config: Config, folder: Path, first: int, device: str) -> None:
        self.begin = time.perf_counter()

    def round(self, t: int, row: dict[str, Any] | None) -> None:
        if t in (self.first, self.last):
            _wait(self.where)
            self.each = (time.perf_counter() - self.since) / (self.last - self.first)
            self.since = time.perf_counter()

    def finished(self, result: kinfolk.Result) -> None:
        self.seconds = time.perf_counter() - self.begin


class Caught(Exception):
    """Out of the first round of a run, with its cohort."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort


def bare(run: Callable[[], object], rounds: int, every: int) -> float:
    """Seconds that the rounds of such a run take with training and evaluation alone."""

    def step(shard: Shard, t: int, evaluate: bool) -> None:
        raise Caught(shard.cohort)

    plain = Shard.step
    Shard.step = step
    try:
        run()
    except Caught as caught:
        cohort = caught.cohort
    finally:
        Shard.step = plain

    def some(last: int) -> float:
        _wait(cohort.device)
        begin = time.perf_counter()
        for t in range(1, last + 1):
            due = t % every == 0 or t in (1, last)
            cohort.begin(evaluate=due, t=t)
            cohort.train(t)
            if due:
                cohort.evaluate().accuracy.cpu()
        _wait(cohort.device)
        return time.perf_counter() - begin

    with kept(cohort.device):  # as in a run
        some(min(rounds, 12))
        return some(rounds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Rounds(Observer):
    """Lets the watch run from before the first round until the result is there."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def started(self, config: Config, folder: Path, first: int, device: str) -> None:
        self.watch.enter(REST)

    def finished(self, result: kinfolk.Result) -> None:
        self.watch.leave()


@contextmanager
def instrumented(watch: Watch) -> Iterator[None]:
    """Timers around the parts, taken off again afterwards."""
    before = [(place, name, getattr(place, name)) for place, name, _ in PARTS]
    for (place, name, part), (_, _, function) in zip(PARTS, before):
        setattr(place, name, watch.around(function, part))
    try:
        yield
    finally:
        for place, name, function in before:
            setattr(place, name, function)


def made_up(shape: tuple[int, ...], n: int, train: int, test: int, device: torch.device) -> Federation:
    """Noisy images of ten patterns; the second half of the clients sees them upside down."""
    generator = torch.Generator(device).manual_seed(0)
    patterns = torch.randn(10, *shape, generator=generator, device=device)

    def samples(client: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(10, (count,), generator=generator, device=device)
        x = patterns[y] + torch.randn(count, *shape, generator=generator, device=device)
        return (x.flip(2, 3) if client >= n // 2 else x), y

    pairs = [(samples(client, train), samples(client, test)) for client in range(n)]
    clusters = [int(client >= n // 2) for client in range(n)]
    return Federation.from_arrays([a for a, _ in pairs], [b for _, b in pairs], clusters, classes=10, name="made-up")


EVERY = 10


def settings(n: int, rounds: int, precision: str, preset: str, device: torch.device) -> list[str]:
    """Stage one is a third of the rounds, as in the paper."""
    return [
        f"data.clients={n}", f"run.rounds={rounds}", f"method.discover_rounds={max(1, rounds // 3)}",
        f"method.preset={preset}", f"run.evaluate_every={EVERY}", f"run.precision={precision}",
        f'run.device="{device}"',
    ]  # fmt: skip


def measure(name: str, n: int, rounds: int, precision: str, preset: str, device: torch.device) -> dict[str, Any]:
    """One experiment: to warm up, timed, and taken apart."""
    file = f"panm/{name}"
    chosen = settings(n, rounds, precision, preset, device)
    config = read(file, chosen)
    try:
        load_federation(config)
        data = None
    except UserError as error:
        print(f"{name}, n = {n}: made-up images ({error})", flush=True)
        data = made_up(EXPERIMENTS[name], n, config.data.train or 200, config.data.test or 100, device)

    def run(overrides: list[str], observer: Observer | None = None) -> tuple[float, kinfolk.Result]:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            result = kinfolk.run(file, overrides, data=data, out=Path(folder) / "run", observer=observer)
            return time.perf_counter() - begin, result

    enough = max(12, -(-SHORT // n))  # a shorter run would leave programs to be compiled by the timed one
    warm_up, _ = run(settings(n, min(rounds, enough), precision, preset, device))
    loop = Loop(rounds, device)
    wall, result = run(chosen, loop)
    alone = bare(lambda: run(chosen), rounds, EVERY)
    watch = Watch(device)
    with instrumented(watch):
        run(chosen, Rounds(watch))
    whole = sum(watch.seconds.values())
    saving = watch.seconds["checkpoint"] / checkpoint_pause(watch.seconds["checkpoint"])
    return {
        "experiment": name,
        "data": "made-up" if data is not None else config.data.name,
        "clients": n,
        "rounds": rounds,
        "precision": precision,
        "preset": preset,
        "wall_s": round(wall, 3),
        "warm_up_run_s": round(warm_up, 3),
        "rounds_s": round(loop.seconds, 3),
        "training_and_evaluation_s": round(alone, 3),
        "beside_them": round(1 - alone / loop.seconds, 4),
        "round_s": round(loop.each, 6),
        "checkpoint_s": round(watch.seconds["checkpoint"], 3),
        "beside_them_in_a_round": round(1 - alone / rounds / (loop.each * (1 + saving)), 4),
        "accuracy": round(result.accuracy, 4),
        "round_ms": {part: round(1e3 * taken / rounds, 4) for part, taken in watch.seconds.items()},
        "share": {part: round(taken / whole, 4) for part, taken in watch.seconds.items()},
        "not_training_or_evaluating": round(1 - (watch.seconds["train"] + watch.seconds["evaluate"]) / whole, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--experiments", default=",".join(EXPERIMENTS), help="some of them, with commas")
    parser.add_argument("--clients", default="100,1000", help="numbers of clients, with commas")
    parser.add_argument("--rounds", type=int, default=None, help="above 100 clients a fifth of it for cifar10")
    parser.add_argument("--precisions", default="float32", help="one or several, with commas")
    parser.add_argument("--presets", default="paper,robust", help="one or both, with a comma")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args()
    device = find_device(options.device)
    rounds = options.rounds or ROUNDS[device.type]
    rows = []
    for name in options.experiments.split(","):
        for n in (int(word) for word in options.clients.split(",")):
            for precision, preset in product(options.precisions.split(","), options.presets.split(",")):
                some = max(3, rounds if n <= 100 else rounds // FEWER[name])
                row = measure(name, n, some, precision, preset, device)
                rows.append(row)
                shares = ", ".join(f"{part} {100 * share:.1f} %" for part, share in row["share"].items())
                print(
                    f"{name}, n = {n}, {some} rounds, {precision}, {preset}: {row['wall_s']:.2f} s, beside training "
                    f"and evaluation {100 * row['beside_them']:.1f} %, of a round of {1e3 * row['round_s']:.2f} ms "
                    f"{100 * row['beside_them_in_a_round']:.1f} %; taken apart: {shares}",
                    flush=True,
                )
                keep("experiments", device, rows, options.out)
    print(keep("experiments", device, rows, options.out))


if __name__ == "__main__":
    main()
