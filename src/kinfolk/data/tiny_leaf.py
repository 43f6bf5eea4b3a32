"""A tiny folder in the form of LEAF's FEMNIST and CelebA, to try the whole path without the real files.

The characters are the embedded digits, of which every writer makes some darker and some wider; the faces are drawn. The
files have the names, keys and shapes that LEAF's preprocess.sh leaves behind, samples divided in 9 to 1 by user.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kinfolk.data import catalog
from kinfolk.data.formats import Array
from kinfolk.data.leaf import CELEBA_LEAST, CELEBA_TRAITS
from kinfolk.data.partition import generator
from kinfolk.errors import UserError

USERS = 20
SAMPLES = 20  # of a writer
PICTURES = 10  # of a celebrity
FACE = (54, 44)  # height and width: LEAF's pictures are 218×178

_Users = dict[str, tuple[list[Any], list[int]]]  # name -> x, y


def write_tiny(root: Path, users: int = USERS) -> list[Path]:
    """Write root/femnist and root/celeba with so many users each, and return the two folders.

    A folder that exists is left alone: nothing is ever written over.
    """
    if users < 2:
        raise UserError(f"--users {users}: at least 2 are needed, to train and to be new at the test")
    made: dict[Path, Callable[[Path, int], None]] = {root / "femnist": _femnist, root / "celeba": _celeba}
    for folder in made:
        if folder.exists():
            raise UserError(f"{folder} exists already: nothing is written over; name another folder")
    try:
        for folder, write in made.items():
            unfinished = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(unfinished, ignore_errors=True)
            write(unfinished, users)
            unfinished.rename(folder)
    except OSError as error:
        raise UserError(f"{root}: cannot be written: {error.strerror or error}") from error
    return list(made)


def _femnist(folder: Path, users: int) -> None:
    digits = catalog.load("digits").train
    found: _Users = {}
    for user in range(users):
        draw = generator(0, "tiny leaf/femnist", user)
        rows = draw.integers(len(digits.y), size=SAMPLES)
        ink = _large(digits.x[rows, 0] / 255, wide=bool(draw.integers(2)))
        pixels = np.rint(255 * (1 - draw.uniform(0.6, 1) * ink)) / 255  # white = 1, and bytes before
        found[f"f{user:04d}_{user % 100:02d}"] = pixels.reshape(SAMPLES, 784).tolist(), digits.y[rows].tolist()
    names = list(found)
    for number, some in enumerate((names[: users // 2], names[users // 2 :])):  # LEAF has a hundred users to a file
        _write(folder, {name: found[name] for name in some}, f"all_data_{number}_niid_0_keep_0")


def _large(ink: Array, wide: bool) -> Array:
    """Digits [N, 8, 8] as [N, 28, 28]: every pixel three times as high and wide, or as wide as the image allows."""
    edged = np.pad(ink, ((0, 0), (1, 1), (1, 1)))
    thrice = np.clip((np.arange(28) - 2) // 3, -1, 8) + 1
    columns = np.arange(28) * 8 // 28 + 1 if wide else thrice
    return np.asarray(edged[:, thrice][:, :, columns])


def _celeba(folder: Path, users: int) -> None:
    from PIL import Image

    images = folder / "raw" / "img_align_celeba"
    images.mkdir(parents=True)
    found: _Users = {}
    traits: dict[str, list[str]] = {}
    for user in range(users):
        draw = generator(0, "tiny leaf/celeba", user)
        count = int(draw.integers(CELEBA_LEAST, PICTURES + 1))
        smiles = draw.integers(2, size=count).tolist()
        names = [f"{PICTURES * user + number + 1:06d}.jpg" for number in range(count)]
        skin = draw.integers(90, 220, size=3)
        for name, smile in zip(names, smiles):
            Image.fromarray(_face(skin, bool(smile), draw)).save(images / name, quality=95)
            traits[name] = draw.choice(["1", "-1"], size=len(CELEBA_TRAITS)).tolist()
        found[str(user + 1)] = names, smiles
    lines = [str(len(traits)), " ".join(CELEBA_TRAITS), *(f"{name} {' '.join(own)}" for name, own in traits.items())]
    (folder / "raw" / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _write(folder, found, "all_data_niid_0_keep_5")


def _face(skin: Array, smile: bool, draw: np.random.Generator) -> Array:
    """[H, W, 3] uint8: two eyes, and a mouth whose corners point up or down."""
    height, width = FACE
    face = np.clip(skin + draw.normal(0, 8, (height, width, 3)), 0, 255).astype(np.uint8)
    face[18:22, [13, 14, 29, 30]] = 20
    across = np.arange(12, 32)
    bend = np.rint(5 * ((across - 21.5) / 9.5) ** 2).astype(int)
    middle = 40 if smile else 35
    mouth = middle - bend if smile else middle + bend
    for thick in range(3):
        face[mouth + thick, across] = (170, 30, 40)
    return face


def _write(folder: Path, users: _Users, stem: str) -> None:
    """One file for training and one for testing, with the first nine tenths of every user's samples and the rest."""
    cuts = {name: max(1, len(y) * 9 // 10) for name, (_, y) in users.items()}
    for part in ("train", "test"):
        data = {}
        for name, (x, y) in users.items():
            here = slice(0, cuts[name]) if part == "train" else slice(cuts[name], None)
            data[name] = {"x": x[here], "y": y[here]}
        sizes = [len(own["y"]) for own in data.values()]
        (folder / part).mkdir(parents=True, exist_ok=True)
        document = {"users": list(data), "num_samples": sizes, "user_data": data}
        (folder / part / f"{stem}_{part}_9.json").write_text(json.dumps(document), encoding="utf-8")
