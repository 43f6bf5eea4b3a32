"""The way back through convolution, ReLU and max-pooling, tap by tap of the filter (Triton).

For numbers of 32 bits: the matrix units take them in one order only, and the long lines of `windows.py` would have to
be turned around on the way. A sum over the taps of the filter and the input channels, a product for each pixel of the
pooling window; in the first layer a row of the filter counts as one tap with four times as many channels.

Names as in `windows.py`; TAPS and DEPTH say how the sum is cut (KS·KS taps of C channels; first layer: KS taps, a row
of KS·4 numbers each), CB and OB are tiles of channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kinfolk.kernels.windows import DEAD, SIZES, product


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


@triton.jit(do_not_specialize=SIZES)
def filters_backward(
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
                    acc0 = product(a, mine, acc0, DOT)
                elif number == 1:
                    acc1 = product(a, mine, acc1, DOT)
                else:
                    acc2 = product(a, mine, acc2, DOT)
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
def inputs_backward(
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
        acc0 = product(_routed(grad, winner, image, images, Y, X, dy, dx, o, OC, PH, PW, KS, POOL), f, acc0, DOT)
        if POOL == 2:
            acc1 = product(
                _routed(grad, winner, image, images, Y, X, dy, dx + 1, o, OC, PH, PW, KS, POOL), f, acc1, DOT
            )
            acc2 = product(
                _routed(grad, winner, image, images, Y, X, dy + 1, dx, o, OC, PH, PW, KS, POOL), f, acc2, DOT
            )
            acc3 = product(
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
