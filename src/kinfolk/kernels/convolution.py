"""Layers of convolution, ReLU and max-pooling on a GPU: the host's side of the programs in `windows.py`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kinfolk.kernels import filters, taps, windows

FEW = 4  # channels of a data set are padded to this many
WIDEST = 128  # columns of a factor at a time, where they can be taken in pieces
PROGRAMS = 2048  # enough to fill a large GPU several times over
DOTS = {"float32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}  # how the matrix units multiply
# Forward: numbers of a line, windows, warps, stages of loading, blocks of windows for each program. Filters: the same
# without blocks. Inputs: blocks of pixels, warps. With a third word: for filters of that side.
TILES: dict[str, dict[tuple[str | int, ...], tuple[int, ...]]] = {
    "bf16": {
        ("forward", "first"): (64, 128, 4, 1, 8),
        ("forward", "inner"): (64, 64, 4, 3, 1),
        ("filters", "first"): (64, 64, 4, 1),
        ("filters", "inner"): (128, 32, 4, 1),
        ("inputs", "inner"): (64, 4),
        ("filters", "first", 5): (32, 128, 4, 1),
        ("filters", "inner", 5): (64, 64, 4, 1),
    },
    "tf32": {("forward", "first"): (64, 64, 4, 1, 4), ("forward", "inner"): (32, 64, 4, 3, 1)},
    "float32": {("forward", "first"): (64, 64, 4, 1, 1), ("forward", "inner"): (64, 64, 4, 1, 1)},
}
TAP_TILES = {"filters": (32, 4), "inputs": (64, 4)}  # windows or blocks of pixels, warps


class Convolution:
    """One layer: `channels` -> `filters`, square kernel, stride 1, then ReLU and max-pooling by `pool` (1: none)."""

    def __init__(
        self, channels: int, filters: int, kernel: int, padding: int, pool: int, size: tuple[int, int], first: bool
    ) -> None:
        """size: height and width of the inputs; first: they are samples of the data set, by index."""
        self.channels, self.filters, self.kernel, self.padding, self.pool = channels, filters, kernel, padding, pool
        self.height, self.width = size
        self.out_size = tuple((side + 2 * padding - kernel + 1) // pool for side in size)
        self.outputs = self.out_size[0] * self.out_size[1] * filters  # numbers for an image
        self.first = first and channels <= FEW
        self.lying = FEW if self.first else channels  # channels as they lie in memory
        self.tile = _power(filters)
        self.pixels = kernel + pool - 1  # that a window sees each way
        self.span = self.pixels * self.lying
        self.end = self.pixels * self.span if self.first else self.span  # numbers of a line

    def samples(self, x: Tensor, precision: str) -> Tensor:
        """The data set [N, C, H, W] as the first layer reads it: channels last and padded."""
        padded = torch.zeros((x.shape[0], *x.shape[2:], self.lying), dtype=_stored(precision), device=x.device)
        padded[:, :, :, : self.channels] = x.permute(0, 2, 3, 1)
        return padded

    def widened(self, weight: Tensor, precision: str) -> Tensor:
        """weight [m, O, C, k, k] -> a filter for each pixel of a window's row: [m, pool, O, k, LINE] with zeros around.

        First layer: for each pixel of a window, [m, pool, O, pool, LINE].
        """
        tall = self.pool if self.first else self.kernel
        shape = (weight.shape[0], self.pool, self.tile, tall, self.line(precision))
        wide = torch.empty(shape, dtype=_stored(precision), device=weight.device)
        return filters.widen(weight, wide, {**self._shape(), "END": self.end})

    def forward(
        self, x: Tensor, index: Tensor, wide: Tensor, bias: Tensor, keep: bool, precision: str
    ) -> tuple[Tensor, Tensor | None]:
        """[m, b, PH, PW, O] and, to `keep` for the way back, which pixel of each window won. index: [m, b]."""
        index = index.contiguous()
        clients, images = index.shape
        out = torch.empty((clients, images, *self.out_size, self.filters), device=x.device, dtype=_stored(precision))
        winner = torch.empty(out.shape, device=x.device, dtype=torch.int8) if keep else None
        columns, rows, warps, stages, blocks = self._tile("forward", precision)
        grid = (triton.cdiv(images * self.out_size[0] * self.out_size[1], rows * blocks), clients)
        windows.forward[grid](
            x, index, wide, bias, out, out if winner is None else winner, images, bias.stride(0),
            **self._lines(wide), **self._constants(rows, precision), CB=columns, KEEP=keep, BLOCKS=blocks,
            STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return out, winner

    def backward(
        self, x: Tensor, index: Tensor, weight: Tensor, wide: Tensor, winner: Tensor, grad: Tensor, inputs: bool,
        precision: str, into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Gradients of the weight [m, O, C, k, k], the bias [m, O] and, if wanted, the inputs [m, b, H, W, C].

        wide: the weight as `widened` gave it; into: where to write the first two.
        """
        index = index.contiguous()
        below = None
        if precision == "bf16":
            of_weight, of_bias = self._filters(x, index, wide, winner, grad, into)
            if inputs:
                below = self._inputs(wide, winner, grad)
        else:
            of_weight, of_bias = self._filters_by_taps(x, index, winner, grad, precision, into)
            if inputs:
                below = self._inputs_by_taps(weight, winner, grad, precision)
        return of_weight, of_bias, below

    def _filters(
        self, x: Tensor, index: Tensor, wide: Tensor, winner: Tensor, grad: Tensor, into: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        clients, images = index.shape
        columns, rows, warps, stages = self._tile("filters", "bf16")
        tall, line = wide.shape[3:]
        chunks = line // columns if self.first else tall * line // columns
        steps, splits = self._shares(images, rows, chunks * clients)
        dw = torch.empty((splits, clients, tall, line, self.pool, self.tile), device=x.device, dtype=torch.float32)
        db = torch.empty((splits, clients, self.filters), device=x.device, dtype=torch.float32)
        windows.filters_backward[(chunks, splits, clients)](
            x, index, grad, winner, dw, db, images, steps,
            **self._lines(wide), **self._constants(rows, "bf16"), CB=columns, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return filters.narrow(dw, db, into, self._shape(), wide=True)

    def _inputs(self, wide: Tensor, winner: Tensor, grad: Tensor) -> Tensor:
        clients, images = grad.shape[:2]
        out = grad.new_empty((clients, images, self.height, self.width, self.channels))
        rows, warps = TILES["bf16"]["inputs", "inner"]
        blocks = [-(-(side + self.padding) // self.pool) for side in (self.height, self.width)]
        numbers = min(_power(self.pool * self.lying), WIDEST)
        pieces = triton.cdiv(self.pool * self.lying, numbers)
        windows.inputs_backward[(triton.cdiv(images * blocks[0] * blocks[1], rows), clients, pieces)](
            grad, winner, wide, out, images, *blocks, **self._constants(rows, "bf16"), LINE=wide.shape[4],
            PB=numbers, NB=min(self.pool * self.tile, WIDEST), num_warps=warps,
        )  # fmt: skip
        return out

    def _filters_by_taps(
        self,
        x: Tensor,
        index: Tensor,
        winner: Tensor,
        grad: Tensor,
        precision: str,
        into: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        clients, images = index.shape
        cut = self._taps()
        group = 3 if cut["TAPS"] % 3 == 0 else 1
        rows, warps = TAP_TILES["filters"]
        groups = cut["TAPS"] // group
        steps, splits = self._shares(images, rows, groups * clients)
        k = self.kernel
        dw = torch.empty((splits, clients, k, k, self.lying, self.filters), device=x.device, dtype=torch.float32)
        db = torch.empty((splits, clients, self.filters), device=x.device, dtype=torch.float32)
        taps.filters_backward[(groups, splits, clients)](
            x, index, grad, winner, dw, db, images, *self._sizes(), steps, **cut,
            **self._tap_constants(rows, cut["DEPTH"], precision), GROUP=group, num_warps=warps, num_stages=1,
        )  # fmt: skip
        return filters.narrow(dw, db, into, self._shape(), wide=False)

    def _inputs_by_taps(self, weight: Tensor, winner: Tensor, grad: Tensor, precision: str) -> Tensor:
        clients, images = grad.shape[:2]
        out = grad.new_empty((clients, images, self.height, self.width, self.channels))
        rows, warps = TAP_TILES["inputs"]
        blocks = [-(-side // self.pool) for side in (self.height, self.width)]
        taken = self.kernel**2 if precision == "tf32" and self.kernel <= 3 and self.channels <= 32 else 1
        taps.inputs_backward[(triton.cdiv(images * blocks[0] * blocks[1], rows), clients)](
            grad, winner, weight.permute(0, 3, 4, 2, 1).contiguous(), out, images, *self._sizes(), *blocks,
            **self._tap_constants(rows, self.channels, precision), UNROLL=taken, num_warps=warps, num_stages=1,
        )  # fmt: skip
        return out

    def _shares(self, images: int, rows: int, programs: int) -> tuple[int, int]:
        """Steps of `rows` windows that each program takes, and into how many shares the windows are cut."""
        steps = triton.cdiv(images * self.out_size[0] * self.out_size[1], rows)
        splits = max(1, min(steps, PROGRAMS // programs))
        return triton.cdiv(steps, splits), splits

    def _tile(self, what: str, precision: str) -> tuple[int, ...]:
        """Numbers and windows at a time, warps, and how far ahead to load, as they turned out best on an H200."""
        place = what, "first" if self.first else "inner"
        columns, *rest = TILES[precision].get((*place, self.kernel), TILES[precision][place])
        if self.pool * self.tile > WIDEST:
            columns, rest[1] = min(columns, 64), 8  # a wide result is spread over more warps
            if precision != "bf16":
                rest[-1] = 1  # nor are there several windows for one filter, which would have to stay at hand
        if what == "forward":
            while columns > 16 and -(-self.end // columns) * columns > 1.2 * self.end:
                columns //= 2  # not much for nothing
            if columns < self.end:
                rest[-1] = 1  # a filter of several pieces does not stay at hand
        else:
            line = self.line(precision)
            while line % columns:
                columns //= 2
        return columns, *rest

    def line(self, precision: str) -> int:
        """Numbers of a line of the widened filter, with zeros to its end."""
        columns = self._tile("forward", precision)[0]
        return -(-self.end // columns) * columns

    def _shape(self) -> dict[str, Any]:
        own = {"C": self.channels, "OC": self.filters, "KS": self.kernel, "LYING": self.lying}
        return {**own, "SPAN": self.span, "FIRST": self.first}

    def _lines(self, wide: Tensor) -> dict[str, Any]:
        return {"END": self.end, "LINE": wide.shape[4], "FIRST": self.first}

    def _taps(self) -> dict[str, Any]:
        taken = self.kernel if self.first else self.kernel**2
        return {"TAPS": taken, "DEPTH": self.kernel * FEW if self.first else self.channels, "FIRST": self.first}

    def _tap_constants(self, rows: int, depth: int, precision: str) -> dict[str, Any]:
        shape = {"C": self.lying, "KS": self.kernel, "PAD": self.padding, "POOL": self.pool}
        return {**shape, "CB": _power(depth), "OB": self.tile, "BM": rows, "DOT": DOTS[precision]}

    def _sizes(self) -> tuple[int, ...]:
        return (self.height, self.width, self.filters, *self.out_size)

    def _constants(self, rows: int, precision: str) -> dict[str, Any]:
        shape = {"H": self.height, "W": self.width, "C": self.lying, "OC": self.filters}
        pooled = {"PH": self.out_size[0], "PW": self.out_size[1], "KS": self.kernel, "PAD": self.padding}
        tile = {"POOL": self.pool, "SPAN": self.span, "OB": self.tile, "BM": rows, "DOT": DOTS[precision]}
        return {**shape, **pooled, **tile}


def _stored(precision: str) -> torch.dtype:
    """What is kept between layers, on the way up and down: in bf16 it is rounded when it is multiplied anyway."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _power(number: int) -> int:
    """The tile that holds `number` columns: a power of two, at least what a matrix unit takes."""
    return max(16, 1 << (number - 1).bit_length())
