"""P4's convolutional nets, with Tanh, which bounds what a sample can do to a gradient.

They have no passes of their own (see `stack.py`): they are computed through `vmap` and autograd, except for private
gradients, which know all their layers.
"""

from __future__ import annotations

from torch import nn

from kinfolk.errors import UserError


def cnn_scattering(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """For scattering features: of colour images two 3×3 convolutions (64), of grey ones 16, 32 and a linear layer."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise UserError(
            f"model 'cnn-scattering' needs features [C, H, W] of at least 4×4 places (data.features = 'scattering'), "
            f"the data have {list(input_shape)}"
        )
    channels, height, width = input_shape
    if channels >= 243:
        return nn.Sequential(
            nn.Conv2d(channels, 64, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1), nn.Tanh(),
            nn.Flatten(), nn.Linear(64 * (height // 2) * (width // 2), classes),
        )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(32 * ((height + 1) // 2) * ((width + 1) // 2), 32), nn.Tanh(), nn.Linear(32, classes),
    )  # fmt: skip


def cnn_tanh(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """For pixels: six 3×3 convolutions (32, 32, 64, 64, 128, 128), halved after every second, two linear layers."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 8:
        hint = "" if len(input_shape) == 3 else "; with features or method.projection there are no pixels left"
        raise UserError(f"model 'cnn-tanh' needs images of at least 8×8 pixels, inputs are {list(input_shape)}{hint}")
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for wide in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.Tanh()]
            channels = wide
        layers.append(nn.MaxPool2d(2))
    flat = 128 * (height // 8) * (width // 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 128), nn.Tanh(), nn.Linear(128, classes))
