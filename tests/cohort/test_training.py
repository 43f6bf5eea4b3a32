"""The vectorised local SGD against the loop anybody would write."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from conftest import make_cohort, make_federation, train_plainly
from kinfolk import Training, UserError
from kinfolk.cohort.training import local_steps, plan


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)
    )


def images() -> nn.Module:
    """Two convolutions, odd sizes, with and without pooling: computed by our own passes."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2), nn.ReLU(),
        nn.Flatten(), nn.Linear(18, 5), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip


class Users(nn.Module):
    """A module as users write them: nested, a tied weight, a frozen one, a buffer, an extra parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.linspace(-1, 1, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.scale + self.shift
        return self.head(torch.relu(self.frozen(self.second(x))) + x)


EQUAL, RAGGED = [20, 20, 20, 20, 20], [20, 3, 41, 8, 16]


@pytest.mark.parametrize("sizes", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("chunk", [None, 1, 2], ids=["auto", "single", "pairs"])
@pytest.mark.parametrize(
    ("factory", "shape"),
    [(mlp, (6,)), (cnn, (2, 6, 6)), (images, (2, 7, 9)), (Users, (6,))],
    ids=["mlp", "cnn", "images", "user's"],
)
@pytest.mark.parametrize(("precision", "bound"), [("float64", 1e-10), ("float32", 1e-5)])
def test_training_equals_a_plain_loop(
    factory: Callable[[], nn.Module],
    shape: tuple[int, ...],
    sizes: list[int],
    chunk: int | None,
    precision: str,
    bound: float,
) -> None:
    settings = Training(epochs=2, batch_size=8, lr=0.05, lr_decay=0.9, momentum=0.9)
    cohort = make_cohort(make_federation(sizes, shape), factory, settings, precision, chunk=chunk)
    for t in (1, 2, 3):
        cohort.train(t)
    trainable = [p for p in factory().parameters() if p.requires_grad]
    assert cohort.layout.size == sum(p.numel() for p in trainable)
    expected = plain_trainable(cohort, factory, 3)
    assert (cohort.weights - expected).abs().max() <= bound * expected.abs().max()
    assert (cohort.weights - cohort.initial).abs().max() > 0.01  # it did learn something


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two cores' worth of threads, and no step too small for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr("kinfolk.cohort.room.SMALL", 0)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("sizes", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize(
    ("factory", "shape"), [(mlp, (6,)), (images, (2, 7, 9)), (Users, (6,))], ids=["mlp", "images", "user's"]
)
def test_chunks_side_by_side_give_the_numbers_of_one_after_the_other(
    factory: Callable[[], nn.Module], shape: tuple[int, ...], sizes: list[int]
) -> None:
    data = make_federation(sizes, shape)
    together, alone = (make_cohort(data, factory, precision="float32", chunk=chunk) for chunk in (1, 1))
    for t in (1, 2):
        threaded = together.train(t), together.evaluate().loss
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        assert alone.room.workers(5, 8) == 1
        plain = alone.train(t), alone.evaluate().loss
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(threaded, plain))
    assert torch.equal(together.weights, alone.weights)
    assert together.room.workers(5, 8) == (1 if factory is Users else 2)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("active", [None, [True, False, True, True, False]], ids=["all", "some"])
@pytest.mark.parametrize("sizes", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_models_that_are_one_in_memory_train_like_models_of_their_own(
    sizes: list[int], active: list[bool] | None
) -> None:
    data = make_federation(sizes, (6,))
    one, own = (make_cohort(data, mlp, precision="float32", chunk=1, shared=shared) for shared in (True, False))
    assert one.weights.stride(0) == 0
    for cohort in (one, own):
        cohort.train(1, None if active is None else torch.tensor(active))
    assert torch.equal(one.weights, own.weights)
    resting = [not (moves and size) for moves, size in zip(active or [True] * len(sizes), sizes)]
    assert (own.weights == own.initial).all(dim=1).tolist() == resting


@pytest.mark.usefixtures("two_threads")
def test_a_client_alone_gets_the_bits_it_gets_in_company() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))

    data = make_federation([200] * 4, (784,), classes=10)
    settings = Training(epochs=1, batch_size=128, lr=0.05)
    company, alone = (make_cohort(d, wide, settings, "float32") for d in (data, data.select(torch.tensor([0]))))
    company.train(1)
    alone.train(1)
    assert torch.equal(company.weights[0], alone.weights[0])
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_one_of_the_chunks_is_raised_and_threads_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = make_cohort(make_federation(EQUAL), mlp, chunk=1)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("kinfolk.cohort.cohort.train_chunk", fail)
    before = cohort.weights
    with pytest.raises(MemoryError, match="no room"):
        cohort.train(1)
    assert cohort.weights is before
    assert torch.get_num_threads() == 2


def plain_trainable(cohort, factory, rounds):  # type: ignore[no-untyped-def]
    """The plain loop's rows without the frozen parameters."""
    rows = train_plainly(cohort, factory, rounds)
    keep = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in factory().parameters()])
    return rows[:, keep]


@pytest.mark.parametrize(
    "settings",
    [
        Training(steps=7, batch_size=8, lr=0.05),
        Training(epochs=1, batch_size=64, lr=0.05, momentum=0.0),
        Training(epochs=3, batch_size=5, lr=0.05, weight_decay=0.1),
    ],
    ids=["steps", "one batch, no momentum", "weight decay"],
)
def test_every_way_to_train_equals_a_plain_loop(settings: Training) -> None:
    cohort = make_cohort(make_federation(RAGGED), mlp, settings)
    cohort.train(1)
    cohort.train(2)
    torch.testing.assert_close(cohort.weights, train_plainly(cohort, mlp, 2), rtol=1e-10, atol=1e-12)


def test_each_epoch_visits_every_sample_once_and_orders_differ() -> None:
    sizes = torch.tensor([10, 4])
    settings = Training(epochs=3, batch_size=4)
    batches = plan(0, 1, torch.tensor([5, 9]), torch.tensor([0, 100]), sizes, settings)
    assert local_steps(sizes, settings).tolist() == [9, 3]
    assert batches.counts.tolist() == [[4, 4, 2] * 3, [4, 4, 4, 0, 0, 0, 0, 0, 0]]
    epochs = []
    for first in (0, 3, 6):
        seen = [batches.index[0, s, : batches.counts[0, s]] for s in range(first, first + 3)]
        epochs.append(torch.cat(seen).tolist())
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(batches.index[1, 0].tolist()) == [100, 101, 102, 103]


def test_batches_of_another_round_are_others() -> None:
    sizes, settings = torch.tensor([30]), Training(epochs=1, batch_size=30)
    first, second = (plan(0, t, torch.tensor([0]), torch.tensor([0]), sizes, settings).index for t in (1, 2))
    assert not torch.equal(first, second)


def test_a_client_that_has_finished_does_not_coast_on_its_momentum() -> None:
    short = make_cohort(make_federation([8, 80]), mlp)
    alone = make_cohort(make_federation([8, 80]).select(torch.tensor([0])), mlp)
    short.chunk = 2
    short.train(1)
    alone.train(1)
    torch.testing.assert_close(short.weights[0], alone.weights[0], rtol=1e-12, atol=1e-12)


def test_training_leaves_the_published_matrix_as_it_was() -> None:
    cohort = make_cohort(make_federation(EQUAL), mlp)
    before, copy = cohort.weights, cohort.weights.clone()
    cohort.train(1)
    assert torch.equal(before, copy)
    assert cohort.weights is not before


def test_only_active_and_present_clients_train() -> None:
    cohort = make_cohort(make_federation(EQUAL), mlp)
    cohort.begin(absent=torch.tensor([False, False, True, False, False]))
    loss = cohort.train(1, active=torch.tensor([True, False, True, True, False]))
    moved = (cohort.weights != cohort.initial).any(dim=1)
    assert moved.tolist() == [True, False, False, True, False]
    assert torch.isfinite(loss).tolist() == [True, False, False, True, False]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("chunk", [None, 1])
def test_a_client_whose_loss_explodes_is_restored_and_quarantined(chunk: int | None) -> None:
    data = make_federation(EQUAL)
    data.train.x[data.train.starts[3]] = torch.inf
    cohort = make_cohort(data, mlp, precision="float32", chunk=chunk)
    loss = cohort.train(1)
    assert cohort.round.quarantined.tolist() == [False, False, False, True, False]
    assert torch.equal(cohort.weights[3], cohort.initial)
    assert torch.isnan(loss[3])
    assert torch.isfinite(cohort.weights).all()
    assert cohort.silent().tolist() == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(6), "GroupNorm"),
        (nn.Dropout(0.5), "Dropout"),
        (nn.LSTM(6, 6), "LSTM"),
    ],
)
def test_layers_that_cannot_be_vectorised_are_refused_by_name(layer: nn.Module, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_cohort(make_federation([4, 4]), lambda: nn.Sequential(layer, nn.Linear(6, 3)))


def test_random_numbers_in_the_forward_pass_are_refused() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(nn.functional.dropout(x, 0.5))

    cohort = make_cohort(make_federation([4, 4]), lambda: Noisy(6, 3))
    with pytest.raises(UserError, match="random numbers"):
        cohort.train(1)


def test_a_model_with_the_wrong_output_or_input_says_so() -> None:
    with pytest.raises(UserError, match="a score for each class"):
        make_cohort(make_federation([4, 4]), lambda: nn.Sequential(nn.Linear(6, 3), nn.Unflatten(1, (3, 1))))
    with pytest.raises(UserError, match=r"inputs of shape \[6\]"):
        make_cohort(make_federation([4, 4]), lambda: nn.Linear(5, 3))
