"""The one vocabulary of results, used in every table and file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Edges:
    """Who mixed with whom: parallel arrays [e]."""

    client: np.ndarray
    neighbor: np.ndarray
    weight: np.ndarray

    @classmethod
    def none(cls) -> Edges:
        return cls(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))

    @classmethod
    def of_lists(cls, neighbors: np.ndarray) -> Edges:
        """Edges from lists of neighbors [n, k] (ids, -1 for none)."""
        client, column = np.nonzero(neighbors >= 0)
        return cls(client, neighbors[client, column], np.ones(client.size))


def spread(accuracy: np.ndarray) -> dict[str, float]:
    """Accuracy [n] of each client's own model on its own test set: mean, std over clients, mean of the worst tenth."""
    known = np.sort(accuracy[np.isfinite(accuracy)])
    if not known.size:
        return {"accuracy": float("nan"), "std": float("nan"), "worst10": float("nan")}
    worst = known[: max(1, round(0.1 * known.size))]
    return {"accuracy": float(known.mean()), "std": float(known.std()), "worst10": float(worst.mean())}


def matching(edges: Edges, clusters: np.ndarray) -> dict[str, float]:
    """Precision and recall of the neighbors found, mean over clients and for client 0.

    precision_i = kin among i's neighbors / i's neighbors (undefined without neighbors, left out of the mean);
    recall_i = kin among i's neighbors / i's kin (0 without neighbors; undefined without kin).
    """
    n = clusters.size
    pairs = np.unique(np.stack([edges.client, edges.neighbor]), axis=1)  # mixed twice is still one neighbor
    client, neighbor = pairs[:, pairs[0] != pairs[1]]
    kin = np.bincount(client, weights=clusters[client] == clusters[neighbor], minlength=n)
    found = np.bincount(client, minlength=n)
    possible = np.bincount(clusters, minlength=clusters.max() + 1)[clusters] - 1
    precision = np.divide(kin, found, out=np.full(n, np.nan), where=found > 0)
    recall = np.divide(kin, possible, out=np.full(n, np.nan), where=possible > 0)
    return {
        "neighbor_precision": _mean(precision),
        "neighbor_recall": _mean(recall),
        "neighbor_precision_client0": float(precision[0]),
        "neighbor_recall_client0": float(recall[0]),
    }


def choice(edges: Edges, labels: np.ndarray) -> dict[str, float]:
    """How many peers a client has, mean over clients, and how much their labels overlap with its own.

    labels: [n, C] shares of a client's training samples. The overlap of two clients is the share of labels that they
    have in common, Σ_c min(a_c, b_c); mean over a client's peers, then over the clients that have any.
    """
    n = labels.shape[0]
    pairs = np.unique(np.stack([edges.client, edges.neighbor]), axis=1)
    client, neighbor = pairs[:, pairs[0] != pairs[1]]
    found = np.bincount(client, minlength=n)
    row = {"neighbors": float(found.mean())}
    if np.ptp(labels, axis=0).max(initial=0.0) > 1e-9:  # else everybody overlaps wholly with everybody
        common = np.minimum(labels[client], labels[neighbor]).sum(axis=1)
        sums = np.bincount(client, weights=common, minlength=n)
        row["label_overlap"] = _mean(np.divide(sums, found, out=np.full(n, np.nan), where=found > 0))
    return row


def cluster_ari(found: np.ndarray, true: np.ndarray) -> float:
    """Adjusted Rand index of the clusters found [n] against the true ones [n]: 1 the same, about 0 by chance."""
    from sklearn.metrics import adjusted_rand_score  # slow to import, and few runs need it

    return float(adjusted_rand_score(true, found))


def helped_and_hurt(accuracy: np.ndarray, local: np.ndarray, test_sizes: np.ndarray) -> tuple[float, float]:
    """Share of clients better and worse than their own local run by more than one standard error of their test set."""
    rate = (accuracy + local) / 2
    error = np.sqrt(rate * (1 - rate) / np.maximum(test_sizes, 1))
    gain = accuracy - local
    known = np.isfinite(gain)
    if not known.any():
        return float("nan"), float("nan")
    return float((gain > error)[known].mean()), float((gain < -error)[known].mean())


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")
