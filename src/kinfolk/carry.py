"""Take finished cells that were computed elsewhere: only what proves to be the cell it is for."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kinfolk import measures, pictures
from kinfolk.assembly import clip
from kinfolk.config import Config, resolve
from kinfolk.errors import UserError
from kinfolk.experiment import Result, read_result
from kinfolk.runs.files import explained
from kinfolk.runs.folder import CONFIG, RunFolder
from kinfolk.runs.pack import Pack, opened, unpack
from kinfolk.studies import Study

FACTS = ("device", "version", "torch", "created", "command")  # of every run; tables print them
DAMAGE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError)  # what reading made-up files may end in


def take(
    source: Path, wanted: Mapping[Path, Config], study: Study, notice: Callable[[str], None]
) -> dict[Path, Result]:
    """Unpack the cells of `wanted` (folder of a cell -> its experiment) that are in `source`; those that were taken.

    Nothing is written over a folder that exists. What is found for a cell and does not hold up is left, with a notice.
    """
    asked = {_key(clip(config, config.data.clients)[0]): path for path, config in wanted.items()}
    taken: dict[Path, Result] = {}
    with explained(lambda error: UserError(f"{source} cannot be unpacked: {error.strerror}")), opened(source) as pack:
        if pack.odd:
            notice(f"{source}: '{pack.odd[0]}' is not the plain name of a cell's file: such cells are left out")
        for name in _like(pack, wanted):
            try:
                path = _place(pack, name, asked, wanted)
                if path is not None and path not in taken:
                    taken[path] = _unpacked(pack, name, path, study)
            except UserError as error:
                notice(f"{source}: {name} is left out: {error}")
    return taken


def _like(pack: Pack, wanted: Mapping[Path, Config]) -> list[str]:
    """The runs that are called like a wanted one, up to the hash: another version may have hashed differently."""
    words = {path.name.rpartition("-")[0] for path in wanted}
    return [name for name in pack.runs if name.rpartition("-")[0] in words]


def _place(pack: Pack, name: str, asked: Mapping[Any, Path], wanted: Mapping[Path, Config]) -> Path | None:
    """Where a run belongs, by what its config says; None if it is none of those asked for."""
    if CONFIG not in pack.files(name):
        raise UserError(f"it has no {CONFIG}")
    try:
        sections = tomllib.loads(pack.read(f"{name}/{CONFIG}").decode())
        sections.pop("kinfolk", None)
        # A model may be anybody's module, which resolving would import: not unless we would have done so anyway.
        known = sections["model"]["name"] in {config.model for config in wanted.values()}
        path = asked.get(_key(resolve(sections))) if known else None
    except DAMAGE as error:
        raise UserError(f"its {CONFIG} cannot be read: {error}") from None
    if path is None and any(other.name == name for other in wanted):
        raise UserError("its config is that of another experiment")
    if path is not None and (setting := wanted[path].newly_on(sections)):
        raise UserError(f"it is from before {setting}, which its preset turns on now")
    return path


def _key(config: Config) -> tuple[str, int]:
    return config.identity(), config.run.rounds


def _unpacked(pack: Pack, name: str, path: Path, study: Study) -> Result:
    """The result of a run that is now at `path`."""
    if path.exists():
        raise UserError(f"{path} is there and unfinished; remove it to take this one instead")
    return replace(unpack(pack, name, path, partial(_checked, study=study)), folder=path)


def _checked(folder: Path, study: Study) -> Result:
    """The result in a folder, if it is finished and has all that the tables and the picture of `study` read."""
    try:
        found = RunFolder.open(folder)
        if found.status().state != "finished":
            raise UserError("it is not finished")
        result = read_result(folder)
        if result.summary["round"] != result.config.run.rounds:
            raise UserError(f"it ended after {result.summary['round']} of {result.config.run.rounds} rounds")
        for measure in study.measures:
            measures.find(measure).of(result)
        unknown = [key for key in FACTS if not isinstance(found.facts().get(key), str)]
    except DAMAGE as error:
        raise UserError(f"its files are damaged: {type(error).__name__}: {error}") from None
    lacking = [*unknown, *(file for file in pictures.reads(study) if not (folder / file).is_file())]
    if lacking:
        raise UserError(f"it has no {lacking[0]}, which is needed here")
    return result
