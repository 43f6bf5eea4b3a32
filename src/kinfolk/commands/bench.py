"""`kinfolk bench`: how fast this machine is, and what to set on it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kinfolk.commands import terminal
from kinfolk.commands.terminal import Device, Json
from kinfolk.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

    from kinfolk.bench import Job

SHORT = 3  # rounds
FULL = 7
BUDGET = 15.0  # seconds after which the short version begins no further round of a job
FEWER = {"C": 8, "X": 11}  # clients in the short version on a CPU, where images take long
CHUNKS = (None, 4, 8, 16, 32)
CHUNK_CLIENTS = 64
CPU_CLIENTS = 20  # of the MLP job on the CPU, beside a GPU

Tell = Callable[[str], None]


def bench_command(
    device: Device = None,
    jobs: Annotated[
        str, typer.Option("--jobs", metavar="M,L,C,X", help="Which jobs; the table says what.")
    ] = "M,L,C,X",
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help=f"Medians over so many; default {SHORT}, with --full {FULL}.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="100 clients in every job, whatever it takes.")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine against a plain loop over clients, and say what to set."""
    from kinfolk.bench import JOBS
    from kinfolk.cohort.room import current
    from kinfolk.experiment import find_device
    from kinfolk.report.speed import speed_table

    where = find_device(device or "auto")
    names = _names(jobs, list(JOBS))
    short = where.type == "cpu" and not full
    wanted = [replace(JOBS[name], clients=FEWER.get(name, 100)) if short else JOBS[name] for name in names]
    with current(where):
        found = _measure(wanted, where, rounds or (FULL if full else SHORT), full)
    if as_json:
        terminal.print_json(found)
    else:
        console = terminal.console()
        what = {name: JOBS[name].what for name in names}
        console.print(speed_table(found["rows"], what, f"{found['device']}, torch {found['torch']}"))
        console.print("\n" + "\n".join(found["recommendation"]), soft_wrap=True, markup=False)
    if not all(row["agrees"] for row in found["rows"]):
        sys.exit(1)


def _names(text: str, known: list[str]) -> list[str]:
    names = list(dict.fromkeys(word.strip().upper() for word in text.split(",") if word.strip()))
    for name in names:
        if name not in known:
            raise UserError(f"unknown job '{name}': {nearest(name, known)}")
    if not names:
        raise UserError(f"no job to measure: --jobs names some of {', '.join(known)}")
    return names


def _measure(jobs: list[Job], device: torch.device, rounds: int, full: bool) -> dict[str, Any]:
    """Everything, with progress on standard error."""
    import torch

    from kinfolk import bench

    try_chunks = device.type == "cpu" and any(job.name == "M" for job in jobs)
    try_cpu = device.type == "cuda" and any(job.name == "M" for job in jobs)
    rows: list[dict[str, Any]] = []
    chunks, cpu = None, None
    with _progress(1 + len(jobs) * (1 + rounds) + try_chunks + try_cpu) as tell:
        tell("the machine's peaks")
        peaks = bench.peaks(device, bench.precisions(device))
        for job in jobs:
            with_name = _named(tell, job.name)
            budget = float("inf") if full else BUDGET
            rows += bench.measure(job, device, rounds, peaks=peaks, budget=budget, tell=with_name)
        if try_chunks:
            tell("numbers of clients at once")
            chunks = bench.seconds_by_chunk(replace(bench.JOBS["M"], clients=CHUNK_CLIENTS), device, CHUNKS)
        if try_cpu:
            tell("the MLP job on the CPU")
            few = replace(bench.JOBS["M"], clients=CPU_CLIENTS)
            each = bench.seconds_by_chunk(few, torch.device("cpu"), [None], rounds=1)[None] / CPU_CLIENTS
            here = next(row for row in rows if row["job"] == "M")
            cpu = each / (here["kinfolk_s"] / here["clients"])
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(torch.get_num_threads()),
        "torch": torch.__version__,
        "peaks": peaks,
        "rows": rows,
        "chunks": None if chunks is None else {str(chunk or "own choice"): taken for chunk, taken in chunks.items()},
        "recommendation": bench.recommend(rows, device.type, chunks, cpu),
    }


def _named(tell: Tell, name: str) -> Tell:
    return lambda text: tell(f"job {name}: {text}")


def _cpu(threads: int) -> str:
    return f"CPU with {threads} thread{'s' if threads != 1 else ''}"


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Tell]:
    """A bar where there is a terminal, else a line for every step."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: console.print(text, soft_wrap=True, markup=False)
        return
    bar = Progress(TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn(), console=console)
    with bar:
        task = bar.add_task("", total=steps)

        def tell(text: str) -> None:
            bar.update(task, description=text)
            bar.advance(task)

        yield tell
