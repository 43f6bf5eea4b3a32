"""One cohort holds everybody: a pull is indexing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class InProcess:
    """Everything that is published is already here."""

    def __init__(self) -> None:
        self._offers: dict[str, tuple[int, Tensor, Tensor, int]] = {}

    def publish(self, t: int, ids: Tensor, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._offers[name] = (t, ids, tensor, tensor._version)

    def fetch(self, t: int, ids: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        for name in names:
            if name not in self._offers or self._offers[name][0] != t:
                raise RuntimeError(f"'{name}' was pulled in round {t} but not published in it")
            _, _, tensor, version = self._offers[name]
            if tensor._version != version:
                raise RuntimeError(f"'{name}' was changed in place after it was published: publish a copy")
        here = self._offers[names[0]][1]
        others = [self._offers[name][1] for name in names[1:]]
        if any(ids is not here and not torch.equal(ids, here) for ids in others):
            raise RuntimeError(f"{', '.join(names)} were published by different clients: publish them together")
        return here, {name: self._offers[name][2] for name in names}

    def forget(self, t: int, name: str) -> None:
        for known in [known for known in self._offers if known == name or known.startswith(f"{name}-")]:
            del self._offers[known]

    def clear(self) -> None:
        """The round is over: let the published tensors go."""
        self._offers.clear()
