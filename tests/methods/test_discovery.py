"""Domains found by sums: against plain formulas and loops over clients, on samples whose domains are known."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from kinfolk.data.federation import Part
from kinfolk.methods import discovery
from kinfolk.methods.discovery import Moments, Sight
from kinfolk.methods.domain_report import agreement, rand_index, tables

CLASSES, WIDTH = 3, 12


class Server:
    """Adds up what clients tell, some of whom it does not hear."""

    def __init__(self, unheard: tuple[int, ...] = ()) -> None:
        self.unheard, self.told = list(unheard), 0

    def total(self, t: int, values: Tensor, weights: Tensor, transfers: int = 2) -> Tensor:
        assert transfers == 0
        weights = weights.clone()
        weights[self.unheard] = 0
        self.told = max(self.told, values[0].numel())
        return torch.einsum("m,m...->...", weights, values)


def samples(per_client: bool, domains: int, sizes: list[int], seed: int = 0) -> tuple[list[Any], Tensor]:
    """Looks of class mean + domain mean + noise, with large class differences and small domain differences."""
    draw = torch.Generator().manual_seed(seed)
    kinds = 4 * torch.randn(CLASSES, WIDTH, generator=draw).double()
    shifts = torch.zeros(domains, WIDTH).double()
    shifts[:, :2] = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])[:domains] * 2.5
    noise = torch.linspace(0.5, 6, WIDTH).double()
    noise[:2] = 1.0
    clients, true = [], []
    for i, size in enumerate(sizes):
        y = torch.randint(CLASSES, (size,), generator=draw)
        d = torch.full((size,), i % domains) if per_client else torch.randint(domains, (size,), generator=draw)
        z = kinds[y] + shifts[d] + noise * torch.randn(size, WIDTH, generator=draw).double()
        clients.append((z, y))
        true.append(d)
    return clients, torch.cat(true)


def sight_of(clients: list[Any], server: Server | None = None, rows: list[int] | None = None) -> Sight:
    widest = max(len(y) for _, y in clients)
    z = torch.stack([F.pad(z, (0, 0, 0, widest - len(y))) for z, y in clients])
    kinds = [F.pad(F.one_hot(y, CLASSES).double(), (0, 0, 0, widest - len(y))) for _, y in clients]
    places = torch.arange(len(clients)) if rows is None else torch.tensor(rows)
    m = int(places.max()) + 1
    return Sight(z, torch.stack(kinds), places, m, server or Server(), 1)  # type: ignore[arg-type]


def taught(sight: Sight, found: discovery.Domains) -> Tensor:
    scores = sight.features @ found.weight.T + sight.classes @ found.offset
    return discovery.settled(scores, sight.inside).argmax(dim=2)[sight.inside > 0]


@pytest.mark.parametrize("per_client", [False, True])
@pytest.mark.parametrize("domains", [2, 4])
def test_domains_that_do_the_same_to_all_classes_are_found(per_client: bool, domains: int) -> None:
    clients, true = samples(per_client, domains, [40, 25, 60, 50] * 6)
    sight = sight_of(clients)
    found = discovery.find(sight, domains, seed=1)
    assert adjusted_rand_score(true, taught(sight, found)) > (0.99 if per_client else 0.85)
    others, unseen = samples(per_client, domains, [300], seed=0)  # same means, as they are drawn first
    z = others[0][0]
    guessed = (z @ found.student_weight.T + found.student_bias).argmax(dim=1)
    if not per_client:
        assert adjusted_rand_score(unseen, guessed) > 0.6


def test_whoever_is_not_heard_or_not_asked_does_not_count() -> None:
    clients, _ = samples(False, 2, [30, 20, 25, 30, 40, 22])
    some = discovery.find(sight_of(clients, Server(unheard=(1, 4))), 2, seed=3)
    alone = [clients[i] for i in (0, 2, 3, 5)]
    few = discovery.find(sight_of(alone, rows=[0, 2, 3, 5]), 2, seed=3)
    for mine, theirs in zip(vars(some).values(), vars(few).values()):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-7)


def test_nobody_tells_a_server_more_than_sums_of_a_fixed_size() -> None:
    told = []
    for sizes in ([20, 30], [200, 300]):
        clients, _ = samples(False, 4, sizes)
        server = Server()
        discovery.find(sight_of(clients, server), 4, seed=0)
        told.append(server.told)
    assert told[0] == told[1] == WIDTH * discovery.STAGES[0][0]


def test_the_teacher_is_the_ratio_of_normal_densities() -> None:
    clients, true = samples(False, 2, [50, 70])
    sight = sight_of(clients)
    share = F.one_hot(true, 2).double()
    padded = torch.zeros(*sight.inside.shape, 2).double()
    padded[sight.inside > 0] = share
    moments = Moments.of(sight, sight.inside)
    sums, counts = discovery._domain_sums(sight, padded)
    weight, offset = discovery._fitted(moments, sums, counts)
    z, y = (torch.cat(column) for column in zip(*clients))
    design = torch.cat([F.one_hot(y, CLASSES).double(), share], dim=1)  # least squares: mu and nu of the additive model
    fitted = design @ torch.linalg.lstsq(design, z, driver="gelsd").solution
    covariance = discovery._ridged((z - fitted).T @ (z - fitted) / len(z))
    effects = torch.linalg.lstsq(design, z, driver="gelsd").solution
    mean = effects[:CLASSES, None] + effects[CLASSES:]
    normal = torch.distributions.MultivariateNormal
    density = torch.stack([normal(mean[y, d], covariance).log_prob(z) for d in range(2)], dim=1)
    scores = z @ weight.T + offset[y]
    torch.testing.assert_close(scores[:, 0] - scores[:, 1], density[:, 0] - density[:, 1], rtol=1e-4, atol=1e-4)


def test_the_student_is_a_linear_discriminant() -> None:
    clients, true = samples(False, 3, [80, 90])
    sight = sight_of(clients)
    padded = torch.zeros(*sight.inside.shape, 3).double()
    padded[sight.inside > 0] = F.one_hot(true, 3).double()
    sums, counts = discovery._domain_sums(sight, padded)
    weight, bias = discovery._student(Moments.of(sight, sight.inside), sums, counts)
    z = torch.cat([z for z, _ in clients])
    library = LinearDiscriminantAnalysis(solver="lsqr").fit(z.numpy(), true.numpy())
    expected = torch.from_numpy(library.predict_proba(z.numpy()))
    torch.testing.assert_close((z @ weight.T + bias).softmax(dim=1), expected, rtol=0, atol=0.02)


def test_a_client_settles_its_own_proportions() -> None:
    draw = torch.Generator().manual_seed(2)
    scores = torch.randn(3, 7, 4, generator=draw).double()
    inside = (torch.arange(7) < torch.tensor([[7], [3], [1]])).double()
    found = discovery.settled(scores, inside)
    for i, size in enumerate([7, 3, 1]):
        share = scores[i, :size].softmax(dim=1)
        for _ in range(discovery.LOCAL_STEPS):
            share = (scores[i, :size] + torch.digamma(share.sum(dim=0) + discovery.OWN)).softmax(dim=1)
        torch.testing.assert_close(found[i, :size], share)
        assert not found[i, size:].any()
    leaning = torch.zeros(1, 100, 2).double()
    leaning[0, :80, 0], leaning[0, 80:, 1] = 2.0, 1.0
    assert (discovery.settled(leaning, torch.ones(1, 100))[0, :, 0] > 0.5).all()


def test_the_rand_index_is_the_usual_one() -> None:
    draw = torch.Generator().manual_seed(5)
    true, found = (torch.randint(4, (60,), generator=draw) for _ in range(2))
    found[:40] = true[:40]
    part = Part(torch.zeros(60, 1), true, torch.tensor([0, 20, 30]), torch.tensor([20, 10, 30]), true)
    row = agreement(tables(found, true, part))
    assert row["domain_ari"] == pytest.approx(adjusted_rand_score(true, found))
    pieces = [slice(0, 20), slice(20, 30), slice(30, 60)]
    within = [adjusted_rand_score(true[some], found[some]) for some in pieces]
    assert row["domain_ari_within"] == pytest.approx(sum(within) / 3)
    most = [(int(true[some].bincount().argmax()), int(found[some].bincount().argmax())) for some in pieces]
    assert row["domain_ari_clients"] == pytest.approx(adjusted_rand_score(*zip(*most)))
    assert rand_index(torch.diag(torch.tensor([3.0, 4, 5]))) == 1
    assert rand_index(torch.tensor([[5.0]])) == 1
    half = true.clone()
    half[::2] = -1
    some = agreement(tables(found, half, part))
    assert some["domain_ari"] == pytest.approx(adjusted_rand_score(true[1::2], found[1::2]))
    assert agreement(tables(found, torch.full_like(true, -1), part)) == {}
