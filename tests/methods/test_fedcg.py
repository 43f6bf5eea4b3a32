"""FedCG's rounds against a plain loop over clients; its schedule, its sources of domains, and what it refuses."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import Training, UserError, engines
from kinfolk.cohort.cohort import Cohort, initial_model
from kinfolk.cohort.training import local_steps, plan
from kinfolk.config import read
from kinfolk.methods import find
from kinfolk.methods.fedcg import Columns
from kinfolk.models.bundle import Bundle
from kinfolk.models.domains import adjacency
from kinfolk.peers.faults import Faults

SIZES = [12, 6, 9, 20, 8, 8]
CLUSTERS = [0, 1, 2, 0, 1, 2]
SHAPE = (1, 4, 4)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def engine_of(
    momentum: float = 0.5, faults: Faults | None = None, resident: str = "all", shards: int = 1, **settings: Any
) -> Any:
    method = find("fedcg")(**{"preset": "paper", "domains": 3, "student_lr": 0.05, **settings})
    training = Training(epochs=2, batch_size=5, lr=0.1, momentum=momentum, weight_decay=0.01)
    cohort = {"training": training, "seed": 4, "device": "cpu", "precision": "float64"}
    data = method.arrange(make_federation(SIZES, SHAPE, clusters=CLUSTERS))
    parts = engines.Parts(
        data, lambda: initial_model(lambda: method.wrap(net(), SHAPE), 4), method, faults or Faults(), cohort,
        resident=resident,
    )  # fmt: skip
    return engines.InProcessEngine(parts) if shards == 1 else engines.ShardedEngine(parts, shards)


def run(engine: Any, rounds: int) -> Tensor:
    for t in range(1, rounds + 1):
        engine.step(t, False)
    model: Tensor = engine.shards[0].state.model
    return model


def loaded(cohort: Cohort, model: Tensor) -> Bundle:
    module = copy.deepcopy(cohort.model)
    assert isinstance(module, Bundle)
    cohort.layout.load(model, module)
    return module


def batches_of(cohort: Cohort, i: int, t: int, purpose: str) -> list[Tensor]:
    part, settings = cohort.data.train, cohort.training
    size = part.sizes[i : i + 1]
    found = plan(cohort.seed, t, cohort.ids[i : i + 1], part.starts[i : i + 1], size, settings, purpose)
    steps = int(local_steps(size, settings)[0])
    return [found.index[0, step, : int(found.counts[0, step])] for step in range(steps)]


def plain_client(cohort: Cohort, start: Tensor, i: int, t: int, student_lr: float) -> tuple[Tensor, Tensor]:
    """One client's round, written out: its model, and the domains of its samples."""
    module = loaded(cohort, start).train()
    settings, part = cohort.training, cohort.data.train
    pixels = part.x[:, :16]
    with torch.no_grad():
        domain = module.teacher(part.x).argmax(dim=1)
    learner = torch.optim.SGD(module.student.parameters(), lr=student_lr)
    for index in batches_of(cohort, i, t, "student"):
        learner.zero_grad()
        F.cross_entropy(module.student(part.x[index]), domain[index]).backward()
        learner.step()
    task = [p for name, p in module.net.named_parameters() if name != "graph"]
    learner = torch.optim.SGD(task, lr=settings.rate(t), momentum=settings.momentum, weight_decay=settings.weight_decay)
    for index in batches_of(cohort, i, t, "batch"):
        learner.zero_grad()
        omega = F.one_hot(domain[index], 3).double()
        scores = module.net(pixels[index].view(-1, *SHAPE), omega)
        F.cross_entropy(scores, part.y[index]).backward()
        learner.step()
    mine = slice(int(part.starts[i]), int(part.starts[i] + part.sizes[i]))
    return cohort.layout.flatten(module), domain[mine]


@pytest.mark.parametrize(
    "settings", [{}, {"layers": "all", "graph_layers": 2}, {"param_relu": False, "project": False}]
)
def test_a_round_is_a_loop_over_clients(settings: dict[str, Any]) -> None:
    engine = engine_of(participation=0.5, teacher_rounds=2, first_graph="rand", **settings)
    shard = engine.shards[0]
    columns = Columns.of(shard.cohort.layout)
    for t in (1, 2, 3):
        before = shard.state.model
        drawn = shard.method.visitors(t, 4, 6, torch.device("cpu")).sort().values.tolist()
        assert len(drawn) == 3
        engine.step(t, False)
        found = [plain_client(shard.cohort, before, i, t, 0.05) for i in drawn]
        weights = torch.tensor([SIZES[i] for i in drawn]).double()
        mean = (torch.stack([model for model, _ in found]) * weights[:, None]).sum(dim=0) / weights.sum()
        after = shard.state.model
        for part in (columns.task, columns.student):
            torch.testing.assert_close(after[part], mean[part], rtol=1e-10, atol=1e-12)
            assert not torch.equal(after[part], before[part])
        everything = torch.cat([domain for _, domain in found])
        shares = torch.bincount(everything, minlength=3) / everything.numel()
        torch.testing.assert_close(shard.state.occupancy, shares.double())


class Residual(nn.Module):
    """What one domain comes down to, written out: common filters and lambda times a second set of them."""

    def __init__(self, first: nn.Sequential, rows: Tensor, share: Tensor) -> None:
        super().__init__()
        self.conv, self.head = copy.deepcopy(first[0]), copy.deepcopy(first[-1])
        self.branch = copy.deepcopy(first[0])
        self.branch.weight.data = rows[:, :-1].reshape(self.branch.weight.shape).clone()
        self.branch.bias.data = rows[:, -1].clone()
        self.share = nn.Parameter(share.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.conv(x) + self.share * self.branch(x)).relu().flatten(1))


@pytest.mark.parametrize("source", ["sums", "classifier", "k-means"])
def test_with_one_domain_it_is_fedavg_of_the_plain_residual_net(source: str) -> None:
    engine = engine_of(domains=1, preset="robust", source=source, project=False, participation=0.5)
    shard = engine.shards[0]
    settings, part = shard.cohort.training, shard.cohort.data.train
    for t in (1, 2):
        before = loaded(shard.cohort, shard.state.model).net
        engine.step(t, False)
        drawn = shard.method.visitors(t, 4, 6, torch.device("cpu")).tolist()
        layer = before.layers[0]
        first = nn.Sequential(layer.common, before.layers[-1])
        models = []
        for i in drawn:
            plain = Residual(first, layer.rows.detach()[0], layer.share.detach())
            learner = torch.optim.SGD(
                plain.parameters(), settings.rate(t), settings.momentum, weight_decay=settings.weight_decay
            )
            for index in batches_of(shard.cohort, i, t, "batch"):
                learner.zero_grad()
                F.cross_entropy(plain(part.x[index, :16].view(-1, *SHAPE)), part.y[index]).backward()
                learner.step()
            models.append(dict(plain.named_parameters()))
        sizes = torch.tensor([SIZES[i] for i in drawn]).double()
        shares = sizes / sizes.sum()
        mean = {name: sum(s * m[name].detach() for s, m in zip(shares, models)) for name in models[0]}
        after = loaded(shard.cohort, shard.state.model).net
        now = after.layers[0]
        branch = torch.cat([mean["branch.weight"].flatten(1), mean["branch.bias"][:, None]], dim=1)
        for found, expected in (
            (now.common.weight, mean["conv.weight"]),
            (now.rows[0], branch),
            (now.share, mean["share"]),
            (after.layers[-1].weight, mean["head.weight"]),
        ):
            torch.testing.assert_close(found.detach(), expected, rtol=1e-10, atol=1e-12)
        assert shard.state.occupancy.tolist() == [1.0]


def test_teacher_and_graph_follow_their_schedule() -> None:
    engine = engine_of(teacher_rounds=3)
    shard = engine.shards[0]
    columns = Columns.of(shard.cohort.layout)
    first = shard.state.model
    assert first[columns.graph].tolist() == torch.eye(3).flatten().tolist()
    for t in range(1, 8):
        before = shard.state.model
        engine.step(t, False)
        after = shard.state.model
        if t % 3:
            assert torch.equal(after[columns.teacher], before[columns.teacher])
        else:
            assert torch.equal(after[columns.teacher], after[columns.student])
        rows = loaded(shard.cohort, after).net.rows()
        expected = torch.eye(3).double() if t < 3 else adjacency(rows)
        torch.testing.assert_close(after[columns.graph].view(3, 3), expected)


def test_a_graph_that_is_not_learned_stays_as_it_began() -> None:
    engine = engine_of(teacher_rounds=1, learn_graph=False, first_graph="uniform")
    run(engine, 3)
    graph = engine.shards[0].method.report(engine.shards[0].cohort, engine.shards[0].state)["domain_graph"]
    torch.testing.assert_close(torch.tensor(graph), torch.full((3, 3), 0.25).fill_diagonal_(0.5))


@pytest.mark.parametrize("assignment", ["soft", "hard"])
def test_in_a_test_the_student_weighs_the_branches(assignment: str) -> None:
    engine = engine_of(assignment=assignment)
    model = run(engine, 3)
    shard = engine.shards[0]
    module, part = loaded(shard.cohort, model).eval(), shard.cohort.data.test
    with torch.no_grad():
        scores = module.student(part.x)
        best = F.one_hot(scores.argmax(1), 3).double()
        logits = module.net(part.x[:, :16].view(-1, *SHAPE), scores.softmax(1) if assignment == "soft" else best)
    right = (logits.argmax(1) == part.y).double()
    expected = [float(own.mean()) for own in right.split(part.sizes.tolist())]
    assert engines.results(engine).accuracy.tolist() == pytest.approx(expected)


def test_true_clusters_are_the_domains_of_training_and_test() -> None:
    engine = engine_of(source="clusters")
    data = engine.shards[0].cohort.data
    for part in (data.train, data.test):
        owner = torch.repeat_interleave(torch.tensor(CLUSTERS), part.sizes)
        assert part.x[:, 16:].argmax(dim=1).tolist() == owner.tolist()
        assert part.x[:, 16:].sum(dim=1).unique().tolist() == [1]
    before = engine.shards[0].state.model
    after = run(engine, 2)
    columns = Columns.of(engine.shards[0].cohort.layout)
    torch.testing.assert_close(after[columns.student], before[columns.student], rtol=0, atol=1e-14)  # nobody is asked
    counts = torch.tensor([SIZES[0] + SIZES[3], SIZES[1] + SIZES[4], SIZES[2] + SIZES[5]]).double()
    torch.testing.assert_close(engine.shards[0].state.occupancy, counts / counts.sum())


def test_random_domains_are_even_and_say_nothing() -> None:
    method = find("fedcg")(domains=4, source="random")
    data = method.arrange(make_federation([400, 400], SHAPE))
    domain = data.train.x[:, 16:].argmax(dim=1)
    assert domain.bincount().min() > 150
    assert torch.equal(method.arrange(make_federation([400, 400], SHAPE)).train.x, data.train.x)


def test_under_the_identity_a_domain_without_samples_does_not_move_but_for_weight_decay() -> None:
    engine = engine_of(source="clusters", domains=4, momentum=0.0)
    engine.shards[0].cohort.training = Training(epochs=1, batch_size=5, lr=0.1, momentum=0.0)
    before = loaded(engine.shards[0].cohort, engine.shards[0].state.model).net.rows()
    after = loaded(engine.shards[0].cohort, run(engine, 2)).net.rows()
    moved = (after - before).abs().amax(dim=1)
    assert (moved > 1e-9).tolist() == [True, True, True, False]


def test_only_the_clients_of_a_round_in_memory_give_the_same() -> None:
    whole, lean = (engine_of(participation=0.4, resident=resident) for resident in ("all", "round"))
    assert lean.shards[0].lean
    torch.testing.assert_close(run(whole, 4), run(lean, 4), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.shards[0].state.occupancy, lean.shards[0].state.occupancy)
    assert engines.results(whole).accuracy.tolist() == engines.results(lean).accuracy.tolist()


@pytest.mark.parametrize("domains", [1, 2, 4])
@pytest.mark.parametrize("source", ["classifier", "clusters"])
def test_it_runs_on_new_clients_and_logs_its_domains(domains: int, source: str) -> None:
    if source == "clusters" and domains == 1:
        return
    data = {"new_clients": 2, "validation_clients": 1}
    method = {"name": "fedcg", "domains": domains, "source": source}
    result = kinfolk.run(tiny_experiment(method=method, data=data), out="a")
    row = result.metrics[-1]
    assert 0 <= row["new_accuracy"] <= 1
    assert sum(row["domain_occupancy"]) == pytest.approx(1)
    assert 0 <= row["domain_entropy"] <= 1 + 1e-12
    assert len(row["domain_share"]) == 1
    if source == "clusters":
        used = result.config.method.arrange(kinfolk.load_federation(result.config))
        assert used.newcomers is not None
        turned = used.outside["newcomers"]
        owner = torch.repeat_interleave(turned, used.newcomers.sizes)
        assert used.newcomers.x[:, 64:].argmax(dim=1).tolist() == owner.tolist()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method.domains=0"], "method.domains"),
        (["method.own_weight=1.5"], "method.own_weight"),
        (["method.teacher_rounds=0"], "method.teacher_rounds"),
        (["method.source=clusters", "method.domains=1"], "method.domains = 1, but the data have 2 clusters"),
        (["method.source=clusters", "data.split.kind=iid"], "true clusters"),
    ],
)
def test_wrong_settings_are_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        kinfolk.run(read(tiny_experiment(method={"name": "fedcg"}), overrides), out="a")
    assert "\n" not in str(caught.value)
    assert not Path("a").exists()


def test_two_domains_that_share_evenly_are_announced() -> None:
    printed = {"preset": "paper"}
    assert find("fedcg")(domains=2, **printed).notices(100)
    assert not find("fedcg")(domains=2, own_weight=0.75, **printed).notices(100)
    assert not find("fedcg")(domains=3, **printed).notices(100)
    assert not find("fedcg")(domains=2).notices(100)
    assert find("fedcg")(domains=2).beta == 0.75
    assert find("fedcg")(domains=4).beta == 0.5
