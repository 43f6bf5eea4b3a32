"""Studies: a table or a figure of a paper as a grid of runs, read from TOML.

A study has columns (an experiment each, with settings over it) and rows (a method each, mostly). A cell is one row in
one column with one seed. `docs/reproduce.md` describes the file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kinfolk import measures
from kinfolk.config import UTF8, Config, is_study, read, shipped, shipped_files
from kinfolk.errors import UserError, nearest
from kinfolk.settings import build, setting

PUBLISHED = re.compile(r"(?P<mean>-?\d+(\.\d+)?)(\s*±\s*(?P<std>\d*\.?\d+))?")
# A study that starts `like` another leaves these behind: what was published holds for the other settings only.
NOT_INHERITED = ("published", "unstated", "notes")


@dataclass(frozen=True)
class Column:
    experiment: str | None = setting(None, "what its runs start from; none: the study's")
    set: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    set: list[str] = field(default_factory=list)
    within: dict[str, list[str]] = field(default_factory=dict)  # settings for single columns, over `set`
    columns: list[str] | None = setting(None, "the only columns it is run in; none: all")
    measures: list[str] | None = setting(None, "the only tables it stands in; none: all")
    beside: str | None = setting(None, "drawn in the colour of this row, dashed")


@dataclass(frozen=True)
class Published:
    """A figure of a paper: mean, and standard deviation where one is given."""

    mean: float
    std: float | None
    text: str


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    row: str
    column: str
    seed: int
    config: Config

    @property
    def name(self) -> str:
        return f"{self.row}, {self.column}, seed {self.seed}"


@dataclass(frozen=True)
class Study:
    """A grid of runs; the fields are the keys of its file."""

    study: str = setting(help="what it is, in a line")
    experiment: str | None = setting(None, "what the columns start from, unless they say otherwise")
    set: list[str] = field(default_factory=list)
    seeds: int = setting(3, "how many, from 0 on", ge=1)
    measures: list[str] = field(default_factory=lambda: ["accuracy"])
    columns: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    published: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    figure: dict[str, Any] | None = setting(None, "kind and settings of its picture")
    unstated: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cells(self, overrides: Sequence[str], seeds: Iterable[int]) -> list[Cell]:
        """Every run, row by row; `overrides` come over the settings of the study, its columns and its rows."""
        if any(text.partition("=")[0].strip() == "run.seed" for text in overrides):
            raise UserError("the seeds of a study are chosen with --seeds and --seed, not with run.seed")
        numbers = list(seeds)
        found = []
        for label, row in self.rows.items():
            for name in self.columns if row.columns is None else row.columns:
                config = self._config(label, name, overrides)
                found += [Cell(label, name, seed, config.with_run(seed=seed)) for seed in numbers]
        return found

    def value(self, measure: str, row: str, column: str) -> Published | None:
        """What the paper has there."""
        texts = self.published.get(measure, {}).get(row)
        return None if texts is None else _published(texts[list(self.columns).index(column)])

    def _config(self, row: str, name: str, overrides: Sequence[str]) -> Config:
        column = self.columns[name]
        try:
            start = column.experiment or self.experiment or ""
            own = self.rows[row]
            return read(start, self.set, column.set, own.set, own.within.get(name, []), overrides)
        except UserError as error:
            raise UserError(f"row '{row}', column '{name}': {error}") from None


def read_study(source: str | Path) -> Study:
    """The study of a file, or a shipped one by its name; every mistake is one line that names the file and the key."""
    path = locate(source)
    values = _parse(path, source)
    if "like" in values:
        values = _inherit(path, values)
    try:
        study = _build(values)
        study.cells([], [0])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return study


def locate(source: str | Path) -> Path:
    """The file `source` names: a path, or a shipped study such as `panm/table2`."""
    path = Path(source)
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise UserError(f"no study file '{source}' (shipped ones: {', '.join(shipped_studies())})")
        return path
    known = shipped_studies()
    if str(source) in known:
        return known[str(source)]
    if str(source) in shipped():
        raise UserError(f"{source} is one experiment, not a study: kinfolk run {source}")
    raise UserError(f"no file and no shipped study '{source}': {nearest(str(source), known)}")


def shipped_studies() -> dict[str, Path]:
    """Name -> file of the studies that come with kinfolk."""
    return {name: path for name, path in shipped_files().items() if is_study(path)}


def _parse(path: Path, source: str | Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding=UTF8))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if "study" not in values:
        raise UserError(f"{path} is not a study: it has no key 'study'; an experiment runs with: kinfolk run {source}")
    return values


def _inherit(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """What the file says over the study it is `like`; rows are added to the other's by name."""
    other = values.pop("like")
    if not isinstance(other, str):
        raise UserError(f"{path}: 'like' = {other!r}: the name of a study is needed")
    base = _parse(locate(other), other)
    if "like" in base:
        raise UserError(f"{path}: 'like' = '{other}', which is itself like '{base['like']}': name that one")
    kept = {key: value for key, value in base.items() if key not in NOT_INHERITED}
    rows = {**_table(kept, "rows"), **_table(values, "rows")}
    return {**kept, **values, "rows": rows}


def _table(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key, {})
    if not isinstance(found, dict):
        raise UserError(f"'{key}' = {found!r} must be a section: write [{key}] and its keys below")
    return found


def _build(values: dict[str, Any]) -> Study:
    for key in ("columns", "rows"):
        if not _table(values, key):
            raise UserError(f"'{key}' is missing: a study needs at least one")
    columns = {name: _entry(Column, value, f"columns.{name}") for name, value in values["columns"].items()}
    rows = {name: _entry(Row, value, f"rows.{name}") for name, value in values["rows"].items()}
    try:
        study = build(Study, {**values, "columns": columns, "rows": rows}, "study")
    except UserError as error:
        raise UserError(str(error).replace("'study.", "'")) from None  # these keys stand in no section
    _check(study)
    return study


def _entry(cls: type[Any], value: Any, where: str) -> Any:
    """A column or a row: a list of settings, or a table with the list under `set`."""
    if not isinstance(value, list | dict):
        raise UserError(f"'{where}' = {value!r}: a list of \"section.key=value\" is needed, or a table with `set`")
    return build(cls, {"set": value} if isinstance(value, list) else value, where)


def _check(study: Study) -> None:
    for name in study.measures:
        measures.find(name)
    for name in (*study.columns, *study.rows):
        if "," in name:
            raise UserError(
                f"'{name}': no comma, please, in the name of a row or column: --rows and --columns take lists"
            )
    for label, column in study.columns.items():
        if column.experiment is None and study.experiment is None:
            raise UserError(f"'columns.{label}' has no experiment to start from, and neither has the study")
    for label, row in study.rows.items():
        for key, known in (("columns", study.columns), ("within", study.columns), ("measures", study.measures)):
            for name in getattr(row, key) or []:
                _known(name, known, f"rows.{label}.{key}")
        if row.beside is not None:
            _known(row.beside, study.rows, f"rows.{label}.beside")
    for measure, values in study.published.items():
        _known(measure, study.measures, "published")
        for label, texts in values.items():
            where = f"published.{measure}.{label}"
            _known(label, study.rows, where)
            if len(texts) != len(study.columns):
                raise UserError(f"'{where}' has {len(texts)} values for {len(study.columns)} columns")
            for text in texts:
                if text and _published(text) is None:
                    raise UserError(f"'{where}': '{text}' must look like \"49.19±0.79\", or be empty")


def _known(name: str, known: Iterable[str], where: str) -> None:
    if name not in known:
        raise UserError(f"'{where}' names '{name}': {nearest(name, known)}")


def _published(text: str) -> Published | None:
    match = PUBLISHED.fullmatch(text.strip())
    if match is None:
        return None
    return Published(float(match["mean"]), float(match["std"]) if match["std"] else None, text)
