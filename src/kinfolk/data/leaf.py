"""LEAF's JSON files: FEMNIST (users are writers) and CelebA (users are celebrities).

Caldas et al., "LEAF: a benchmark for federated settings", 2018. A folder holds train/*.json and test/*.json
as LEAF's preprocess.sh leaves them; each file is
{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}.
User numbers are positions in the sorted list of the user names of both parts: a user of both has one number.

LEAF divides by sample, when every user is in both parts, or by user, when none is. Anything between means that files
are missing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kinfolk.data.formats import Array, Arrays, read_image, read_json
from kinfolk.errors import UserError

PARTS = ("train", "test")
FEMNIST_CLASSES = 62
CELEBA_SIDE = 84
CELEBA_LEAST = 5  # LEAF drops celebrities with fewer images
CELEBA_TRAITS = ("Attractive", "Heavy_Makeup", "High_Cheekbones", "Mouth_Slightly_Open", "Wavy_Hair")

_User = tuple[Any, Array]  # x as `convert` made it, y [N] int64
_Part = dict[str, _User]
_Files = dict[str, tuple[_User, Path]]  # with the file that each user is in


def read_femnist(folder: Path) -> Arrays:
    """x: [N, 1, 28, 28] uint8, white = 255; y: [N] uint8 in 0..61; user: [N] int64.

    The files hold 784 numbers in [0, 1] with white = 1. They were made from bytes, so rounding to 1/255 gives
    the original pixels back, at a quarter of the memory.
    """
    parts = _read_parts(folder, _femnist_pixels, FEMNIST_CLASSES)
    numbers = _numbers(parts.values())
    arrays: Arrays = {}
    for part, users in parts.items():
        empty = np.empty((0, 1, 28, 28), np.uint8)
        arrays[f"{part}_x"] = np.concatenate([empty, *(x for x, _ in users.values())])
        _add_labels(arrays, part, users, numbers)
    return arrays


def _femnist_pixels(x: Sequence[Any]) -> Array:
    pixels = np.asarray(x, np.float32) if x else np.empty((0, 784), np.float32)
    if pixels.ndim != 2 or pixels.shape[1] != 784:
        raise ValueError(f"x is {list(pixels.shape)}, expected [N, 784]")
    if not (pixels >= 0).all() or not (pixels <= 1).all():  # written so that a NaN fails too
        raise ValueError(f"pixels run from {pixels.min()} to {pixels.max()}, expected 0 to 1")
    return np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, 28, 28)


def read_celeba(folder: Path, least: int = CELEBA_LEAST) -> Arrays:
    """x: [N, 3, 84, 84] uint8; y: [N] uint8, 1 = smiling; user: [N] int64.

    The JSON names image files, which lie in raw/img_align_celeba/ (or in raw/). Users with fewer than `least`
    images in train and test together are dropped. Where raw/list_attr_celeba.txt is there, domain [N] int64 says which
    of five traits a face has, as the digits of a number below 32.
    """
    images = next((path for path in (folder / "raw" / "img_align_celeba", folder / "raw") if path.is_dir()), None)
    if images is None:
        raise UserError(f"{folder}: there is no raw/img_align_celeba folder with CelebA's images")
    parts = _read_parts(folder, _file_names, 2)
    counts: dict[str, int] = {}
    for users in parts.values():
        for user, (x, _) in users.items():
            counts[user] = counts.get(user, 0) + len(x)
    parts = {part: {u: own for u, own in users.items() if counts[u] >= least} for part, users in parts.items()}
    numbers = _numbers(parts.values())
    traits = _traits(folder / "raw" / "list_attr_celeba.txt")
    arrays: Arrays = {}
    for part, users in parts.items():
        files = [images / name for x, _ in users.values() for name in x]
        x = np.empty((len(files), 3, CELEBA_SIDE, CELEBA_SIDE), np.uint8)
        for row, path in enumerate(files):
            x[row] = read_image(path, (CELEBA_SIDE, CELEBA_SIDE)).transpose(2, 0, 1)
        arrays[f"{part}_x"] = x
        _add_labels(arrays, part, users, numbers)
        if traits is not None:
            if lost := [path.name for path in files if path.name not in traits]:
                raise UserError(f"{folder / 'raw' / 'list_attr_celeba.txt'}: there is no {lost[0]} ({len(lost)} such)")
            arrays[f"{part}_domain"] = np.array([traits[path.name] for path in files], np.int64)
    return arrays


def _traits(path: Path) -> dict[str, int] | None:
    """The five traits of each picture as digits of a number, the first counting most; None where there is no list."""
    if not path.is_file():
        return None
    try:
        _, header, *lines = path.read_text(encoding="utf-8").splitlines()
        columns = [1 + header.split().index(trait) for trait in CELEBA_TRAITS]
        rows = [line.split() for line in lines if line.strip()]
        return {row[0]: int("".join("1" if row[column] == "1" else "0" for column in columns), 2) for row in rows}
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{path}: not CelebA's list of attributes, or cut off: {error}") from error


def _file_names(x: Sequence[Any]) -> list[str]:
    for name in x:
        # A name with a folder in it could reach any file of the machine.
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ValueError(f"x holds {name!r}, expected the name of an image file")
    return list(x)


def _read_parts(folder: Path, convert: Callable[[Sequence[Any]], Any], classes: int) -> dict[str, _Part]:
    found = {part: _read_part(folder, part, convert, classes) for part in PARTS}
    train, test = found.values()
    if not train.keys().isdisjoint(test):
        _refuse_halves(train, test, "test")
        _refuse_halves(test, train, "train")
    return {part: {user: own for user, (own, _) in users.items()} for part, users in found.items()}


def _refuse_halves(here: _Files, there: _Files, other: str) -> None:
    """Where samples are divided, each user has some in both parts."""
    if lost := sorted(here.keys() - there.keys()):
        raise UserError(
            f"{here[lost[0]][1]}: user '{lost[0]}' is not in {other} ({len(lost)} such users), though others are in "
            f"both parts: a file is missing in {other}, or the two were not prepared together"
        )


def _read_part(folder: Path, part: str, convert: Callable[[Sequence[Any]], Any], classes: int) -> _Files:
    files = sorted((folder / part).glob("*.json"))
    if not files:
        raise UserError(f"{folder / part}: there are no LEAF files (*.json)")
    users: _Files = {}
    for file in files:
        new = read_json(file, lambda document: _read_users(document, convert, classes))
        if twice := sorted(users.keys() & new.keys()):
            raise UserError(f"{file}: user '{twice[0]}' is already in another file of {part} ({len(twice)} such users)")
        users.update({user: (own, file) for user, own in new.items()})
    if not users:
        raise UserError(f"{files[0]}: there are no users in it, nor in any other file of {part}")
    return users


def _read_users(document: Any, convert: Callable[[Sequence[Any]], Any], classes: int) -> _Part:
    if not isinstance(document, dict):
        raise ValueError("expected an object with 'users', 'num_samples' and 'user_data'")
    names, sizes, data = document["users"], document["num_samples"], document["user_data"]
    if len(names) != len(sizes):
        raise ValueError(f"{len(names)} users but {len(sizes)} entries in num_samples")
    _check_names(names, data)
    users: _Part = {}
    for name, size in zip(names, sizes):
        x, y = _samples(name, data[name])
        if not len(y):
            raise ValueError(f"user '{name}' has no samples: take the user out of the file, or prepare the data again")
        if not len(x) == len(y) == size:
            raise ValueError(f"user '{name}' has {len(x)} x and {len(y)} y, num_samples says {size}")
        if wrong := [label for label in y if type(label) is not int or not 0 <= label < classes]:
            raise ValueError(f"user '{name}' has the label {wrong[0]!r}, expected 0 to {classes - 1}")
        try:
            users[name] = (convert(x), np.array(y, np.int64))
        except (ValueError, TypeError) as error:
            raise ValueError(f"user '{name}': {error}") from error
    return users


def _samples(name: str, own: Any) -> tuple[list[Any], list[Any]]:
    """x and y of a user."""
    for key in ("x", "y"):
        if not isinstance(own, dict) or key not in own:
            raise ValueError(f"user '{name}': there is no '{key}'")
        if not isinstance(own[key], list):
            raise ValueError(f"user '{name}': '{key}' is not a list")
    return own["x"], own["y"]


def _check_names(names: Any, data: Any) -> None:
    """The users that are named must be those whose samples are there, each once: no sample is left behind."""
    if not isinstance(names, list) or not isinstance(data, dict) or not all(isinstance(name, str) for name in names):
        raise ValueError("expected a list of names in 'users' and an object by these names in 'user_data'")
    if len(set(names)) < len(names):
        raise ValueError(f"user '{next(name for name in names if names.count(name) > 1)}' is named twice in 'users'")
    for one, other, where, lacks in (
        (set(names), data.keys(), "users", "user_data"),
        (data.keys(), set(names), "user_data", "users"),
    ):
        if unknown := sorted(one - other):
            raise ValueError(f"user '{unknown[0]}' is in '{where}' but not in '{lacks}' ({len(unknown)} such users)")


def _numbers(parts: Any) -> dict[str, int]:
    return {user: number for number, user in enumerate(sorted({user for users in parts for user in users}))}


def _add_labels(arrays: Arrays, part: str, users: _Part, numbers: dict[str, int]) -> None:
    labels = [y for _, y in users.values()]
    owners = [np.full(len(y), numbers[user], np.int64) for user, (_, y) in users.items()]
    arrays[f"{part}_y"] = np.concatenate([np.empty(0, np.int64), *labels]).astype(np.uint8)
    arrays[f"{part}_user"] = np.concatenate([np.empty(0, np.int64), *owners])
