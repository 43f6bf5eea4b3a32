"""Is the promise kept? A canary is put into one record, and somebody who knows all else tries to tell if it is there.

Two worlds differ in one record of a client: its gradient is C·v in one and -C·v in the other, the furthest that two
clipped gradients can be apart. Each trial is a client of its own. The observer knows the model, every other record and
the direction v, takes the known gradients off the releases, projects the rest on v and adds up the rounds. How often it
errs bounds epsilon from below: Clopper-Pearson bounds on both error rates, which hold together with the stated
confidence, are turned into an epsilon. For any mechanism that is ln((1 - δ - misses) / false alarms). Where releases
are known to be Gaussian, the error rates bound the distance of two normal distributions, whose epsilon is known (Nasr
et al. 2023); nothing is lost on that way.

An honest implementation comes close to its claim from below. More than the claim is a leak; much less means that
something else is added than what was claimed, which is a mistake too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinfolk.cohort.layout import Layout
from kinfolk.privacy.accounting import Mechanism, epsilon, gaussian_epsilon
from kinfolk.privacy.dpsgd import PrivateGradients
from kinfolk.privacy.sampling import draw
from kinfolk.privacy.source import Seeded

CLASSES = 2  # with two classes a label's gradient is the other one's, turned around
LEAST = 0.8  # of the claim, for releases without sampling


@dataclass(frozen=True)
class Trial:
    """What is audited: gradients of a linear model, released `mechanism.releases` times from weights of zero."""

    mechanism: Mechanism
    delta: float = 1e-5
    clip: float = 0.5
    records: int = 4
    features: int = 6
    trials: int = 20_000  # of each world
    seed: int = 0
    confidence: float = 0.95


@dataclass(frozen=True)
class Audit:
    """A lower bound of epsilon that holds with the stated confidence, beside what was claimed."""

    claimed: float
    lower: float
    confidence: float
    trials: int
    misses: float  # share of canaries taken for the other record
    alarms: float  # share of the other record taken for the canary
    tight: bool  # whether an honest implementation must reach 80 % of its claim

    @property
    def flagged(self) -> str | None:
        """What is wrong, if something is."""
        if self.lower > self.claimed:
            return f"leaks epsilon {self.lower:.3g} or more, claimed is {self.claimed:.3g}"
        if self.tight and self.lower < LEAST * self.claimed:
            return (
                f"shows epsilon {self.lower:.3g}, claimed is {self.claimed:.3g}: other noise or clipping than claimed"
            )
        return None


Release = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (round, x [n·R, f], y [n, R], ids [n]) -> [n, d]


def audit(trial: Trial, release: Release | None = None) -> Audit:
    """Play the trials. release: what a client sends in a round; default: the package's own DP-SGD step."""
    release = release or honest(trial)
    x, direction = _records(trial)
    scores = []
    for world in range(2):
        ids = torch.arange(trial.trials) + world * trial.trials
        y = _labels(trial, world).expand(trial.trials, -1).contiguous()
        known = _clipped(x[1:], y[0, 1:], trial.clip).sum(dim=0)  # all but the canary, by formulas of our own
        samples = x.repeat(trial.trials, 1)
        total = sum(release(t, samples, y, ids) for t in range(trial.mechanism.releases))
        scores.append((_batch(trial) * total - trial.mechanism.releases * trial.mechanism.rate * known) @ direction)
    claimed = epsilon([trial.mechanism], trial.delta)
    tight = not trial.mechanism.sampled
    lower, misses, alarms = lower_bound(scores[0], scores[1], trial.delta, trial.confidence, gaussian=tight)
    return Audit(claimed, lower, trial.confidence, trial.trials, misses, alarms, tight)


def honest(trial: Trial) -> Release:
    """The step as methods take it, from a model of zeros."""
    module = nn.Sequential(nn.Linear(trial.features, CLASSES)).to(torch.float64)
    layout = Layout.of(module)
    gradients = PrivateGradients(module, layout, (trial.features,), trial.clip)
    mechanism, source = trial.mechanism, Seeded(trial.seed)

    def release(t: int, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        clients, size = y.shape
        starts, sizes = torch.arange(clients) * size, torch.full((clients,), size)
        batches = draw(source, t, ids, sizes, mechanism.sampling, mechanism.rate)
        labels = y.gather(1, batches.positions)
        deviation = torch.full((clients,), mechanism.deviation(trial.clip), dtype=torch.float64)
        models = torch.zeros(clients, layout.size, dtype=torch.float64)
        return gradients(models, x, starts, batches, (labels,), deviation, source, t, ids)[0]

    return release


def lower_bound(
    with_canary: Tensor, without: Tensor, delta: float, confidence: float = 0.95, gaussian: bool = False
) -> tuple[float, float, float]:
    """The bound, the misses and the false alarms, of scores [n] that are higher where the canary is.

    gaussian: the scores are known to be normal with one variance, and 0 lies halfway. Otherwise the threshold is chosen
    on every other score and used on the rest.
    """
    if gaussian:
        misses, alarms = (with_canary < 0), (without >= 0)
        high = [_upper(int(errors.sum()), errors.numel(), confidence) for errors in (misses, alarms)]
        distance = -float(torch.special.ndtri(torch.tensor(high, dtype=torch.float64)).sum())
        lower = 0.0 if distance <= 0 else gaussian_epsilon(1 / distance, delta)
        return lower, float(misses.double().mean()), float(alarms.double().mean())
    candidates = torch.quantile(without[::2][:100_000], torch.linspace(0.5, 1, 50, dtype=without.dtype)).tolist()

    def bound(half: int, threshold: float) -> tuple[float, float, float]:
        return _any_epsilon(with_canary[half::2], without[half::2], threshold, delta, confidence)

    return bound(1, max(candidates, key=lambda threshold: bound(0, threshold)[0]))


def _any_epsilon(
    with_canary: Tensor, without: Tensor, threshold: float, delta: float, confidence: float
) -> tuple[float, float, float]:
    misses, alarms = with_canary < threshold, without >= threshold
    most_misses, most_alarms = (_upper(int(e.sum()), e.numel(), confidence) for e in (misses, alarms))
    hit = 1 - delta - most_misses
    lower = math.log(hit / most_alarms) if hit > most_alarms else 0.0
    return lower, float(misses.double().mean()), float(alarms.double().mean())


def _upper(errors: int, trials: int, confidence: float) -> float:
    """Clopper-Pearson upper bound of a rate; two of them hold together with `confidence`."""
    from scipy.stats import beta

    return 1.0 if errors >= trials else float(beta.ppf(1 - (1 - confidence) / 2, errors + 1, trials - errors))


def _batch(trial: Trial) -> float:
    return trial.mechanism.rate * trial.records


def _labels(trial: Trial, world: int) -> Tensor:
    """[R] of one client: the canary's comes first."""
    others = torch.arange(1, trial.records) % CLASSES
    return torch.cat([torch.tensor([1 - world]), others])


def _records(trial: Trial) -> tuple[Tensor, Tensor]:
    """The samples [R, f] of a client, the canary first, and the unit direction [d] of the gradient of its label 1.

    The canary's input has length 1, so weights and bias share its gradient: who clips them apart is found out.
    """
    generator = torch.Generator().manual_seed(trial.seed)
    x = 3 * torch.randn(trial.records, trial.features, generator=generator, dtype=torch.float64)
    x[0] /= x[0].norm()
    gradient = _clipped(x[:1], torch.tensor([1]), trial.clip)[0]
    return x, gradient / gradient.norm()


def _clipped(x: Tensor, y: Tensor, clip: float) -> Tensor:
    """Clipped gradients [R, d] of a linear model of zeros, weights [2, f] before biases [2]."""
    slope = 0.5 - nn.functional.one_hot(y, CLASSES).to(torch.float64)  # both classes are equally likely
    weights = slope[:, :, None] * x[:, None, :]
    flat = torch.cat([weights.flatten(1), slope], dim=1)
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    return flat / (norms / clip).clamp(min=1)
