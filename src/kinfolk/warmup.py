"""How long a GPU takes to get ready."""

from __future__ import annotations

import time

import torch


class WarmUp:
    """How much longer than others the first rounds of a process take, in which a GPU's programs are made ready."""

    ROUNDS = 2  # the first run and the recording

    def __init__(self, device: torch.device, done: int) -> None:
        self.device, self.first = device, done
        self.begin = time.perf_counter()
        self.first_rounds = 0.0

    def over(self, t: int) -> bool:
        """Whether round t, just done, was the last of them."""
        if self.device.type != "cuda" or t != self.first + self.ROUNDS:
            return False
        torch.cuda.synchronize(self.device)
        self.first_rounds = time.perf_counter() - self.begin
        return True

    def seconds(self, total: int) -> float | None:
        """None on a CPU, or if there were too few rounds to compare with."""
        others = total - self.first - self.ROUNDS
        if not self.first_rounds or others < 1:
            return None
        each = (time.perf_counter() - self.begin - self.first_rounds) / others
        return round(max(0.0, self.first_rounds - self.ROUNDS * each), 3)
