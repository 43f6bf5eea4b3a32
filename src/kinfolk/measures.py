"""What can be read off a finished run, by name: the vocabulary of studies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kinfolk.errors import UserError, nearest
from kinfolk.experiment import Result


@dataclass(frozen=True)
class Measure:
    """A number of a finished run; None where it has none."""

    heading: str
    of: Callable[[Result], float | None]
    digits: int = 2


def find(name: str) -> Measure:
    if name not in MEASURES:
        raise UserError(f"unknown measure '{name}': {nearest(name, MEASURES)}")
    return MEASURES[name]


def _number(key: str, factor: float = 1.0) -> Callable[[Result], float | None]:
    def of(result: Result) -> float | None:
        value = result.summary.get(key)
        return None if value is None else factor * float(value)

    return of


def _mean(key: str) -> Callable[[Result], float | None]:
    """Of a list in the summary; None where there is none, or nothing in it."""

    def of(result: Result) -> float | None:
        values = result.summary.get(key)
        return sum(values) / len(values) if values else None

    return of


def _per_client(key: str) -> Callable[[Result], float | None]:
    """What was received, in the unit of the nominal costs, Δ: one model for every client. None where nothing was."""

    def of(result: Result) -> float | None:
        return float(result.summary[key]) / len(result.clients) or None

    return of


def _nominal(key: str) -> Callable[[Result], float | None]:
    """What the method should cost by its formula; None where it has none."""

    def of(result: Result) -> float | None:
        method = result.config.method
        if not hasattr(method, "nominal"):
            return None
        return float(getattr(method.nominal(result.config.run.rounds, len(result.clients)), key))

    return of


MEASURES = {
    "accuracy": Measure("accuracy, %", _number("accuracy", 100)),
    "accuracy_client0": Measure("accuracy of client 0, %", _number("accuracy_client0", 100)),
    "proxy_accuracy": Measure("accuracy of the proxies, %", _number("proxy_accuracy", 100)),
    "constant_accuracy": Measure("always the client's most frequent label, %", _number("constant_accuracy", 100)),
    "epsilon": Measure("epsilon, accounted", _number("epsilon"), 3),
    "group_purity": Measure("pairs of a group with the same main label, %", _number("group_purity", 100)),
    "group_purity_chance": Measure("the same by chance, %", _number("group_purity_chance", 100)),
    "group_objective": Measure("sum of known distances within groups", _number("group_objective"), 1),
    "best_accuracy": Measure("accuracy in the best round, %", _number("best_accuracy", 100)),
    "global_accuracy": Measure("accuracy on the common test set, %", _number("global_accuracy", 100)),
    "best_global_accuracy": Measure("best accuracy on the common test set, %", _number("best_global_accuracy", 100)),
    "new_accuracy": Measure("accuracy on all samples of new clients, %", _number("new_accuracy", 100)),
    "new_accuracy_clients": Measure("accuracy of new clients, mean, %", _number("new_accuracy_clients", 100)),
    "new_worst10": Measure("accuracy of the worst tenth of new clients, %", _number("new_worst10", 100)),
    "validation_accuracy": Measure("accuracy on validation clients, %", _number("validation_accuracy", 100)),
    "before_mixing": Measure("accuracy before mixing, %", _number("before_mixing", 100)),
    "worst10": Measure("accuracy of the worst tenth of the clients, %", _number("worst10", 100)),
    "loss": Measure("test loss", _number("loss"), 3),
    "neighbor_precision": Measure("neighbor precision, %", _number("neighbor_precision", 100)),
    "neighbor_recall": Measure("neighbor recall, %", _number("neighbor_recall", 100)),
    "neighbor_precision_client0": Measure("precision of client 0, %", _number("neighbor_precision_client0", 100)),
    "neighbor_recall_client0": Measure("recall of client 0, %", _number("neighbor_recall_client0", 100)),
    "neighbors": Measure("peers per client", _number("neighbors"), 1),
    "label_overlap": Measure("label overlap with the peers, %", _number("label_overlap", 100)),
    "ari": Measure("adjusted Rand index of the clusters", _number("ari"), 3),
    "domain_entropy": Measure("evenness of the domains in use", _number("domain_entropy"), 2),
    "domain_share": Measure("lambda, mean over layers", _mean("domain_share"), 2),
    "domain_ari": Measure("domains of training samples and true ones, adjusted Rand index", _number("domain_ari")),
    "domain_ari_clients": Measure("the same of clients", _number("domain_ari_clients")),
    "domain_ari_within": Measure("the same within a client, mean", _number("domain_ari_within")),
    "new_domain_ari": Measure("domains of new clients' samples, adjusted Rand index", _number("new_domain_ari")),
    "new_domain_ari_clients": Measure("domains of new clients, adjusted Rand index", _number("new_domain_ari_clients")),
    "new_domain_ari_within": Measure("domains within a new client, mean", _number("new_domain_ari_within")),
    "nominal_total": Measure("nominal cost, Δ", _nominal("total"), 0),
    "nominal_peak": Measure("nominal peak, Δ", _nominal("peak")),
    "received_total": Measure("received, Δ", _per_client("models_received"), 1),
    "received_peak": Measure("received at once, Δ", _per_client("peak_received")),
    "seconds": Measure("seconds", _number("seconds"), 1),
}  # fmt: skip
