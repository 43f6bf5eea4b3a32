"""The batched hard EM against a plain one for one client, and every degenerate case by itself."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kinfolk.matching import mixture
from kinfolk.matching.mixture import Match, match

NO_EVENTS = dict.fromkeys(
    ("nobody_answered", "no_candidates", "no_information", "empty_list", "all_same", "none_same", "cycle"), 0
)


@dataclass
class Plain:
    """What the plain hard EM finds for one client."""

    same: set[int]
    events: list[str]
    mean: tuple[float, float] = (math.nan, math.nan)
    variance: tuple[float, float] = (math.nan, math.nan)
    close: bool = False  # a decision that rounding could turn


def hard_em(y: dict[int, float], old: list[int], new: list[int], seeds: int) -> Plain:
    """HARD_EM as it is specified, for one client: similarities y of the listed (old) and of the strangers (new)."""
    everybody = sorted([*old, *new])
    if not everybody:
        return Plain(set(), ["nobody_answered"])
    if not new:
        return Plain(set(), ["no_candidates"])
    whole = _moments([y[j] for j in everybody])[1]
    if whole < 1e-24 or len(everybody) < 3:
        return Plain(set(old), ["no_information"])
    events = [] if old else ["empty_list"]
    first = set(old) or set(sorted(new, key=lambda j: (-y[j], j))[:seeds])
    floor = max(1e-12, 1e-2 * whole)
    z = {j: 0 if j in first else 1 for j in everybody}
    seen = [z]
    likelihoods = []
    close = False
    for _ in range(100):
        parts = [[y[j] for j in everybody if z[j] == r] for r in (0, 1)]
        if not all(parts):
            break
        mean, variance = zip(*(_moments(part) for part in parts))
        variance = tuple(max(v, floor) for v in variance)
        share = [len(part) / len(everybody) for part in parts]
        score = {
            j: [
                math.log(share[r]) - 0.5 * math.log(variance[r]) - (y[j] - mean[r]) ** 2 / (2 * variance[r])
                for r in (0, 1)
            ]
            for j in everybody
        }
        close |= any(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in score.values())
        likelihoods.append(sum(score[j][z[j]] for j in everybody))
        z = {j: (0 if j in old else 1) if a == b else int(b > a) for j, (a, b) in score.items()}
        if z == seen[-1]:
            break
        if z in seen:
            cycle = range(seen.index(z), len(seen))
            z = seen[max(cycle, key=lambda s: likelihoods[s])]
            events.append("cycle")
            break
        seen.append(z)
    parts = [[y[j] for j in everybody if z[j] == r] for r in (0, 1)]
    mean, variance = zip(*(_moments(part) if part else (math.nan, 0.0) for part in parts))
    variance = tuple(max(v, floor) for v in variance)
    if mean[0] < mean[1]:
        z = {j: 1 - r for j, r in z.items()}
        mean, variance = mean[::-1], variance[::-1]
    same = {j for j in everybody if z[j] == 0}
    if len(same) == len(everybody):
        events.append("all_same")
    if not same:
        events.append("none_same")
    return Plain(same, events, mean, variance, close)


def _moments(values: list[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((v - mean) ** 2 for v in values) / len(values)


def plainly(y: Tensor, observed: Tensor, listed: Tensor, seeds: int) -> list[Plain]:
    found = []
    for values, seen, old in zip(y.tolist(), observed.tolist(), listed.tolist()):
        columns = [j for j, value in enumerate(values) if seen[j] and not math.isnan(value)]
        known, fresh = [j for j in columns if old[j]], [j for j in columns if not old[j]]
        found.append(hard_em(dict(enumerate(values)), known, fresh, seeds))
    return found


def draw(kind: str, m: int, c: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(m, c, generator=generator, dtype=torch.float64)
    if kind == "one Gaussian":
        return noise
    if kind == "heavy tails":
        return (2 * noise).exp()
    if kind == "ties":
        return (2 * noise).round() / 4
    kin = torch.rand(m, c, generator=generator) < torch.rand(m, 1, generator=generator)
    return 0.3 + 0.4 * kin + 0.1 * noise


def one(y: list[float], listed: list[int], seeds: int = 2) -> Match:
    """A single client whose first `listed` entries are 1 for the list and 0 for strangers."""
    values = torch.tensor([y], dtype=torch.float64)
    return match(values, ~values.isnan(), torch.tensor([listed], dtype=torch.bool), seeds)


def same(found: Match) -> list[int]:
    return torch.nonzero(found.same[0]).flatten().tolist()


@pytest.mark.parametrize("kind", ["two Gaussians", "one Gaussian", "heavy tails", "ties"])
@pytest.mark.parametrize("c", [1, 2, 3, 4, 7, 20])
def test_it_is_hard_em_for_every_client(kind: str, c: int) -> None:
    generator = torch.Generator().manual_seed(c)
    m, seeds = 100, 2
    y = draw(kind, m, c, generator)
    share = torch.rand(m, 1, generator=generator).clamp(min=0.1) * 1.3
    observed = torch.rand(m, c, generator=generator) < share  # ragged, some rows complete and some empty
    listed = torch.rand(m, c, generator=generator) < torch.rand(m, 1, generator=generator) * 1.2 - 0.1
    y[torch.rand(m, c, generator=generator) < 0.05] = torch.nan

    found, expected = match(y, observed, listed, seeds), plainly(y, observed, listed, seeds)

    sure = [i for i, plain in enumerate(expected) if not plain.close]
    assert len(sure) > 0.6 * m
    for i in sure:
        assert set(torch.nonzero(found.same[i]).flatten().tolist()) == expected[i].same, (i, y[i], observed[i])
        assert bool(found.skipped[i]) == bool({"nobody_answered", "no_candidates"} & set(expected[i].events))
        fitted = not {"nobody_answered", "no_candidates", "no_information"} & set(expected[i].events)
        if fitted:
            assert found.mean[i].tolist() == pytest.approx(expected[i].mean, rel=1e-9, abs=1e-9, nan_ok=True)
            assert found.variance[i].tolist() == pytest.approx(expected[i].variance, rel=1e-9)
    alone = match(y[sure], observed[sure], listed[sure], seeds)
    assert alone.events == {name: sum(name in expected[i].events for i in sure) for name in NO_EVENTS}


def test_every_degenerate_case_but_a_cycle_comes_up_in_the_comparison() -> None:
    generator = torch.Generator().manual_seed(0)
    total = dict(NO_EVENTS)
    for c in (1, 3, 5):
        y = draw("one Gaussian", 300, c, generator)
        observed = torch.rand(y.shape, generator=generator) < 0.7
        listed = torch.rand(y.shape, generator=generator) < 0.5
        for name, count in match(y, observed, listed, 2).events.items():
            total[name] += count
    assert all(count > 0 for name, count in total.items() if name != "cycle"), total
    assert total["cycle"] == 0  # hard EM climbs: only rounding could send it round


def test_a_client_does_not_depend_on_the_others_nor_on_empty_columns() -> None:
    generator = torch.Generator().manual_seed(1)
    y = draw("two Gaussians", 40, 9, generator)
    observed = torch.rand(40, 9, generator=generator) < 0.8
    listed = torch.rand(40, 9, generator=generator) < 0.4
    together = match(y, observed, listed, 3).same
    for i in range(40):
        piece = slice(i, i + 1)
        pad = torch.nn.functional.pad
        alone = match(pad(y[piece], (0, 3), value=9.0), pad(observed[piece], (0, 3)), pad(listed[piece], (0, 3)), 3)
        assert torch.equal(alone.same[:, :9], together[piece])
        assert not alone.same[:, 9:].any()


def test_two_separated_gaussians_are_split_exactly() -> None:
    generator = torch.Generator().manual_seed(2)
    kin = (torch.arange(20) < 10).expand(200, 20)
    y = torch.where(kin, 0.7, 0.2) + 0.04 * torch.randn(200, 20, generator=generator, dtype=torch.float64)
    listed = (torch.arange(20) % 10 < 8).expand(200, 20) == kin  # two of the list and two of the others are misplaced
    found = match(y, torch.ones_like(kin), listed, 5)
    assert torch.equal(found.same, kin)
    assert found.events == NO_EVENTS
    assert found.mean[:, 0].mean() == pytest.approx(0.7, abs=0.02)
    assert found.mean[:, 1].mean() == pytest.approx(0.2, abs=0.02)


def test_a_list_that_holds_the_strangers_is_turned_round() -> None:
    generator = torch.Generator().manual_seed(3)
    kin = (torch.arange(10) < 4).expand(50, 10)
    y = torch.where(kin, 0.7, 0.2) + 0.04 * torch.randn(50, 10, generator=generator, dtype=torch.float64)
    found = match(y, torch.ones_like(kin), ~kin, 5)
    assert torch.equal(found.same, kin)
    assert (found.mean[:, 0] > found.mean[:, 1]).all()


def test_a_component_of_one_peer_lives_on_the_floor_of_the_variance() -> None:
    strangers = [0.01 * i for i in range(10)]
    found = one([0.9, *strangers], [1] + [0] * 10)
    assert same(found) == [0]
    whole = torch.tensor([0.9, *strangers], dtype=torch.float64).var(correction=0)
    assert float(found.variance[0, 0]) == pytest.approx(0.01 * float(whole))


@pytest.mark.parametrize("y", [[0.5] * 6, [0.5 + 1e-14 * i for i in range(6)]])
def test_similarities_without_spread_say_nothing(y: list[float]) -> None:
    found = one(y, [0, 1, 0, 1, 0, 0])
    assert same(found) == [1, 3]
    assert not found.skipped.any()
    assert found.events == NO_EVENTS | {"no_information": 1}


def test_a_little_spread_is_used() -> None:
    assert same(one([0.5, 0.50001, 0.5, 0.50001, 0.5, 0.5], [0, 1, 0, 0, 0, 0])) == [1, 3]


def test_two_peers_are_too_few() -> None:
    found = one([0.1, 0.9, math.nan], [1, 0, 0])
    assert same(found) == [0]
    assert found.events == NO_EVENTS | {"no_information": 1}
    assert same(one([0.1, 0.9, 0.8], [1, 0, 0])) == [1, 2]  # three are enough


def test_nobody_answered() -> None:
    found = one([math.nan] * 4, [1, 1, 0, 0])
    assert same(found) == []
    assert found.skipped.all()
    assert found.events == NO_EVENTS | {"nobody_answered": 1}
    assert match(torch.zeros(2, 0), torch.zeros(2, 0).bool(), torch.zeros(2, 0).bool(), 2).skipped.all()


def test_an_empty_list_starts_from_the_most_similar_strangers() -> None:
    found = one([0.1, 0.9, 0.12, 0.11, 0.91, 0.13], [0] * 6, seeds=2)
    assert same(found) == [1, 4]
    assert found.events == NO_EVENTS | {"empty_list": 1}
    tied = one([0.5, 0.5, 0.1, 0.12, 0.14, 0.11], [0] * 6, seeds=1)  # the first of equals seeds; EM brings the other
    assert same(tied) == [0, 1]


def test_without_candidates_the_list_stays() -> None:
    found = one([0.1, 0.9, 0.5, math.nan], [1, 1, 1, 0])
    assert same(found) == []
    assert found.skipped.all()
    assert found.events == NO_EVENTS | {"no_candidates": 1}


SPREAD = torch.linspace(-1, 1, 10, dtype=torch.float64).tolist()


def test_when_nobody_is_different_all_are_kin() -> None:
    y, listed = [*SPREAD, -1.05, 1.0], [1] * 10 + [0, 0]
    found = one(y, listed)
    assert same(found) == list(range(12))
    assert found.events == NO_EVENTS | {"all_same": 1}


def test_when_nobody_is_kin_nobody_is() -> None:
    found = one([*SPREAD, -1.05, 1.0], [0] * 10 + [1, 1])
    assert same(found) == []
    assert not found.skipped.any()
    assert found.events == NO_EVENTS | {"none_same": 1}


def test_a_tie_leaves_a_peer_where_it_came_from() -> None:
    assert same(one([0.0, 1.0, 0.0, -1.0], [1, 1, 0, 0])) == [0, 1]
    assert same(one([0.0, -1.0, 0.0, 1.0], [0, 0, 1, 1])) == [2, 3]


@pytest.mark.parametrize("levels", [(0.0, -2.0, -1.0), (0.0, -1.0, -2.0)])
def test_a_cycle_ends_in_its_likelier_state(levels: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    # true hard EM never goes round, so the scores are made to: state 0 -> 1 -> 2 -> 1; the first is the likeliest, but
    # lies before the cycle
    states = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    follows = [1, 2, 1]

    def scores(y: Tensor, observed: Tensor, zero: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        at = [int((states == row).all(dim=1).nonzero()) for row in zero]
        level = torch.tensor([levels[s] for s in at], dtype=y.dtype)[:, None]
        sign = torch.where(states[[follows[s] for s in at]], 0.01, -0.01).to(y.dtype)
        return torch.stack([level + sign, level - sign], dim=2)

    monkeypatch.setattr(mixture, "_scores", scores)
    found = one([4.0, 3.0, 1.0, 0.0], [1, 1, 0, 0])
    assert torch.equal(found.same[0], states[1 if levels[1] > levels[2] else 2])
    assert found.events == NO_EVENTS | {"cycle": 1}
    part = found.same[0]
    y = torch.tensor([4.0, 3.0, 1.0, 0.0], dtype=torch.float64)
    assert found.mean[0].tolist() == pytest.approx([float(y[part].mean()), float(y[~part].mean())])


def test_who_was_not_observed_is_never_kin() -> None:
    generator = torch.Generator().manual_seed(5)
    y = draw("two Gaussians", 300, 8, generator)
    missing = torch.rand(y.shape, generator=generator) < 0.4
    y[missing] = torch.nan
    observed = torch.rand(y.shape, generator=generator) < 0.8  # says True of some NaN too
    found = match(y, observed, torch.rand(y.shape, generator=generator) < 0.5, 2)
    assert found.same.any()
    assert not (found.same & (missing | ~observed)).any()
