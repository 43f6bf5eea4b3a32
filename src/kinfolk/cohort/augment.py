"""Training images as a client sees them at one visit: moved by a few pixels, perhaps mirrored, anew at every step.

A look is a number below LOOKS that says how an image is seen. Looks are drawn with the batches, for every place in
every step, so they do not depend on who else is trained at the same time. Images are moved batch by batch: no second
copy of the data set is needed, and on a GPU the looks are one more input of the recorded steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.errors import UserError

PADDING = 4  # pixels that an image can be moved by, each way
SHIFTS = 2 * PADDING + 1
LOOKS = 2 * SHIFTS**2


def check(augment: str | None, input_shape: tuple[int, ...]) -> None:
    """Refuse samples that are no images."""
    if augment is not None and len(input_shape) != 3:
        raise UserError(f"training.augment = '{augment}' needs images [C, H, W], the data have {list(input_shape)}")


def draw(seed: int, t: int, ids: Tensor, steps: int, width: int, purpose: str = "batch") -> Tensor:
    """The looks of round t: [m, steps, width], for each place of each client's batches of that purpose."""
    index = (torch.arange(steps, device=ids.device) << 32)[:, None] + torch.arange(width, device=ids.device)
    return (
        randomness.bits(seed, "augment" if purpose == "batch" else f"augment/{purpose}", t, ids[:, None, None], index)
        % LOOKS
    )


def seen(x: Tensor, index: Tensor, looks: Tensor) -> Tensor:
    """The images x[index] as the looks show them: x [N, C, H, W]; index, looks [m, b] -> [m·b, C, H, W].

    A crop of the image's own size out of the image with PADDING zeros around it, and then perhaps its mirror image.
    """
    channels, height, width = x.shape[1:]
    looks = looks.flatten()[:, None]
    mirrored, down, right = looks >= SHIFTS**2, looks // SHIFTS % SHIFTS - PADDING, looks % SHIFTS - PADDING
    column = torch.arange(width, device=x.device)
    row = torch.arange(height, device=x.device) + down  # [m·b, H] of the image, where it is not outside
    column = torch.where(mirrored, width - 1 - column, column) + right
    outside = ((row < 0) | (row >= height))[:, :, None] | ((column < 0) | (column >= width))[:, None, :]
    pixel = row.clamp(0, height - 1)[:, :, None] * width + column.clamp(0, width - 1)[:, None, :]
    images = x.flatten(2).index_select(0, index.flatten())
    moved = images.gather(2, pixel.flatten(1)[:, None].expand(-1, channels, -1))
    return moved.view(-1, channels, height, width).masked_fill_(outside[:, None], 0)
