"""`kinfolk export`: a trained model as a file for use without kinfolk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kinfolk.commands import terminal
from kinfolk.commands.terminal import Json


def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="Where to; a file that exists is left alone.")],
    client: Annotated[
        int | None, typer.Option("--client", min=0, help="Whose model; default the one that all share.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a trained model as safetensors, with what is needed to build the net with torch alone."""
    from kinfolk.exporting import export, read_file

    path = export(run, to, client)
    about, numbers = read_file(path)
    if as_json:
        terminal.print_json({"file": str(path), **about})
        return
    size = sum(tensor.numel() for tensor in numbers.values())
    whose = "the model that all share" if client is None else f"client {client}'s model"
    console = terminal.console()
    console.print(f"{escape(str(path))}: {whose} after round {about['round']}, {size:,} numbers", soft_wrap=True)
    if about["net"] is None:
        console.print("its net is no row of known layers: make the module yourself and load the file into it")
