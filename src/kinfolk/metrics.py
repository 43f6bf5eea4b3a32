"""The one vocabulary of results, used in every table and file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

FEW = 2000  # clients up to which a table of all pairs is small
TOGETHER = 2**20  # pairs whose labels are compared at a time


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

    @cached_property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Clients and their neighbors, each pair once and in order, without pairs of a client with itself."""
        span = int(max(self.client.max(initial=0), self.neighbor.max(initial=0))) + 1
        keys = self.client * span + self.neighbor
        if span <= FEW:  # mixed twice is still one neighbor
            there = np.zeros(span * span, dtype=bool)
            there[keys] = True
            keys = np.flatnonzero(there)
        else:
            keys = np.unique(keys)
        client, neighbor = np.divmod(keys, span)
        return client[client != neighbor], neighbor[client != neighbor]


def spread(accuracy: np.ndarray) -> dict[str, float]:
    """Accuracy [n] of each client's own model on its own test set: mean, std over clients, mean of the worst tenth."""
    known = np.sort(accuracy[np.isfinite(accuracy)])
    if not known.size:
        return {"accuracy": float("nan"), "std": float("nan"), "worst10": float("nan")}
    worst = known[: max(1, round(0.1 * known.size))]
    return {"accuracy": float(known.mean()), "std": float(known.std()), "worst10": float(worst.mean())}


def matching(edges: Edges, clusters: np.ndarray, who: np.ndarray | None = None) -> dict[str, float]:
    """Precision and recall of the neighbors found, mean over clients (of those in who [n] bool) and for client 0.

    precision_i = kin among i's neighbors / i's neighbors (undefined without neighbors, left out of the mean);
    recall_i = kin among i's neighbors / i's kin (0 without neighbors; undefined without kin).
    """
    n = clusters.size
    client, neighbor = edges.pairs
    kin = np.bincount(client, weights=clusters[client] == clusters[neighbor], minlength=n)
    found = np.bincount(client, minlength=n)
    possible = np.bincount(clusters, minlength=clusters.max() + 1)[clusters] - 1
    precision = np.divide(kin, found, out=np.full(n, np.nan), where=found > 0)
    recall = np.divide(kin, possible, out=np.full(n, np.nan), where=possible > 0)
    if who is not None:
        precision, recall = (np.where(who, values, np.nan) for values in (precision, recall))
    return {
        "neighbor_precision": _mean(precision),
        "neighbor_recall": _mean(recall),
        "neighbor_precision_client0": float(precision[0]),
        "neighbor_recall_client0": float(recall[0]),
    }


def overlaps(labels: np.ndarray, client: np.ndarray, neighbor: np.ndarray) -> np.ndarray:
    """Share of labels that each pair has in common, Σ_c min(a_c, b_c): [e]. labels: [n, C]; client, neighbor: [e]."""
    found = np.empty(client.size)
    for first in range(0, client.size, TOGETHER):
        some = slice(first, first + TOGETHER)
        found[some] = np.minimum(labels[client[some]], labels[neighbor[some]]).sum(axis=1)
    return found


def all_overlaps(labels: np.ndarray) -> np.ndarray | None:
    """`overlaps` of all pairs, [n, n]; None where that would take too much room."""
    n, classes = labels.shape
    if n > FEW:
        return None
    blocks = np.array_split(labels, max(1, n * n * classes // TOGETHER))
    return np.concatenate([np.minimum(block[:, None], labels).sum(axis=2) for block in blocks])


def choice(
    edges: Edges, labels: np.ndarray, overlap: np.ndarray | None = None, who: np.ndarray | None = None
) -> dict[str, float]:
    """How many peers a client has, mean over clients, and how much their labels overlap with its own.

    labels: [n, C] shares of a client's training samples; the overlap of two clients is what `overlaps` says, mean over
    a client's peers, then over the clients that have any. overlap: [n, n], if that of all pairs is known already. who:
    [n] bool, the only clients that count.
    """
    n = labels.shape[0]
    client, neighbor = edges.pairs
    if who is not None:
        client, neighbor = client[who[client]], neighbor[who[client]]
    found = np.bincount(client, minlength=n)
    row = {"neighbors": float((found if who is None else found[who]).mean())}
    if np.ptp(labels, axis=0).max(initial=0.0) > 1e-9:  # else everybody overlaps wholly with everybody
        common = overlaps(labels, client, neighbor) if overlap is None else overlap[client, neighbor]
        sums = np.bincount(client, weights=common, minlength=n)
        row["label_overlap"] = _mean(np.divide(sums, found, out=np.full(n, np.nan), where=found > 0))
    return row


def lied_to(edges: Edges, attackers: np.ndarray) -> float:
    """Share of the peers of honest clients that are attackers [n] bool."""
    client, neighbor = edges.pairs
    honest = ~attackers[client]
    return float(attackers[neighbor[honest]].mean()) if honest.any() else float("nan")


def cluster_ari(found: np.ndarray, true: np.ndarray) -> float:
    """Adjusted Rand index of the clusters found [n] against the true ones [n]: 1 the same, about 0 by chance."""
    from sklearn.metrics import adjusted_rand_score  # slow to import, and few runs need it

    return float(adjusted_rand_score(true, found))


def grouping(groups: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Of groups [n] (-1: none) and shares of labels [n, C]: how alike the clients of a group are, over pairs.

    purity: share of the pairs within groups that have the same main label, and what chance would give; distance: of
    their labels, Σ |a - b|. NaN without a pair.
    """
    client, other = np.triu_indices(groups.size, 1)
    inside = (groups[client] == groups[other]) & (groups[client] >= 0)
    main = labels.argmax(axis=1)
    same = main[client] == main[other]
    apart = 2 - 2 * overlaps(labels, client[inside], other[inside])
    return {
        "group_purity": _mean(same[inside].astype(float)),
        "group_purity_chance": _mean(same.astype(float)),
        "group_label_distance": _mean(apart),
    }


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
