"""Training, judging, mixing and testing parts of models, each against the loop anybody would write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import make_cohort, make_federation
from kinfolk import Cohort, Peers, Training, UserError
from kinfolk.cohort.judging import Mixture
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.program import Derived, Explicit
from kinfolk.cohort.steer import Masked, Proximal
from kinfolk.cohort.training import local_steps, plan
from kinfolk.peers.base import Pool
from kinfolk.peers.inprocess import InProcess

EQUAL, RAGGED = [20, 20, 20, 20], [20, 3, 41, 1]
BOUND = 1e-10
Factory = Callable[[], nn.Module]
Bend = Callable[[int, list[nn.Parameter]], None]


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3))


class Users(nn.Module):
    """A module as users write them, which goes through vmap: a tied weight, a frozen layer, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        return self.head(torch.relu(self.frozen(self.second(x))) + x)


@pytest.fixture(params=["stack equal", "stack ragged", "user's equal", "user's ragged"])
def made(request: pytest.FixtureRequest) -> tuple[Cohort, Factory]:
    """A cohort after a round of training, and what makes its model."""
    kind, sizes = request.param.split()
    factory: Factory = stack if kind == "stack" else Users
    settings = Training(epochs=2, batch_size=8, lr=0.05, lr_decay=0.9, weight_decay=0.01)
    cohort = make_cohort(make_federation(EQUAL if sizes == "equal" else RAGGED), factory, settings)
    assert isinstance(cohort.program, Explicit if kind == "stack" else Derived)
    cohort.train(1)
    return cohort, factory


def module_of(cohort: Cohort, factory: Factory, row: Tensor) -> nn.Module:
    """A module of its own with the parameters row [d]; what is frozen is as in the cohort's model."""
    module = factory().double()
    module.load_state_dict(cohort.model.state_dict())
    cohort.layout.load(row, module)
    return module


def plainly(
    cohort: Cohort,
    factory: Factory,
    models: Tensor,
    t: int,
    moving: slice | None = None,
    epochs: int | None = None,
    purpose: str = "batch",
    bend: Bend | None = None,
) -> tuple[Tensor, Tensor]:
    """`Cohort.trained`, one client and one SGD at a time: models [m, d] and mean losses [m]."""
    settings, part = cohort.training, cohort.data.train
    if epochs is not None:
        settings = Training(**{**settings.__dict__, "epochs": epochs})
    rows, means = [], []
    for i, client in enumerate(cohort.ids.tolist()):
        module = module_of(cohort, factory, models[i])
        named = dict(module.named_parameters())
        places = zip(cohort.layout.names, cohort.layout.offsets)
        chosen = [named[name] for name, at in places if moving is None or moving.start <= at < moving.stop]
        sgd = torch.optim.SGD(
            chosen, lr=settings.rate(t), momentum=settings.momentum, weight_decay=settings.weight_decay
        )
        start, size = part.starts[i : i + 1], part.sizes[i : i + 1]
        batches = plan(cohort.seed, t, torch.tensor([client]), start, size, settings, purpose)
        losses = []
        for step in range(int(local_steps(size, settings)[0])):
            index = batches.index[0, step, : int(batches.counts[0, step])]
            module.zero_grad()
            loss = F.cross_entropy(module(part.x[index]), part.y[index])
            loss.backward()
            if bend is not None:
                bend(i, [named[name] for name in cohort.layout.names])
            sgd.step()
            losses.append(loss.item())
        rows.append(cohort.layout.flatten(module))
        means.append(sum(losses) / len(losses))
    return torch.stack(rows), torch.tensor(means, dtype=torch.float64)


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= BOUND)


def pool_of(cohort: Cohort) -> Pool:
    peers = Peers(len(cohort), cohort, InProcess())
    peers.publish(1, weights=cohort.weights)
    return peers.pull(1, torch.arange(len(cohort)).expand(len(cohort), -1))


def scored(cohort: Cohort, logits: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and accuracy [m] of what logits(client, x) predicts on each client's own test set."""
    part, found = cohort.data.test, []
    for i in range(len(cohort)):
        rows = slice(int(part.starts[i]), int(part.starts[i] + part.sizes[i]))
        scores, y = logits(i, part.x[rows]).detach(), part.y[rows]
        found.append((F.cross_entropy(scores, y).item(), (scores.argmax(dim=1) == y).double().mean().item()))
    return tuple(torch.tensor(column, dtype=torch.float64) for column in zip(*found))  # type: ignore[return-value]


# -- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["body", "head"])
def test_only_the_columns_of_a_part_are_trained(made: tuple[Cohort, Factory], which: str) -> None:
    cohort, factory = made
    columns = getattr(cohort.division, which)
    before = cohort.weights
    expected, losses = plainly(cohort, factory, before, 2, columns)
    found = cohort.train(2, part=columns)
    assert close(cohort.weights, expected)
    assert close(found, losses)
    still = torch.ones(cohort.layout.size, dtype=torch.bool)
    still[columns] = False
    assert torch.equal(cohort.weights[:, still], before[:, still])
    assert (cohort.weights[:, columns] - before[:, columns]).abs().amax(dim=1).min() > 1e-4


def test_head_and_body_are_the_whole_model_and_the_head_is_its_last_layer(made: tuple[Cohort, Factory]) -> None:
    cohort, factory = made
    division, module = cohort.division, factory()
    last = module.head if isinstance(module, Users) else list(module.children())[-1]
    assert (division.body.start, division.body.stop, division.head.stop) == (0, division.head.start, cohort.layout.size)
    assert division.head.stop - division.head.start == sum(p.numel() for p in last.parameters())
    layer = cohort.weights[:, division.proxy]
    name = "first.weight" if isinstance(module, Users) else "2.weight"
    assert torch.equal(layer, cohort.layout.views(cohort.weights)[name].flatten(1))


def test_other_epochs_and_another_purpose_take_other_batches(made: tuple[Cohort, Factory]) -> None:
    cohort, factory = made
    same, other, long = (
        cohort.trained(cohort.weights, 2, purpose=purpose, epochs=epochs)[0]
        for purpose, epochs in (("batch", None), ("head", None), ("head", 5))
    )
    assert close(same, plainly(cohort, factory, cohort.weights, 2)[0])
    assert close(other, plainly(cohort, factory, cohort.weights, 2, purpose="head")[0])
    assert close(long, plainly(cohort, factory, cohort.weights, 2, purpose="head", epochs=5)[0])
    assert not close(same[0], other[0])
    assert not close(other[0], long[0])


def test_epochs_stand_in_for_the_runs_number_of_steps() -> None:
    cohort = make_cohort(make_federation(RAGGED), stack, Training(steps=3, batch_size=8, lr=0.05))
    asked = cohort.trained(cohort.weights, 1, epochs=2)[0]
    usual = make_cohort(make_federation(RAGGED), stack, Training(epochs=2, batch_size=8, lr=0.05))
    usual.train(1)
    assert torch.equal(asked, usual.weights)


def test_a_proximal_pull_is_a_penalty_on_the_distance(made: tuple[Cohort, Factory]) -> None:
    cohort, factory = made
    anchor = cohort.initial + 0.1 * torch.arange(len(cohort))[:, None]
    views = cohort.layout.views(anchor)

    def bend(i: int, parameters: list[nn.Parameter]) -> None:
        for parameter, target in zip(parameters, views.values()):
            gradient(parameter).add_(0.7 * (parameter.detach() - target[i]))

    found = cohort.trained(cohort.weights, 2, steer=Proximal(anchor, 0.7))[0]
    assert close(found, plainly(cohort, factory, cohort.weights, 2, bend=bend)[0])
    free = cohort.trained(cohort.weights, 2)[0]
    assert torch.equal(cohort.trained(cohort.weights, 2, steer=Proximal(anchor, 0.0))[0], free)
    assert ((found - anchor).norm(dim=1) < (free - anchor).norm(dim=1)).all()


@pytest.mark.parametrize("longest", [0.05, 10.0], ids=["cut", "not cut"])
def test_a_mask_holds_weights_still_and_cuts_what_is_left_of_the_gradient(
    made: tuple[Cohort, Factory], longest: float
) -> None:
    cohort, factory = made
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(cohort.weights.shape, generator=generator) < 0.5).double()
    models, views = cohort.weights * mask, cohort.layout.views(mask)

    def bend(i: int, parameters: list[nn.Parameter]) -> None:
        for parameter, here in zip(parameters, views.values()):
            gradient(parameter).mul_(here[i])
        length = float(torch.cat([gradient(parameter).flatten() for parameter in parameters]).norm())
        for parameter in parameters:
            gradient(parameter).mul_(min(1.0, longest / length))

    found = cohort.trained(models, 2, steer=Masked(mask, longest))[0]
    assert close(found, plainly(cohort, factory, models, 2, bend=bend)[0])
    assert (found[mask == 0] == 0).all()
    assert (found - models).abs().max() > 1e-3


def test_a_cut_gradient_is_exactly_as_long_as_allowed() -> None:
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1]], dtype=torch.float64)
    slopes = [torch.tensor([[3.0, 4, 99], [0.3, 0.4, 0]], dtype=torch.float64)]
    Masked(mask, 1.0).bend([], slopes, [mask])
    torch.testing.assert_close(slopes[0], torch.tensor([[0.6, 0.8, 0], [0.3, 0.4, 0]], dtype=torch.float64))


def test_whoever_is_not_active_or_goes_to_infinity_stays_where_it_was(made: tuple[Cohort, Factory]) -> None:
    cohort, _ = made
    before = cohort.weights
    anchor = before.clone()
    anchor[2] = torch.inf
    active = torch.tensor([True, False, True, True])
    found, losses = cohort.trained(before, 2, active, steer=Proximal(anchor, 1.0))
    assert torch.equal(found[1:3], before[1:3])
    assert (found[[0, 3]] != before[[0, 3]]).any(dim=1).all()
    assert losses.isnan().tolist() == [False, True, True, False]
    assert cohort.round.quarantined.tolist() == [False, False, True, False]


# -- judging and mixing ------------------------------------------------------------------------------------------


def test_a_peers_model_is_judged_with_ones_own_head(made: tuple[Cohort, Factory]) -> None:
    cohort, factory = made
    ids = torch.tensor([[1, 2], [3, -1], [0, 1], [2, 0]])
    head, part = cohort.division.head, cohort.data.train
    pool = pool_of(cohort)
    cohort.weights = cohort.weights.clone()
    cohort.weights[:, head] *= torch.arange(1.0, 5)[:, None]  # heads trained since
    losses = cohort.losses(pool, ids, head=head)
    plain = cohort.losses(pool, ids)
    for i, row in enumerate(ids.tolist()):
        rows = slice(int(part.starts[i]), int(part.starts[i] + part.sizes[i]))
        for place, j in enumerate(row):
            if j < 0:
                assert torch.isnan(losses[i, place])
                continue
            both = pool["weights"][j].clone()
            both[head] = cohort.weights[i, head]
            for model, found in ((both, losses), (pool["weights"][j], plain)):
                expected = F.cross_entropy(module_of(cohort, factory, model)(part.x[rows]), part.y[rows]).item()
                assert found[i, place].item() == pytest.approx(expected, abs=BOUND)
    assert not close(losses[0], plain[0])


def test_mixing_a_part_leaves_the_rest_alone(made: tuple[Cohort, Factory]) -> None:
    cohort, _ = made
    before, body, head = cohort.weights, cohort.division.body, cohort.division.head
    coefficients = torch.tensor([[1.0, 3.0], [2.0, 9.0], [0.0, 0.0], [1.0, 0.0]])
    cohort.mix(
        pool_of(cohort),
        torch.tensor([[1, 2], [3, -1], [0, 1], [0, 1]]),
        coefficients,
        torch.tensor([4.0, 0, 0, 1]),
        part=body,
    )
    expected = torch.stack(
        [(4 * before[0] + before[1] + 3 * before[2]) / 8, before[3], before[2], (before[3] + before[0]) / 2]
    )
    assert close(cohort.weights[:, body], expected[:, body])
    assert torch.equal(cohort.weights[:, head], before[:, head])


# -- what is tested ----------------------------------------------------------------------------------------------


def test_a_copy_is_tuned_before_the_test_and_thrown_away(made: tuple[Cohort, Factory]) -> None:
    cohort, factory = made
    before, untuned = cohort.weights, cohort.evaluate()
    cohort.tuning = 2
    cohort.begin(t=3)
    scores = cohort.evaluate()
    tuned, _ = plainly(cohort, factory, before, 3, epochs=2, purpose="tuning")
    loss, accuracy = scored(cohort, lambda i, x: module_of(cohort, factory, tuned[i])(x))
    assert close(scores.loss, loss)
    assert close(scores.accuracy, accuracy)
    assert not close(scores.loss, untuned.loss)
    assert cohort.weights is before


def test_a_test_leaves_no_trace_and_does_not_ask_who_is_absent() -> None:
    results: list[Any] = []
    for poison in (False, True):
        data = make_federation(EQUAL)
        cohort = make_cohort(data, stack, Training(epochs=1, batch_size=8, lr=0.05))
        cohort.tuning = 1
        if poison:  # whatever is trained on this becomes NaN
            cohort.train_x[3] = torch.inf
        cohort.begin(absent=torch.tensor([False, True, False, False]))
        results.append(cohort.evaluate())
        assert not cohort.round.quarantined.any()
        assert cohort.round.absent.tolist() == [False, True, False, False]
    assert torch.equal(results[0].loss[1:], results[1].loss[1:])
    tuned, _ = cohort.trained(cohort.weights, 1)
    assert torch.equal(tuned[1], cohort.weights[1])  # absent: it does not train
    cohort.tuning = 0
    assert float(cohort.evaluate().loss[1]) != float(results[0].loss[1])  # but was tuned for the test


def test_a_personal_model_is_what_is_tested(made: tuple[Cohort, Factory]) -> None:
    cohort, factory = made
    personal = cohort.weights + 0.1
    cohort.personal = personal
    loss, accuracy = scored(cohort, lambda i, x: module_of(cohort, factory, personal[i])(x))
    scores = cohort.evaluate()
    assert close(scores.loss, loss)
    assert close(scores.accuracy, accuracy)
    cohort.tuning = 1
    tuned, _ = plainly(cohort, factory, personal, 1, epochs=1, purpose="tuning")
    loss, _ = scored(cohort, lambda i, x: module_of(cohort, factory, tuned[i])(x))
    assert close(cohort.evaluate().loss, loss)


@pytest.mark.parametrize("tests", [7, 1500], ids=["few", "in several passes"])
@pytest.mark.parametrize("factory", [stack, Users])
def test_a_mixture_predicts_by_the_mean_of_probabilities(factory: Factory, tests: int) -> None:
    cohort = make_cohort(make_federation(RAGGED, tests=tests), factory)
    cohort.train(1)
    others = torch.stack([cohort.weights[0] + 0.3, cohort.weights[1] - 0.3, torch.full_like(cohort.initial, torch.nan)])
    rows = torch.tensor([[0, 1], [1, -1], [-1, -1], [1, 0]])
    shares = torch.tensor([[0.5, 0.2], [0.7, 0.3], [0.4, 0.6], [1.0, 0.0]], dtype=torch.float64)
    cohort.mixture = Mixture(others, rows, shares)

    def predict(i: int, x: Tensor) -> Tensor:
        own = 1.0
        mean = torch.zeros(x.shape[0], 3, dtype=torch.float64)
        for row, share in zip(rows[i].tolist(), shares[i].tolist()):
            if row >= 0:
                mean += share * module_of(cohort, factory, others[row])(x).softmax(dim=1)
                own -= share
        return (mean + own * module_of(cohort, factory, cohort.weights[i])(x).softmax(dim=1)).log()

    scores = cohort.evaluate()
    loss, accuracy = scored(cohort, predict)
    assert close(scores.loss, loss)
    assert close(scores.accuracy, accuracy)
    cohort.mixture = Mixture(others[:0], torch.full_like(rows, -1), shares)
    alone = cohort.evaluate()
    cohort.mixture = None
    assert close(alone.loss, cohort.evaluate().loss)


# -- models without such parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), "no body to share"),
        (nn.Linear(6, 3), "no body to share"),
        (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), "no body to share"),
        (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3), nn.LayerNorm(3)), "no head to keep"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3)), "no head to keep"),
        (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).requires_grad_(False), "no head to keep"),
    ],
    ids=["flattened", "one layer", "norms only", "norm at the end", "convolution at the end", "frozen"],
)
def test_a_model_without_body_or_head_is_refused_in_one_line(module: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        Layout.of(module).divide(module)
    assert "\n" not in str(error.value)
