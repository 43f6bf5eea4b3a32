"""Local SGD of many clients as one batched program.

`plan` says which samples each client takes at each of its steps (drawn statelessly, ragged clients padded with a mask);
`train_chunk` runs those steps for a handful of clients at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.cohort import augment
from kinfolk.cohort.program import Program
from kinfolk.cohort.steer import Steer
from kinfolk.kernels import dispatch
from kinfolk.kernels.dispatch import there
from kinfolk.settings import setting

# How many times as many steps as another a client of the same chunk may have. What is planned and never taken costs
# little; chunks of their own for a few clients cost much where models are small, and on a GPU (benchmarks/ragged.py).
SPREAD = 8


@dataclass(frozen=True)
class Training:
    """What every client does with its own data in a round."""

    epochs: int = setting(3, "passes over the local data per round", ge=1)
    steps: int | None = setting(None, "local steps per round, instead of epochs", ge=1)
    batch_size: int = setting(128, "samples per step; the last, smaller batch of a pass is kept", ge=1)
    lr: float = setting(0.08, "step size in round 1", gt=0)
    lr_decay: float = setting(0.99, "factor on the step size from one round to the next", gt=0, le=1)
    momentum: float = setting(0.9, "SGD momentum; starts from zero every round", ge=0, lt=1)
    weight_decay: float = setting(0.0, "L2 penalty added to the gradient", ge=0)
    augment: Literal["crop-flip"] | None = setting(
        None, "crop-flip: at every step images are moved by up to 4 pixels, and half of them mirrored"
    )

    def rate(self, t: int) -> float:
        """Step size of round t (1-based)."""
        return self.lr * self.lr_decay ** (t - 1)


@dataclass(frozen=True)
class Frame:
    """All of a round's batches but which samples are in them: the same every round for the same clients."""

    counts: Tensor  # [m, steps] on the CPU: samples of each client's batch, 0 once a client has finished
    first: Tensor  # [m, steps] where in a client's shuffled samples, one pass after another, a batch begins
    moving: Tensor  # [steps, m] bool: who takes a step
    epochs: int  # passes that have to be shuffled
    widest: int  # samples of the largest client
    width: int  # samples of the largest batch
    widths: list[int]  # of each step
    rows: list[int]  # how many of the clients, from the first on, each step needs: all behind them have finished
    shares: list[Tensor | None]  # [m, b] weights of a step's samples (1/count, 0 outside); None: every batch is full

    @staticmethod
    def of(sizes: Tensor, training: Training, device: torch.device) -> Frame:
        """For clients of `sizes` [m] samples, which is on the CPU."""
        size = training.batch_size
        steps = local_steps(sizes, training)
        batches = (-(-sizes // size)).clamp(min=1)
        epochs, widest = int((-(-steps // batches)).max()), int(sizes.max())
        step = torch.arange(int(steps.max()))
        epoch, batch = step // batches[:, None], step % batches[:, None]  # [m, steps]
        counts = (sizes[:, None] - batch * size).clamp(max=size)
        counts = torch.where(step < steps[:, None], counts, 0)
        first = epoch.clamp(max=epochs - 1) * widest + batch * size
        widths = counts.amax(dim=0).tolist()
        places = torch.arange(1, counts.shape[0] + 1)[:, None]
        rows = torch.where(counts > 0, places, 0).amax(dim=0).tolist()
        known = there(counts, device)
        shares = [
            None if least == width else _shares(known[:, step, None], width)
            for step, (least, width) in enumerate(zip(counts.amin(dim=0).tolist(), widths))
        ]
        return Frame(
            counts,
            there(first, device),
            (known.T > 0).contiguous(),
            epochs,
            widest,
            min(size, widest),
            widths,
            rows,
            shares,
        )


def _shares(counts: Tensor, width: int) -> Tensor:
    inside = torch.arange(width, device=counts.device) < counts
    return inside.to(torch.float64) / counts.clamp(min=1)


class Frames:
    """The frames of late, by sizes and settings."""

    MOST = 16

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[tuple[bytes, Training], Frame] = {}

    def __call__(self, sizes: Tensor, training: Training) -> Frame:
        key = sizes.numpy().tobytes(), training
        if (frame := self._known.get(key)) is None:
            if len(self._known) >= self.MOST:
                self._known = {}
            frame = self._known[key] = Frame.of(sizes, training, self.device)
        return frame


@dataclass(frozen=True)
class Plan:
    """The batches of one round for a chunk of clients; those with most steps had better come first."""

    index: Tensor  # [m, steps, batch] rows of the data set; meaningless outside a batch
    frame: Frame
    looks: Tensor | None = None  # [m, steps, batch] how the images are seen (see augment.py); none: as they are

    @property
    def counts(self) -> Tensor:
        """[m, steps] on the CPU: samples of each client's batch, 0 once a client has finished."""
        return self.frame.counts


def local_steps(sizes: Tensor, training: Training) -> Tensor:
    """Steps each client takes in a round, 0 for a client without data: [m]."""
    batches = -(-sizes // training.batch_size)
    if training.steps is not None:
        return torch.where(sizes > 0, training.steps, 0)
    return batches * training.epochs


def alike(steps: Tensor, sizes: Tensor, most: int) -> list[Tensor]:
    """Rows [*] of the clients that have steps [m] to take, in chunks of clients with about as many steps.

    sizes: [m] samples; most: clients in a chunk. Those with more steps, and of equals those with more samples, come
    first: whoever has finished is left out of the steps that follow, and a chunk that takes long begins soon.
    """
    if not steps.numel():
        return []
    order = torch.argsort(steps * (sizes.max() + 1) + sizes, descending=True, stable=True)
    order = order[steps[order] > 0]
    chunks: list[Tensor] = []
    while order.numel():
        alike = SPREAD * steps[order[:most]] >= steps[order[0]]
        count = int(alike.sum())
        chunks.append(order[:count])
        order = order[count:]
    return chunks


class Chunks:
    """What `alike` gives, of the last time: in most rounds clients have as many steps as in the round before."""

    def __init__(self) -> None:
        self._key: object = None
        self._rows: list[Tensor] = []

    def __call__(self, steps: Tensor, sizes: Tensor, most: int) -> list[Tensor]:
        key = steps.numpy().tobytes(), sizes.numpy().tobytes(), most
        if key != self._key:
            self._key, self._rows = key, alike(steps, sizes, most)
        return self._rows


def plan(
    seed: int,
    t: int,
    ids: Tensor,
    starts: Tensor,
    sizes: Tensor,
    training: Training,
    purpose: str = "batch",
    frame: Frame | None = None,
) -> Plan:
    """Draw the batches of round t. `sizes` [m] lives on the CPU; `ids` and `starts` [m] on the cohort's device.

    Different purposes draw different batches. frame: that of these clients, if it is known.
    """
    device = ids.device
    frame = frame or Frame.of(sizes, training, device)
    order = randomness.permutations(seed, purpose, t, ids, sizes, frame.epochs).flatten(1)  # [m, epochs · widest]
    position = frame.first[:, :, None] + torch.arange(frame.width, device=device)
    position = position.clamp(max=order.shape[1] - 1)  # past the end only outside a batch
    chosen = order.gather(1, position.flatten(1)).view(position.shape)
    if int(sizes.min()) < frame.widest:  # padding points at a client's first sample, which is always there
        chosen = torch.where(chosen < there(sizes, device)[:, None, None], chosen, 0)
    looks = None if training.augment is None else augment.draw(seed, t, ids, len(frame.widths), frame.width, purpose)
    return Plan(starts[:, None, None] + chosen, frame, looks)


def rates(plan: Plan, lr: float, dtype: torch.dtype) -> Tensor:
    """Step sizes [steps, m]: lr, and 0 once a client has finished: its momentum must not carry it on."""
    return plan.frame.moving.to(dtype) * lr


def train_chunk(
    program: Program,
    block: Tensor,
    x: Tensor,
    y: Tensor,
    plan: Plan,
    steps: Tensor,
    training: Training,
    part: slice | None = None,
    steer: Steer | None = None,
    beside: Sequence[Tensor] = (),
) -> Tensor:
    """Take the planned steps in place on the models `block` [m, d]; mean loss [m] of the steps.

    x: [N, ...] and y: [N] are the samples of the whole cohort, as `program.samples` gave them or, if the plan has
    looks, as they are; steps: [steps, m] the sizes of the steps; part: the only columns that move; steer: what is done
    to a gradient before the step, given the tensors `beside` [m, d] or [m] that go with it.
    """
    velocity: list[Tensor] = []
    spare: list[Tensor] | None = None
    total = torch.zeros(block.shape[0], dtype=torch.float64, device=x.device)
    slots = program.slots(block)

    def moved(tensors: list[Tensor]) -> list[Tensor]:
        return tensors if part is None else program.within(tensors, part)

    moving = moved(slots)
    others = [[tensor] if tensor.dim() == 1 else moved(program.slots(tensor)) for tensor in beside]
    labels = y[plan.index]  # of all steps at once: one call
    present = block.shape[0]
    fewest = 1 if program.concurrent else min(2, present)  # products of autograd round otherwise for one alone
    for number, (width, share, needed) in enumerate(zip(plan.frame.widths, plan.frame.shares, plan.frame.rows)):
        count = max(needed, fewest)
        if count < present:  # the others have finished
            present = count
            slots, moving, velocity = (_first(tensors, count) for tensors in (slots, moving, velocity))
            others = [_first(tensors, count) for tensors in others]
            spare = None if spare is None else _first(spare, count)
        index = plan.index[:count, number, :width]
        share = None if share is None else share[:count]
        images = x
        if plan.looks is not None:
            images = program.samples(augment.seen(x, index, plan.looks[:count, number, :width]))
            index = torch.arange(index.numel(), device=x.device).view(index.shape)
        wanted = labels[:count, number, :width]
        loss, gradients = program.gradients(slots, images, wanted, index, share, spare)
        ways = moved(gradients)
        if steer is not None:
            steer.bend(moving, ways, *others, step=number)
        velocity = descend(moving, velocity, ways, steps[number, :count], training)
        spare = gradients if velocity[0] is not ways[0] or not training.momentum else None
        total[:count] += loss
    return total / (steps > 0).sum(dim=0).clamp(min=1)


def all_finite(block: Tensor) -> Tensor:
    """[m] whether a row [d] holds neither NaN nor infinity."""
    if block.is_cuda:
        return torch.isfinite(torch.linalg.vector_norm(block, torch.inf, dim=1))
    return torch.isfinite(block.amax(dim=1)) & torch.isfinite(block.amin(dim=1))  # eleven times faster there


def _first(tensors: list[Tensor], count: int) -> list[Tensor]:
    return [tensor[:count] for tensor in tensors]


def descend(
    slots: list[Tensor], velocity: list[Tensor], gradients: list[Tensor], rates: Tensor, training: Training
) -> list[Tensor]:
    """Move the models in place and return the new velocity (which starts empty). rates: [m] step sizes."""
    if len(slots) == 1 and slots[0].dtype == torch.float32 and dispatch.fused(slots[0]):
        from kinfolk.kernels.descent import descend as fused

        first = not velocity or not training.momentum
        carried = gradients[0] if first else velocity[0]
        fused(slots[0], carried, gradients[0], rates, training.momentum, training.weight_decay, first)
        return [carried]
    if training.weight_decay:
        torch._foreach_add_(gradients, slots, alpha=training.weight_decay)
    if not velocity or not training.momentum:
        velocity = gradients
    elif not slots[0].is_cuda:
        for speed, gradient in zip(velocity, gradients):
            torch.add(gradient, speed, alpha=training.momentum, out=speed)
    else:
        torch._foreach_mul_(velocity, training.momentum)
        torch._foreach_add_(velocity, gradients)
    for slot, speed in zip(slots, velocity):
        slot.addcmul_(speed, rates.view(-1, *[1] * (slot.dim() - 1)), value=-1)
    return velocity
