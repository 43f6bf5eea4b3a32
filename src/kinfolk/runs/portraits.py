"""What the domains that FedCG found look like: `domains.json`, the mean image of every label in every domain."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kinfolk.errors import UserError
from kinfolk.runs.folder import DOMAINS


@dataclass(frozen=True)
class Portraits:
    labels: list[int]
    samples: np.ndarray  # [D, L] that each image is the mean of
    images: np.ndarray  # [D, L, height, width] 0 to 255


def read_portraits(folder: Path) -> Portraits:
    """Those of a run, which must have some."""
    path = folder / DOMAINS
    try:
        said = json.loads(path.read_bytes())
        labels = [int(label) for label in said["labels"]]
        samples = np.array(said["samples"], dtype=np.int64)
        pixels = [[np.frombuffer(bytes.fromhex(image), np.uint8) for image in row] for row in said["images"]]
        images = np.array(pixels).reshape(len(samples), len(labels), int(said["height"]), int(said["width"]))
        if samples.shape != images.shape[:2] or not images.size:
            raise ValueError("images and samples do not match")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return Portraits(labels, samples, images)
