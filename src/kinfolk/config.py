"""One experiment as validated data: sections of settings, read from TOML, the command line or Python."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from kinfolk import aggregation, methods, models
from kinfolk.cohort.training import Training
from kinfolk.data.partition import SPLITS, Rotate
from kinfolk.errors import UserError, nearest
from kinfolk.peers.access import Access
from kinfolk.peers.faults import Faults
from kinfolk.settings import build, check_type, setting


@dataclass(frozen=True)
class Data:
    """Which samples, and how many each client holds."""

    name: str = setting("digits", "data set: see `kinfolk data ls`")
    clients: int = setting(40, "number of clients (n)", ge=1)
    train: int | None = setting(None, "training samples per client; none: what the split gives", ge=1)
    test: int | None = setting(None, "test samples per client; none: what the split gives", ge=1)
    global_test: int | None = setting(
        None, "test samples, even over the classes, on which every model is tested beside the client's own", ge=1
    )
    new_clients: int | None = setting(
        None, "clients beside the others that never train: the server's model is tested on all their samples", ge=1
    )
    validation_clients: int | None = setting(None, "more such clients, to choose settings by", ge=1)
    rotate: Rotate | None = setting(
        None, "images turned by 0°, 90°, 180° or 270°: an angle for each of the clients, or for each of the samples"
    )
    scale: Literal["standardize", "unit"] = setting("standardize", "pixels: mean 0 and deviation 1, or 0 to 1")
    features: Literal["scattering"] | None = setting(None, "handcrafted, in place of pixels; none: pixels")
    norm: Literal["per-client", "group"] | None = setting(
        None, "of channels: by each client's own mean and variance, or within 27 groups of a sample's channels"
    )


@dataclass(frozen=True)
class Run:
    """How long, how often to look, and where to compute."""

    rounds: int = setting(50, "rounds (T)", ge=1)
    seed: int = setting(0, "root of every random draw", ge=0)
    evaluate_every: int = setting(10, "rounds between evaluations; the first and last are always evaluated", ge=1)
    checkpoint_every: int | None = setting(
        None, "rounds between checkpoints; none: every half minute, or less often if saving takes long", ge=1
    )
    engine: Literal["inprocess", "sharded"] = setting("inprocess", "one cohort, or several in one process")
    shards: int = setting(2, "cohorts of the sharded engine", ge=1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    precision: Literal["float32", "float64", "tf32", "bf16"] = setting(
        "float32", "of training; tf32 and bf16 keep float32 weights and round factors (tf32: on a GPU only)"
    )
    chunk: int | None = setting(None, "clients trained at once; none: what fits the cache or the GPU", ge=1)
    resident: Literal["auto", "all", "round"] = setting(
        "auto", "whose models are in memory: all, or where clients share one those of a round; auto: all up to 1 GiB"
    )
    watch: list[int] = setting([], "clients whose similarities with others go into similarity.csv", ge=0)
    watch_rounds: list[int] = setting([], "rounds in which they are watched; []: every evaluated round", ge=1)
    watch_all: bool = setting(False, "compare the watched with all they can reach, as only an observer could")

    def notices(self, clients: int) -> list[str]:
        """What of these settings does nothing in a run of so many clients."""
        found = []
        if self.engine != "sharded" and self.shards != Run.shards:
            found.append(f"run.shards = {self.shards} is ignored: run.engine = 'sharded' is what uses it")
        if self.engine == "sharded" and self.shards > clients:
            found.append(f"run.shards = {self.shards}, but there are only {clients} clients: using {clients}")
        if not self.watch and (self.watch_all or self.watch_rounds):
            name = "watch_all" if self.watch_all else "watch_rounds"
            found.append(f"run.{name} is ignored: run.watch names no client")
        return found


@dataclass(frozen=True)
class Config:
    """A whole experiment."""

    name: str = "experiment"
    data: Data = field(default_factory=Data)
    split: Any = field(default_factory=lambda: SPLITS["iid"]())
    model: str = "mlp"
    model_options: dict[str, Any] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    method: Any = field(default_factory=lambda: methods.find("local")())
    peers: Access = field(default_factory=Access)
    faults: Faults = field(default_factory=Faults)
    aggregation: Any = field(default_factory=lambda: aggregation.find("mean")())
    run: Run = field(default_factory=Run)

    @property
    def method_name(self) -> str:
        return str(self.method.method_name)

    @property
    def rule_name(self) -> str:
        return str(self.aggregation.rule_name)

    def sections(self) -> dict[str, Any]:
        """The resolved experiment as it would stand in a TOML file, nothing left to a default."""
        split = {"kind": _kind(self.split), **dataclasses.asdict(self.split)}
        return _without_none(
            {
                "name": self.name,
                "data": {**dataclasses.asdict(self.data), "split": split},
                "model": {"name": self.model, **self.model_options},
                "training": dataclasses.asdict(self.training),
                "method": {"name": self.method_name, **dataclasses.asdict(self.method)},
                "peers": dataclasses.asdict(self.peers),
                "faults": dataclasses.asdict(self.faults),
                "aggregation": {"rule": self.rule_name, **dataclasses.asdict(self.aggregation)},
                "run": dataclasses.asdict(self.run),
            }
        )

    def identity(self) -> str:
        """A hash of everything that changes the numbers: not how long, nor where it is computed."""
        return fingerprint(self.sections())

    def about(self) -> str:
        """A hash of which samples the clients hold."""
        samples = json.dumps([self.sections()["data"], self.run.seed], sort_keys=True)
        return hashlib.sha256(samples.encode()).hexdigest()[:16]

    def newly_on(self, earlier: dict[str, Any]) -> str | None:
        """A setting that a preset turns on now and that an earlier run, given by its sections, did not know."""
        known = earlier.get("method", {})
        for each in dataclasses.fields(self.method):
            value = getattr(self.method, each.name)
            if value and value != each.default and each.name not in known:
                return f"method.{each.name}"
        return None

    def with_method(self, name: str, **settings: Any) -> Config:
        """The same experiment with another method; settings it shares with the present one (k, say) are kept."""
        cls = methods.find(name)
        known = {f.name for f in dataclasses.fields(cls)}
        kept = {k: v for k, v in dataclasses.asdict(self.method).items() if k in known and v is not None}
        return dataclasses.replace(self, method=build(cls, {**kept, **settings}, "method"))

    def with_run(self, **changes: Any) -> Config:
        """The same experiment with other `[run]` settings."""
        values = {k: v for k, v in dataclasses.asdict(self.run).items() if v is not None} | changes
        return dataclasses.replace(self, run=build(Run, values, "run"))


# Overrides that choose among kinds come first, so that settings of the new kind can be given in any order.
CHOICES = ("method.name", "model.name", "data.split.kind", "aggregation.rule")
# What of [run] says how long, where and how closely watched, and changes no number.
HOW = (
    *("rounds", "evaluate_every", "checkpoint_every", "engine", "shards", "device", "chunk"),
    *("watch", "watch_rounds", "watch_all"),
)
UTF8 = "utf-8-sig"  # with or without the mark that Windows' Notepad puts first
PLAIN = {"bool": bool, "int": int, "float": float, "str": str}  # annotations of model options that are checked
TABLES = ("data", "model", "training", "method", "peers", "faults", "aggregation", "run")
SECTIONS = {"name": str} | dict.fromkeys(TABLES, dict)


def read(source: str | Path | dict[str, Any], overrides: Iterable[str] = (), *more: Iterable[str]) -> Config:
    """An experiment from a file, the name of a shipped one, or a dict; `overrides` are "section.key=value".

    `more` overrides are applied after them, one group after another: a method that a later group chooses takes over
    what it knows of the settings before.
    """
    if isinstance(source, dict):
        sections, name = json.loads(json.dumps(source)), "experiment"
    else:
        path = locate(source)
        name = path.stem
        try:
            sections = tomllib.loads(path.read_text(encoding=UTF8))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid TOML: {error}") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        if "study" in sections:
            raise UserError(f"{source} is a study of many runs, not one experiment: kinfolk reproduce {source}")
    changed = copy.deepcopy(sections)
    for group in (overrides, *more):
        for override in sorted(group, key=lambda text: text.partition("=")[0].strip() not in CHOICES):
            _override(changed, override)
    try:
        return resolve({"name": name, **changed})
    except UserError as error:
        where = "" if isinstance(source, dict) or _is_sound(sections) else f"{path}: "
        raise UserError(f"{where}{error}") from None


def resolve(sections: dict[str, Any]) -> Config:
    """Validate the sections of an experiment; every mistake is one line."""
    for key, value in sections.items():
        if key not in SECTIONS:
            raise UserError(f"unknown section '{key}': {nearest(key, SECTIONS)}")
        if not isinstance(value, SECTIONS[key]):
            shape = "a text" if SECTIONS[key] is str else f"a section: write [{key}] and its keys below"
            raise UserError(f"'{key}' = {value!r} must be {shape}")
    data = dict(sections.get("data", {}))
    split = data.pop("split", {"kind": "iid"})
    if not isinstance(split, dict) or "kind" not in split:
        raise UserError("'data.split' must look like { kind = \"rotation\", clusters = 4 }")
    split = dict(split)
    kind = str(split.pop("kind"))
    if kind not in SPLITS:
        raise UserError(f"unknown split '{kind}': {nearest(kind, SPLITS)}")
    method = dict(sections.get("method", {}))
    model = dict(sections.get("model", {}))
    name = str(model.pop("name", "mlp"))
    _check_options(name, model)
    return Config(
        name=sections.get("name", "experiment"),
        data=build(Data, data, "data"),
        split=build(SPLITS[kind], split, "data.split"),
        model=name,
        model_options=model,
        training=build(Training, dict(sections.get("training", {})), "training"),
        method=build(methods.find(str(method.pop("name", "local"))), method, "method"),
        peers=build(Access, dict(sections.get("peers", {})), "peers"),
        faults=build(Faults, dict(sections.get("faults", {})), "faults"),
        aggregation=aggregation.make(sections.get("aggregation", {})),
        run=build(Run, dict(sections.get("run", {})), "run"),
    )


def fingerprint(sections: dict[str, Any]) -> str:
    """A hash of what of an experiment's sections changes the numbers: not how long, nor where it is computed."""
    how = {*HOW, "resident"} if sections.get("run", {}).get("resident", "auto") == "auto" else HOW
    kept = {key: value for key, value in sections.items() if key not in ("name", "run")}
    kept["run"] = {key: value for key, value in sections.get("run", {}).items() if key not in how}
    if not kept.get("peers"):
        kept.pop("peers", None)
    if kept.get("aggregation", {}).get("rule", "mean") == "mean":
        kept.pop("aggregation", None)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _is_sound(sections: dict[str, Any]) -> bool:
    """Whether a file is in order by itself, so that a mistake comes from the overrides."""
    try:
        resolve(sections)
    except UserError:
        return False
    return True


def locate(source: str | Path) -> Path:
    """The file `source` names: a path, or a shipped experiment such as `digits`."""
    path = Path(source)
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise UserError(f"no experiment file '{source}' (shipped ones: {', '.join(shipped())})")
        return path
    known = shipped_files()
    if str(source) not in known:
        raise UserError(f"no file and no shipped experiment '{source}': {nearest(str(source), shipped())}")
    return known[str(source)]


def shipped() -> dict[str, Path]:
    """Name -> file of the experiments that come with kinfolk."""
    return {name: path for name, path in shipped_files().items() if not is_study(path)}


def is_study(path: Path) -> bool:
    """Whether a file describes many runs (see `studies.py`): its key `study` begins a line."""
    return any(line.startswith("study =") for line in path.read_text(encoding=UTF8).splitlines())


def shipped_files() -> dict[str, Path]:
    """Name -> file of every experiment and study that comes with kinfolk."""
    inside = Path(str(resources.files("kinfolk"))) / "experiments"
    folder = inside if inside.is_dir() else Path(__file__).parents[2] / "experiments"  # a source checkout
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.toml"))}


def _override(sections: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"override '{override}' must look like section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a text: method.name=random
    table = sections
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise UserError(f"override '{override}': '{key}' is not a section")
    if ".".join(keys) in CHOICES and table.get(keys[-1]) != value:
        known = _known_to(keys, str(value))
        for key in [key for key in table if key not in known]:
            del table[key]  # settings of the kind that was named in the file
    table[keys[-1]] = value


def _known_to(choice: list[str], name: str) -> set[str]:
    """The settings of the method, model or kind of split that an override chooses."""
    if choice[0] == "model":
        return set(_options(name))
    if choice[0] == "data" and name not in SPLITS:
        return set()  # refused later
    if choice[0] == "aggregation":
        return {field.name for field in dataclasses.fields(aggregation.find(name))}
    cls: Any = methods.find(name) if choice[0] == "method" else SPLITS[name]
    return {field.name for field in dataclasses.fields(cls)}


def _options(model: str) -> dict[str, inspect.Parameter]:
    """What a model's factory takes beside (input_shape, classes)."""
    try:
        parameters = inspect.signature(models.find(model)).parameters
    except ValueError:  # something built in, which does not tell
        return {}
    return dict(list(parameters.items())[2:])


def _check_options(name: str, options: dict[str, Any]) -> None:
    known = _options(name)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for key in options:
        if key not in known:
            hint = nearest(key, known) if known else f"model '{name}' has no options"
            raise UserError(f"unknown key 'model.{key}': {hint}")
        kind = PLAIN.get(str(known[key].annotation).removeprefix("<class '").removesuffix("'>"))
        if kind is not None:
            check_type(options[key], kind, f"model.{key}")


def _kind(split: Any) -> str:
    return next(kind for kind, cls in SPLITS.items() if cls is type(split))


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: a setting that is not set is left out."""
    cleaned = {k: _without_none(v) if isinstance(v, dict) else v for k, v in table.items()}
    return {key: value for key, value in cleaned.items() if value is not None}
