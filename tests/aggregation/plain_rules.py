"""The rules as anybody would write them: one client, one list of models, Python loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Judge = Callable[[Tensor], float]


def sound(models: list[Tensor]) -> list[Tensor]:
    return [model for model in models if bool(torch.isfinite(model).all())]


def average(models: list[Tensor], weights: list[float] | None = None) -> Tensor:
    weights = weights or [1.0] * len(models)
    return torch.stack([model.double() * weight for model, weight in zip(models, weights)]).sum(0) / sum(weights)


def median(own: Tensor, peers: list[Tensor]) -> Tensor:
    models = sound([own, *peers])
    out = []
    for column in range(own.numel()):
        values = sorted(float(model[column]) for model in models)
        out.append((values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2)
    return torch.tensor(out, dtype=torch.float64)


def trimmed_mean(own: Tensor, peers: list[Tensor], f: int) -> Tensor:
    models = sound([own, *peers])
    if len(models) <= 2 * f:
        return own.double()
    columns = [sorted(float(model[column]) for model in models) for column in range(own.numel())]
    return torch.tensor([sum(c[f : len(c) - f]) / (len(c) - 2 * f) for c in columns], dtype=torch.float64)


def krum_scores(models: list[Tensor], f: int, printed: bool) -> list[float]:
    scores = []
    for i, model in enumerate(models):
        others = sorted(float((model.double() - o.double()).square().sum()) for j, o in enumerate(models) if j != i)
        scores.append(sum(others[: len(models) - f - (2 if printed else 1)]))
    return scores


def krum(own: Tensor, peers: list[Tensor], f: int, keep: int | None, printed: bool = False) -> Tensor:
    """keep: how many are averaged; none: n - f."""
    models = sound([own, *peers])
    if len(models) < 2 * f + (3 if printed else 1):
        return own.double()
    scores = krum_scores(models, f, printed)
    ranked = sorted(range(len(models)), key=lambda i: (scores[i], i))
    return average([models[i] for i in ranked[: min(keep or len(models), len(models) - f)]])


def clipping(own: Tensor, peers: list[Tensor], radius: float | None, f: int) -> Tensor:
    models = sound(peers)
    distances = [float((model.double() - own.double()).norm()) for model in models]
    if radius is None:
        near = sorted(distances)[: max(0, len(models) - f)]
        radius = math.sqrt(sum(x * x for x in near) / len(near)) if near else 0.0
    total = torch.zeros_like(own, dtype=torch.float64)
    for model, distance in zip(models, distances):
        total += (model.double() - own.double()) * (1.0 if distance <= radius else radius / distance)
    return own.double() + total / (len(models) + 1)


def balance(own: Tensor, peers: list[Tensor], gamma: float, kappa: float, alpha: float, progress: float) -> Tensor:
    bound = gamma * math.exp(-kappa * progress) * float(own.double().norm())
    near = [model for model in sound(peers) if float((model.double() - own.double()).norm()) <= bound]
    return alpha * own.double() + (1 - alpha) * average(near) if near else own.double()


def ubar(own: Tensor, peers: list[Tensor], rho: float, alpha: float, judge: Judge) -> Tensor:
    models = sound(peers)
    distances = [float((model.double() - own.double()).norm()) for model in models]
    near = sorted(range(len(models)), key=lambda i: (distances[i], i))[: math.ceil(rho * len(models) - 1e-9)]
    losses = {i: judge(models[i]) for i in sorted(near)}
    good = [i for i in losses if losses[i] <= judge(own)] or sorted(losses, key=lambda i: losses[i])[:1]
    return alpha * own.double() + (1 - alpha) * average([models[i] for i in good]) if good else own.double()
