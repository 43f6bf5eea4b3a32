"""A trained model as a file for use outside: safetensors, with what is needed to build the net with torch alone.

The file holds the numbers of an ordinary `nn.Module` under the names of its `state_dict()`. Its metadata have one entry
`kinfolk`, a JSON object: how the inputs were scaled, which layers the net has (`net`, none where it is not a row of
known layers), and where it comes from. `examples/use_exported.py` reads it without kinfolk.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save as serialised
from torch import Tensor, nn

from kinfolk import models, origins
from kinfolk.assembly import load_federation
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.layout import Layout
from kinfolk.config import Config, resolve
from kinfolk.data import catalog
from kinfolk.data.federation import Federation, scaling
from kinfolk.data.projection import CPU, directions, unit
from kinfolk.errors import UserError
from kinfolk.models import Factory
from kinfolk.models.plain import build, describe, plain
from kinfolk.runs import checkpoint
from kinfolk.runs.files import write_atomically
from kinfolk.runs.folder import RunFolder

KEY = "kinfolk"
VERSION = 2


def export(
    run: str | Path,
    to: str | Path,
    client: int | None = None,
    *,
    data: Federation | None = None,
    model: Factory | None = None,
) -> Path:
    """Write the model that a client uses, or with None the one that all share, after the last round that was kept.

    `data` and `model` are those of your own that the run was given, if it was. Nothing is written over.
    """
    path = Path(to)
    if path.exists():
        raise UserError(f"{path} exists already: nothing is written over; name another file")
    folder = RunFolder.open(Path(run))
    config = resolve(folder.config())
    origins.refuse_others(folder, config, data, model, "kinfolk.export")
    saved = checkpoint.load(folder.checkpoints)
    row = _row(saved.tensors, client)
    federation = load_federation(config) if data is None else data
    module = plain(_module(config, federation, model, row)).eval()
    about = {
        "format": "kinfolk model",
        "version": VERSION,
        "net": describe(module),
        "model": {"name": config.model, "options": config.model_options},
        "input_shape": list(federation.input_shape),
        "classes": federation.classes,
        "inputs": _inputs(config, federation, own=data is not None),
        "client": client,
        "method": config.method_name,
        "data": config.data.name,
        "seed": config.run.seed,
        "round": saved.round,
        "privacy": next((row["privacy"] for row in reversed(folder.metrics()) if "privacy" in row), None),
    }
    numbers = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    content = serialised(numbers, {KEY: json.dumps(about)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def read_model(path: str | Path) -> nn.Module:
    """The module of an exported file, ready for use; only where its layers are described there."""
    about, numbers = read_file(path)
    if about["net"] is None:
        name = about["model"]["name"]
        raise UserError(f"{path}: the net '{name}' is no row of known layers: make it, and load the tensors into it")
    module = build(about["net"])
    module.to(next(iter(numbers.values())).dtype).load_state_dict(numbers)
    if about["inputs"]["length_one"]:
        module = nn.Sequential(Unit(about["inputs"]["projection"]), module)
    return module.eval()


class Unit(nn.Module):
    """Samples projected onto directions that no data decide, if [inputs, directions] are given, and of length one."""

    def __init__(self, size: list[int] | None) -> None:
        super().__init__()
        self.matrix: Tensor | None
        self.register_buffer("matrix", None if size is None else directions(*size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return unit(x, self.matrix).to(x.dtype)


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What an exported file says of itself, and its tensors by name."""
    try:
        with safetensors.safe_open(path, framework="pt") as reader:
            about = json.loads((reader.metadata() or {}).get(KEY, "{}"))
            numbers = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be read as an exported model: {error}") from None
    if about.get("format") != "kinfolk model" or about.get("version") != VERSION:
        raise UserError(f"{path} is no model that kinfolk exported, or one of another version")
    return about, numbers


def _row(saved: dict[str, Tensor], client: int | None) -> Tensor:
    """The model [d] that a client uses, or all do."""
    common = saved.get("shared/model")
    if client is None:
        if common is None:
            raise UserError("there is no model that all clients share in this run: say whose is wanted, --client N")
        return common
    n = saved["quarantined"].numel()
    if not 0 <= client < n:
        raise UserError(f"--client {client}: the run has clients 0 to {n - 1}")
    own = saved.get("state/personal", saved.get("weights"))
    return common if own is None and common is not None else own[client]  # type: ignore[index]


def _module(config: Config, federation: Federation, factory: Factory | None, row: Tensor) -> nn.Module:
    """The run's own module with the weights `row` [d]."""
    method, options = config.method, config.model_options if factory is None else {}
    if hasattr(method, "arrange") and not hasattr(method, "wrap"):
        federation = method.arrange(federation, CPU)
    shape, make = federation.input_shape, models.find(config.model) if factory is None else factory

    def made() -> nn.Module:
        net = models.make(make, shape, federation.classes, options)
        return method.wrap(net, shape) if hasattr(method, "wrap") else net

    module = initial_model(made, config.run.seed).to(row.dtype)
    layout = Layout.of(module)
    if layout.size != row.numel():
        raise UserError(f"the run's models have {row.numel()} numbers, the net {layout.size}: it is not the same net")
    layout.load(row, module)
    return module


def _inputs(config: Config, federation: Federation, own: bool) -> dict[str, Any]:
    """What was done to a sample before the model saw it: (pixel - shift) / spread, features or norms, projection."""
    data, inputs, count = config.data, math.prod(federation.input_shape), getattr(config.method, "projection", 0)
    about: dict[str, Any] = {"features": data.features, "norm": data.norm, "shift": None, "spread": None}
    about |= {"projection": [inputs, count] if count and inputs > count else None, "length_one": bool(count)}
    if not own and data.features is None:
        shift, spread = scaling(catalog.shared(data.name), data.scale)
        about |= {"shift": shift.flatten().tolist(), "spread": spread.flatten().tolist()}
    return about
