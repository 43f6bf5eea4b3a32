"""Clients of different sizes in one chunk: who has finished costs nothing and changes nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from conftest import make_cohort, make_federation
from kinfolk import Cohort, Training
from kinfolk.cohort.steer import Proximal
from kinfolk.cohort.training import alike, local_steps, plan, rates, train_chunk

SIZES = [20, 3, 41, 8, 16, 9]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


def own() -> nn.Module:
    """Computed through autograd."""
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


@pytest.mark.parametrize("factory", [mlp, own])
@pytest.mark.parametrize(
    "settings",
    [
        Training(epochs=2, batch_size=8, lr=0.1),
        Training(epochs=1, batch_size=5, lr=0.1, momentum=0.0, weight_decay=0.01),
        Training(steps=3, batch_size=8, lr=0.1),
    ],
)
@pytest.mark.parametrize("part", [None, slice(0, 63)], ids=["whole", "body"])
def test_who_has_finished_is_left_out_and_no_bit_changes(
    factory: Callable[[], nn.Module], settings: Training, part: slice | None
) -> None:
    cohort = make_cohort(make_federation(SIZES), factory, settings, "float32")
    data = cohort.data.train
    order = torch.argsort(data.sizes, descending=True)

    def chunk(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batches = plan(cohort.seed, 1, cohort.ids[rows], data.starts[rows], data.sizes[rows], settings)
        needed.append(batches.frame.rows)
        block = cohort.weights[rows].clone()
        steer = Proximal(torch.ones_like(block), 0.1)
        lengths = rates(batches, 0.1, cohort.dtype)
        args = (cohort.program, block, cohort.train_x, data.y, batches, lengths, settings, part, steer, steer.beside)
        return block, train_chunk(*args)

    needed: list[list[int]] = []
    (longest_first, loss), (longest_last, same) = chunk(order), chunk(order.flip(0))
    assert torch.equal(longest_first, longest_last.flip(0))
    assert torch.equal(loss, same.flip(0))
    steps = local_steps(data.sizes, settings)
    assert needed[0] == [int((steps > step).sum()) for step in range(int(steps.max()))]
    assert needed[1] == [len(SIZES)] * int(steps.max())  # the last one is needed to the end


def padded(cohort: Cohort, monkeypatch: pytest.MonkeyPatch) -> int:
    """Samples that the cohort computes gradients of in a round, padding included."""
    count, plain = 0, cohort.program.gradients

    def counted(slots, x, labels, index, share, spare=None):  # type: ignore[no-untyped-def]
        nonlocal count
        count += index.numel()
        return plain(slots, x, labels, index, share, spare)

    monkeypatch.setattr(cohort.program, "gradients", counted)
    cohort.train(1)
    return count


def test_padding_is_a_small_part_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [int(size) for size in 1 + 300 * torch.rand(60, generator=generator) ** 3]
    cohort = make_cohort(make_federation(sizes), mlp, Training(epochs=2, batch_size=10, lr=0.1))
    real = 2 * sum(sizes)
    whole_batches = 2 * sum(-(-size // 10) * 10 for size in sizes)
    assert real <= padded(cohort, monkeypatch) <= whole_batches < 1.15 * real
    longest = 60 * 2 * max(sizes)
    assert longest > 3 * real  # what a rectangle would have cost


def test_chunks_hold_clients_with_about_as_many_steps_the_longest_first() -> None:
    steps, sizes = torch.tensor([4, 4, 40, 0, 8, 5, 4]), torch.tensor([31, 40, 400, 0, 77, 45, 33])
    assert [rows.tolist() for rows in alike(steps, sizes, 10)] == [[2, 4, 5], [1, 6, 0]]
    assert [rows.tolist() for rows in alike(steps, sizes, 2)] == [[2, 4], [5, 1], [6, 0]]
    equal = torch.full((5,), 3)
    assert [rows.tolist() for rows in alike(equal, 8 * equal, 3)] == [[0, 1, 2], [3, 4]]
    assert alike(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), 3) == []
