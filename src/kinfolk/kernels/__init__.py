"""GPU programs for what library calls do badly: convolutions whose weights differ from client to client, and passes
over the whole matrix of models that would otherwise read it several times.

They are written in Triton, which comes with torch's CUDA builds. Without it everything works, only slower.
"""

import importlib.util
from functools import cache


@cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
