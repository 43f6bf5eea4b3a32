"""What FedCG says of its domains: in a row of metrics, and with pictures at the end of a run."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from kinfolk.cohort.cohort import Cohort
from kinfolk.data.federation import Part
from kinfolk.methods import domain_labels
from kinfolk.models.bundle import Bundle, apart
from kinfolk.models.domains import evenness

AT_ONCE = 1024  # samples that are looked at
CLIENTS = 500  # whose training samples are compared with their true domains
LABELS = 10  # that have a mean image, those with most samples
SIDE = 32  # pixels of a mean image, at most


def report(cohort: Cohort, model: Tensor, occupancy: Tensor, asked: str | None) -> dict[str, Any]:
    """A row's worth of the server's model [d]. asked: where a sample's domain comes from, if somebody is asked."""
    module = cast(Bundle, copy.deepcopy(cohort.model))
    cohort.layout.load(model, module)
    net, views = module.net, cohort.layout.views(model[None])
    dead = net.dead()
    row: dict[str, Any] = {
        "domain_occupancy": occupancy.tolist(),
        "domain_entropy": float(evenness(occupancy)),
        "domain_share": [float(view) for name, view in views.items() if name.endswith(".share")],
        "domain_zeros": net.zeros(),
        "dead_layer": [number for number, share in enumerate(dead) if share == 1],
        "domain_graph": net.graph.tolist(),
    }
    if asked is not None and net.graph.shape[0] > 1:
        row |= _matches(cohort, module, asked)
    return row


def _matches(cohort: Cohort, module: Bundle, asked: str) -> dict[str, Any]:
    """How domains agree with the true ones, where these are known: in training, and as new clients are given them."""
    row: dict[str, Any] = {}
    train = cohort.data.train
    if train.domains is not None:
        found = _taught(cohort, module, asked)
        row |= agreement(found, torch.where(found < 0, -1, train.domains), train)
    new = cohort.data.newcomers
    if new is not None and new.domains is not None:
        found = _guessed(module, new.x)
        row |= {f"new_{name}": value for name, value in agreement(found, new.domains, new).items()}
    return row


def _taught(cohort: Cohort, module: Bundle, asked: str) -> Tensor:
    """[N] domains that the teacher gives to the training samples of the first clients, -1 for those of others."""
    found = torch.full_like(cohort.data.train.y, -1)
    teacher = torch.cat([p.detach().flatten() for p in module.teacher.parameters()])
    rows = torch.arange(min(len(cohort), CLIENTS))
    for index, omega in domain_labels.opinions(cohort, asked, teacher, rows):
        found[index] = omega.argmax(dim=1)
    return found


def _guessed(module: Bundle, x: Tensor) -> Tensor:
    """[N] domains that the student sees in rows x [N, pixels + D]."""
    with torch.no_grad():
        return torch.cat([module.student(some).argmax(dim=1) for some in torch.split(x, AT_ONCE)])


def agreement(found: Tensor, true: Tensor, part: Part) -> dict[str, Any]:
    """Adjusted Rand indices of domains found [N] and true [N], samples whose true domain is not known (-1) left out.

    domain_ari: of all samples; domain_ari_clients: of clients, by the domain that most of their samples are in;
    domain_ari_within: mean over clients of that of their own samples, of those who have several true domains;
    domain_table: how many samples of each true domain (row) are found to be in which (column).
    """
    owner = part.owners().to(true.device)
    known = true >= 0
    if not known.any():
        return {}
    found, true, owner = found[known], true[known], owner[known]
    shape = (part.sizes.numel(), int(true.max()) + 1, int(found.max()) + 1)
    tables = torch.zeros(shape, dtype=torch.float64, device=true.device)
    tables.index_put_((owner, true, found), torch.ones_like(true, dtype=torch.float64), accumulate=True)
    tables = tables.cpu()
    there = tables.sum(dim=(1, 2)) > 0
    main = tables[there].sum(dim=2).argmax(dim=1), tables[there].sum(dim=1).argmax(dim=1)
    clients = torch.zeros(shape[1:], dtype=torch.float64)
    clients.index_put_(main, torch.ones(len(main[0]), dtype=torch.float64), accumulate=True)
    several = (tables.sum(dim=2) > 0).sum(dim=1) > 1
    within = [rand_index(table) for table in tables[several]]
    return {
        "domain_ari": rand_index(tables.sum(dim=0)),
        "domain_ari_clients": rand_index(clients),
        **({"domain_ari_within": sum(within) / len(within)} if within else {}),
        "domain_table": tables.sum(dim=0).long().tolist(),
    }


def rand_index(table: Tensor) -> float:
    """Adjusted Rand index of two groupings with so many samples [a, b] in group a of one and b of the other."""

    def pairs(counts: Tensor) -> float:
        return float((counts * (counts - 1) / 2).sum())

    both, rows, columns = pairs(table), pairs(table.sum(dim=1)), pairs(table.sum(dim=0))
    everything = pairs(table.sum()[None])
    chance = rows * columns / everything if everything else 0.0
    most = (rows + columns) / 2
    return 1.0 if most == chance else (both - chance) / (most - chance)


def portraits(cohort: Cohort, model: Tensor, asked: str | None) -> dict[str, Any] | None:
    """The mean image of each label in each domain, of new clients or where there are none, of the clients' test sets.

    None where samples are no images. Pixels are hexadecimal numbers of two digits, row by row.
    """
    module = cast(Bundle, copy.deepcopy(cohort.model))
    cohort.layout.load(model, module)
    data, shape, domains = cohort.data, module.input_shape, module.domains
    part, x = (data.test, cohort.test_x) if data.newcomers is None else (data.newcomers, data.newcomers.x)
    if len(shape) != 3 or not len(x):
        return None
    found = _guessed(module, x) if asked is not None and domains > 1 else x[:, -domains:].argmax(dim=1)
    labels = torch.bincount(part.y, minlength=data.classes).argsort(descending=True, stable=True)[:LABELS].sort().values
    cell = found * data.classes + part.y
    samples = torch.bincount(cell, minlength=domains * data.classes)
    size = min(SIDE, shape[1]), min(SIDE, shape[2])
    total = torch.zeros(domains * data.classes, size[0] * size[1], dtype=x.dtype, device=x.device)
    for rows, cells in zip(torch.split(x, AT_ONCE), torch.split(cell, AT_ONCE)):
        small = adaptive_avg_pool2d(apart(rows, shape)[0].mean(dim=1, keepdim=True), size)
        total.index_add_(0, cells, small.flatten(1))
    means = (total / samples.clamp(min=1)[:, None]).view(domains, data.classes, -1)[:, labels]
    counts = samples.view(domains, -1)[:, labels]
    low, high = (float(edge) for edge in means[counts > 0].aminmax())
    grey = ((means - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round().to(torch.uint8).cpu()
    return {
        "labels": labels.tolist(),
        "samples": counts.tolist(),
        "height": size[0],
        "width": size[1],
        "images": [[bytes(image.tolist()).hex() for image in row] for row in grey],
    }
