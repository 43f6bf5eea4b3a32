"""Tensors that come from a GPU together, while it goes on with something else.

Whoever asks a GPU for a tensor waits until all that was launched before is done, and meanwhile launches nothing more. A
parcel is copied behind that work, into memory that a GPU can write by itself, and opened when it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Parcel:
    """Put tensors in, send it, and take them out on the CPU."""

    def __init__(self, packed: bool = False) -> None:
        """packed: all travel as one tensor, and what becomes of them after `send` does not matter; otherwise they stay
        where they are until somebody takes them out, which on a CPU costs nothing."""
        self._packed = packed
        self._tensors: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None

    def add(self, tensor: Tensor) -> int:
        """Put in one more; its place in the parcel."""
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def send(self) -> None:
        """No more is put in. Nobody waits for anything."""
        if not self._packed or not self._tensors:
            return
        flat = pack(self._tensors)
        if flat.is_cuda:
            pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            pinned.copy_(flat, non_blocking=True)
            self._copied = torch.cuda.current_stream(flat.device).record_event()
            flat = pinned
        # All views, which are the same before and after the numbers have come; the tensors themselves can go.
        self._wanted = [(tensor.dtype, tensor.shape) for tensor in self._tensors]
        self._tensors = list(torch.split(flat, [tensor.numel() for tensor in self._tensors]))

    @property
    def arrived(self) -> bool:
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until it has arrived."""
        if self._copied is not None:
            self._copied.synchronize()

    def __getitem__(self, place: int) -> Tensor:
        """The tensor in this place, on the CPU; waits for it."""
        if not self._packed:
            return self._tensors[place].cpu()
        self.wait()
        return unpack(self._tensors[place], *self._wanted[place])


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor [*] int64 with the numbers of all, each widened to eight bytes, which loses nothing."""
    return torch.cat([tensor.to(_wide(tensor.dtype)).reshape(-1).view(torch.int64) for tensor in tensors])


def unpack(part: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """The tensor whose numbers are this part of what `pack` made."""
    return part.view(_wide(dtype)).to(dtype).view(shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.int64
