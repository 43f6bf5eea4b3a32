"""Images turned by quarter turns on top of a split: domains across clients, or mixed inside each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from kinfolk.data.partition.base import Split, generator
from kinfolk.errors import UserError

ANGLES = 4  # 0°, 90°, 180° and 270°
Rotate = Literal["clients", "samples"]


def turned(split: Split, rotate: Rotate | None, samples: int, seed: int) -> Split:
    """The split with images at 0°, 90°, 180° or 270°, drawn by the seed; None: as it is.

    clients: one angle for all images of a client, each for as many clients as another (but for one), and these are then
    the true clusters; samples: every image of the set, which has so many `samples`, has an angle of its own, the same
    for everybody who holds it.
    """
    if rotate is None:
        return split
    if split.quarter_turns is not None:
        raise UserError(f"data.rotate = '{rotate}': this split turns images itself; use another, or leave it out")
    if rotate == "samples":
        turns = generator(seed, "rotate/samples").integers(ANGLES, size=samples)
        notes = [*split.notes, "every image is turned by 0°, 90°, 180° or 270°, drawn by the seed"]
        return replace(split, sample_turns=turns, notes=notes)
    if split.clusters is not None:
        raise UserError("data.rotate = 'clients': clients of this split are in clusters already; use 'samples'")
    clients = len(split.train)
    turns = generator(seed, "rotate/clients").permutation(np.arange(clients) % ANGLES)
    notes = [*split.notes, "every client's images are turned by 0°, 90°, 180° or 270°, drawn by the seed"]
    return replace(split, clusters=turns, quarter_turns=turns, notes=notes)
