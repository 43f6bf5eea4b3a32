"""GPU programs in tests: on the GPU where there is one, else in Triton's interpreter."""

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from kinfolk.kernels import dispatch, gram

__all__ = ["DEVICE", "randn", "take_over", "tl", "triton"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

_call = InterpretedFunction.__call__


def _quick_call(self: InterpretedFunction, *args: Any, **options: Any) -> Any:
    """Our own functions find the language exchanged for the interpreter's already, as the program they are called from
    has done it: doing it again for every call would take most of the time."""
    ours = self.fn.__module__.startswith("kinfolk.")
    return self.rewrite()(*args, **options) if ours else _call(self, *args, **options)


InterpretedFunction.__call__ = _quick_call


def take_over(patch: pytest.MonkeyPatch, used: bool) -> None:
    """Let the programs take over whatever the device, or nothing."""
    patch.setattr(dispatch, "_on_gpu", lambda where: used)
    if DEVICE.type != "cuda":
        patch.setattr(gram, "HALF", tl.float16)  # the interpreter has no bf16


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
