"""Where the GPU programs take over from plain torch: the one place that decides it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kinfolk import kernels

PROCESSORS = 132  # of an H200, which numbers of programs are chosen for
TOGETHER = 65_535  # programs in the second and third direction of a launch, at most
WIDEST = 4096  # numbers of a client's row that one program holds at a time; longer rows are for plain torch
OLDEST = (8, 0)  # compute capability: before it, matrix units know neither TF32 nor bf16, and Triton unrolls products


def fused(where: Tensor, width: int = 1) -> bool:
    """Whether programs can do the work on a tensor like `where`, in rows of up to `width` numbers."""
    return _on_gpu(where) and 0 < width <= WIDEST and where.numel() > 0 and kernels.available()


def refusal(device: torch.device) -> str | None:
    """Why there are no programs for this GPU, in a few words; None: there are."""
    if not kernels.available():
        return "Triton is not installed"
    if not torch.cuda.is_available():  # nor can anything be computed there: somebody only asks what would be
        return None
    number = torch.cuda.current_device() if device.index is None else device.index
    if number != torch.cuda.current_device():
        return f"programs are launched on GPU {torch.cuda.current_device()}, which is the current one"
    return None if _young(number) else f"the GPU's compute capability is below {OLDEST[0]}.{OLDEST[1]}"


def _on_gpu(where: Tensor) -> bool:
    """Programs are launched on the current GPU, so the tensor has to lie there."""
    return where.is_cuda and where.get_device() == torch.cuda.current_device() and _young(where.get_device())


@cache
def _young(number: int) -> bool:
    return torch.cuda.get_device_capability(number) >= OLDEST


def tile(width: int, least: int = 16) -> int:
    """Numbers that a program holds for a row of `width`: a power of two, of few different ones, each compiled once."""
    size = least
    while size < width:
        size *= 4
    return size


def there(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. A GPU copies it from pinned memory: from any other it would first finish its work."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def aligned(lists: Tensor) -> Tensor:
    """[m, w] with the numbers of a row side by side, which programs take for granted."""
    return lists if lists.stride(1) == 1 else lists.contiguous()


def unit(*numbers: int) -> int:
    """How many numbers of a row a program may read together, if rows lie these far apart: a power of two up to 4."""
    return next(size for size in (4, 2, 1) if all(number % size == 0 for number in numbers))
