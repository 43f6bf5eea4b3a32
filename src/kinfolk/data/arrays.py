"""Arrays of the user's own as tensors: what they may be, and one line about what they may not be."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfolk.errors import UserError

SHOWN = 5  # clusters that a notice names


def stacked(pairs: Sequence[Any], kind: str, shape: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The samples of (x, y) pairs one after another: inputs [N, ...] float32, labels [N] and sizes [n].

    `shape` is that of a training input, if it has to be that; a client without samples tells none.
    """
    whose, xs, ys = "training has", list[Tensor](), list[Tensor]()
    for client, pair in enumerate(pairs):
        where = f"client {client} {kind}"
        given = _pair(pair, where)
        x, y = _inputs(given[0], where), _labels(given[1], where)
        if y.ndim != 1 or x.shape[:1] != y.shape:
            raise UserError(f"{where}: {list(x.shape)} inputs but {list(y.shape)} labels")
        if shape is None and y.numel():
            shape, whose = tuple(x.shape[1:]), f"client {client} has"
        if y.numel() and x.shape[1:] != shape:
            raise UserError(f"{where}: inputs of shape {list(x.shape[1:])}, {whose} {list(shape or ())}")
        xs.append(x)
        ys.append(y)
    sizes = torch.tensor([y.numel() for y in ys])
    if kind == "train" and int(sizes.min()) == 0:
        raise UserError(f"client {int(sizes.argmin())} has no training samples")
    form = xs[0].shape[1:] if shape is None else shape
    whole = torch.empty(int(sizes.sum()), *form, dtype=torch.float32, device=xs[0].device)
    for client, (x, place) in enumerate(zip(xs, torch.split(whole, sizes.tolist()))):
        if x.shape[0]:  # an empty array may have any shape
            place.copy_(x)
            _refuse_infinite(place, x, f"client {client} {kind}")
    return whole, torch.cat(ys), sizes


def whole(number: Any, name: str) -> int:
    """A positive whole number of any type that has one: Python's, numpy's, a tensor's."""
    try:
        found = operator.index(number)
    except TypeError:
        found = 0
    if found < 1 or isinstance(number, bool):
        raise UserError(f"{name} = {number!r}: a whole number from 1 on is needed")
    return found


def numbered(clusters: Any, clients: int) -> tuple[Tensor, list[str]]:
    """Clusters [n] as numbers: those below n as they are, other ones and names counted anew, with a notice of it."""
    ids = clusters.cpu().numpy() if isinstance(clusters, Tensor) else np.asarray(clusters)
    if ids.shape != (clients,):
        found = ids.size if ids.ndim == 1 else list(ids.shape)
        raise UserError(f"{found} clusters for {clients} clients")
    if ids.dtype.kind not in "biufU" or (ids.dtype.kind == "f" and not (np.isfinite(ids) & (ids % 1 == 0)).all()):
        raise UserError(f"clusters such as {_odd(ids)}: every client needs one, a number from 0 on or a name")
    if ids.dtype.kind != "U" and (ids < 0).any():
        raise UserError(f"clusters such as {ids.min()}: every client needs one, a number from 0 on or a name")
    if ids.dtype.kind != "U" and (ids < clients).all():
        return torch.from_numpy(ids.astype(np.int64)), []
    names, new = np.unique(ids, return_inverse=True)
    shown = ", ".join(f"{name} is {i}" for i, name in enumerate(names[:SHOWN].tolist()))
    more = ", …" if names.size > SHOWN else ""
    return torch.from_numpy(new.astype(np.int64)), [f"clusters are counted from 0: {shown}{more}"]


def samples(dataset: Any, where: str) -> tuple[Tensor, np.ndarray]:
    """All (x, label) of a map-style data set: inputs [N, ...] and labels [N]."""
    read = [_sample(dataset[index], where) for index in range(len(dataset))]
    if not read:
        raise UserError("a data set is empty: every client needs at least one sample")
    shapes = {tuple(x.shape) for x, _ in read}
    if len(shapes) > 1:
        raise UserError(f"{where}: inputs of shapes {' and '.join(str(list(s)) for s in sorted(shapes)[:2])}")
    return torch.stack([x for x, _ in read]), np.stack([y for _, y in read])


def _sample(given: Any, where: str) -> tuple[Tensor, np.ndarray]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise UserError(f"{where}: a sample is {_what(given)}, (x, label) is needed")
    x, y = given
    label = np.asarray(y.cpu() if isinstance(y, Tensor) else y)
    if label.size != 1:
        raise UserError(f"{where}: a label of shape {list(label.shape)}, one number is needed")
    return _tensor(x, where, "inputs"), label.reshape(())


def _pair(given: Any, where: str) -> Sequence[Any]:
    if isinstance(given, tuple | list) and len(given) == 2:
        return given
    hint = "a pair (x, y) of arrays is needed; data sets of (x, label) are for Federation.from_datasets"
    raise UserError(f"{where} is {_what(given)}: {hint}")


def _inputs(given: Any, where: str) -> Tensor:
    """[N, ...]; numbers that are not in arrays of their own are one feature each."""
    x = _tensor(given, where, "inputs")
    return x[:, None] if x.ndim == 1 and x.numel() else x


def _refuse_infinite(taken: Tensor, x: Tensor, where: str) -> None:
    """`taken`: x as float32."""
    if not torch.isfinite(taken).all():
        finite = bool(torch.isfinite(x).all())
        what = f"up to {float(x.abs().max()):.3g}, which float32 cannot hold" if finite else "NaN or infinite values"
        raise UserError(f"{where}: inputs hold {what}")


def _labels(given: Any, where: str) -> Tensor:
    y = _tensor(given, where, "labels")
    if y.is_floating_point() and not bool((y % 1 == 0).all()):  # of NaN and infinity the rest is NaN
        raise UserError(f"{where}: labels such as {float(y[y % 1 != 0][0]):.6g}, whole numbers from 0 on are needed")
    return y.to(torch.int64)


def _tensor(given: Any, where: str, what: str) -> Tensor:
    """What torch can compute with, whatever its strides and its order of bytes."""
    if isinstance(given, Tensor):
        if given.is_complex():
            raise UserError(f"{where}: {what} of type {given.dtype}, real numbers are needed")
        return given.detach()
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: {what} that are no array: {str(error).splitlines()[0]}") from None
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise UserError(f"{where}: {what} of type {array.dtype}, real numbers of up to 64 bits are needed")
    plain = np.require(array, array.dtype.newbyteorder("="), ["C", "ALIGNED", "WRITEABLE"])
    return torch.from_numpy(plain.copy() if min(plain.strides, default=0) < 0 else plain)  # one row may lie backwards


def _what(given: Any) -> str:
    return f"{len(given)} things" if isinstance(given, tuple | list) else f"of type {type(given).__name__}"


def _odd(ids: np.ndarray) -> Any:
    """One of the clusters that cannot be."""
    odd = ids[~(ids % 1 == 0)] if ids.dtype.kind == "f" else ids
    return odd[0]
