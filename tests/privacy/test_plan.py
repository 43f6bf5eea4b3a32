"""Noise for clients of different sizes, and a whole private run by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from kinfolk.cohort.layout import Layout
from kinfolk.errors import UserError
from kinfolk.privacy import Ledger, PrivateGradients, Seeded, draw, epsilon, plan


def test_the_papers_setting() -> None:
    sizes = torch.tensor([160, 160, 80])
    found = plan(sizes, 15.0, 100, rule="noble")
    assert found.nominal == 15.0
    assert found.which.tolist() == [1, 1, 0]
    torch.testing.assert_close(found.delta, 1 / sizes.double())
    assert float(found.deviation(1.0)[0]) / 160 == pytest.approx(0.0645, abs=5e-5)
    half = plan(sizes, 15.0, 100, rate=0.5, sampling="without-replacement", rule="rdp")
    assert half.mechanisms[1].noise_multiplier == pytest.approx(3.17, abs=0.005)
    assert half.nominal is None


@pytest.mark.parametrize(("sampling", "rate"), [("none", 1.0), ("without-replacement", 0.3), ("poisson", 0.3)])
def test_everybody_can_afford_all_rounds_and_no_more(sampling: str, rate: float) -> None:
    sizes = torch.tensor([40, 40 if sampling == "poisson" else 25, 40, 0])
    found = plan(sizes, 1.5, 6, steps=2, rate=rate, sampling=sampling)  # type: ignore[arg-type]
    ledger = Ledger(range(4), 1.5, found.delta, simulated=True)
    got = [ledger.charge(f"{t}", found.mechanisms, which=found.which).tolist() for t in range(8)]
    assert got == [[True] * 4] * 6 + [[False] * 4] * 2
    assert (ledger.spent() > 1.45).all()


def test_the_rate_without_replacement_is_that_of_whole_records() -> None:
    found = plan(torch.tensor([25, 3]), 4.0, 10, rate=0.3, sampling="without-replacement")
    torch.testing.assert_close(found.rate(), torch.tensor([7 / 25, 1 / 3], dtype=torch.float64))
    single = plan(torch.tensor([4, 4]), 4.0, 10, rate=1.0, sampling="without-replacement")
    assert single.mechanisms[0].sampling == "none"


def test_wrong_budgets_are_refused() -> None:
    sizes = torch.tensor([50, 20])
    for wrong, words in [
        ({"epsilon": 0.0}, "positive"),
        ({"delta": 0.1}, "more than 1/20"),
        ({"delta": 1.0}, "between"),
    ]:
        with pytest.raises(UserError, match=words):
            plan(sizes, **{"epsilon": 3.0, "rounds": 5, **wrong})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="single record"):
        plan(torch.tensor([50, 1]), 3.0, 5)
    with pytest.raises(UserError, match="nobody has any records"):
        plan(torch.tensor([0, 0]), 3.0, 5)


def test_a_private_run_learns_and_stops_when_the_budget_is_spent() -> None:
    generator = torch.Generator().manual_seed(0)
    clients, size, features = 12, 60, 5
    y = torch.randint(3, (clients * size,), generator=generator)
    x = torch.randn(clients * size, features, generator=generator) * 0.3 + torch.eye(3, features)[y]
    module = nn.Sequential(nn.Linear(features, 3))
    layout = Layout.of(module)
    gradients = PrivateGradients(module, layout, (features,), clip=1.0)
    sizes, ids = torch.full((clients,), size), torch.arange(clients)
    starts, source = ids * size, Seeded(0)
    planned = plan(sizes, 5.0, 20, rate=0.5, sampling="poisson")
    ledger = Ledger(ids, 5.0, planned.delta, simulated=True)
    models = torch.zeros(clients, layout.size)
    losses = []
    for t in range(1, 26):
        may = ledger.charge(f"seed 0, round {t}", planned.mechanisms, which=planned.which)
        assert bool(may.all()) == (t <= 20)
        batches = draw(source, t, ids, sizes, "poisson", planned.rate())
        labels = y[batches.rows(starts)]
        found, sums = gradients(
            models, x, starts, batches, (labels,), planned.deviation(1.0), source, t, ids
        )  # fmt: skip
        models = torch.where(may[:, None], models - 1.0 * found, models)
        losses.append(float(sums.loss.mean()))
    assert losses[-1] < 0.8 * losses[0]
    guarantee = ledger.guarantee()
    assert guarantee.epsilon == epsilon([replace(planned.mechanisms[0], releases=20)], 1 / size) <= 5.0
    assert str(guarantee).startswith("simulated, not private: epsilon 5")


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out.startswith("simulated, not private: epsilon 3 at delta 0.00625 for replacing one")
