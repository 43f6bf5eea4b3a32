"""`kinfolk reproduce`: a table or a figure of a paper, as far as it has been run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kinfolk.commands import terminal
from kinfolk.commands.terminal import Device, Json, Overrides
from kinfolk.errors import UserError

if TYPE_CHECKING:
    from kinfolk.reproduce import Reproduction
    from kinfolk.studies import Cell

Name = Annotated[str, typer.Argument(metavar="STUDY", help="A shipped study (panm/table2), or the file of one.")]
OutFolder = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Of tables and runs; default one under runs/reproduce/.")
]
Cells = Annotated[
    list[Path] | None,
    typer.Option("--cells", metavar="FILE.zip|DIR", help="Take finished cells from here; may be given several times."),
]
PackFile = Annotated[
    Path | None,
    typer.Option("--pack", metavar="FILE.zip", help="At the end add the finished cells, without checkpoints, to it."),
]
Workers = Annotated[
    int, typer.Option("--workers", metavar="N", min=1, help="Run N cells at a time, each in a process of its own.")
]
NoRun = Annotated[bool, typer.Option("--no-run", help="Run nothing: write tables and picture of what is there.")]


def reproduce_command(
    study: Name,
    overrides: Overrides = None,
    rows: Annotated[str, typer.Option("--rows", metavar="A,B", help="These rows only.")] = "",
    columns: Annotated[str, typer.Option("--columns", metavar="X,Y", help="These columns only.")] = "",
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="How many seeds; default the study's.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The first of them.")] = 0,
    out: OutFolder = None,
    device: Device = None,
    cells: Cells = None,
    pack: PackFile = None,
    workers: Workers = 1,
    no_run: NoRun = False,
    only_list: Annotated[bool, typer.Option("--list", help="Show the cells and which are done; run nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Reproduce a table or a figure of a paper: run what is missing, show it beside what was published.

    Stop at any time and call it again to go on. Runs go to another machine with --pack, and are taken with --cells.
    """
    from kinfolk.parallel import Stopped
    from kinfolk.reproduce import CellsFailed, look, reproduce

    chosen = [*(overrides or []), *([f'run.device="{device}"'] if device is not None else [])]
    if only_list:
        if cells or pack:
            raise UserError("--list shows what is in --out and changes nothing: leave out --cells and --pack")
        found = look(study, chosen, seeds=seeds, seed=seed, out=out)
        _list(found, found.states(_words(rows), _words(columns)), as_json)
        return
    failed: dict[str, str] = {}
    with terminal.reporting(_how_to_go_on) as reporter:
        try:
            found = reproduce(
                study,
                chosen,
                rows=_words(rows),
                columns=_words(columns),
                seeds=seeds,
                seed=seed,
                out=out,
                cells=cells or [],
                pack=pack,
                run=not no_run,
                workers=workers,
                observer=reporter,
            )
        except CellsFailed as error:
            found, failed = error.found, error.reasons
        except Stopped as stopped:
            reporter.close()
            terminal.fail(f"{stopped}; go on with: {_how_to_go_on(stopped.folder)}", 130)
    _print(found, pack, as_json)
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if failed:
        told = "1 cell failed" if len(failed) == 1 else f"{len(failed)} cells failed"
        terminal.fail(f"{told}, what is there is in the tables; try again with: {_how_to_go_on(found.folder)}", 2)


def _print(found: Reproduction, pack: Path | None, as_json: bool) -> None:
    if as_json:
        from kinfolk.report.published import csv_rows

        files = [str(path) for path in (*found.files, *([pack] if pack else []))]
        terminal.print_json({"files": files, "privacy": found.privacy(), "rows": csv_rows(found.entries())})
        return
    print("\n\n".join([found.study.study, found.tables(), *found.privacy()]) + "\n")
    for path in found.files:
        terminal.console().print(f"written: {escape(str(path))}", soft_wrap=True)
    if found.packed:
        terminal.console().print(f"packed: {escape(found.packed)}", soft_wrap=True)


def _list(found: Reproduction, states: list[tuple[Cell, str]], as_json: bool) -> None:
    if as_json:
        listed = [
            {"row": c.row, "column": c.column, "seed": c.seed, "state": state, "folder": str(found.paths[c.name])}
            for c, state in states
        ]
        terminal.print_json({"cells": listed})
        return
    width = max((len(cell.name) for cell, _ in states), default=0)
    for cell, state in states:
        print(f"{cell.name:<{width}}  {state:<10}  {found.paths[cell.name]}")
    runs = {found.paths[cell.name]: state for cell, state in states}
    done = sum(state == "finished" for state in runs.values())
    print(f"{len(states)} cells, {len(runs)} runs (equal cells share one), {done} finished")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _how_to_go_on(folder: Path) -> str:
    """A study goes on when it is asked for again."""
    return shlex.join(["kinfolk", *sys.argv[1:]])
