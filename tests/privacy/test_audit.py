"""The audit: an honest implementation passes, and eleven mistakes that people make are found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kinfolk.privacy import Mechanism, clipping, dpsgd, source
from kinfolk.privacy.accounting import epsilon
from kinfolk.privacy.audit import LEAST, Release, Trial, _labels, _records, audit, honest, lower_bound

STRICT = Trial(Mechanism(2.0, releases=4))  # all records, replace-one, no distillation: epsilon 4.377 at 1e-5
SAMPLED = Trial(Mechanism(0.5, 0.1, "poisson"))
Patch = pytest.MonkeyPatch


def test_an_honest_run_comes_close_to_its_claim_from_below() -> None:
    found = audit(STRICT)
    assert found.claimed == pytest.approx(4.377, abs=1e-3)
    assert LEAST * found.claimed <= found.lower <= found.claimed
    assert found.flagged is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mechanism", [Mechanism(2.0, releases=4), Mechanism(0.5), Mechanism(4.0, releases=10)])
def test_so_it_does_whatever_the_seed(mechanism: Mechanism, seed: int) -> None:
    """At 95 % an honest audit may exceed its claim now and then, by little."""
    found = audit(Trial(mechanism, seed=seed))
    assert LEAST * found.claimed <= found.lower <= 1.02 * found.claimed


def test_honest_sampling_stays_below_its_claim() -> None:
    for mechanism in (SAMPLED.mechanism, Mechanism(0.8, 0.5, "without-replacement")):
        found = audit(replace(SAMPLED, mechanism=mechanism, trials=6000))
        assert 0 <= found.lower <= found.claimed
        assert found.flagged is None


# -- mistakes ----------------------------------------------------------------------------------------------------


def no_clipping(patch: Patch, trial: Trial) -> Release:
    patch.setattr(clipping, "factors", lambda norms, clip, inside: torch.ones_like(norms))
    return honest(trial)


def clipping_at_the_median_of_the_batch(patch: Patch, trial: Trial) -> Release:
    def factors(norms: Tensor, clip: float, inside: Tensor | None) -> Tensor:
        return (norms.median(dim=1, keepdim=True).values / norms).clamp(max=1)

    patch.setattr(clipping, "factors", factors)
    return honest(trial)


def clipping_by_the_mean_of_a_batch(patch: Patch, trial: Trial) -> Release:
    def factors(norms: Tensor, clip: float, inside: Tensor | None) -> Tensor:
        return (clip / norms.mean(dim=1, keepdim=True)).clamp(max=1).expand_as(norms)

    patch.setattr(clipping, "factors", factors)
    return honest(trial)


def clipping_every_parameter_on_its_own(patch: Patch, trial: Trial) -> Release:
    def add(self: clipping._Linear, seen: Tensor, g: Tensor, factor: Tensor, into: dict[str, Tensor]) -> None:
        length = g.norm(dim=2, keepdim=True)
        weights = (trial.clip / (length * seen.norm(dim=2, keepdim=True))).clamp(max=1)
        into[f"{self.name}.weight"].baddbmm_((g * weights).transpose(1, 2), seen)
        into[f"{self.name}.bias"] += (g * (trial.clip / length).clamp(max=1)).sum(dim=1)

    patch.setattr(clipping._Linear, "add", add)
    return honest(trial)


def noise_for_a_sensitivity_of_one_clipping_norm(patch: Patch, trial: Trial) -> Release:
    patch.setattr(Mechanism, "sensitivity", 1)
    return honest(trial)


def noise_divided_by_the_batch_twice(patch: Patch, trial: Trial) -> Release:
    scaled_noise(patch, lambda deviation: deviation / trial.records)
    return honest(trial)


def noise_for_every_sample(patch: Patch, trial: Trial) -> Release:
    scaled_noise(patch, lambda deviation: deviation * trial.records**0.5)
    return honest(trial)


def scaled_noise(patch: Patch, scale: Callable[[Tensor], Tensor]) -> None:
    plain = source.add_noise

    def scaled(s: source.Source, purpose: str, t: int, ids: Tensor, deviation: Tensor, into: Tensor) -> None:
        plain(s, purpose, t, ids, scale(deviation), into)

    patch.setattr(dpsgd.source, "add_noise", scaled)


def the_same_noise_in_every_round(patch: Patch, trial: Trial) -> Release:
    plain = source.add_noise
    patch.setattr(dpsgd.source, "add_noise", lambda s, purpose, t, *rest: plain(s, purpose, 0, *rest))
    return honest(trial)


def the_same_noise_for_every_client(patch: Patch, trial: Trial) -> Release:
    plain = source.add_noise
    patch.setattr(
        dpsgd.source, "add_noise", lambda s, purpose, t, ids, *rest: plain(s, purpose, t, torch.zeros_like(ids), *rest)
    )
    return honest(trial)


def releases_that_are_not_charged(patch: Patch, trial: Trial) -> Release:
    """Every round releases twice; the sum of both, with the noise of a mean, says as much as the two."""
    step = honest(trial)

    def release(t: int, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        return (step(t, x, y, ids) + step(t + 1000, x, y, ids)) / 2

    return release


def all_records_where_a_tenth_was_claimed(patch: Patch, trial: Trial) -> Release:
    actual = replace(trial, mechanism=replace(trial.mechanism, rate=1.0))
    step = honest(actual)
    return lambda t, x, y, ids: step(t, x, y, ids) / trial.mechanism.rate


MISTAKES = [
    (STRICT, no_clipping),
    (STRICT, clipping_at_the_median_of_the_batch),
    (STRICT, clipping_by_the_mean_of_a_batch),
    (STRICT, clipping_every_parameter_on_its_own),
    (STRICT, noise_for_a_sensitivity_of_one_clipping_norm),
    (STRICT, noise_divided_by_the_batch_twice),
    (STRICT, noise_for_every_sample),
    (STRICT, the_same_noise_in_every_round),
    (STRICT, the_same_noise_for_every_client),
    (STRICT, releases_that_are_not_charged),
    (SAMPLED, all_records_where_a_tenth_was_claimed),
]
# These show this observer less than was claimed: more noise, or a canary that is cut by louder records.
TOO_QUIET = {noise_for_every_sample, the_same_noise_in_every_round, clipping_by_the_mean_of_a_batch}


@pytest.mark.parametrize(("trial", "mistake"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_mistake_is_found(trial: Trial, mistake: Callable[..., Release], monkeypatch: Patch) -> None:
    trial = replace(trial, trials=6000)
    found = audit(trial, mistake(monkeypatch, trial))
    assert found.flagged is not None
    if mistake in TOO_QUIET:
        assert "than claimed" in found.flagged
    elif mistake is not the_same_noise_for_every_client:  # then all trials have the same luck
        assert "leaks" in found.flagged
        assert found.lower > found.claimed


def test_the_mistakes_are_not_found_where_there_are_none() -> None:
    for trial in {trial for trial, _ in MISTAKES}:
        assert audit(replace(trial, trials=6000)).flagged is None


# -- the bounds themselves ---------------------------------------------------------------------------------------


def test_the_gaussian_bound_covers_as_often_as_it_says() -> None:
    """Scores of two normal distributions whose epsilon is known: the bound may exceed it in 5 % of all cases."""
    distance, delta = 1.5, 1e-5
    truth = epsilon([Mechanism(1 / distance)], delta)
    generator = torch.Generator().manual_seed(0)
    above = 0
    for _ in range(200):
        scores = torch.randn(2, 1000, generator=generator, dtype=torch.float64)
        lower, _, _ = lower_bound(scores[0] + distance / 2, scores[1] - distance / 2, delta, gaussian=True)
        above += lower > truth
    assert above <= 20  # 5 % are 10; more than 20 has a chance of one in 800


def test_the_bound_for_anything_covers_too() -> None:
    """Randomised response: the canary is seen with a probability that is e^epsilon times that of a false alarm."""
    generator = torch.Generator().manual_seed(1)
    truth = 1.2
    seen = torch.exp(torch.tensor(truth)) / (1 + torch.exp(torch.tensor(truth)))
    lowers = []
    for _ in range(40):
        draws = torch.rand(2, 4000, generator=generator, dtype=torch.float64)
        scores = (draws < torch.tensor([[float(seen)], [1 - float(seen)]])).double()
        lowers.append(lower_bound(scores[0], scores[1], 0.0)[0])
    assert sum(lower > truth for lower in lowers) <= 6
    assert max(lowers) > 0.85 * truth


def test_scores_that_say_nothing_bound_nothing() -> None:
    scores = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert lower_bound(scores[0], scores[1], 1e-5, gaussian=True)[0] < 0.5
    assert lower_bound(scores[0], scores[1], 1e-5)[0] < 0.5
    same = torch.zeros(100, dtype=torch.float64)
    assert lower_bound(same, same, 1e-5, gaussian=True)[0] == 0


def test_the_canary_stands_as_far_apart_as_two_records_can() -> None:
    quiet = replace(STRICT, mechanism=Mechanism(1e-6), trials=1)
    step = honest(quiet)
    x, direction = _records(quiet)
    found = [step(0, x, _labels(quiet, world)[None], torch.zeros(1, dtype=torch.int64))[0] for world in (0, 1)]
    moved = quiet.records * (found[0] - found[1])
    torch.testing.assert_close(moved, 2 * quiet.clip * direction, rtol=0, atol=2e-5)
