"""Who looks at whose model: a few places in each row of a table that is mostly empty."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def matrix(counts: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    """Sparse, [m, width], with counts [m] places in each row: their columns and values [*], row by row."""
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int32)  # MKL counts with these: others would be copied
    torch.cumsum(counts, dim=0, out=starts[1:])
    with warnings.catch_warnings():  # torch says once that its sparse tensors are new, or unchecked
        warnings.filterwarnings("ignore", message="Sparse (CSR|invariant checks)", category=UserWarning)
        return torch.sparse_csr_tensor(
            starts, columns.to(torch.int32), values, (counts.numel(), width), check_invariants=False
        )


def same(mine: Tensor, theirs: Tensor) -> bool:
    """Whether these are the same models [m, d] in the same place: everybody's own is one of those to look at."""
    place = theirs.data_ptr() == mine.data_ptr()
    return place and theirs.shape == mine.shape and theirs.stride() == mine.stride()
