"""Convolution, ReLU and max-pooling of many clients in one pass, each with its own weights, on a GPU (Triton).

A library sees such a layer as a grouped convolution and runs it far from the speed of the machine. Here it is a matrix
product per client whose left factor, the image patches, is never written to memory. The maximum over a pooling window
and the ReLU are taken before anything is stored; what is kept for the way back is which pixel won.

Everything lies channels last, [m, b, H, W, C], so the numbers that a pooling window sees in one row of the image lie
next to one another: KS + POOL - 1 pixels of C channels, SPAN numbers. A row of the product is a window, its columns are
the output channels of all pixels of a window row, and the filter is widened to match: for each of those pixels it is
moved on by one pixel, with zeros around. A third more to multiply (filters of 3, pooling by 2), but long products of
long lines, which is what matrix units and memory like. The sum runs over the KS rows of the filter.

The first layer picks its images by index from the data set, whose few channels are padded to four. Its lines are
short, so all rows that a window sees are taken as one line, and the filter is moved down as well.

The way back is for bf16; numbers of 32 bits go back through `taps.py`.

Names inside the programs: H, W, C inputs, OC output channels, PH, PW pooled pixels, KS side of the filter, CB and OB
tiles of numbers and of output channels, BM windows at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ("images", "bias_stride", "steps")  # vary from batch to batch: not worth a program of their own each
DEAD = tl.constexpr(4)  # in `winner`: the ReLU cut it off, nothing flows back


@triton.jit
def product(a, b, acc, DOT: tl.constexpr):
    """acc + a @ b, factors rounded as DOT says."""
    if DOT == "bf16":
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=DOT)
    return acc


@triton.jit
def _corner(x, index, client, q, images, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, PH: tl.constexpr,
            PW: tl.constexpr, FIRST: tl.constexpr):  # fmt: skip
    """Where the images of the windows q [rows] start: picked by index from the data set, or one after the other."""
    image = q // (PH * PW)
    if FIRST:
        start = x + tl.load(index + client * images + image) * (H * W * C)
    else:
        start = x + client * images * (H * W * C) + image * (H * W * C)
    return start


@triton.jit
def _line(base, y, x, k, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, END: tl.constexpr,
          PAD: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    """Numbers k of what windows see from pixel (y, x) on, of the images at `base`: [windows, numbers].

    Lines of SPAN numbers one below the other, END numbers in all; CUT: k may go beyond.
    """
    at = (base + (y * W + x) * C)[:, None] + (k // SPAN * (W * C) + k % SPAN)[None, :]
    if PAD > 0:
        row = y[:, None] + (k // SPAN)[None, :]
        column = x[:, None] + (k % SPAN // C)[None, :]
        here = (k < END)[None, :] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        numbers = tl.load(at, mask=here, other=0.0)
    elif CUT:
        numbers = tl.load(at, mask=(k < END)[None, :], other=0.0)
    else:
        numbers = tl.load(at)
    return numbers


@triton.jit
def _larger(best, first, other, place):
    """The running maximum and where it was found; the first of equals stays, NaN wins."""
    better = (other > best) | (other != other)
    return tl.where(better, other, best), tl.where(better, place, first)


@triton.jit
def _halves(acc, BM: tl.constexpr, OB: tl.constexpr):
    """[BM, 2·OB] -> the left and the right half."""
    return tl.split(tl.permute(tl.reshape(acc, [BM, 2, OB]), (0, 2, 1)))


@triton.jit(do_not_specialize=SIZES)
def forward(
    x, index, w, bias, out, winner, images, bias_stride,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OC: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    KS: tl.constexpr, PAD: tl.constexpr, POOL: tl.constexpr, SPAN: tl.constexpr, END: tl.constexpr, LINE: tl.constexpr,
    FIRST: tl.constexpr, CB: tl.constexpr, OB: tl.constexpr, BM: tl.constexpr, DOT: tl.constexpr,
    KEEP: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCKS times BM windows of one client: all pixels of each, and the largest of them."""
    client = tl.program_id(1).to(tl.int64)
    rows = images * PH * PW
    n = tl.arange(0, POOL * OB)
    o = tl.arange(0, OB)
    N: tl.constexpr = POOL * OB
    CHUNKS: tl.constexpr = LINE // CB
    TALL: tl.constexpr = POOL if FIRST else KS  # lines that a filter has
    f_at = w + client * (N * TALL * LINE) + n[:, None] * (TALL * LINE) + tl.arange(0, CB)[None, :]
    shift = tl.load(bias + client * bias_stride + o, mask=o < OC, other=0.0)[None, :]
    if BLOCKS > 1:  # the whole filter stays at hand
        upper = tl.trans(tl.load(f_at))
        lower = tl.trans(tl.load(f_at + (TALL - 1) * LINE))
    for block in tl.range(0, BLOCKS, num_stages=STAGES if BLOCKS > 1 else 1):
        q = (tl.program_id(0) * BLOCKS + block) * BM + tl.arange(0, BM)
        inside = tl.minimum(q, rows - 1)
        base = _corner(x, index, client, inside, images, H, W, C, PH, PW, FIRST)
        top = (inside % (PH * PW) // PW) * POOL - PAD
        left = (inside % PW) * POOL - PAD
        acc0 = tl.zeros([BM, N], dtype=tl.float32)
        acc1 = tl.zeros([BM, N], dtype=tl.float32)
        if BLOCKS > 1:
            a = _line(base, top, left, tl.arange(0, CB), H, W, C, SPAN, END, PAD, END < LINE)
            acc0 = product(a, upper, acc0, DOT)
            if POOL == 2:
                acc1 = product(a, lower, acc1, DOT)
        else:
            for step in tl.range(0, CHUNKS if FIRST else KS * CHUNKS, num_stages=STAGES):
                k = step % CHUNKS * CB + tl.arange(0, CB)
                f = tl.trans(tl.load(f_at + step * CB))
                y = top if FIRST else top + step // CHUNKS
                a = _line(base, y, left, k, H, W, C, SPAN, END, PAD, END < LINE)
                acc0 = product(a, f, acc0, DOT)
                if POOL == 2 and FIRST:
                    acc1 = product(a, tl.trans(tl.load(f_at + LINE + step * CB)), acc1, DOT)
                elif POOL == 2:
                    acc1 = product(_line(base, y + 1, left, k, H, W, C, SPAN, END, PAD, END < LINE), f, acc1, DOT)
        first = tl.zeros([BM, OB], dtype=tl.int32)
        if POOL == 2:
            best, other1 = _halves(acc0, BM, OB)
            other2, other3 = _halves(acc1, BM, OB)
            best, first = _larger(best, first, other1, 1)
            best, first = _larger(best, first, other2, 2)
            best, first = _larger(best, first, other3, 3)
        else:
            best = acc0
        best += shift
        to = client * rows * OC + (q * OC)[:, None] + o[None, :]
        here = (q < rows)[:, None] & (o < OC)[None, :]
        tl.store(out + to, tl.where(best <= 0, 0.0, best), mask=here)  # NaN stays NaN
        if KEEP:
            tl.store(winner + to, tl.where(best <= 0, DEAD, first).to(tl.int8), mask=here)


@triton.jit(do_not_specialize=SIZES)
def filters_backward(
    x, index, grad, winner, dw, db, images, steps,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OC: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    KS: tl.constexpr, PAD: tl.constexpr, POOL: tl.constexpr, SPAN: tl.constexpr, END: tl.constexpr, LINE: tl.constexpr,
    FIRST: tl.constexpr, CB: tl.constexpr, OB: tl.constexpr, BM: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """CB numbers of a line of the widened filter and one share of the windows: partial sums of its gradient."""
    chunk = tl.program_id(0)
    split = tl.program_id(1)
    client = tl.program_id(2).to(tl.int64)
    rows = images * PH * PW
    CHUNKS: tl.constexpr = LINE // CB
    N: tl.constexpr = POOL * OB
    n = tl.arange(0, N)
    o = n % OB
    k = chunk % CHUNKS * CB + tl.arange(0, CB)
    grad += client * rows * OC
    winner += client * rows * OC
    total = tl.zeros([N], dtype=tl.float32)
    acc0 = tl.zeros([CB, N], dtype=tl.float32)
    acc1 = tl.zeros([CB, N], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        q = (split * steps + step) * BM + tl.arange(0, BM)
        inside = tl.minimum(q, rows - 1)
        base = _corner(x, index, client, inside, images, H, W, C, PH, PW, FIRST)
        top = (inside % (PH * PW) // PW) * POOL - PAD + chunk // CHUNKS
        left = (inside % PW) * POOL - PAD
        at = (inside * OC)[:, None] + o[None, :]
        here = (q < rows)[:, None] & (o < OC)[None, :]
        g = tl.load(grad + at, mask=here, other=0.0)
        won = tl.load(winner + at, mask=here, other=DEAD)
        total += tl.sum(tl.where(won < DEAD, g, 0.0).to(tl.float32), axis=0)
        a = tl.trans(_line(base, top, left, k, H, W, C, SPAN, END, PAD, END < LINE))
        acc0 = product(a, tl.where(won == (n // OB)[None, :], g, 0.0), acc0, DOT)
        if POOL == 2:
            lower = tl.where(won == (POOL + n // OB)[None, :], g, 0.0)
            if FIRST:
                acc1 = product(a, lower, acc1, DOT)
            else:
                below = tl.trans(_line(base, top + 1, left, k, H, W, C, SPAN, END, PAD, END < LINE))
                acc0 = product(below, lower, acc0, DOT)
    part = split * tl.num_programs(2) + client
    TALL: tl.constexpr = POOL if FIRST else KS
    to = dw + part * (TALL * LINE * N) + (chunk * CB + tl.arange(0, CB))[:, None] * N + n[None, :]
    tl.store(to, acc0)
    if FIRST and POOL == 2:
        tl.store(to + LINE * N, acc1)
    if chunk == 0:
        tl.store(db + part * OC + n, total, mask=n < OC)


@triton.jit
def _seen(
    grad, winner, w, images, image, Y, X, n, p, acc0, acc1, uy: tl.constexpr, ux: tl.constexpr,
    C: tl.constexpr, OC: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, KS: tl.constexpr, POOL: tl.constexpr,
    SPAN: tl.constexpr, LINE: tl.constexpr, OB: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What flows back to blocks (Y, X) from the windows uy blocks above and ux to the left, for each of their rows."""
    y = Y - uy
    x = X - ux
    o = n % OB
    live = (image < images) & (y >= 0) & (y < PH) & (x >= 0) & (x < PW)
    at = (((image * PH + y) * PW + x) * OC)[:, None] + o[None, :]
    here = live[:, None] & (o < OC)[None, :]
    g = tl.load(grad + at, mask=here, other=0.0)
    won = tl.load(winner + at, mask=here, other=DEAD)
    k = ux * (POOL * C) + p
    there = (p < POOL * C) & (k < SPAN)
    for r in tl.static_range(POOL):
        mine = tl.where(won == (r * POOL + n // OB)[None, :], g, 0.0)
        for a in tl.static_range(POOL):
            dy = POOL * uy + a - r
            if (dy >= 0) & (dy < KS):
                f_at = w + (n * (KS * LINE) + dy * LINE)[:, None] + k[None, :]
                f = tl.load(f_at, mask=there[None, :], other=0.0)
                if a == 0:
                    acc0 = product(mine, f, acc0, DOT)
                else:
                    acc1 = product(mine, f, acc1, DOT)
    return acc0, acc1


@triton.jit(do_not_specialize=SIZES)
def inputs_backward(
    grad, winner, w, out, images, BH, BW,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OC: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    KS: tl.constexpr, PAD: tl.constexpr, POOL: tl.constexpr, SPAN: tl.constexpr, LINE: tl.constexpr,
    PB: tl.constexpr, NB: tl.constexpr, OB: tl.constexpr, BM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """PB numbers of the rows of BM blocks of POOL x POOL input pixels, from the few windows that see them.

    The window that begins u blocks before (up or left) sees a block's pixels as its pixels u·POOL and on.
    """
    client = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * BM + tl.arange(0, BM)
    image = b // (BH * BW)
    Y = b % (BH * BW) // BW
    X = b % BW
    N: tl.constexpr = POOL * OB
    p = tl.program_id(2) * PB + tl.arange(0, PB)
    w += client * (N * KS * LINE)
    grad += client * images * (PH * PW * OC)
    winner += client * images * (PH * PW * OC)
    acc0 = tl.zeros([BM, PB], dtype=tl.float32)
    acc1 = tl.zeros([BM, PB], dtype=tl.float32)
    AWAY: tl.constexpr = (KS + 2 * POOL - 2) // POOL  # windows that see a pixel, each way
    for piece in tl.static_range(N // NB):
        n = piece * NB + tl.arange(0, NB)
        for uy in tl.static_range(AWAY):
            for ux in tl.static_range(AWAY):
                acc0, acc1 = _seen(grad, winner, w, images, image, Y, X, n, p, acc0, acc1, uy, ux,
                                   C, OC, PH, PW, KS, POOL, SPAN, LINE, OB, DOT)  # fmt: skip
    out += client * images * (H * W * C)
    for a in tl.static_range(POOL):
        y = Y * POOL + a - PAD
        x = X[:, None] * POOL - PAD + (p // C)[None, :]
        to = out + ((image * H + y) * (W * C) + (X * POOL - PAD) * C)[:, None] + p[None, :]
        here = ((image < images) & (y >= 0) & (y < H))[:, None] & (x >= 0) & (x < W) & (p < POOL * C)[None, :]
        if a == 0:
            tl.store(to, acc0, mask=here)
        else:
            tl.store(to, acc1, mask=here)
