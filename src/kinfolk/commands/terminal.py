"""What all commands share: their arguments, standard output, progress, and how to fail."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from kinfolk.config import Config
    from kinfolk.progress import Reporter

File = Annotated[str, typer.Argument(metavar="FILE", help="An experiment file, or the name of a shipped one (digits).")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Settings over the file's: run.rounds=20")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder; default a new one under runs/.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Root of every random draw.")]
Device = Annotated[str | None, typer.Option("--device", metavar="auto|cpu|cuda", help="Where to compute.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]


def read(file: str, overrides: list[str] | None, seed: int | None, device: str | None) -> Config:
    from kinfolk.config import read

    chosen = list(overrides or [])
    chosen += [f"run.seed={seed}"] if seed is not None else []
    chosen += [f'run.device="{device}"'] if device is not None else []
    return read(file, chosen)


def how_to_resume(folder: Path) -> str:
    return shlex.join(["kinfolk", "resume", str(folder)])


@contextlib.contextmanager
def reporting(how_to_go_on: Callable[[Path], str] = how_to_resume) -> Iterator[Reporter]:
    """Progress while runs go on; Ctrl-C says how to go on from there."""
    from kinfolk.experiment import Interrupted
    from kinfolk.progress import Reporter

    reporter = Reporter()
    stopped = ""
    try:
        yield reporter
    except Interrupted as interrupted:
        stopped = f"stopped after round {interrupted.round}"
    except KeyboardInterrupt:
        stopped = "stopped at once"
    finally:
        reporter.close()
    if stopped:
        fail(f"{stopped}; go on with: {how_to_go_on(reporter.folder)}" if reporter.folder else stopped, 130)


def console() -> Console:
    """Standard output; wide enough for every table where there is no terminal to fit."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def accept_streams() -> None:
    """Whoever calls may have closed a stream, or given it an encoding that lacks characters of ours: do without."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the next file or pipe would get this number, and be taken for the stream
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open to the end
        elif getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def give_up_output() -> None:
    """What standard output does not take is not offered once more when Python ends, which would say so at length."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def print_json(value: Any) -> None:
    from kinfolk.runs.files import strict_json

    text = strict_json(value)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(json.loads(text))  # the same in ASCII: a character replaced would be another value
    print(text, flush=True)  # whatever comes next, this is out


def fail(message: str, code: int) -> NoReturn:
    print(f"kinfolk: {message}", file=sys.stderr)
    sys.exit(code)
