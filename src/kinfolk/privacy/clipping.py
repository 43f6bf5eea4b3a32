"""Sums of clipped gradients of single samples, for many clients at once.

For linear layers and convolutions the norm of a sample's gradient follows from the layer's inputs a and the gradient g
of its outputs, without the gradient itself: |g ⊗ a| = |g|·|a| for a linear layer. The gradient of a convolution is a
sum over positions; its norm follows from products of g and of a between positions, or from the sample's own product if
that is smaller. With the norms known, the clipped sum is one batched product per layer. Every other module goes through
`vmap` over `grad`, some samples at a time.

Activations that mix samples would let one record move another's gradient: BatchNorm is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from kinfolk.cohort.layout import Layout
from kinfolk.errors import UserError
from kinfolk.models.stack import SLIM, in_order
from kinfolk.models.vectorise import refuse_what_cannot_be_vectorised
from kinfolk.privacy.losses import SampleLoss

NUMBERS = 2**23  # that a chunk of samples may need at a time
GPU_NUMBERS = 2**27  # the same on a GPU: small chunks would leave it waiting
SHRINK = 1e-6  # gradients are clipped by this much more, for what rounding adds

Views = dict[str, Tensor]
Targets = tuple[Tensor, ...]
_PLAIN = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.SiLU, nn.LeakyReLU, nn.Identity, nn.MaxPool2d, nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
)  # fmt: skip


class Clipping(Protocol):
    """Per-sample gradients of one net, clipped and added up."""

    numbers: int  # that a sample needs while it is computed

    def add(
        self,
        models: Tensor,
        x: Tensor,
        inside: Tensor | None,
        targets: tuple[Tensor, ...],
        loss: SampleLoss,
        clip: float,
        into: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Add each client's sum to `into` [m, d]; losses [m, b] and norms before clipping [m, b] of the samples.

        models [m, d]; x [m, b, ...]; inside [m, b]: which samples are any, none for all; targets [m, b, ...].
        """


def clipping_for(module: nn.Module, layout: Layout, input_shape: tuple[int, ...]) -> Clipping:
    """The best way for this module; an error if its samples cannot be told apart."""
    refuse_mixing(module)
    refuse_what_cannot_be_vectorised(module)
    parts = _parts(module, layout)
    return Single(module, layout) if parts is None else Layered(parts, layout, input_shape)


def refuse_mixing(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            raise UserError(
                f"layer '{name}' is {type(part).__name__}, which mixes the records of a batch: one record would change "
                f"the gradients of all others, whatever is clipped. Use nn.GroupNorm(groups, {part.num_features})"
            )


def factors(norms: Tensor, clip: float, inside: Tensor | None) -> Tensor:
    """[m, b] what gradients of these norms are multiplied by: at most `clip` is left of them, and nothing of those
    outside or not finite (which would make a sum not finite, and so tell of one record)."""
    factor = (clip * (1 - SHRINK) / norms).clamp(max=1)
    usable = torch.isfinite(norms) if inside is None else torch.isfinite(norms) & inside
    return torch.where(usable, factor, 0)


class Layered:
    """Linear layers, convolutions and layers without parameters, one after the other."""

    def __init__(self, parts: list[tuple[str, nn.Module]], layout: Layout, input_shape: tuple[int, ...]) -> None:
        self.parts = parts
        self.layout = layout
        self.numbers = _needed(parts, input_shape)

    def add(
        self,
        models: Tensor,
        x: Tensor,
        inside: Tensor | None,
        targets: Targets,
        loss: SampleLoss,
        clip: float,
        into: Tensor,
    ) -> tuple[Tensor, Tensor]:
        views = self.layout.views(models)
        kept: list[tuple[_Layer, Tensor, Tensor]] = []
        h = x
        with torch.enable_grad():
            for name, part in self.parts:
                layer = _LAYERS.get(type(part))
                if layer is None:
                    flat = part(h.flatten(0, 1))
                    h = flat.view(*h.shape[:2], *flat.shape[1:])
                    continue
                known = layer(name, part, views)
                seen, out = known.forward(h)
                if not out.requires_grad:
                    out.requires_grad_()
                kept.append((known, seen.detach(), out))
                h = known.shaped(out)
            losses = loss(h, *targets)
            gradients = torch.autograd.grad(losses.sum(), [out for _, _, out in kept])
        with torch.no_grad():
            squares = [known.square(seen, g) for (known, seen, _), g in zip(kept, gradients)]
            norms = torch.stack(squares).sum(dim=0).sqrt()
            factor = factors(norms, clip, inside)
            spread = self.layout.views(into)
            for (known, seen, _), g in zip(kept, gradients):
                known.add(seen, g, factor, spread)
        return losses.detach(), norms


class _Layer(Protocol):
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """What the gradient needs of the inputs, and the outputs."""

    def shaped(self, out: Tensor) -> Tensor:
        """The outputs as the next layer takes them."""

    def square(self, seen: Tensor, g: Tensor) -> Tensor:
        """[m, b] squared norms of the samples' gradients."""

    def add(self, seen: Tensor, g: Tensor, factor: Tensor, into: Views) -> None: ...


class _Linear:
    def __init__(self, name: str, part: nn.Module, views: Views) -> None:
        self.name = name
        self.weight, self.bias = views[f"{name}.weight"], views.get(f"{name}.bias")

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        out = _outputs(h, self.weight)
        return h, out if self.bias is None else out + self.bias[:, None]

    def shaped(self, out: Tensor) -> Tensor:
        return out

    def square(self, seen: Tensor, g: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(seen, dim=2).square()
        if self.bias is not None:
            length += 1
        return length * g.square().sum(dim=2)

    def add(self, seen: Tensor, g: Tensor, factor: Tensor, into: Views) -> None:
        seen, g = _scaled(seen, g, factor)
        into[f"{self.name}.weight"].baddbmm_(g.transpose(1, 2), seen)
        if self.bias is not None:
            into[f"{self.name}.bias"] += g.sum(dim=1)


class _Convolution:
    """Seen as patches [m, b, P, K] of the images and outputs [m, b, P, O]: positions P, patch size K."""

    def __init__(self, name: str, part: nn.Module, views: Views) -> None:
        assert isinstance(part, nn.Conv2d)
        self.name, self.conv = name, part
        self.weight, self.bias = views[f"{name}.weight"].flatten(2), views.get(f"{name}.bias")
        self.size: tuple[int, ...] = ()

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        conv = self.conv
        self.size = _after(conv, h.shape[3], h.shape[4])
        columns = F.unfold(
            h.flatten(0, 1), conv.kernel_size, dilation=conv.dilation, padding=conv.padding, stride=conv.stride  # type: ignore[arg-type]
        )  # fmt: skip
        patches = columns.transpose(1, 2).reshape(*h.shape[:2], columns.shape[2], columns.shape[1])
        out = _outputs(patches.flatten(1, 2), self.weight).reshape(*patches.shape[:3], -1)
        return patches, out if self.bias is None else out + self.bias[:, None, None]

    def shaped(self, out: Tensor) -> Tensor:
        return out.transpose(2, 3).reshape(*out.shape[:2], -1, *self.size)

    def square(self, seen: Tensor, g: Tensor) -> Tensor:
        """Terms of different positions can cancel, and what rounding leaves of them is counted as if it did not."""
        places, inputs, outputs = seen.shape[2], seen.shape[3], g.shape[3]
        a, g = seen.flatten(0, 1), g.flatten(0, 1)
        if places**2 < inputs * outputs:
            square = (torch.bmm(a, a.transpose(1, 2)) * torch.bmm(g, g.transpose(1, 2))).sum(dim=(1, 2)).clamp(min=0)
        else:
            square = torch.bmm(g.transpose(1, 2), a).square().sum(dim=(1, 2))
        terms = (torch.linalg.vector_norm(a, dim=2) * torch.linalg.vector_norm(g, dim=2)).sum(dim=1)
        square += 4 * torch.finfo(terms.dtype).eps * terms.square()
        if self.bias is not None:
            square += g.sum(dim=1).square().sum(dim=1)
        return square.view(seen.shape[:2])

    def add(self, seen: Tensor, g: Tensor, factor: Tensor, into: Views) -> None:
        seen, g = _scaled(seen, g, factor)
        g = g.flatten(1, 2)
        into[f"{self.name}.weight"].flatten(2).baddbmm_(g.transpose(1, 2), seen.flatten(1, 2))
        if self.bias is not None:
            into[f"{self.name}.bias"] += g.sum(dim=1)


_LAYERS: dict[type[nn.Module], Callable[[str, nn.Module, Views], _Layer]] = {
    nn.Linear: _Linear,
    nn.Conv2d: _Convolution,
}


class Single:
    """Any module: the gradient of every sample on its own, through `vmap`."""

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.module = module
        self.layout = layout
        self.numbers = 2 * layout.size

    def add(
        self,
        models: Tensor,
        x: Tensor,
        inside: Tensor | None,
        targets: Targets,
        loss: SampleLoss,
        clip: float,
        into: Tensor,
    ) -> tuple[Tensor, Tensor]:
        def one(parameters: Views, sample: Tensor, *its: Tensor) -> tuple[Tensor, Tensor]:
            logits = functional_call(self.module, parameters, (sample[None],))
            value = loss(logits[None], *(target[None, None] for target in its)).sum()
            return value, value

        samples = (0,) * (1 + len(targets))
        alone = vmap(vmap(grad(one, has_aux=True), in_dims=(None, *samples)), in_dims=(0, *samples))
        gradients, losses = alone(self.layout.views(models), x, *targets)
        flat = torch.cat([gradients[name].reshape(*x.shape[:2], -1) for name in self.layout.names], dim=2)
        norms = torch.linalg.vector_norm(flat, dim=2)
        flat, factor = _scaled(flat, factors(norms, clip, inside)[:, :, None], None)
        into += torch.bmm(factor.transpose(1, 2), flat)[:, 0]
        return losses, norms


def _scaled(seen: Tensor, g: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """g times the factor of each sample; both are nothing where the factor is 0, even if they are not finite."""
    if factor is not None:
        weights = factor.view(*factor.shape, *[1] * (g.dim() - 2))
        zero = weights == 0
        g = torch.where(zero, 0, g * weights)
    else:
        zero = g == 0
    if seen.is_cuda or bool(zero.any()):
        seen = torch.where(zero.view(*zero.shape[:2], *[1] * (seen.dim() - 2)), 0, seen)
    return seen, g


def _outputs(h: Tensor, weight: Tensor) -> Tensor:
    """h [m, b, in], weight [m, out, in] -> [m, b, out]."""
    if not h.is_cuda and weight.shape[2] >= SLIM * weight.shape[1]:
        return torch.bmm(weight, h.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(h, weight.transpose(1, 2))


def _after(conv: nn.Conv2d, *size: int) -> tuple[int, ...]:
    """Height and width of what a convolution puts out."""
    terms = zip(size, conv.kernel_size, conv.dilation, map(int, conv.padding), conv.stride)
    return tuple((s + 2 * p - d * (k - 1) - 1) // r + 1 for s, k, d, p, r in terms)


def _parts(module: nn.Module, layout: Layout) -> list[tuple[str, nn.Module]] | None:
    """The layers in order if we know all of them and each takes samples one by one; none otherwise."""
    parts = in_order(module, layout.names)
    return parts if not isinstance(parts, str) and all(_known(part) for _, part in parts) else None


def _known(part: nn.Module) -> bool:
    if type(part) is nn.Conv2d:
        return part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)
    if type(part) is nn.Flatten:
        return (part.start_dim, part.end_dim) == (1, -1)
    if type(part) is nn.GroupNorm:
        return not part.affine
    return type(part) is nn.Linear or type(part) in _PLAIN


def _needed(parts: list[tuple[str, nn.Module]], input_shape: tuple[int, ...]) -> int:
    """Numbers that one sample needs: inputs, outputs and their gradients, patches, products."""
    count = math.prod(input_shape)
    hooks: list[Any] = []

    def look(part: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal count
        count += 0 if out.data_ptr() == inputs[0].data_ptr() else 3 * out.numel()
        if isinstance(part, nn.Conv2d):
            places, patch = out.numel() // part.out_channels, part.weight[0].numel()
            count += 2 * places * patch + min(places**2, patch * part.out_channels)

    module = nn.Sequential(*(part for _, part in parts))
    weight = next(module.parameters())
    try:
        hooks = [part.register_forward_hook(look) for _, part in parts]
        with torch.no_grad():
            module(torch.zeros(1, *input_shape, dtype=weight.dtype, device=weight.device))
    finally:
        for hook in hooks:
            hook.remove()
    return count
