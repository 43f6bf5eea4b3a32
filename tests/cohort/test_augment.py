"""Images that are moved and mirrored: how often, how far, and the same for everybody however the work is cut."""

from collections.abc import Hashable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kinfolk
from conftest import make_cohort, make_federation, tiny_experiment, train_plainly
from kinfolk import Cohort, Training, UserError
from kinfolk.cohort import augment
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.replay import Work
from kinfolk.cohort.training import local_steps, plan
from kinfolk.config import read
from kinfolk.models import NETS

SHAPE = (2, 7, 9)
RAGGED = [20, 3, 41, 8, 16]
SETTINGS = Training(epochs=2, batch_size=8, lr=0.05, lr_decay=0.9, augment="crop-flip")


def images() -> nn.Module:
    """Computed by our own passes."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2), nn.ReLU(),
        nn.Flatten(), nn.Linear(18, 5), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(126, 6), nn.ReLU(), nn.Linear(6, 3))


def anything() -> nn.Module:
    """Computed through vmap and autograd."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(140, 3))


def plainly_seen(image: Tensor, look: int) -> Tensor:
    """One image as anybody would write it: padded, cropped, flipped."""
    height, width = image.shape[1:]
    mirrored, down, right = look // 81, look // 9 % 9, look % 9
    cropped = F.pad(image, (4, 4, 4, 4))[:, down : down + height, right : right + width]
    return cropped.flip(2) if mirrored else cropped


def test_every_look_is_a_crop_and_perhaps_its_mirror_image() -> None:
    x = torch.randn(5, *SHAPE)
    index = torch.randint(5, (2, augment.LOOKS), generator=torch.Generator().manual_seed(1))
    looks = torch.stack([torch.arange(augment.LOOKS), torch.arange(augment.LOOKS).flip(0)])
    found = augment.seen(x, index, looks)
    expected = [plainly_seen(x[i], int(look)) for i, look in zip(index.flatten(), looks.flatten())]
    assert found.shape == (2 * augment.LOOKS, *SHAPE)
    assert torch.equal(found, torch.stack(expected))
    centre = torch.full((1, 5), 4 * 9 + 4)
    assert torch.equal(augment.seen(x, torch.arange(5)[None], centre), x)


def test_what_is_outside_an_image_is_zero_even_beside_a_pixel_that_is_not_a_number() -> None:
    x = torch.full((1, 1, 3, 3), torch.nan)
    found = augment.seen(x, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[0]]))
    assert torch.equal(found, torch.zeros(1, 1, 3, 3))  # moved by four pixels: nothing is left of it


def test_all_shifts_occur_equally_often_and_half_of_the_images_are_mirrored() -> None:
    looks = augment.draw(0, 1, torch.arange(50), 20, 100)
    assert looks.shape == (50, 20, 100)
    counts = torch.bincount(looks.flatten(), minlength=augment.LOOKS)
    assert counts.numel() == augment.LOOKS
    expected = looks.numel() / augment.LOOKS
    assert float(((counts - expected) ** 2 / expected).sum()) < 230  # chi-squared with 161 degrees: 99.97 % are below
    assert float((looks >= 81).double().mean()) == pytest.approx(0.5, abs=0.007)


def test_looks_depend_on_round_client_and_place_alone() -> None:
    ids = torch.tensor([3, 8, 1])
    looks = augment.draw(0, 5, ids, 4, 10)
    assert torch.equal(augment.draw(0, 5, ids, 4, 10), looks)
    assert torch.equal(augment.draw(0, 5, ids[1:2], 2, 7), looks[1:2, :2, :7])
    for other in (augment.draw(0, 6, ids, 4, 10), augment.draw(1, 5, ids, 4, 10), looks.roll(1, 0), looks.roll(1, 1)):
        assert 0 <= float((other == looks).double().mean()) < 0.1


def train_plainly_augmented(cohort: Cohort, factory: object, rounds: int) -> Tensor:
    """One module and one SGD per client, one image after the other: [m, d]."""
    settings, part = cohort.training, cohort.data.train
    rows = []
    for i, client in enumerate(cohort.ids.tolist()):
        module = initial_model(factory, cohort.seed).to(cohort.dtype)  # type: ignore[arg-type]
        for t in range(1, rounds + 1):
            optimizer = torch.optim.SGD(module.parameters(), lr=settings.rate(t), momentum=settings.momentum)
            ids, start, size = torch.tensor([client]), part.starts[i : i + 1], part.sizes[i : i + 1]
            batches = plan(cohort.seed, t, ids, start, size, settings)
            looks = augment.draw(cohort.seed, t, ids, batches.index.shape[1], settings.batch_size)[0]
            for step in range(int(local_steps(size, settings)[0])):
                index = batches.index[0, step, : int(batches.counts[0, step])]
                seen = torch.stack(
                    [plainly_seen(part.x[n], int(looks[step, place])) for place, n in enumerate(index.tolist())]
                )
                optimizer.zero_grad()
                F.cross_entropy(module(seen), part.y[index]).backward()
                optimizer.step()
        rows.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
    return torch.stack(rows)


@pytest.mark.parametrize("factory", [images, dense, anything])
@pytest.mark.parametrize("chunk", [None, 1, 2], ids=["auto", "single", "pairs"])
@pytest.mark.parametrize("sizes", [[20] * 5, RAGGED], ids=["equal", "ragged"])
def test_training_equals_a_loop_over_clients_and_images(factory: object, chunk: int | None, sizes: list[int]) -> None:
    cohort = make_cohort(make_federation(sizes, SHAPE), factory, SETTINGS, chunk=chunk)  # type: ignore[arg-type]
    for t in (1, 2):
        cohort.train(t)
    expected = train_plainly_augmented(cohort, factory, 2)
    assert (cohort.weights - expected).abs().max() <= 1e-10 * expected.abs().max()
    plain = train_plainly(cohort, factory, 2)  # type: ignore[arg-type]
    assert (cohort.weights - plain).abs().max() > 1e-3  # it does make a difference


def test_a_number_of_steps_can_be_given_instead_of_epochs() -> None:
    settings = Training(steps=7, batch_size=8, lr=0.05, augment="crop-flip")
    cohort = make_cohort(make_federation(RAGGED, SHAPE), images, settings)
    cohort.train(1)
    torch.testing.assert_close(cohort.weights, train_plainly_augmented(cohort, images, 1), rtol=1e-10, atol=1e-12)


def test_a_client_sees_the_same_whoever_is_trained_beside_it() -> None:
    data = make_federation(RAGGED, SHAPE)
    whole = make_cohort(data, images, SETTINGS, "float32")
    rows = torch.tensor([4, 1])
    some = make_cohort(data.select(rows), images, SETTINGS, "float32", ids=rows, n=5)
    for t in (1, 2):
        whole.train(t)
        some.train(t)
    assert torch.equal(whole.weights[rows], some.weights)


class Tape:
    """A recording as a GPU makes it: what the first call did is done again on other inputs, and nothing else is new."""

    def __init__(self) -> None:
        self.works: dict[Hashable, Work] = {}

    def __call__(self, key: Hashable, work: Work, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        copies = [given.clone() for given in inputs]
        return copies[0], self.works.setdefault(key, work)(*copies)


@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, augment=None)], ids=["augmented", "plain"])
def test_recorded_steps_take_everything_that_changes_as_their_input(settings: Training) -> None:
    data = make_federation([20] * 5, SHAPE)
    plain, recorded = (make_cohort(data, images, settings) for _ in range(2))
    recorded._replay = tape = Tape()  # type: ignore[assignment]
    for t in (1, 2, 3):
        plain.train(t)
        recorded.train(t)
    assert len(tape.works) == 1
    assert torch.equal(recorded.weights, plain.weights)


def test_without_augmentation_the_plan_has_no_looks_and_the_same_batches() -> None:
    ids, starts, sizes = torch.tensor([0, 1]), torch.tensor([0, 9]), torch.tensor([9, 5])
    off = plan(0, 1, ids, starts, sizes, Training(batch_size=4))
    on = plan(0, 1, ids, starts, sizes, Training(batch_size=4, augment="crop-flip"))
    assert off.looks is None
    assert on.looks is not None
    assert on.looks.shape == on.index.shape
    assert torch.equal(on.index, off.index)


def test_tests_and_losses_are_of_the_images_as_they_are() -> None:
    data = make_federation([20] * 3, SHAPE)
    one, other = (make_cohort(data, images, training) for training in (SETTINGS, None))
    one.train(1)
    other.weights = one.weights
    assert torch.equal(one.evaluate().loss, other.evaluate().loss)
    assert torch.equal(one.train_losses(one.weights), other.train_losses(one.weights))


def test_samples_that_are_no_images_are_refused_in_one_line() -> None:
    with pytest.raises(
        UserError, match=r"^training.augment = 'crop-flip' needs images \[C, H, W\], the data have \[6\]$"
    ):
        make_cohort(make_federation([5, 5]), lambda: NETS["linear"]((6,), 3), SETTINGS)


def test_a_run_is_the_same_on_shards_and_after_a_resume() -> None:
    settings = tiny_experiment(training={"augment": "crop-flip"})
    whole = kinfolk.run(settings, out="whole")
    shards = kinfolk.run(settings, ["run.engine=sharded", "run.shards=3", "run.chunk=2"], out="shards")
    kinfolk.run(settings, ["run.rounds=2"], out="short")
    resumed = kinfolk.resume("short", rounds=4)
    plain = kinfolk.run(tiny_experiment(), out="plain")
    assert torch.equal(whole.weights(), shards.weights())
    assert torch.equal(whole.weights(), resumed.weights())
    assert not torch.equal(whole.weights(), plain.weights())


def test_the_setting_changes_what_a_run_is_only_where_it_is_used() -> None:
    off = read(tiny_experiment())
    assert "augment" not in off.sections()["training"]  # as before there was such a setting: old runs are still found
    assert read(tiny_experiment(), ["training.augment=none"]).identity() == off.identity()
    on = read(tiny_experiment(), ["training.augment=crop-flip"])
    assert on.training.augment == "crop-flip"
    assert on.identity() != off.identity()
    with pytest.raises(UserError, match=r"'training\.augment' = 'flip'"):
        read(tiny_experiment(), ["training.augment=flip"])
