"""Local SGD of many clients as one batched program.

`plan` says which samples each client takes at each of its steps (drawn statelessly, ragged clients padded with a mask);
`train_chunk` runs those steps for a handful of clients at once. The gradient of the summed loss is every client's own
gradient, because no client's loss reads another client's row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk import randomness
from kinfolk.settings import setting

Forward = Callable[[dict[str, Tensor], Tensor], Tensor]  # ([m, *shape] per name, x [m, b, ...]) -> logits [m, b, C]


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

    def rate(self, t: int) -> float:
        """Step size of round t (1-based)."""
        return self.lr * self.lr_decay ** (t - 1)


@dataclass(frozen=True)
class Plan:
    """The batches of one round for a chunk of clients."""

    index: Tensor  # [m, steps, batch] rows of the data set; meaningless where the mask is false
    counts: Tensor  # [m, steps] on the CPU: samples of each client's batch, 0 once a client has finished

    def batch(self, step: int) -> tuple[Tensor, Tensor | None]:
        """Row indices [m, b] of a step and their weights [m, b] (1/count inside, 0 outside), None if all equal."""
        counts = self.counts[:, step]
        width = int(counts.max())
        index = self.index[:, step, :width]
        if int(counts.min()) == width:
            return index, None
        counts = counts.to(index.device)
        inside = torch.arange(width, device=index.device) < counts[:, None]
        return index, inside.to(torch.float64) / counts.clamp(min=1)[:, None]


def local_steps(sizes: Tensor, training: Training) -> Tensor:
    """Steps each client takes in a round, 0 for a client without data: [m]."""
    batches = -(-sizes // training.batch_size)
    if training.steps is not None:
        return torch.where(sizes > 0, training.steps, 0)
    return batches * training.epochs


def plan(seed: int, t: int, ids: Tensor, starts: Tensor, sizes: Tensor, training: Training) -> Plan:
    """Draw the batches of round t. `sizes` [m] lives on the CPU; `ids` and `starts` [m] on the cohort's device."""
    device = ids.device
    size = training.batch_size
    steps = local_steps(sizes, training)
    batches = (-(-sizes // size)).clamp(min=1)
    epochs = int((-(-steps // batches)).max())
    step = torch.arange(int(steps.max()))
    epoch, batch = step // batches[:, None], step % batches[:, None]  # [m, steps]
    counts = (sizes[:, None] - batch * size).clamp(max=size)
    counts = torch.where(step < steps[:, None], counts, 0)

    order = randomness.permutations(seed, "batch", t, ids, sizes, epochs)  # [m, epochs, widest]
    widest = order.shape[2]
    order = order.flatten(1)
    width = min(size, widest)
    first = (epoch.clamp(max=epochs - 1) * widest + batch * size).to(device)
    position = first[:, :, None] + torch.arange(width, device=device)
    position = position.clamp(max=order.shape[1] - 1)  # past the end only where the mask is false
    chosen = order.gather(1, position.flatten(1)).view(position.shape)
    if int(sizes.min()) < widest:  # padding points at a client's first sample, which is always there
        chosen = torch.where(chosen < sizes.to(device)[:, None, None], chosen, 0)
    return Plan(starts[:, None, None] + chosen, counts)


def train_chunk(
    forward: Forward,
    parameters: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    plan: Plan,
    lr: float,
    training: Training,
) -> Tensor:
    """Take the planned steps in place on `parameters` (name -> [m, *shape]); mean loss [m] of the steps.

    x: [N, ...] and y: [N] are the samples of the whole cohort.
    """
    names = list(parameters)
    weights = [parameters[name].detach().requires_grad_() for name in names]
    momentum: list[Tensor] = []
    total = torch.zeros(weights[0].shape[0], dtype=torch.float64, device=x.device)
    for step in range(plan.counts.shape[1]):
        index, share = plan.batch(step)
        losses = sample_losses(forward(dict(zip(names, weights)), x[index]), y[index])
        each = losses.mean(dim=1) if share is None else (losses * share.to(losses.dtype)).sum(dim=1)
        gradients = list(torch.autograd.grad(each.sum(), weights))
        with torch.no_grad():
            if training.weight_decay:
                torch._foreach_add_(gradients, weights, alpha=training.weight_decay)
            if step == 0 or not training.momentum:
                momentum = gradients
            else:
                torch._foreach_mul_(momentum, training.momentum)
                torch._foreach_add_(momentum, gradients)
            _descend(weights, momentum, lr, plan.counts[:, step])
            total += each
    steps = (plan.counts > 0).sum(dim=1).clamp(min=1)
    return total / steps.to(total.device)


def sample_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every sample: logits [m, b, C], labels [m, b] -> [m, b]."""
    losses: Tensor = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


def _descend(weights: list[Tensor], momentum: list[Tensor], lr: float, counts: Tensor) -> None:
    if int(counts.min()) > 0:
        torch._foreach_add_(weights, momentum, alpha=-lr)
        return
    # Clients that have finished stand still: their momentum must not carry them on.
    rates = (counts > 0).to(weights[0]) * lr
    for weight, speed in zip(weights, momentum):
        weight.sub_(speed * rates.view(-1, *[1] * (weight.dim() - 1)))
