"""What FedCG says of its domains: in a row of metrics, and with pictures at the end of a run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, pad

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
    """A row's worth of the server's model [d], and `tables` [k, true, found] of this cohort's samples in each domain.

    asked: where a sample's domain comes from, if somebody is asked.
    """
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
    if asked is None or net.graph.shape[0] == 1:
        return row
    train, new = cohort.data.train, cohort.data.newcomers
    if train.domains is not None:
        found = _taught(cohort, module, asked)
        row["tables"] = tables(found, torch.where(found < 0, -1, train.domains), train)
    if new is not None and new.domains is not None:
        row["new_tables"] = tables(_guessed(module, new.x), new.domains, new)
    return row


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of all cohorts: how domains agree with the true ones, in training, and as new clients are given them."""
    row = {name: value for name, value in parts[0].items() if name not in ("tables", "new_tables")}
    if "tables" in parts[0]:
        row |= agreement(_together([part["tables"] for part in parts]))
    if "new_tables" in parts[0]:  # all cohorts know the same new clients
        row |= {f"new_{name}": value for name, value in agreement(parts[0]["new_tables"]).items()}
    return row


def _together(tables: Sequence[Tensor]) -> Tensor:
    """Tables [k, a, b] of several cohorts one below another, as wide as the widest."""
    most = [max(table.shape[axis] for table in tables) for axis in (1, 2)]
    return torch.cat([pad(table, (0, most[1] - table.shape[2], 0, most[0] - table.shape[1])) for table in tables])


def _taught(cohort: Cohort, module: Bundle, asked: str) -> Tensor:
    """[N] domains that the teacher gives to the training samples of the first clients, -1 for those of others."""
    found = torch.full_like(cohort.data.train.y, -1)
    teacher = torch.cat([p.detach().flatten() for p in module.teacher.parameters()])
    rows = torch.nonzero(cohort.ids.cpu() < CLIENTS).flatten()
    for index, omega in domain_labels.opinions(cohort, asked, teacher, rows):
        found[index] = omega.argmax(dim=1)
    return found


def _guessed(module: Bundle, x: Tensor) -> Tensor:
    """[N] domains that the student sees in rows x [N, pixels + D]."""
    with torch.no_grad():
        return torch.cat([module.student(some).argmax(dim=1) for some in torch.split(x, AT_ONCE)])


def tables(found: Tensor, true: Tensor, part: Part) -> Tensor:
    """[k, a, b] float64 on the CPU: how many samples of a client are of true domain a and found to be in b.

    found, true: [N]; samples whose true domain is not known (-1) are left out.
    """
    owner = part.owners().to(true.device)
    known = true >= 0
    found, true, owner = found[known], true[known], owner[known]
    wide = [int(numbers.max()) + 1 if numbers.numel() else 0 for numbers in (true, found)]
    counts = torch.zeros((part.sizes.numel(), *wide), dtype=torch.float64, device=true.device)
    counts.index_put_((owner, true, found), torch.ones_like(true, dtype=torch.float64), accumulate=True)
    return counts.cpu()


def agreement(tables: Tensor) -> dict[str, Any]:
    """Adjusted Rand indices of found and true domains, from tables [k, a, b] of the clients; {} without samples.

    domain_ari: of all samples; domain_ari_clients: of clients, by the domain that most of their samples are in;
    domain_ari_within: mean over clients of that of their own samples, of those who have several true domains;
    domain_table: how many samples of each true domain (row) are found to be in which (column).
    """
    there = tables.sum(dim=(1, 2)) > 0
    if not there.any():
        return {}
    main = tables[there].sum(dim=2).argmax(dim=1), tables[there].sum(dim=1).argmax(dim=1)
    clients = torch.zeros(tables.shape[1:], dtype=torch.float64)
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


@dataclass(frozen=True)
class Sums:
    """What mean images of domains are made of, of one cohort."""

    size: tuple[int, int]
    total: Tensor  # [D, C, pixels] sums of images
    samples: Tensor  # [D, C]
    of_all: bool  # of new clients, whom every cohort knows


def portraits(cohort: Cohort, model: Tensor, asked: str | None) -> Sums | None:
    """Sums of the images of each label in each domain, of new clients or where there are none, of the clients' tests.

    None where samples are no images, or there are none.
    """
    module = cast(Bundle, copy.deepcopy(cohort.model))
    cohort.layout.load(model, module)
    data, shape, domains = cohort.data, module.input_shape, module.domains
    part, x = (data.test, cohort.test_x) if data.newcomers is None else (data.newcomers, data.newcomers.x)
    if len(shape) != 3 or not len(x):
        return None
    found = _guessed(module, x) if asked is not None and domains > 1 else x[:, -domains:].argmax(dim=1)
    cell = found * data.classes + part.y
    samples = torch.bincount(cell, minlength=domains * data.classes)
    size = min(SIDE, shape[1]), min(SIDE, shape[2])
    total = torch.zeros(domains * data.classes, size[0] * size[1], dtype=x.dtype, device=x.device)
    for rows, cells in zip(torch.split(x, AT_ONCE), torch.split(cell, AT_ONCE)):
        small = adaptive_avg_pool2d(apart(rows, shape)[0].mean(dim=1, keepdim=True), size)
        total.index_add_(0, cells, small.flatten(1))
    return Sums(size, total.view(domains, data.classes, -1), samples.view(domains, -1), data.newcomers is not None)


def drawn(parts: Sequence[Sums]) -> dict[str, Any]:
    """Mean images of the labels with most samples; pixels are hexadecimal numbers of two digits, row by row."""
    of = parts[:1] if parts[0].of_all else parts
    total, samples = (torch.stack([getattr(part, name) for part in of]).sum(dim=0) for name in ("total", "samples"))
    labels = samples.sum(dim=0).argsort(descending=True, stable=True)[:LABELS].sort().values
    counts = samples[:, labels]
    means = total[:, labels] / counts.clamp(min=1)[..., None]
    low, high = (float(edge) for edge in means[counts > 0].aminmax())
    grey = ((means - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round().to(torch.uint8).cpu()
    return {
        "labels": labels.tolist(),
        "samples": counts.tolist(),
        "height": parts[0].size[0],
        "width": parts[0].size[1],
        "images": [[bytes(image.tolist()).hex() for image in row] for row in grey],
    }
