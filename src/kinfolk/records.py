"""What a run says of itself: a row of metrics, a row for every client, a summary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kinfolk import engines, metrics
from kinfolk.config import Config
from kinfolk.data.federation import Federation


@dataclass(frozen=True)
class Truth:
    """What is known of the clients from outside."""

    clusters: np.ndarray | None  # [n] true clusters
    labels: np.ndarray  # [n, C] shares of each label among a client's training samples

    @classmethod
    def of(cls, engine: engines.Engine) -> Truth:
        clusters = engine.shards[0].cohort.clusters
        parts = [shard.cohort.data for shard in engine.shards]
        counts = np.concatenate([_label_counts(part) for part in parts])
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        return cls(None if clusters is None else clusters.cpu().numpy(), shares)

    @cached_property
    def overlap(self) -> np.ndarray | None:
        """[n, n] how much the labels of two clients overlap; None for many clients."""
        return metrics.all_overlaps(self.labels)


def _label_counts(data: Federation) -> np.ndarray:
    """[m, C] how often each client has each label."""
    part = data.train
    client = np.repeat(np.arange(data.clients), part.sizes.cpu().numpy())
    cells = client * data.classes + part.y.cpu().numpy()
    return np.bincount(cells, minlength=data.clients * data.classes).reshape(data.clients, data.classes)


def measure(
    t: int, results: engines.Results, edges: metrics.Edges, truth: Truth, method: Any, seconds: float
) -> dict[str, Any]:
    """A row of metrics after round t; `seconds` since the start of the run."""
    clusters = truth.clusters
    row: dict[str, Any] = {"round": t, **metrics.spread(results.accuracy)}
    row["accuracy_client0"] = float(results.accuracy[0])
    row["before_mixing"] = metrics.spread(results.before_mixing)["accuracy"]
    row["loss"] = float(np.nanmean(results.loss)) if np.isfinite(results.loss).any() else math.nan
    if results.global_accuracy is not None:
        row["global_accuracy"] = metrics.spread(results.global_accuracy)["accuracy"]
    if results.neighbors is not None:
        edges = metrics.Edges.of_lists(results.neighbors)
    if clusters is not None and edges.client.size:
        row |= metrics.matching(edges, clusters)
    if edges.client.size:
        row |= metrics.choice(edges, truth.labels, truth.overlap)
    if clusters is not None and results.clusters is not None:
        row["ari"] = metrics.cluster_ari(results.clusters, clusters)
    row["models_received"] = int(results.models_received.sum())
    row["vectors_received"] = int(results.vectors_received.sum())
    row["bytes_received"] = int(results.bytes_received.sum())
    row["peak_received"] = int(results.peak_received.max())
    row |= nominal(method, t, results.accuracy.size)
    row["quarantined"] = int(results.quarantined.sum())
    row["seconds"] = round(seconds, 3)
    return row


def nominal(method: Any, rounds: int, n: int) -> dict[str, int | None]:
    """What the method's formula says it receives in so many rounds, in models; None where it has no formula."""
    if not hasattr(method, "nominal"):
        return {"nominal_models": None, "nominal_peak": None}
    cost = method.nominal(rounds, n)  # in units of n models
    return {"nominal_models": round(cost.total * n), "nominal_peak": round(cost.peak * n)}


def clients(results: engines.Results, truth: Truth, engine: engines.Engine) -> list[dict[str, Any]]:
    """A row for every client, after the last round."""
    clusters = truth.clusters
    train = torch.cat([shard.cohort.data.train.sizes for shard in engine.shards])
    test = torch.cat([shard.cohort.data.test.sizes for shard in engine.shards])
    everywhere = results.global_accuracy
    return [
        {
            "client": i,
            "cluster": None if clusters is None else int(clusters[i]),
            "train_samples": int(train[i]),
            "test_samples": int(test[i]),
            "accuracy": float(results.accuracy[i]),
            "loss": float(results.loss[i]),
            "before_mixing": float(results.before_mixing[i]),
            "models_received": int(results.models_received[i]),
            "bytes_received": int(results.bytes_received[i]),
            "quarantined": int(results.quarantined[i]),
            **({} if everywhere is None else {"global_accuracy": float(everywhere[i])}),
        }
        for i in range(results.accuracy.size)
    ]


def summary(history: list[dict[str, Any]], config: Config) -> dict[str, Any]:
    """The last row of metrics, and the best."""
    best = _best(history, "accuracy")
    everywhere = {}
    if "global_accuracy" in history[-1]:
        row = _best(history, "global_accuracy")
        everywhere = {"best_global_accuracy": row["global_accuracy"], "best_global_round": row["round"]}
    return {
        "method": config.method_name,
        "seed": config.run.seed,
        **history[-1],
        "best_accuracy": best["accuracy"],
        "best_round": best["round"],
        **everywhere,
    }


def _best(history: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """The row with the largest value; undefined ones come last."""
    return max(history, key=lambda row: -1.0 if row.get(key) is None else row[key])
