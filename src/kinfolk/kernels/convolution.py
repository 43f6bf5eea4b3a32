"""Convolution, ReLU and max-pooling of many clients in one pass, each with its own weights, on a GPU (Triton).

A library sees such a layer as a grouped convolution and runs it far from the speed of the machine. Here it is a matrix
product per client whose left factor, the image patches, is never written to memory: rows are pixels, columns are output
channels, and the sum runs over the taps of the filter and the input channels. The maximum over a pooling window and the
ReLU are taken before anything is stored; what is kept for the way back is which pixel won.

Everything lies channels last, [m, b, H, W, C]. The first layer picks its images by index from the data set, whose few
channels are padded to four: then all taps of a row of the filter lie next to one another in memory, and count as one
tap with four times as many channels.

Names inside the programs: H, W, C inputs, OC output channels, PH, PW pooled pixels, KS side of the filter, TAPS and
DEPTH how the sum is cut (KS·KS taps of C channels; first layer: KS taps, a row of KS·4 numbers each), CB and OB tiles
of channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZES = ("images", "bias_stride", "steps")  # vary from batch to batch: not worth a program of their own each
DEAD = tl.constexpr(4)  # in `winner`: the ReLU cut it off, nothing flows back


@triton.jit
def _dot(a, b, acc, DOT: tl.constexpr):
    if DOT == "bf16":
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=DOT)
    return acc


@triton.jit
def _images(x, index, client, image, images, live, size, FIRST: tl.constexpr):
    """Where the images [rows] start: picked by index from the data set, or one after the other."""
    if FIRST:
        start = x + tl.load(index + client * images + image, mask=live, other=0) * size
    else:
        start = x + client * images * size + image * size
    return start


@triton.jit
def _patch(base, y, x, live, c, H, W, C, DEPTH, PAD: tl.constexpr):
    """Inputs [rows, columns] from pixel (y, x) on, of the images at `base` [rows]: the first DEPTH numbers."""
    here = live[:, None] & (c < DEPTH)[None, :]
    if PAD > 0:
        column = x[:, None] + (c // C)[None, :]
        here = here & (y >= 0)[:, None] & (y < H)[:, None] & (column >= 0) & (column < W)
    return tl.load((base + (y * W + x) * C)[:, None] + c[None, :], mask=here, other=0.0)


@triton.jit
def _filter(w, tap, c, o, OC, DEPTH):
    """One tap of the filter: [columns, OC]."""
    here = (c < DEPTH)[:, None] & (o < OC)[None, :]
    return tl.load(w + (tap * DEPTH + c)[:, None] * OC + o[None, :], mask=here, other=0.0)


@triton.jit
def _larger(best, first, other, place):
    """The running maximum and where it was found; the first of equals stays, NaN wins."""
    better = (other > best) | (other != other)
    return tl.where(better, other, best), tl.where(better, place, first)


@triton.jit(do_not_specialize=SIZES)
def _forward(
    x, index, w, bias, out, winner, images, bias_stride, H, W, OC, PH, PW,
    C: tl.constexpr, KS: tl.constexpr, TAPS: tl.constexpr, DEPTH: tl.constexpr, PAD: tl.constexpr, POOL: tl.constexpr,
    FIRST: tl.constexpr, KEEP: tl.constexpr, CB: tl.constexpr, OB: tl.constexpr,
    BM: tl.constexpr, DOT: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """BM pooled pixels of one client: a product for each pixel of the pooling window, and the largest of them."""
    client = tl.program_id(1).to(tl.int64)
    rows = images * PH * PW
    q = tl.program_id(0) * BM + tl.arange(0, BM)
    live = q < rows
    base = _images(x, index, client, q // (PH * PW), images, live, H * W * C, FIRST)
    top = (q % (PH * PW) // PW) * POOL - PAD
    left = (q % PW) * POOL - PAD
    c = tl.arange(0, CB)
    o = tl.arange(0, OB)
    w += client * TAPS * DEPTH * OC
    acc0 = tl.zeros([BM, OB], dtype=tl.float32)
    acc1 = tl.zeros([BM, OB], dtype=tl.float32)
    acc2 = tl.zeros([BM, OB], dtype=tl.float32)
    acc3 = tl.zeros([BM, OB], dtype=tl.float32)
    for tap in tl.range(0, TAPS, loop_unroll_factor=UNROLL):
        y = top + (tap if FIRST else tap // KS)
        px = left + (0 if FIRST else tap % KS)
        f = _filter(w, tap, c, o, OC, DEPTH)
        acc0 = _dot(_patch(base, y, px, live, c, H, W, C, DEPTH, PAD), f, acc0, DOT)
        if POOL == 2:
            acc1 = _dot(_patch(base, y, px + 1, live, c, H, W, C, DEPTH, PAD), f, acc1, DOT)
            acc2 = _dot(_patch(base, y + 1, px, live, c, H, W, C, DEPTH, PAD), f, acc2, DOT)
            acc3 = _dot(_patch(base, y + 1, px + 1, live, c, H, W, C, DEPTH, PAD), f, acc3, DOT)
    first = tl.zeros([BM, OB], dtype=tl.int32)
    if POOL == 2:
        acc0, first = _larger(acc0, first, acc1, 1)
        acc0, first = _larger(acc0, first, acc2, 2)
        acc0, first = _larger(acc0, first, acc3, 3)
    acc0 += tl.load(bias + client * bias_stride + o, mask=o < OC, other=0.0)[None, :]
    to = (q * OC)[:, None] + o[None, :]
    here = live[:, None] & (o < OC)[None, :]
    tl.store(out + client * rows * OC + to, tl.where(acc0 <= 0, 0.0, acc0), mask=here)  # NaN stays NaN
    if KEEP:
        tl.store(winner + client * rows * OC + to, tl.where(acc0 <= 0, DEAD, first).to(tl.int8), mask=here)


@triton.jit(do_not_specialize=SIZES)
def _filters_backward(
    x, index, grad, winner, dw, db, images, H, W, OC, PH, PW, steps,
    C: tl.constexpr, KS: tl.constexpr, TAPS: tl.constexpr, DEPTH: tl.constexpr, PAD: tl.constexpr, POOL: tl.constexpr,
    FIRST: tl.constexpr, CB: tl.constexpr, OB: tl.constexpr,
    BM: tl.constexpr, DOT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP (1 or 3) taps and one share of the pooled pixels: partial sums of the gradients of filter and bias."""
    group = tl.program_id(0) * GROUP
    split = tl.program_id(1)
    client = tl.program_id(2).to(tl.int64)
    rows = images * PH * PW
    c = tl.arange(0, CB)
    o = tl.arange(0, OB)
    grad += client * rows * OC
    winner += client * rows * OC
    total = tl.zeros([OB], dtype=tl.float32)
    acc0 = tl.zeros([CB, OB], dtype=tl.float32)
    acc1 = tl.zeros([CB, OB], dtype=tl.float32)
    acc2 = tl.zeros([CB, OB], dtype=tl.float32)
    for step in range(steps):
        q = (split * steps + step) * BM + tl.arange(0, BM)
        live = q < rows
        base = _images(x, index, client, q // (PH * PW), images, live, H * W * C, FIRST)
        top = (q % (PH * PW) // PW) * POOL - PAD
        left = (q % PW) * POOL - PAD
        at = (q * OC)[:, None] + o[None, :]
        here = live[:, None] & (o < OC)[None, :]
        g = tl.load(grad + at, mask=here, other=0.0)
        won = tl.load(winner + at, mask=here, other=DEAD)
        total += tl.sum(tl.where(won < DEAD, g, 0.0).to(tl.float32), axis=0)
        for number in tl.static_range(GROUP):
            for pos in tl.static_range(POOL * POOL):
                y = top + pos // POOL + (group + number if FIRST else (group + number) // KS)
                px = left + pos % POOL + (0 if FIRST else (group + number) % KS)
                a = tl.trans(_patch(base, y, px, live, c, H, W, C, DEPTH, PAD))
                mine = tl.where(won == pos, g, 0.0)
                if number == 0:
                    acc0 = _dot(a, mine, acc0, DOT)
                elif number == 1:
                    acc1 = _dot(a, mine, acc1, DOT)
                else:
                    acc2 = _dot(a, mine, acc2, DOT)
    part = split * tl.num_programs(2) + client
    to = dw + (part * TAPS + group) * DEPTH * OC + c[:, None] * OC + o[None, :]
    inside = (c < DEPTH)[:, None] & (o < OC)[None, :]
    tl.store(to, acc0, mask=inside)
    if GROUP == 3:
        tl.store(to + DEPTH * OC, acc1, mask=inside)
        tl.store(to + 2 * DEPTH * OC, acc2, mask=inside)
    if group == 0:
        tl.store(db + part * OC + o, total, mask=o < OC)


@triton.jit
def _routed(grad, winner, image, images, Y, X, dy, dx, o, OC, PH, PW, KS: tl.constexpr, POOL: tl.constexpr):
    """Gradients [blocks, o] of the output pixels (POOL·Y + dy, POOL·X + dx): zero unless they won their window."""
    dy += KS * POOL  # not negative: the language rounds towards zero
    dx += KS * POOL
    y = Y + dy // POOL - KS
    x = X + dx // POOL - KS
    live = (image < images) & (y >= 0) & (y < PH) & (x >= 0) & (x < PW)
    at = (((image * PH + y) * PW + x) * OC)[:, None] + o[None, :]
    here = live[:, None] & (o < OC)[None, :]
    won = tl.load(winner + at, mask=here, other=DEAD) == dy % POOL * POOL + dx % POOL
    return tl.where(won, tl.load(grad + at, mask=here, other=0.0), 0.0)


@triton.jit(do_not_specialize=SIZES)
def _inputs_backward(
    grad, winner, w, out, images, H, W, OC, PH, PW, BH, BW,
    C: tl.constexpr, KS: tl.constexpr, PAD: tl.constexpr, POOL: tl.constexpr,
    CB: tl.constexpr, OB: tl.constexpr, BM: tl.constexpr, DOT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The POOL x POOL input pixels of BM blocks; together they took part in few windows.

    Input pixel (POOL·Y + py, POOL·X + px) lies under tap t of output pixel POOL·Y + py + PAD - t: window and place in
    it follow without knowing Y.
    """
    client = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * BM + tl.arange(0, BM)
    image = b // (BH * BW)
    Y = b % (BH * BW) // BW
    X = b % BW
    c = tl.arange(0, CB)
    o = tl.arange(0, OB)
    w += client * C * KS * KS * OC
    grad += client * images * PH * PW * OC
    winner += client * images * PH * PW * OC
    acc0 = tl.zeros([BM, CB], dtype=tl.float32)
    acc1 = tl.zeros([BM, CB], dtype=tl.float32)
    acc2 = tl.zeros([BM, CB], dtype=tl.float32)
    acc3 = tl.zeros([BM, CB], dtype=tl.float32)
    for tap in tl.range(0, KS * KS, loop_unroll_factor=UNROLL):
        f = tl.trans(_filter(w, tap, c, o, OC, C))
        dy = PAD - tap // KS
        dx = PAD - tap % KS
        acc0 = _dot(_routed(grad, winner, image, images, Y, X, dy, dx, o, OC, PH, PW, KS, POOL), f, acc0, DOT)
        if POOL == 2:
            acc1 = _dot(_routed(grad, winner, image, images, Y, X, dy, dx + 1, o, OC, PH, PW, KS, POOL), f, acc1, DOT)
            acc2 = _dot(_routed(grad, winner, image, images, Y, X, dy + 1, dx, o, OC, PH, PW, KS, POOL), f, acc2, DOT)
            acc3 = _dot(
                _routed(grad, winner, image, images, Y, X, dy + 1, dx + 1, o, OC, PH, PW, KS, POOL), f, acc3, DOT
            )
    out += client * images * H * W * C
    for pixel in tl.static_range(POOL * POOL):
        y = Y * POOL + pixel // POOL
        x = X * POOL + pixel % POOL
        to = out + (((image * H + y) * W + x) * C)[:, None] + c[None, :]
        here = ((image < images) & (y < H) & (x < W))[:, None] & (c < C)[None, :]
        if pixel == 0:
            tl.store(to, acc0, mask=here)
        elif pixel == 1:
            tl.store(to, acc1, mask=here)
        elif pixel == 2:
            tl.store(to, acc2, mask=here)
        else:
            tl.store(to, acc3, mask=here)


FEW = 4  # channels of a data set are padded to this many
PROGRAMS = 2048  # enough to fill a large GPU several times over
DOTS = {"float32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}  # how the matrix units multiply
# Rows of a tile, warps
TILES = {"forward": (64, 4), "filters": (32, 4), "inputs": (64, 4)}


class Convolution:
    """One layer: `channels` -> `filters`, square kernel, stride 1, then ReLU and max-pooling by `pool` (1: none)."""

    def __init__(
        self, channels: int, filters: int, kernel: int, padding: int, pool: int, size: tuple[int, int], first: bool
    ) -> None:
        """size: height and width of the inputs; first: they are samples of the data set, by index."""
        self.channels, self.filters, self.kernel, self.padding, self.pool = channels, filters, kernel, padding, pool
        self.height, self.width = size
        self.out_size = tuple((side + 2 * padding - kernel + 1) // pool for side in size)
        self.first = first and channels <= FEW
        self.lying = FEW if self.first else channels  # channels as they lie in memory
        self.tile = _power(filters)
        self.depth = kernel * FEW if self.first else channels  # numbers next to one another
        self.taps = kernel if self.first else kernel**2
        self.columns = _power(self.depth)
        self.group = 3 if self.taps % 3 == 0 else 1
        self.tiles: dict[str, Any] = dict(TILES)

    def samples(self, x: Tensor) -> Tensor:
        """The data set [N, C, H, W] as the first layer reads it: channels last and padded."""
        padded = torch.zeros((x.shape[0], *x.shape[2:], self.lying), dtype=torch.float32, device=x.device)
        padded[:, :, :, : self.channels] = x.permute(0, 2, 3, 1)
        return padded

    def filters_for_use(self, weight: Tensor) -> Tensor:
        """weight [m, O, C, k, k] -> [m, k, k, C, O], channels padded as the inputs are."""
        last = weight.permute(0, 3, 4, 2, 1)
        if self.lying == self.channels:
            return last.contiguous()
        k = self.kernel
        padded = weight.new_zeros((weight.shape[0], k, k, self.lying, self.filters))
        padded[:, :, :, : self.channels] = last
        return padded

    def forward(
        self, x: Tensor, index: Tensor, filters: Tensor, bias: Tensor, keep: bool, precision: str
    ) -> tuple[Tensor, Tensor | None]:
        """[m, b, PH, PW, O] and, to `keep` for the way back, which pixel of each window won. index: [m, b]."""
        index = index.contiguous()
        clients, images = index.shape
        out = torch.empty((clients, images, *self.out_size, self.filters), device=x.device, dtype=_stored(precision))
        winner = torch.empty(out.shape, device=x.device, dtype=torch.int8) if keep else None
        rows, warps = self.tiles["forward"]
        grid = (triton.cdiv(images * self.out_size[0] * self.out_size[1], rows), clients)
        _forward[grid](
            x, index, filters, bias, out, out if winner is None else winner, images, bias.stride(0), *self._sizes(),
            **self._cut(), **self._constants(rows, precision), KEEP=keep, UNROLL=_unroll(self.taps, precision),
            num_warps=warps, num_stages=1,
        )  # fmt: skip
        return out, winner

    def backward(
        self, x: Tensor, index: Tensor, filters: Tensor, winner: Tensor, grad: Tensor, inputs: bool, precision: str
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of the weight [m, O, C, k, k], the bias [m, O] and, if wanted, the inputs [m, b, H, W, C]."""
        index = index.contiguous()
        clients, images = index.shape
        rows, warps = self.tiles["filters"]
        groups = self.taps // self.group
        steps = triton.cdiv(images * self.out_size[0] * self.out_size[1], rows)
        splits = max(1, min(steps, PROGRAMS // (groups * clients)))
        steps = triton.cdiv(steps, splits)
        k = self.kernel
        dw = torch.empty((splits, clients, k, k, self.lying, self.filters), device=x.device, dtype=torch.float32)
        db = torch.empty((splits, clients, self.filters), device=x.device, dtype=torch.float32)
        _filters_backward[(groups, splits, clients)](
            x, index, grad, winner, dw, db, images, *self._sizes(), steps,
            **self._cut(), **self._constants(rows, precision), GROUP=self.group, num_warps=warps, num_stages=1,
        )  # fmt: skip
        weight = dw.sum(dim=0)[:, :, :, : self.channels].permute(0, 4, 3, 1, 2)
        below = self._inputs(filters, winner, grad, images, precision) if inputs else None
        return weight, db.sum(dim=0), below

    def _inputs(self, filters: Tensor, winner: Tensor, grad: Tensor, images: int, precision: str) -> Tensor:
        clients = grad.shape[0]
        shape = (clients, images, self.height, self.width, self.channels)
        out = torch.empty(shape, device=grad.device, dtype=_stored(precision))
        rows, warps = self.tiles["inputs"]
        blocks = [-(-side // self.pool) for side in (self.height, self.width)]
        grid = (triton.cdiv(images * blocks[0] * blocks[1], rows), clients)
        unroll = _unroll(self.taps, precision) if self.channels <= 32 else 1
        _inputs_backward[grid](
            grad, winner, filters, out, images, *self._sizes(), *blocks,
            **self._constants(rows, precision), UNROLL=unroll, num_warps=warps, num_stages=1,
        )  # fmt: skip
        return out

    def _sizes(self) -> tuple[int, ...]:
        return (self.height, self.width, self.filters, *self.out_size)

    def _cut(self) -> dict[str, Any]:
        return {"TAPS": self.taps, "DEPTH": self.depth, "FIRST": self.first}

    def _constants(self, rows: int, precision: str) -> dict[str, Any]:
        shape = {"C": self.lying, "KS": self.kernel, "PAD": self.padding, "POOL": self.pool}
        return {**shape, "CB": self.columns, "OB": self.tile, "BM": rows, "DOT": DOTS[precision]}


def _unroll(taps: int, precision: str) -> int:
    """Loops over taps are written out, which shares loads; not where products take three passes: they would not fit."""
    return 1 if precision == "float32" or taps > 9 else taps


def _stored(precision: str) -> torch.dtype:
    """What is kept between layers, on the way up and down: in bf16 it is rounded when it is multiplied anyway."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _power(number: int) -> int:
    """The tile that holds `number` columns: a power of two, at least what a matrix unit takes."""
    return max(16, 1 << (number - 1).bit_length())
