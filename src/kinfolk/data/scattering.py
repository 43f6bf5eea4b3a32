"""Scattering features of images: handcrafted, the same for everybody, and never trained.

An image is filtered with wavelets of `scales` sizes (J) and `angles` directions (L), rectified by the modulus, filtered
and rectified once more, and averaged over 2^J × 2^J pixels. At J = 2 and L = 8 every channel of the image becomes 81:
one average, 16 of the first order and 64 of the second.

The filters and the order of the channels are kymatio's (the 2-D scattering that P4 and Handcrafted-DP use). They are
applied here, a whole bank at a time and with the averaging as two small matrix products, which is several times as fast
as kymatio's own loop over filters; a test compares the two. `feature_cache.py` keeps the features of a whole set.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.errors import UserError

SCALES, ANGLES = 2, 8  # J and L of P4
CPU_PLANES = 24  # channels of images at a time: what lies between two steps stays in the cache of a CPU
GPU_PLANES = 4096
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation of pixels in 0..1, red, green, blue


@dataclass(frozen=True)
class _Bank:
    """Filters for padded images of one size, in the frequency domain; each number of a wavelet stands there twice.

    waves[j, level]: [q, L, h, w * 2] wavelets of scale j for planes that were thinned out to scale `level` before. The
    q = 4^(j - level) parts of a plane's frequencies fall together when the result is thinned out to scale j.
    rows[level], columns[level]: [h', h], [w', w] averaging, thinning out and cutting off the padding.
    """

    waves: dict[tuple[int, int], Tensor]
    rows: list[Tensor]
    columns: list[Tensor]


def channels(scales: int = SCALES, angles: int = ANGLES) -> int:
    """Features per channel of the image: 1 + L J + L² J (J - 1) / 2."""
    return 1 + angles * scales + angles**2 * scales * (scales - 1) // 2


def feature_shape(shape: tuple[int, ...], scales: int = SCALES, angles: int = ANGLES) -> tuple[int, int, int]:
    """Shape of the features of one image [C, H, W]."""
    if len(shape) != 3:
        raise UserError(f"scattering needs images [C, H, W], the samples have {list(shape)}")
    least = 2**scales + 1
    if min(shape[1:]) < least:
        raise UserError(
            f"scattering at scale {scales} needs images of at least {least}×{least} pixels, these have "
            f"{shape[1]}×{shape[2]}"
        )
    return shape[0] * channels(scales, angles), shape[1] // 2**scales, shape[2] // 2**scales


def scattered(x: Tensor, scales: int = SCALES, angles: int = ANGLES) -> Tensor:
    """Features [N, 81 C, H/4, W/4] of images [N, C, H, W], in float32 and where the images are.

    All features of the first channel come first, in kymatio's order.
    """
    shape = feature_shape(tuple(x.shape[1:]), scales, angles)
    if not x.is_floating_point():
        raise UserError(f"scattering needs images in floating point, not {x.dtype}: divide the pixels by 255 first")
    planes = x.to(torch.float32).reshape(-1, *x.shape[2:])
    out = torch.empty(len(planes), shape[0] // x.shape[1], *shape[1:], device=x.device)
    bank = _bank(x.shape[2], x.shape[3], scales, angles, x.device)
    on_cpu = x.device.type == "cpu"
    step = CPU_PLANES if on_cpu else GPU_PLANES

    @torch.no_grad()
    def fill(at: int) -> None:
        out[at : at + step] = _scatter(planes[at : at + step], bank, scales)

    _side_by_side(fill, range(0, len(planes), step), torch.get_num_threads() if on_cpu else 1)
    return out.view(len(x), *shape)


def standardised(x: Tensor) -> Tensor:
    """Pixels in 0..1 [N, C, H, W] as the features are made of: colours by ImageNet's moments, grey as it is."""
    if x.shape[1] != 3:
        return x
    mean, deviation = (x.new_tensor(values).view(3, 1, 1) for values in IMAGENET)
    return (x - mean) / deviation


def _side_by_side(work: Callable[[int], None], items: Sequence[int], workers: int) -> None:
    """work(item) for every item, a core for each: cores that share one operation mostly wait for each other."""
    before = torch.get_num_threads()
    with ThreadPoolExecutor(max(1, min(workers, len(items))), "kinfolk", torch.set_num_threads, (1,)) as pool:
        try:
            list(pool.map(work, items))
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)  # threads to come inherit the last number set


def _scatter(planes: Tensor, bank: _Bank, scales: int) -> Tensor:
    """Features [P, K, h, w] of planes [P, H, W]."""
    spectrum = torch.fft.fft2(_padded(planes, scales))
    first, second = [], []
    for j in range(scales):
        rectified = _modulus(spectrum, bank.waves[j, 0])  # [P, L, ...]
        first.append(_averaged(rectified, bank, j))
        if j + 1 < scales:
            again = torch.fft.fft2(rectified)
            deeper = [_averaged(_modulus(again, bank.waves[k, j]), bank, k) for k in range(j + 1, scales)]
            second.append(torch.cat(deeper, 2).flatten(1, 2))
    return torch.cat([_averaged(_padded(planes, scales), bank, 0)[:, None], *first, *second], 1)


def _modulus(spectrum: Tensor, waves: Tensor) -> Tensor:
    """|plane * wavelet|, thinned out: spectrum [..., H, W] and waves [q, L, h, w * 2] -> [..., L, h, w]."""
    height, width = waves.shape[-2], waves.shape[-1] // 2
    numbers = torch.view_as_real(spectrum).flatten(-2).unsqueeze(-3)  # [..., 1, H, W * 2]
    bands = numbers.chunk(spectrum.shape[-2] // height, -2)
    parts = [part for band in bands for part in band.chunk(spectrum.shape[-1] // width, -1)]
    total = parts[0] * waves[0]
    for part, wave in zip(parts[1:], waves[1:]):
        total.addcmul_(part, wave)
    filtered = torch.fft.ifft2(torch.view_as_complex(total.view(*total.shape[:-1], width, 2)))
    # abs() guards against overflow, for several times the time.
    squares: Tensor = filtered.real.square().addcmul_(filtered.imag, filtered.imag)
    return squares.sqrt_()


def _averaged(planes: Tensor, bank: _Bank, level: int) -> Tensor:
    return bank.rows[level] @ (planes @ bank.columns[level].T)


def _padded(planes: Tensor, scales: int) -> Tensor:
    """Planes [P, H, W] mirrored at their borders."""
    (top, bottom), (left, right) = (_padding(side, scales) for side in planes.shape[1:])
    return F.pad(planes, (left, right, top, bottom), mode="reflect")


def _padding(side: int, scales: int) -> tuple[int, int]:
    """Pixels before and after, so that one averaged pixel on each side can be cut off."""
    more = ((side >> scales) + 2 << scales) - side
    return more // 2, (more + 1) // 2


@lru_cache(maxsize=8)
def _bank(height: int, width: int, scales: int, angles: int, device: torch.device) -> _Bank:
    """The filters for images [height, width]."""
    padded = [side + sum(_padding(side, scales)) for side in (height, width)]
    filters = _kymatio_filters()(*padded, scales, angles)
    waves: dict[tuple[int, int], Tensor] = {}
    for j in range(scales):
        of_scale = [wave["levels"] for wave in filters["psi"] if wave["j"] == j]
        for level in range(len(of_scale[0])):
            bank = torch.from_numpy(np.stack([levels[level] for levels in of_scale]))
            waves[j, level] = _quartered(bank, j - level).to(device)
    rows, columns = [], []
    for level, low in enumerate(filters["phi"]["levels"]):
        # The averaging filter is a round Gaussian, hence a product of one along the rows and one along the columns.
        peak = float(low[0, 0]) ** 0.5
        rows.append(_averaging(low[:, 0] / peak, scales - level).to(device))
        columns.append(_averaging(low[0] / peak, scales - level).to(device))
    return _Bank(waves, rows, columns)


def _quartered(waves: Tensor, halvings: int) -> Tensor:
    """Wavelets [L, H, W] -> [q, L, H / k, W / k * 2], k = 2^halvings and q = k²."""
    count, height, width = waves.shape
    k = 2**halvings
    parts = waves.view(count, k, height // k, k, width // k).permute(1, 3, 0, 2, 4).flatten(0, 1)
    return parts.div(k**2).repeat_interleave(2, -1)


def _averaging(frequencies: Any, halvings: int) -> Tensor:
    """The circular filter with these `frequencies` [n], every 2^halvings-th place without the first and last."""
    kernel = np.fft.ifft(frequencies.astype(np.float64)).real
    places = np.arange(0, len(kernel), 2**halvings)[1:-1]
    index = (places[:, None] - np.arange(len(kernel))) % len(kernel)
    return torch.tensor(kernel[index], dtype=torch.float32)


def _kymatio_filters() -> Any:
    """kymatio's filter bank. Its front door does not open with SciPy 1.17 (3-D code), the room itself does."""
    try:
        return importlib.import_module("kymatio.scattering2d.filter_bank").filter_bank
    except ImportError as error:
        raise UserError(f"scattering needs the package kymatio ({error}): pip install 'kinfolk[features]'") from None
