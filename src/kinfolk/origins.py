"""What a run was made from that its config cannot say, and whether what it is gone on with is the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kinfolk.cohort.layout import Layout
from kinfolk.config import Config
from kinfolk.data.federation import Federation
from kinfolk.data.fingerprint import fingerprint, shape
from kinfolk.errors import UserError
from kinfolk.models import Factory
from kinfolk.runs.checkpoint import Checkpoint
from kinfolk.runs.folder import RunFolder

WORDS = {"clients": "{} clients", "classes": "{} classes", "input_shape": "inputs of shape {}"}


def facts(data: Federation | None, model: Factory | None) -> dict[str, Any]:
    """For the table [kinfolk] of a run's config: what of it is the user's own."""
    known = {} if data is None else {"data": fingerprint(data)}
    return {"custom_data": data is not None, "custom_model": model is not None, **known}


def refuse_others(
    folder: RunFolder, config: Config, data: Federation | None, model: Factory | None, call: str = "kinfolk.resume"
) -> None:
    """Data and a model of the user's own must be given for a run that has them, the same data, and for no other run.

    Of a model that cannot be known here; its shapes are looked at beside the checkpoint.
    """
    made = folder.facts()
    for what, given in (("data", data), ("model", model)):
        own = bool(made.get(f"custom_{what}"))
        if own and given is None:
            raise UserError(f"{folder.path} was run with {what} of your own: call {call}(..., {what}=...) from Python")
        if not own and given is not None:
            name = config.data.name if what == "data" else config.model
            raise UserError(f"{folder.path} was run with the {what} '{name}', not with your own")
    if data is not None:
        _refuse_other_data(folder, made.get("data"), data)


def refuse_other_net(folder: Path, saved: Checkpoint, layout: Layout, hint: str) -> None:
    """The models of a checkpoint must fit into a net: of versions that kept no shapes only the size is known."""
    kept = saved.facts.get("net")
    size = models(saved.tensors).shape[-1]
    if size != layout.size:
        raise UserError(f"the models in {folder} have {size:,} numbers, the net given {layout.size:,}: {hint}")
    for (name, old), (other, new) in zip(kept or [], layout.described()):  # names may differ: the order is what counts
        if old != new:
            raise UserError(f"'{name}' of the models in {folder} is {old}, '{other}' of the net given {new}: {hint}")


def models(tensors: Mapping[str, Tensor]) -> Tensor:
    """What of a checkpoint clients use: a model each [n, d], or one for all."""
    return next(tensors[name] for name in ("state/personal", "weights", "shared/model") if name in tensors)


def of_clients(tensors: Mapping[str, Tensor]) -> Tensor:
    """The models that the clients of a checkpoint use: [n, d]."""
    return models(tensors).expand(tensors["quarantined"].numel(), -1)


def _refuse_other_data(folder: RunFolder, before: Mapping[str, Any] | None, data: Federation) -> None:
    """`before`: the fingerprint of the run's own data, None in runs of versions that kept none."""
    clients = int(folder.config()["data"]["clients"])
    kept, now = before or {"clients": clients}, shape(data)
    for key, words in WORDS.items():
        if key in kept and kept[key] != now[key]:
            was, given = words.format(kept[key]), words.format(now[key])
            raise UserError(f"{folder.path} was run with other data: {was}, those given have {given}")
    sizes = [row["test_samples"] for row in folder.clients()]
    if before is None and sizes and sizes != data.test.sizes.tolist():
        raise UserError(f"{folder.path} was run with other data: its clients have other numbers of test samples")
    if before is not None and fingerprint(data)["sum"] != before["sum"]:
        raise UserError(f"{folder.path} was run with other data: as many clients, but not the same samples or labels")
