"""Noise on the gradients of local training, against a loop over clients and steps."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import make_cohort, make_federation
from kinfolk import Cohort, Training, randomness
from kinfolk.cohort.noise import Noise
from kinfolk.cohort.training import plan
from kinfolk.randomness import normal

SIZES = [20, 3, 41, 8, 16]
SETTINGS = Training(epochs=2, batch_size=8, lr=0.05, momentum=0.9, weight_decay=0.01)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


def own() -> nn.Module:
    """Computed through autograd, a slot for each parameter, of odd sizes."""
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def plainly(
    cohort: Cohort, factory: Callable[[], nn.Module], noise: Noise, t: int, part: slice, purpose: str
) -> Tensor:
    """Models [m, d] after one round, one client and one step at a time."""
    settings, data, rows = cohort.training, cohort.data.train, []
    for i, client in enumerate(cohort.ids.tolist()):
        ids = torch.tensor([client])
        batches = plan(cohort.seed, t, ids, data.starts[[i]], data.sizes[[i]], settings, purpose)
        key = randomness.bits(cohort.seed, f"noise/{purpose}", t, ids, torch.tensor([0]))
        weights, velocity = cohort.weights[i].clone(), torch.zeros(part.stop - part.start, dtype=torch.float64)
        for step in range(batches.counts.shape[1]):
            module = factory().double()
            nn.utils.vector_to_parameters(weights, module.parameters())
            index = batches.index[0, step, : int(batches.counts[0, step])]
            F.cross_entropy(module(data.x[index]), data.y[index]).backward()
            gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])[part]
            gradient = gradient * min(1.0, noise.longest / float(gradient.norm()))
            width = gradient.numel()
            gradient = gradient + noise.deviation * normal(0, "noise", 0, key, width, step * width)[0]
            velocity = settings.momentum * velocity + gradient + settings.weight_decay * weights[part]
            weights[part] -= settings.rate(t) * velocity
        rows.append(weights)
    return torch.stack(rows)


@pytest.mark.parametrize("factory", [mlp, own])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize(("longest", "deviation"), [(0.1, 0.3), (100.0, 0.05), (0.2, 0.0)])
def test_noisy_training_is_that_of_a_plain_loop(
    factory: Callable[[], nn.Module], chunk: int | None, longest: float, deviation: float
) -> None:
    cohort = make_cohort(make_federation(SIZES), factory, SETTINGS, chunk=chunk)
    body = cohort.division.body
    noise = cohort.noise = Noise(longest, deviation)
    for part, purpose in ((None, "batch"), (body, "head")):
        columns = slice(0, cohort.layout.size) if part is None else body
        found, _ = cohort.trained(cohort.weights, 3, part=part, purpose=purpose)
        expected = plainly(cohort, factory, noise, 3, columns, purpose)
        assert (found - expected).abs().max() <= 1e-10
        assert (found[:, columns] - cohort.weights[:, columns]).abs().max() > 0.01
        if part is not None:
            assert torch.equal(found[:, cohort.division.head], cohort.weights[:, cohort.division.head])


@pytest.mark.parametrize("factory", [mlp, own])
def test_a_clients_noise_does_not_depend_on_its_company(factory: Callable[[], nn.Module]) -> None:
    data = make_federation([16] * 6)
    settings = Training(epochs=2, batch_size=8, lr=0.05)
    together = make_cohort(data, factory, settings, "float32")
    few = torch.tensor([4, 1])
    apart = make_cohort(data.select(few), factory, settings, "float32", ids=few, n=6)
    for cohort in (together, apart):
        cohort.noise = Noise(0.5, 0.2)
        cohort.train(2)
    assert torch.equal(together.weights[few], apart.weights)
    assert (together.weights[0] - together.weights[2]).abs().max() > 0.01


def test_every_step_round_purpose_and_seed_has_noise_of_its_own() -> None:
    noise, ids = Noise(1.0, 1.0), torch.arange(3)

    def drawn(seed: int, t: int, purpose: str, step: int, width: int = 40) -> Tensor:
        steer, gradients = noise.on(seed, t, ids, purpose), [torch.zeros(3, width, dtype=torch.float64)]
        steer.bend([], gradients, list(steer.beside), step=step)
        return gradients[0]

    all_of_them = [drawn(0, 1, "batch", 0)]
    for other in ((0, 1, "batch", 1), (0, 2, "batch", 0), (0, 1, "tuning", 0), (1, 1, "batch", 0)):
        all_of_them.append(drawn(*other))
    values = torch.cat(all_of_them).flatten()
    assert values.unique().numel() == values.numel()
    assert torch.equal(drawn(0, 1, "batch", 0), all_of_them[0])
    steps = torch.cat([drawn(0, 1, "batch", step, 5000) for step in range(4)])
    assert abs(float(steps.mean())) < 0.02
    assert float(steps.std()) == pytest.approx(1, abs=0.01)


def test_pieces_of_noise_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    client = torch.tensor([5, 9])
    whole = normal(3, "noise", 7, client, 101)
    for first, width in ((0, 1), (1, 50), (2, 99), (51, 50), (100, 1)):
        assert torch.equal(normal(3, "noise", 7, client, width, first), whole[:, first : first + width])
    found = []
    for piece in (2**22, 14):
        monkeypatch.setattr("kinfolk.cohort.noise.PIECE", piece)
        gradients = [torch.zeros(2, 5, 3), torch.zeros(2, 7)]
        steer = Noise(1.0, 2.0).on(0, 1, client, "batch")
        steer.bend([], gradients, list(steer.beside), step=1)
        found.append(torch.cat([gradient.flatten(1) for gradient in gradients], dim=1))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], 2 * normal(0, "noise", 0, steer.keys, 22, 22).float())


def test_a_gradient_of_zero_and_one_that_is_short_are_not_cut() -> None:
    steer = Noise(1.0, 0.0).on(0, 1, torch.arange(3), "batch")
    gradients = [torch.tensor([[0.0, 0.0], [0.3, 0.4], [30.0, 40.0]])]
    steer.bend([], gradients, list(steer.beside))
    torch.testing.assert_close(gradients[0], torch.tensor([[0.0, 0.0], [0.3, 0.4], [0.6, 0.8]]))
