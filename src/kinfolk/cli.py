"""The command line: parses, calls, prints. Heavy imports wait until a command needs them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kinfolk.commands import terminal
from kinfolk.commands.bench import bench_command
from kinfolk.commands.data import data_app
from kinfolk.commands.export import export_command
from kinfolk.commands.reproduce import reproduce_command
from kinfolk.commands.terminal import Device, File, Json, Out, Overrides, Seed
from kinfolk.errors import UserError, known_failure
from kinfolk.version import __version__

if TYPE_CHECKING:
    from kinfolk.runs.folder import RunFolder

app = typer.Typer(
    help="Personalized peer-to-peer federated learning: every client trains its own model and learns with its kin.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")


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

    config = terminal.read(file, overrides, seed, device)
    with terminal.reporting() as reporter:
        result = run(config, out=out, observer=reporter)
    if as_json:
        terminal.print_json({"folder": str(result.folder), **result.summary})
        return
    console = terminal.console()
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

    config = terminal.read(file, overrides, seed, device)
    names = [name.strip() for name in methods.split(",") if name.strip()] or [config.method_name]
    for name in names:
        find(name)
    with terminal.reporting(_how_to_compare_on) as reporter:
        comparison = compare_methods(config, names, seeds, references=references, out=out, observer=reporter)
    table = comparison.as_dict()
    if as_json:
        terminal.print_json(table)
        return
    console = terminal.console()
    plural = "seeds" if seeds > 1 else "seed"
    title = f"{config.name}: {config.data.clients} clients, {config.run.rounds} rounds, {seeds} {plural}"
    console.print(comparison_table(table["rows"], title))
    console.print(f"run folders: {escape(str(comparison.folder))}", soft_wrap=True)


app.command("reproduce")(reproduce_command)
app.command("bench")(bench_command)
app.command("export")(export_command)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Make the run this long in all.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that was stopped, or make a finished one longer."""
    from kinfolk import experiment

    with terminal.reporting() as reporter:
        result = experiment.resume(run, rounds=rounds, device=device, observer=reporter)
    if as_json:
        terminal.print_json({"folder": str(result.folder), **result.summary})
    else:
        _show(run)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    png: Annotated[Path | None, typer.Option("--png", metavar="PATH", help="Also draw accuracy over rounds.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a run, or a comparison, came to."""
    from kinfolk.runs import comparison

    facts = _facts(run)
    if "rows" in facts and (said := comparison.outdated(run)) is not None:
        print(f"note: {said}", file=sys.stderr)
    if as_json:
        terminal.print_json(facts)
    else:
        _show(run)
    sys.stdout.flush()
    if png is not None:  # after the table, which is there whatever becomes of the picture
        _draw(run, facts, png)
        if not as_json:
            terminal.console().print(f"picture: {escape(str(png))}", soft_wrap=True)


@app.command("list")
def list_command(
    pattern: Annotated[
        str, typer.Argument(metavar="[PATTERN]", help="Methods, by wildcards as in 'fed*'; or: rules, attacks.")
    ] = "*",
    as_json: Json = False,
) -> None:
    """List methods with their settings, models, experiments and studies; or rules of aggregation, or attacks."""
    from kinfolk.commands import listing
    from kinfolk.config import shipped
    from kinfolk.models import DERIVED, NETS
    from kinfolk.studies import shipped_studies

    found = listing.find(pattern)
    if as_json:
        terminal.print_json({name: entry.as_dict() for name, entry in found.items()})
        return
    console = terminal.console()
    for name, entry in found.items():
        console.print(f"[bold]{name}[/bold]  {escape(entry.description)}")
        for setting, kind, default, text in entry.settings:
            console.print(f"    {setting} = {escape(default)}  [dim]{escape(kind)}[/dim]  {escape(text)}")
    if pattern == "*":
        nets = ", ".join([*NETS, *DERIVED])
        console.print(f"\nmodels: {nets}, or your own as package.module:factory", soft_wrap=True)
        console.print(f"aggregation rules (`kinfolk list rules`): {', '.join(listing.rules())}", soft_wrap=True)
        console.print(f"attacks (`kinfolk list attacks`): {', '.join(listing.attacks())}", soft_wrap=True)
        console.print(f"shipped experiments: {', '.join(shipped())}", soft_wrap=True)
        console.print(f"studies, for `kinfolk reproduce`: {', '.join(shipped_studies())}", soft_wrap=True)


def _how_to_compare_on(folder: Path) -> str:
    """A comparison goes on when it is asked for again in its folder."""
    out = [] if any(word.partition("=")[0] == "--out" for word in sys.argv) else ["--out", str(folder.parent)]
    return shlex.join(["kinfolk", *sys.argv[1:], *out])


def _show(path: Path) -> None:
    from kinfolk.report.tables import comparison_table, run_table
    from kinfolk.runs.folder import RunFolder

    console = terminal.console()
    if (path / "comparison.json").is_file():
        console.print(comparison_table(_facts(path)["rows"], str(path)))
        return
    folder = RunFolder.open(path)
    facts, rows = folder.facts(), folder.evaluations()
    name, method, seed = _names(folder)
    console.print(run_table(rows, f"{name}, {method}, seed {seed} ({folder.status()})"))
    console.print(
        f"{escape(str(path))}: kinfolk {facts['version']}, torch {facts['torch']}, {facts['device']}", soft_wrap=True
    )
    console.print(f"made by: {escape(str(facts['command']))}", soft_wrap=True)
    if rows and "privacy" in rows[-1]:
        console.print(escape(rows[-1]["privacy"]), soft_wrap=True)
    if folder.status().state != "finished":
        console.print(f"go on with: kinfolk resume {escape(str(path))}", soft_wrap=True)


def _draw(run: Path, facts: dict[str, Any], path: Path) -> None:
    """Accuracy over rounds, of a run or of all methods of a comparison."""
    from kinfolk.report.curves import curves_picture
    from kinfolk.runs.folder import RunFolder

    folders = {name: [Path(p) for p in paths] for name, paths in facts.get("runs", {run.name: [run]}).items()}
    name, _, _ = _names(RunFolder.open(next(iter(folders.values()))[0]))
    curves_picture(folders, path, f"{name}: accuracy over rounds")


def _names(folder: RunFolder) -> tuple[str, str, int]:
    """What a run is called: the name of its experiment, its method and its seed."""
    config = folder.config()
    try:
        return config["name"], config["method"]["name"], config["run"]["seed"]
    except (KeyError, TypeError):
        raise UserError(f"{folder.path / 'config.toml'} is damaged: it lacks name, method.name or run.seed") from None


def _facts(path: Path) -> dict[str, Any]:
    from kinfolk.runs import comparison
    from kinfolk.runs.folder import RunFolder

    if (path / "comparison.json").is_file():
        return comparison.read(path)
    folder = RunFolder.open(path)
    status = folder.status()
    return {
        "folder": str(path),
        "status": status.state,
        "round": status.round,
        "rounds": status.rounds,
        "config": folder.config(),
        "made_by": folder.facts(),
        "metrics": folder.evaluations(),
        "clients": folder.clients(),
        "summary": folder.summary() if status.state == "finished" else None,
    }


def main() -> None:
    """The command line: a user's mistake is one line and exit code 2, a bug keeps its traceback."""
    terminal.accept_streams()
    try:
        code = app(prog_name="kinfolk", standalone_mode=False)
        sys.stdout.flush()  # a full disk shows here, and not after the last chance to say so
    except Exception as error:
        terminal.give_up_output()
        if isinstance(error, BrokenPipeError):  # whoever read has read enough
            sys.exit(1)
        _known_failure(error)
        raise
    if code == 130:  # typer's word for Ctrl-C
        terminal.fail("stopped", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _known_failure(error: Exception) -> None:
    """Failures that are no bug and that the user can do something about."""
    if hasattr(error, "format_message"):  # a usage error: newer typer brings its own click, so no class to name
        if not error.format_message():  # no arguments at all: the help has been shown
            sys.exit(2)
        terminal.fail(f"{error.format_message().rstrip('.')}; see `{_command(sys.argv[1:])} --help`", 2)
    if (told := known_failure(error)) is not None:
        terminal.fail(told, 2)


def _command(words: Sequence[str]) -> str:
    """The command among what was typed: its name and those of the groups it is in."""
    names, found = ["kinfolk"], typer.main.get_command(app)
    for word in words:
        if word not in (commands := getattr(found, "commands", {})):
            break
        names, found = [*names, word], commands[word]
    return " ".join(names)
