"""The papers' nets, and how to bring your own.

A factory takes the shape of one input and the number of classes and returns an `nn.Module`; in an experiment file it is
named (`name = "mlp"`) or pointed at (`name = "package.module:factory"`).
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from kinfolk.errors import UserError, nearest
from kinfolk.models.norm import GroupNorm
from kinfolk.models.tanh import cnn_scattering, cnn_tanh

Factory = Callable[..., nn.Module]  # (input_shape, classes, **options) -> module


def linear(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


def mlp(input_shape: tuple[int, ...], classes: int, hidden: int = 200, layers: int = 2) -> nn.Module:
    """Fully connected net with ReLU; 784-200-200-10 on MNIST (PANM's net for MNIST and FashionMNIST)."""
    if hidden < 1 or layers < 0:
        raise UserError(f"model 'mlp' needs hidden >= 1 and layers >= 0: hidden = {hidden}, layers = {layers}")
    modules: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for _ in range(layers):
        modules += [nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    return nn.Sequential(*modules, nn.Linear(width, classes))


def cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Three 3×3 convolutions (32, 64, 64), each halved by pooling, two linear layers: 73,418 weights on CIFAR-10."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 22:
        raise UserError(f"model 'cnn' needs images of at least 22×22 pixels, the data have {list(input_shape)}")
    side = [_after_three_pools(size) for size in input_shape[1:]]
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * side[0] * side[1], 64), nn.ReLU(), nn.Linear(64, classes),
    )  # fmt: skip


def _after_three_pools(size: int) -> int:
    for _ in range(3):
        size = (size - 2) // 2
    return size


def cnn4(input_shape: tuple[int, ...], classes: int, hidden: int = 512, padding: int = 0) -> nn.Module:
    """Two 5×5 convolutions (32, 64), each halved by pooling, two linear layers: 878,538 weights on CIFAR-10."""
    if hidden < 1:
        raise UserError(f"model 'cnn4' needs hidden >= 1: hidden = {hidden}")
    height, width = _after_5x5("cnn4", input_shape, 2, padding)
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 32, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * height * width, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip


def cnn2(input_shape: tuple[int, ...], classes: int, padding: int = 0) -> nn.Module:
    """One 5×5 convolution (32), halved by pooling, and a linear layer: 46,922 weights on FashionMNIST."""
    height, width = _after_5x5("cnn2", input_shape, 1, padding)
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 32, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * height * width, classes),
    )  # fmt: skip


def cnn_celeba(input_shape: tuple[int, ...], classes: int, groups: int = 8) -> nn.Module:
    """LEAF's net for CelebA: four 3×3 convolutions (32), normalised and halved, and a linear layer: 84×84 becomes 6×6.

    LEAF has batch normalisation, which is no function of one sample; here channels are normalised in `groups` (0: not).
    """
    if groups < 0 or (groups and 32 % groups):
        raise UserError(f"model 'cnn-celeba' has 32 channels, which groups = {groups} do not divide; 0 is for none")
    if len(input_shape) != 3:
        raise UserError(f"model 'cnn-celeba' needs images, the data have {list(input_shape)}")
    modules: list[nn.Module] = []
    channels, sides = input_shape[0], list(input_shape[1:])
    for _ in range(4):
        modules += [nn.Conv2d(channels, 32, 3, padding=1), *([GroupNorm(groups, 32)] if groups else [])]
        modules += [nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()]
        channels, sides = 32, [-(-side // 2) for side in sides]
    return nn.Sequential(*modules, nn.Flatten(), nn.Linear(32 * math.prod(sides), classes))


def _after_5x5(name: str, input_shape: tuple[int, ...], layers: int, padding: int) -> list[int]:
    """Height and width after so many 5×5 convolutions with pooling."""
    if not 0 <= padding <= 4:
        raise UserError(f"model '{name}' needs padding between 0 and 4: padding = {padding}")
    sides = list(input_shape[1:])
    for _ in range(layers):
        sides = [(side + 2 * padding - 4) // 2 for side in sides]
    if len(input_shape) != 3 or min(sides) < 1:
        raise UserError(
            f"model '{name}' needs images that {layers} 5×5 convolutions and halvings leave something of; the data "
            f"have {list(input_shape)}, padding = {padding} (2 keeps the size)"
        )
    return sides


NETS: dict[str, Factory] = {"linear": linear, "mlp": mlp, "cnn": cnn, "cnn4": cnn4, "cnn2": cnn2}
DERIVED: dict[str, Factory] = {  # without passes of their own
    "cnn-scattering": cnn_scattering,
    "cnn-tanh": cnn_tanh,
    "cnn-celeba": cnn_celeba,
}


def find(name: str) -> Factory:
    """The factory called `name`: a shipped net or "package.module:factory"."""
    if ":" not in name:
        known = NETS | DERIVED
        if name not in known:
            raise UserError(f"unknown model '{name}': {nearest(name, known)} (your own: \"package.module:factory\")")
        return known[name]
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UserError(f"model '{name}' must look like \"package.module:factory\"")
    if str(Path.cwd()) not in sys.path:  # a file beside the experiment is what people write first
        sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise UserError(
            f"model '{name}': no module named '{error.name}' (looked in this folder and on the path)"
        ) from None
    except AttributeError:
        raise UserError(f"model '{name}': '{module_name}' has no '{attribute}'") from None
    if not callable(factory):
        raise UserError(f"model '{name}' is not callable: a function (input_shape, classes) -> nn.Module is needed")
    return factory  # type: ignore[no-any-return]


def make(factory: Factory, input_shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> nn.Module:
    """Call a factory, and say what is wrong with it in one line."""
    try:
        module = factory(input_shape, classes, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        name = getattr(factory, "__name__", factory)
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"model '{name}' could not be made from (input_shape, classes) and {options or 'no options'}: {reason}"
        ) from None
    if not isinstance(module, nn.Module):
        raise UserError(f"the model factory returned a {type(module).__name__}, not an nn.Module")
    refuse_without_size(module)
    return module


def refuse_without_size(module: nn.Module) -> None:
    """A lazy layer has no parameters before its first call, so nobody could say how long a client's row is."""
    for name, part in module.named_modules():
        if any(is_lazy(parameter) for parameter in part.parameters(recurse=False)):
            raise UserError(f"layer '{name}' ({type(part).__name__}) has no size yet: say how many inputs it has")
