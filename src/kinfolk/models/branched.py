"""FedCG's net as explicit passes over many clients on a CPU, forward and backward.

What `models/domains.py` says as one module, without autograd. Three things make D domains cost little more than one:

- Every sample is multiplied with filters of its own, mixed of its domains', or where these are larger than what they
  see, samples are sorted so that those in the same domains lie side by side and share a product.
- Where V^ = A V W without ReLU or bottleneck, fields x of an image see x V^^T = (x W^T) (A V)^T: either the filters are
  projected or the fields, whichever are fewer.
- Pixels that pooling drops are not computed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.models.bundle import Bundle
from kinfolk.models.convolve import Convolve
from kinfolk.models.domains import DomainLayer
from kinfolk.models.rows import Rows, Sorted, grouped, multiplied, products
from kinfolk.models.stack import Dense, Gather, Layer, Stack, Step, Views, product, stack_of

LAYERS = "net.layers."

_aten = torch.ops.aten


class Branches:
    """The parameters of a layer with filters for each domain."""

    def __init__(self, name: str, layer: DomainLayer) -> None:
        self.rows = Rows(name, layer)
        self.agnostic, self.biased = layer.agnostic, layer.common.bias is not None
        self.weight, self.bias, self.share = f"{name}.common.weight", f"{name}.common.bias", f"{name}.share"

    def _common(self, views: Views) -> Tensor:
        """Filters [m, filters, width] that all samples see."""
        weight = views[self.weight].flatten(2)
        return torch.cat([weight, views[self.bias][..., None]], dim=2) if self.biased else weight

    def _write(self, into: Views, of_common: Tensor, of_share: Tensor) -> None:
        """The gradients of what is common [m, filters, width], and of lambda [m]."""
        weight = of_common[..., :-1] if self.biased else of_common
        into[self.weight].copy_(weight.reshape(into[self.weight].shape))
        into[self.share].copy_(of_share)
        if self.biased:
            into[self.bias].copy_(of_common[..., -1])


class Branched(Branches):
    """A linear layer or a convolution with filters for each domain, ReLU, and perhaps pooling, on a CPU.

    Whatever a filter is multiplied with is a field: an input, or one of the P windows of an image, with a one behind
    where there is a bias.
    """

    def __init__(self, name: str, layer: DomainLayer, plain: Dense | Convolve) -> None:
        super().__init__(name, layer)
        self.plain = plain

    def forward(self, views: Views, h: Tensor, index: Tensor, keep: bool, precision: str) -> tuple[Tensor, Any]:
        assert isinstance(views, Sorted)
        x, sides = self._fields(h)
        out, kept = self._multiply(views, x, precision)
        found, winner = self._after(out, sides)
        return found, (h.shape, x, sides, kept, found, winner)

    def backward(
        self, views: Views, grad: Tensor, kept: Any, index: Tensor, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        assert isinstance(views, Sorted)
        shape, x, sides, kept, found, winner = kept
        grad = self._before(grad, sides, found, winner)
        below = self._back(views, grad, x, kept, into, inputs, precision)
        return None if below is None else self._images(below, shape)

    def _multiply(self, views: Sorted, x: Tensor, precision: str) -> tuple[Tensor, Any]:
        """Fields x [m, b, P, width] -> [m, b, P, filters], and what the way back needs."""
        raise NotImplementedError

    def _back(
        self, views: Sorted, grad: Tensor, x: Tensor, kept: Any, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        """Write the parameters' gradients, given that of the products; return that of the fields, if wanted."""
        raise NotImplementedError

    def _fields(self, h: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """What filters see of inputs h, [m, b, P, width], and how many there are in height and width."""
        if isinstance(self.plain, Dense):
            h = h[:, :, None]
            return (torch.cat([h, torch.ones_like(h[..., :1])], dim=3) if self.biased else h), (1, 1)
        side, pad = self.plain.side, self.plain.padding
        wide = F.pad(h, (0, 0, pad, pad, pad, pad)) if pad else h
        tall, long = self._sides(wide.shape)
        x = h.new_ones(*h.shape[:2], tall, long, self.rows.shape[2])
        windows = self._windows(x)
        for line in range(side):
            windows[..., line, :] = wide[:, :, line : line + tall].unfold(3, side, 1)[:, :, :, :long]
        return x.flatten(2, 3), (tall, long)

    def _images(self, below: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of inputs of this shape, given that of fields [m, b, P, width]."""
        if isinstance(self.plain, Dense):
            return below[:, :, 0, :-1] if self.biased else below[:, :, 0]
        side, pad = self.plain.side, self.plain.padding
        wide = below.new_zeros(*shape[:2], shape[2] + 2 * pad, shape[3] + 2 * pad, shape[4])
        tall, long = self._sides(wide.shape)
        windows = self._windows(below.view(*shape[:2], tall, long, -1))
        for line in range(side):
            for column in range(side):
                wide[:, :, line : line + tall, column : column + long] += windows[..., line, column]
        return wide[:, :, pad : pad + shape[2], pad : pad + shape[3]].contiguous()

    def _sides(self, shape: torch.Size) -> tuple[int, int]:
        """How many windows images [m, b, H, W, C] have in height and width that pooling looks at."""
        assert isinstance(self.plain, Convolve)
        tall, long = (pooled(count - self.plain.side + 1, self.plain.pool) for count in shape[2:4])
        return tall, long

    def _windows(self, x: Tensor) -> Tensor:
        """Fields x [m, b, H, W, width] as what they see: [m, b, H, W, C, side, side]."""
        assert isinstance(self.plain, Convolve)
        side = self.plain.side
        return x[..., : x.shape[4] - self.biased].view(*x.shape[:4], -1, side, side)

    def _after(self, out: Tensor, sides: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """What the layer puts out, given the products [m, b, P, filters], and which pixels won."""
        if isinstance(self.plain, Dense):
            out = out[:, :, 0]
            return out.relu_() if self.plain.relu else out, None
        images, winner = out.view(-1, *sides, out.shape[3]).permute(0, 3, 1, 2), None
        if self.plain.pool > 1:
            images, winner = _aten.max_pool2d_with_indices(images, [2, 2], [2, 2])
        found = images.permute(0, 2, 3, 1).contiguous().relu_()
        return found.view(*out.shape[:2], *found.shape[1:]), winner

    def _before(self, grad: Tensor, sides: tuple[int, int], found: Tensor, winner: Tensor | None) -> Tensor:
        """The gradient [m, b, P, filters] of the products, given that of what the layer puts out."""
        grad = grad.contiguous()
        if not isinstance(self.plain, Dense) or self.plain.relu:
            grad = _aten.threshold_backward(grad, found, 0)
        if isinstance(self.plain, Dense):
            return grad[:, :, None]
        wide = grad.flatten(0, 1).permute(0, 3, 1, 2)
        if winner is not None:
            like = grad.new_empty(len(wide), *sides, grad.shape[4]).permute(0, 3, 1, 2)
            wide = _aten.max_pool2d_with_indices_backward(wide, like, [2, 2], [2, 2], [0, 0], [1, 1], False, winner)
        return wide.permute(0, 2, 3, 1).reshape(*grad.shape[:2], -1, grad.shape[4])


class BySamples(Branched):
    """Every sample has filters of its own, mixed of its domains': no more numbers than its fields."""

    def _multiply(self, views: Sorted, x: Tensor, precision: str) -> tuple[Tensor, Any]:
        rows, along = self.rows.forward(views, True, precision)
        shape = *x.shape[:2], *self.rows.shape[1:]  # m, b, filters, width
        seen = torch.bmm(views.omega, rows.flatten(2)).view(shape)
        own = seen
        if self.agnostic:
            own = torch.addcmul(self._common(views)[:, None], seen, views[self.share].view(-1, 1, 1, 1))
        out = product(x.flatten(0, 1), own.flatten(0, 1).transpose(1, 2), precision)
        return out.view(*x.shape[:3], -1), (rows, along, seen, own)

    def _back(
        self, views: Sorted, grad: Tensor, x: Tensor, kept: Any, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        rows, along, seen, own = kept
        each = grad.flatten(0, 1)
        of_seen = product(each.transpose(1, 2), x.flatten(0, 1), precision).view(seen.shape)
        if self.agnostic:
            self._write(into, of_seen.sum(dim=1), (of_seen * seen).sum(dim=(1, 2, 3)))
            of_seen = of_seen * views[self.share].view(-1, 1, 1, 1)
        of_rows = torch.bmm(views.omega.transpose(1, 2), of_seen.flatten(2))
        self.rows.backward(views, of_rows.view(rows.shape), along, into, True, precision)
        return product(each, own.flatten(0, 1), precision).view(x.shape) if inputs else None


class ByGroups(Branched):
    """Samples in the same domains are multiplied with their filters together.

    early: fields are projected in place of filters.
    """

    def __init__(self, name: str, layer: DomainLayer, plain: Dense | Convolve, early: bool) -> None:
        super().__init__(name, layer, plain)
        self.early = early

    def _multiply(self, views: Sorted, x: Tensor, precision: str) -> tuple[Tensor, Any]:
        rows, along = self.rows.forward(views, not self.early, precision)
        flat = x.flatten(1, 2)
        z = product(flat, self._projection(views).transpose(1, 2), precision) if self.early else flat
        seen = x.new_empty(flat.shape[:2] + rows.shape[2:3])
        fields, into = z.flatten(0, 1), seen.flatten(0, 1)
        for group in views.groups:
            here = group.fields(x.shape[2])
            multiplied(fields[here], group.seen(rows).T, into[here], precision)
        out, common = seen, None
        if self.agnostic:
            common = self._common(views)
            out = product(flat, common.transpose(1, 2), precision)
            out.addcmul_(seen, views[self.share].view(-1, 1, 1))
        return out.view(*x.shape[:3], -1), (rows, along, common, z, seen)

    def _back(
        self, views: Sorted, grad: Tensor, x: Tensor, kept: Any, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        rows, along, common, z, seen = kept
        flat, all_grad = x.flatten(1, 2), grad.flatten(1, 2)
        grad = all_grad
        if self.agnostic:
            of_common = product(grad.transpose(1, 2), flat, precision)
            self._write(into, of_common, (grad * seen).sum(dim=(1, 2)))
            grad = grad * views[self.share].view(-1, 1, 1)
        of_rows, below = into[self.rows.name].zero_(), torch.empty_like(z)
        fields, of_fields, slopes = z.flatten(0, 1), below.flatten(0, 1), grad.flatten(0, 1)
        for group in views.groups:
            here = group.fields(x.shape[2])
            slope = slopes[here]
            multiplied(slope, group.seen(rows), of_fields[here], precision)
            group.hand_back(of_rows, slope.T, fields[here], precision)
        self.rows.backward(views, of_rows, along, into, not self.early, precision)
        if self.early:
            products(below.transpose(1, 2), flat, into[self.rows.projections[0]], precision)
        if not inputs:
            return None
        if self.early:
            below = product(below, self._projection(views), precision)
        if common is not None:
            below = below + product(all_grad, common, precision)
        return below.view(x.shape)

    def _projection(self, views: Views) -> Tensor:
        return views[self.rows.projections[0]]


def pooled(count: int, pool: int) -> int:
    """How many of so many pixels in a line pooling looks at: what is left at the end is dropped."""
    return count // pool * pool


class BranchedStack(Stack):
    """The layers of FedCG's net in order, for m clients at once; samples are rows of pixels with omega [D] behind."""

    def __init__(self, layers: list[Layer], precision: str, shape: tuple[int, ...], still: list[str]) -> None:
        """shape: of the pixels as the first layer wants them; still: parameters that no gradient reaches."""
        self.layers, self.precision, self.shape, self.still = layers, precision, shape, still
        self._first = 0

    def prepared(self, views: Views, x: Tensor, labels: Tensor, index: Tensor, share: Tensor | None) -> Step:
        """The samples of a client sorted by their domains, as the first layer wants them."""
        size = math.prod(self.shape)
        order, omega, groups = grouped(x[:, size:][index])
        index, labels = index.gather(1, order), labels.gather(1, order)
        share = None if share is None else share.gather(1, order)
        h = x.index_select(0, index.flatten())[:, :size].reshape(*index.shape, *self.shape)
        if h.dim() > 3:
            h = h.permute(0, 1, 3, 4, 2).contiguous()
        return Sorted(views, omega, groups), h, labels, index, share


def branched_stack(
    module: Bundle, names: tuple[str, ...], device: torch.device, precision: str, batch: int
) -> BranchedStack | str:
    """The module as a stack for a CPU, or in a few words why it cannot be one. `names` are its trainable parameters.

    batch: samples of a step.
    """
    steps = plain_layers(module, device, precision)
    if isinstance(steps, str):
        return steps
    images = isinstance(steps[0], Convolve)
    shape = module.input_shape if images else (math.prod(module.input_shape),)
    sides = [*shape[1:]]
    made: list[Layer] = []
    for step in steps:
        if isinstance(step, Convolve):
            step.first = False  # images come sorted
            sides = [side + 2 * step.padding - step.side + 1 for side in sides]
            made.append(_branched(step, module, math.prod(pooled(side, step.pool) for side in sides), batch))
            sides = [side // step.pool for side in sides]
        else:
            made.append(_branched(step, module, 1, batch) if isinstance(step, Dense) else step)
    return BranchedStack(made, precision, shape, unreached(names))


def plain_layers(module: Bundle, device: torch.device, precision: str) -> list[Layer] | str:
    """The layers of the net as they would be in a plain stack, or why it cannot be one."""
    layers = module.net.layers
    plain = nn.Sequential(*(layer.common if isinstance(layer, DomainLayer) else layer for layer in layers))
    hidden = {str(place) for place, layer in enumerate(layers) if isinstance(layer, DomainLayer)}
    moving = [name for name, p in plain.named_parameters() if p.requires_grad or name.split(".")[0] in hidden]
    found = stack_of(plain, tuple(moving), module.input_shape, device, precision)
    return found if isinstance(found, str) else [step for step in found.layers if not isinstance(step, Gather)]


def unreached(names: tuple[str, ...]) -> list[str]:
    """Of the trainable parameters those that no gradient reaches: whatever is no layer of the net."""
    return [name for name in names if not name.startswith(LAYERS)]


def split_layer(step: Any, module: Bundle) -> tuple[str, DomainLayer] | None:
    """The name in the module of a step of `plain_layers` and the layer that it stands for, if that has branches.

    One that has none is given its parameters' names in the module.
    """
    place = step.weight.removesuffix(".weight")
    layer = module.net.layers[int(place)] if place.isdecimal() else None
    if isinstance(layer, DomainLayer):
        return f"{LAYERS}{place}", layer
    step.weight = f"{LAYERS}{step.weight}"
    if step.bias is not None:
        step.bias = f"{LAYERS}{step.bias}"
    return None


def _branched(step: Convolve | Dense, module: Bundle, fields: int, batch: int) -> Layer:
    """The layer as it is in a stack, or with branches where it has them; fields: of a sample, that filters see."""
    found = split_layer(step, module)
    if found is None:
        return step
    name, layer = found
    domains, filters, _ = layer.rows.shape
    early = Rows(name, layer).linear and fields * batch < domains * filters
    return BySamples(name, layer, step) if fields >= filters and not early else ByGroups(name, layer, step, early)
