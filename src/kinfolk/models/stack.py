"""A plain net, layer after layer, as explicit passes over many clients at once.

Going through `vmap` and autograd serves every module, but it hides two things that cost most of the time: gradients
come as one tensor per parameter instead of one matrix of models, and a convolution with different weights for each
client becomes a grouped one, which libraries run slowly. A `Stack` knows its few layers: each has a forward and a
backward pass, gradients are written where they belong in a matrix [m, d], and convolutions go to our own programs on a
GPU, or client by client to the library on a CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kinfolk.kernels import dispatch
from kinfolk.models.convolve import Convolve
from kinfolk.models.kinds import flattens, halves, plain

Views = dict[str, Tensor]  # name -> [m, *shape]
Step = tuple[Views, Tensor, Tensor, Tensor, Tensor | None]  # parameters, samples, labels, index, share
SLIM = 32  # inputs per output from which a CPU's library is up to four times faster at the transposed product


class Layer(Protocol):
    """One step of the net. `kept` is whatever its backward pass needs."""

    def forward(self, views: Views, h: Tensor, index: Tensor, keep: bool, precision: str) -> tuple[Tensor, Any]: ...

    def backward(
        self, views: Views, grad: Tensor, kept: Any, index: Tensor, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        """Write the parameters' gradients into `into`; return those of the inputs, if wanted."""


class Gather:
    """The samples of a batch: x [N, ...], index [m, b] -> [m, b, features].

    On a CPU each thread has one place for them: new memory at every step costs more than the copying itself.
    """

    def __init__(self) -> None:
        self._own = threading.local()

    def forward(self, views: Views, h: Tensor, index: Tensor, keep: bool, precision: str) -> tuple[Tensor, Any]:
        if h.is_cuda:
            return h[index].flatten(2), None
        place = getattr(self._own, "place", None)
        if place is None or place.dtype != h.dtype:
            place = self._own.place = torch.empty(0, dtype=h.dtype)
        flat = h.flatten(1)
        place.resize_(index.numel(), flat.shape[1])
        return torch.index_select(flat, 0, index.flatten(), out=place).view(*index.shape, -1), None

    def backward(
        self, views: Views, grad: Tensor, kept: Any, index: Tensor, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        return None


class Dense:
    """A linear layer, with or without ReLU."""

    def __init__(self, name: str, bias: bool, relu: bool) -> None:
        self.weight = f"{name}.weight"
        self.bias = f"{name}.bias" if bias else None
        self.relu = relu

    def forward(self, views: Views, h: Tensor, index: Tensor, keep: bool, precision: str) -> tuple[Tensor, Any]:
        weight = views[self.weight]
        if precision == "bf16":  # rounded once, for both ways
            dtype, h, weight = weight.dtype, h.to(torch.bfloat16), weight.to(torch.bfloat16)
            out = torch.bmm(h, weight.transpose(1, 2)).to(dtype)
            if self.bias is not None:
                out += views[self.bias][:, None]
        elif self.bias is None:
            out = torch.bmm(h, weight.transpose(1, 2))
        else:
            out = _affine(h, weight.transpose(1, 2), views[self.bias])
        if self.relu:
            out = out.relu_()
        return out, (h, weight, out) if keep else None

    def backward(
        self, views: Views, grad: Tensor, kept: Any, index: Tensor, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        h, weight, out = kept
        if self.relu:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        if self.bias is not None:
            torch.sum(grad, dim=1, out=into[self.bias])
        if precision == "bf16":
            grad = grad.to(torch.bfloat16)
            into[self.weight].copy_(torch.bmm(grad.transpose(1, 2), h))
        else:
            torch.bmm(grad.transpose(1, 2), h, out=into[self.weight])
        return torch.bmm(grad, weight).to(out.dtype) if inputs else None


class Convolved:
    """A convolution with ReLU and perhaps pooling, on a GPU."""

    def __init__(self, name: str, program: Any) -> None:
        self.weight, self.bias = f"{name}.weight", f"{name}.bias"
        self.program = program  # kernels.convolution.Convolution

    def forward(self, views: Views, h: Tensor, index: Tensor, keep: bool, precision: str) -> tuple[Tensor, Any]:
        wide = self.program.widened(views[self.weight], precision)
        out, winner = self.program.forward(h, index, wide, views[self.bias], keep, precision)
        return out, (h, wide, winner) if keep else None

    def backward(
        self, views: Views, grad: Tensor, kept: Any, index: Tensor, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        h, wide, winner = kept
        places = into[self.weight], into[self.bias]
        _, _, below = self.program.backward(
            h, index, views[self.weight], wide, winner, grad.contiguous(), inputs, precision, places
        )
        return below  # type: ignore[no-any-return]


class ChannelsLast:
    """The samples of a batch for a first convolution with many channels: [N, C, H, W] -> [m, b, H, W, C]."""

    def forward(self, views: Views, h: Tensor, index: Tensor, keep: bool, precision: str) -> tuple[Tensor, Any]:
        return h[index].permute(0, 1, 3, 4, 2).contiguous(), None

    def backward(
        self, views: Views, grad: Tensor, kept: Any, index: Tensor, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        return None


class Flatten:
    """From channels last to the order of `nn.Flatten`: [m, b, H, W, C] -> [m, b, C·H·W]."""

    def forward(self, views: Views, h: Tensor, index: Tensor, keep: bool, precision: str) -> tuple[Tensor, Any]:
        return h.permute(0, 1, 4, 2, 3).flatten(2), h.shape

    def backward(
        self, views: Views, grad: Tensor, kept: Any, index: Tensor, into: Views, inputs: bool, precision: str
    ) -> Tensor | None:
        clients, batch, height, width, channels = kept
        return grad.view(clients, batch, channels, height, width).permute(0, 1, 3, 4, 2)


class Stack:
    """The layers of a net in order, for m clients at once."""

    still: Sequence[str] = ()  # parameters that no gradient reaches

    def __init__(self, layers: list[Layer], precision: str) -> None:
        self.layers = layers
        self.precision = precision
        self._first = next(i for i, layer in enumerate(layers) if isinstance(layer, (Dense, Convolve, Convolved)))

    @property
    def compiles(self) -> bool:
        """Whether it has GPU programs that are compiled when they are first needed."""
        return any(isinstance(layer, Convolved) for layer in self.layers)

    @property
    def outputs(self) -> int | None:
        """Numbers that programs of our own leave between layers for a sample; none: as many as the module's layers."""
        sizes = [layer.program.outputs for layer in self.layers if isinstance(layer, Convolved)]
        return sum(sizes) if sizes else None

    def samples(self, x: Tensor) -> Tensor:
        """The data set [N, ...] as the first layer wants to read it."""
        first = self.layers[0]
        return first.program.samples(x, self.precision) if isinstance(first, Convolved) else x

    def logits(self, views: Views, x: Tensor, index: Tensor) -> Tensor:
        """Scores [m, b, C] of the samples x[index]; x as `samples` gave it."""
        h = x
        for layer in self.layers:
            h, _ = layer.forward(views, h, index, False, self.precision)
        return h

    def owner(self, name: str) -> tuple[int, list[str]]:
        """Which layer has the parameter, and all of that layer's."""
        for number, layer in enumerate(self.layers):
            own = [getattr(layer, kind, None) for kind in ("weight", "bias")]
            if name in own:
                return number, [each for each in own if each is not None]
        raise KeyError(name)

    def prepared(self, views: Views, x: Tensor, labels: Tensor, index: Tensor, share: Tensor | None) -> Step:
        """What the layers are given of a step on the samples x[index]: here just that."""
        return views, x, labels, index, share

    def gradients(
        self,
        views: Views,
        x: Tensor,
        labels: Tensor,
        index: Tensor,
        share: Tensor | None,
        into: Views,
        last: int | None = None,
    ) -> Tensor:
        """Each client's loss [m] on x[index], labels [m, b]; its gradient is written into the views `into`.

        share [m, b]: weights of the samples that sum to one; none: all the same. last: the layer that the way back ends
        with; gradients of those before it are not wanted.
        """
        views, h, labels, index, share = self.prepared(views, x, labels, index, share)
        all_kept, last = [], self._first if last is None else last
        for number, layer in enumerate(self.layers):
            h, kept = layer.forward(views, h, index, number >= last, self.precision)
            all_kept.append(kept)
        loss, grad = _cross_entropy(h, labels, share)
        for number in range(len(self.layers) - 1, last - 1, -1):
            layer, inputs = self.layers[number], number > last
            below = layer.backward(views, grad, all_kept.pop(), index, into, inputs, self.precision)
            if below is not None:
                grad = below
        return loss


def stack_of(
    module: nn.Module,
    names: tuple[str, ...],
    input_shape: tuple[int, ...],
    device: torch.device,
    precision: str,
    programs: bool = False,
) -> Stack | str:
    """The module as a stack, or in a few words why it cannot be one. `names` are its trainable parameters.

    programs: linear layers have programs of their own on a GPU, too.
    """
    parts = in_order(module, names)
    if isinstance(parts, str):
        return parts
    if isinstance(parts[0][1], nn.Conv2d):
        return _convolutional(parts, input_shape, device, precision, programs)
    if len(input_shape) > 1 and not flattens(parts[0][1]):
        return "it does not begin with Flatten"
    return _dense(parts, [], precision, device, programs)


def in_order(module: nn.Module, names: tuple[str, ...]) -> list[tuple[str, nn.Module]] | str:
    """Its layers one after the other, with their names, or why it is more than that. `names`: trainable parameters."""
    if type(module) is not nn.Sequential:
        return "it is not an nn.Sequential"
    parts = list(_flat(module, ""))
    if any(part._forward_hooks or part._forward_pre_hooks for _, part in parts):
        return "it has hooks"
    owned = {f"{name}.{key}" for name, part in parts for key, _ in part.named_parameters(recurse=False)}
    return parts if owned == set(names) else "parameters are tied or frozen"


def _flat(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module.named_children():
        if type(part) is nn.Sequential:
            yield from _flat(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part


def _dense(
    parts: list[tuple[str, nn.Module]], before: list[Layer], precision: str, device: torch.device, programs: bool
) -> Stack | str:
    """Linear and ReLU layers, after those `before` or as the first of a net, which gathers its samples."""
    programs = programs and device.type == "cuda" and precision != "float64" and dispatch.refusal(device) is None
    layers: list[Layer] = before if before or programs else [Gather()]
    rest = [(name, part) for name, part in parts if not isinstance(part, nn.Identity) and not flattens(part)]
    for number, (name, part) in enumerate(rest):
        if type(part) is nn.Linear:
            relu = number + 1 < len(rest) and type(rest[number + 1][1]) is nn.ReLU
            if programs:
                from kinfolk.models.dense_gpu import DenseProgram

                layers.append(DenseProgram(name, part.bias is not None, relu, first=not layers))
            else:
                layers.append(Dense(name, part.bias is not None, relu))
        elif type(part) is not nn.ReLU or number == 0 or type(rest[number - 1][1]) is not nn.Linear:
            return f"it has a layer {type(part).__name__}"
    return Stack(layers, precision) if rest else "it has no layers"


def _convolutional(
    parts: list[tuple[str, nn.Module]],
    input_shape: tuple[int, ...],
    device: torch.device,
    precision: str,
    programs: bool,
) -> Stack | str:
    """Convolutions with ReLU and perhaps pooling, then linear layers."""
    if len(input_shape) != 3:
        return "its inputs are no images"
    if device.type == "cuda" and precision == "float64":
        return "convolutions have a program of their own on a GPU only in float32 or less"
    layers: list[Layer] = []
    size = (input_shape[1], input_shape[2])
    at = 0
    while at < len(parts) and isinstance(conv := parts[at][1], nn.Conv2d):
        name, after = parts[at][0], [type(part) for _, part in parts[at + 1 : at + 3]]
        if not plain(conv) or not after or after[0] is not nn.ReLU:
            return f"layer {name} is no square convolution of stride 1 followed by a ReLU"
        pool = 2 if after[1:] == [nn.MaxPool2d] else 1
        if pool == 2 and not halves(parts[at + 2][1]):
            return f"layer {parts[at + 2][0]} pools otherwise than by 2"
        if device.type == "cuda":
            found = _on_gpu(device, name, conv, pool, size, at == 0)
            if isinstance(found, str):
                return found
            layers += found
        else:
            layers.append(Convolve(name, conv, pool, at == 0))
        grown = 2 * int(conv.padding[0]) - conv.kernel_size[0] + 1
        size = ((size[0] + grown) // pool, (size[1] + grown) // pool)
        at += 1 + pool
    if at == len(parts) or not flattens(parts[at][1]) or min(size) < 1:
        return "convolutions are not followed by Flatten and linear layers"
    return _dense(parts[at + 1 :], [*layers, Flatten()], precision, device, programs)


def _on_gpu(
    device: torch.device, name: str, conv: nn.Conv2d, pool: int, size: tuple[int, int], first: bool
) -> list[Layer] | str:
    """The layer as a program of our own for inputs of `size`, with what has to come before it."""
    if max(conv.in_channels, conv.out_channels) > 128:
        return f"layer {name} has more than 128 channels"  # a tile holds all of them
    if (reason := dispatch.refusal(device)) is not None:
        return reason
    from kinfolk.kernels.convolution import Convolution

    program = Convolution(
        conv.in_channels, conv.out_channels, conv.kernel_size[0], int(conv.padding[0]), pool, size, first=first
    )
    before: list[Layer] = [ChannelsLast()] if first and not program.first else []
    return [*before, Convolved(name, program)]


def _affine(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """h [m, b, in] @ weight [m, in, out] + bias [m, out] for every client."""
    if not h.is_cuda and weight.shape[1] >= SLIM * weight.shape[2]:
        return torch.baddbmm(bias[:, :, None], weight.transpose(1, 2), h.transpose(1, 2)).transpose(1, 2)
    return torch.baddbmm(bias[:, None], h, weight)


def product(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """a @ b for every client; with "bf16" factors and results are rounded, the sums are not."""
    if precision == "bf16":
        return torch.bmm(a.to(torch.bfloat16), b.to(torch.bfloat16)).to(torch.promote_types(a.dtype, b.dtype))
    return torch.bmm(a, b)


def _cross_entropy(logits: Tensor, labels: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean loss [m] over the samples [m, b] and its gradient [m, b, C]."""
    if logits.dtype == torch.float32 and dispatch.fused(logits, 32 * logits.shape[2]):
        from kinfolk.kernels.entropy import entropy

        return entropy(logits, labels, share)
    classes = 2
    if not logits.is_cuda:  # a CPU's vectors run along the samples, of which there are more than classes
        logits, classes = logits.transpose(1, 2).contiguous(), 1
    logs = torch.log_softmax(logits, dim=classes)
    chosen = labels.unsqueeze(classes)
    losses = -logs.gather(classes, chosen).squeeze(classes)
    grad = logs.exp_()
    grad.scatter_add_(classes, chosen, torch.full_like(chosen, -1, dtype=grad.dtype))
    if share is None:
        loss, grad = losses.mean(dim=1), grad.div_(labels.shape[1])
    else:
        share = share.to(grad.dtype)
        loss, grad = (losses * share).sum(dim=1), grad.mul_(share.unsqueeze(classes))
    return loss, grad.transpose(1, 2) if classes == 1 else grad
