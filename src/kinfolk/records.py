"""What a run says of itself: a row of metrics, a row for every client, a summary."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kinfolk import engines, metrics
from kinfolk.config import Config
from kinfolk.errors import UserError
from kinfolk.findings import Results


@dataclass(frozen=True)
class Truth:
    """What is known of the clients from outside."""

    clusters: np.ndarray | None  # [n] true clusters
    labels: np.ndarray  # [n, C] shares of each label among a client's training samples
    attackers: np.ndarray | None = None  # [n] bool, if there are any: they count in no mean
    constant: np.ndarray | None = None  # [n] accuracy of a client's most frequent training label; None: some have none

    @classmethod
    def of(cls, engine: engines.Engine) -> Truth:
        clusters = engine.shards[0].cohort.clusters
        parts = [shard.cohort.data for shard in engine.shards]
        counts = np.concatenate([part.class_counts() for part in parts])
        tests = np.concatenate([part.class_counts(part.test) for part in parts])
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        attack = engine.shards[0].peers.attack
        attackers = None if attack is None else attack.attackers.cpu().numpy()
        constant = _constant(counts, tests) if counts.any(axis=1).all() else None
        return cls(None if clusters is None else clusters.cpu().numpy(), shares, attackers, constant)

    @property
    def honest(self) -> np.ndarray | None:
        """[n] bool; None if all are."""
        return None if self.attackers is None else ~self.attackers

    @cached_property
    def overlap(self) -> np.ndarray | None:
        """[n, n] how much the labels of two clients overlap; None for many clients."""
        return metrics.all_overlaps(self.labels)


def _constant(train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """[n] share of its test samples that have a client's most frequent training label; counts [n, C]."""
    right = np.take_along_axis(test, train.argmax(axis=1)[:, None], axis=1)[:, 0]
    total = test.sum(axis=1)
    return np.where(total > 0, right / np.maximum(total, 1), np.nan)


def measure(
    t: int, results: Results, edges: metrics.Edges, truth: Truth, method: Any, seconds: float
) -> dict[str, Any]:
    """A row of metrics after round t; `seconds` since the start of the run."""
    clusters, honest = truth.clusters, truth.honest
    results = _without(results, truth.attackers)
    row: dict[str, Any] = {"round": t, **metrics.spread(results.accuracy)}
    row["accuracy_client0"] = float(results.accuracy[0])
    if truth.constant is not None:
        constant = truth.constant if honest is None else truth.constant[honest]
        row["constant_accuracy"] = metrics.spread(constant)["accuracy"]
    row["before_mixing"] = metrics.spread(results.before_mixing)["accuracy"]
    row["loss"] = float(np.nanmean(results.loss)) if np.isfinite(results.loss).any() else math.nan
    if results.global_accuracy is not None:
        row["global_accuracy"] = metrics.spread(results.global_accuracy)["accuracy"]
    if results.proxy_accuracy is not None:
        row["proxy_accuracy"] = metrics.spread(results.proxy_accuracy)["accuracy"]
    if results.neighbors is not None:
        edges = metrics.Edges.of_lists(results.neighbors)
    if clusters is not None and edges.client.size:
        row |= metrics.matching(edges, clusters, honest)
    if edges.client.size:
        row |= metrics.choice(edges, truth.labels, truth.overlap, honest)
        if truth.attackers is not None:
            row["attacking_neighbors"] = metrics.lied_to(edges, truth.attackers)
    if clusters is not None and results.clusters is not None:
        known = slice(None) if honest is None else honest
        row["ari"] = metrics.cluster_ari(results.clusters[known], clusters[known])
    if getattr(method, "forms_groups", False) and results.clusters is not None and results.clusters.size <= metrics.FEW:
        row |= metrics.grouping(results.clusters, truth.labels)
    if results.apart is not None and np.isfinite(results.apart).any():
        row["group_objective"] = float(np.nansum(results.apart) / 2)  # of both of a pair
    row["models_received"] = int(results.models_received.sum())
    row["vectors_received"] = int(results.vectors_received.sum())
    row["bytes_received"] = int(results.bytes_received.sum())
    row["peak_received"] = int(results.peak_received.max())
    row |= nominal(method, t, results.accuracy.size)
    row["quarantined"] = int(results.quarantined.sum())
    if results.unusual is not None and results.unusual.any():
        counts = zip(results.unusual_names, results.unusual.sum(axis=0).tolist())
        row["unusual"] = {name: count for name, count in counts if count}
    if results.epsilon is not None:
        row["epsilon"] = float(results.epsilon.max())
    row["seconds"] = round(seconds, 3)
    return row


def promised(engine: engines.Engine) -> dict[str, str]:
    """What `privacy` says as a line, for a row of metrics."""
    return {name: promise["statement"] for name, promise in privacy(engine).items()}


def _without(results: Results, attackers: np.ndarray | None) -> Results:
    """The results with nothing known of how attackers' own models do."""
    if attackers is None:
        return results
    names = ("accuracy", "loss", "before_mixing", "global_accuracy", "proxy_accuracy")
    columns = {name: getattr(results, name) for name in names}
    known: dict[str, Any] = {
        name: np.where(attackers, np.nan, values) for name, values in columns.items() if values is not None
    }
    return replace(results, **known)


def privacy(engine: engines.Engine) -> dict[str, Any]:
    """What is promised to the client that has spent most, in full and as a line; {} if the method is not private."""
    promises = [account.guarantee() for account in engines.accounts(engine)]
    if not promises:
        return {}
    worst = max(promises, key=lambda promise: float(promise.epsilon))
    return {"privacy": {**worst.as_dict(), "statement": str(worst)}}


def nominal(method: Any, rounds: int, n: int) -> dict[str, int | None]:
    """What the method's formula says it receives in so many rounds, in models; None where it has no formula."""
    if not hasattr(method, "nominal"):
        return {"nominal_models": None, "nominal_peak": None}
    cost = method.nominal(rounds, n)  # in units of n models
    return {"nominal_models": round(cost.total * n), "nominal_peak": round(cost.peak * n)}


def clients(results: Results, truth: Truth, engine: engines.Engine) -> list[dict[str, Any]]:
    """A row for every client, after the last round."""
    clusters = truth.clusters
    train = torch.cat([shard.cohort.data.train.sizes for shard in engine.shards])
    test = torch.cat([shard.cohort.data.test.sizes for shard in engine.shards])
    everywhere = results.global_accuracy
    return [
        {
            "client": i,
            "cluster": None if clusters is None else int(clusters[i]),
            **({} if truth.attackers is None else {"attacker": bool(truth.attackers[i])}),
            "train_samples": int(train[i]),
            "test_samples": int(test[i]),
            "accuracy": float(results.accuracy[i]),
            "loss": float(results.loss[i]),
            "before_mixing": float(results.before_mixing[i]),
            "models_received": int(results.models_received[i]),
            "bytes_received": int(results.bytes_received[i]),
            "quarantined": int(results.quarantined[i]),
            **({} if everywhere is None else {"global_accuracy": float(everywhere[i])}),
            **_private(results, i),
        }
        for i in range(results.accuracy.size)
    ]


def _private(results: Results, i: int) -> dict[str, Any]:
    """What is known of client i where a method is private."""
    row: dict[str, Any] = {}
    if results.proxy_accuracy is not None:
        row["proxy_accuracy"] = float(results.proxy_accuracy[i])
    if results.epsilon is not None and results.delta is not None and results.releases is not None:
        row |= {"epsilon": float(results.epsilon[i]), "delta": float(results.delta[i])}
        row["releases"] = int(results.releases[i])
    return row


def outside(engine: engines.Engine) -> dict[str, float]:
    """For a row of metrics: how clients that never train fare, over all their samples and as a mean over clients."""
    row = {}
    for role, found in engines.outsiders(engine).items():
        spread = metrics.spread(found.accuracy)
        row[f"{role}_accuracy"] = found.pooled
        row[f"{role}_accuracy_clients"], row[f"{role}_worst10"] = spread["accuracy"], spread["worst10"]
    return row


def of_method(engine: engines.Engine) -> dict[str, Any]:
    """For a row of metrics: what the method itself has to say of its state."""
    return _said(engine, "report", "reported")


def files(engine: engines.Engine) -> dict[str, Any]:
    """What the method wants kept at the end of a run: name of a file -> what becomes JSON."""
    return _said(engine, "files", "filed")


def _said(engine: engines.Engine, each: str, all_together: str) -> dict[str, Any]:
    """What a method says of each cohort as one; without a way to join them it is the same of all."""
    method = engine.shards[0].method
    if not hasattr(method, each):
        return {}
    join = getattr(method, all_together, None)
    parts = [getattr(method, each)(shard.cohort, shard.state) for shard in engine.shards[: 1 if join is None else None]]
    found: dict[str, Any] = parts[0] if join is None else join(parts)
    return found


def diverged(results: Results, truth: Truth, rounds: int) -> str | None:
    """What to say where honest clients' models went astray in `rounds` rounds; attackers' are meant to be refused."""
    honest = truth.honest
    times = results.quarantined if honest is None else results.quarantined[honest]
    if not times.any():
        return None
    whose = "" if honest is None else "honest clients' "
    return (
        f"{whose}models were not finite in {times.sum():,} of {rounds * times.size:,} client-rounds and were put back: "
        "a smaller training.lr may help"
    )


def strangers(engine: engines.Engine) -> list[dict[str, Any]]:
    """A row for every client that never trains."""
    return [
        {"role": role, "client": i, "samples": int(size), "accuracy": float(accuracy), "loss": float(loss)}
        for role, found in engines.outsiders(engine).items()
        for i, (accuracy, loss, size) in enumerate(zip(found.accuracy, found.loss, found.sizes))
    ]


def summary(history: list[dict[str, Any]], config: Config) -> dict[str, Any]:
    """The last row of metrics, and the best."""
    if not history:  # resumed after its last round
        raise UserError(
            "metrics.jsonl is gone and no round is left to evaluate: add some with `kinfolk resume RUN --rounds N`"
        )
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
