"""FedCG's other sources of domains: sums, k-means and D whole models; what it reports of them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_fedcg import CLUSTERS, SHAPE, SIZES, batches_of, engine_of, loaded, net, run

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import UserError, engines
from kinfolk.cohort import newcomers
from kinfolk.config import read
from kinfolk.data.federation import Part
from kinfolk.methods import domain_labels, find
from kinfolk.methods.fedcg import Columns
from kinfolk.models.coarse import look
from kinfolk.models.domains import DomainNet, Sharing

ROBUST = {"preset": "robust"}


def test_presets() -> None:
    robust, printed = find("fedcg")(), find("fedcg")(preset="paper")
    assert (robust.source, robust.param_relu, robust.learn_graph) == ("sums", False, False)
    assert (printed.source, printed.param_relu, printed.learn_graph) == ("classifier", True, True)
    assert find("fedcg")(source="random").source == "random"
    assert find("fedcg")(param_relu=True).param_relu is True


def test_shares_of_domains_count_every_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of several sizes, out of order, one of them with nothing; and nobody with anything."""
    sizes, starts = torch.tensor([2, 0, 3, 1]), torch.tensor([3, 6, 0, 5])
    x = torch.cat([torch.randn(6, 4), torch.eye(3)[[0, 1, 1, 2, 2, 0]]], dim=1)
    part = Part(x, torch.zeros(6, dtype=torch.long), starts, sizes)
    wanted = torch.tensor([[0, 0, 1], [0, 0, 0], [1 / 3, 2 / 3, 0], [1, 0, 0]], dtype=torch.float64)
    for at_once in (64, 1, 3):
        monkeypatch.setattr(domain_labels, "CLIENTS_AT_ONCE", at_once)
        torch.testing.assert_close(domain_labels.shares(part, x, 3), wanted)
    empty = Part(x[:0], part.y[:0], torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long))
    assert domain_labels.shares(empty, x[:0], 3).tolist() == [[0, 0, 0]] * 2


# -- sums ----------------------------------------------------------------------------------------------------------


def test_teacher_and_student_by_sums_are_found_once_and_stay() -> None:
    engine = engine_of(**ROBUST)
    shard = engine.shards[0]
    columns = Columns.of(shard.cohort.layout)
    both = slice(columns.student.start, None)
    assert not shard.state.model[both].any()
    first = run(engine, 1)
    assert first[both].any()
    engine.step(2, False)
    after = shard.state.model
    assert torch.equal(after[both], first[both])
    assert torch.equal(after[columns.graph].view(3, 3), torch.eye(3).double())
    assert not torch.equal(after[columns.task], first[columns.task])


def test_samples_are_labelled_by_the_teacher_and_their_clients_proportions() -> None:
    engine = engine_of(**ROBUST)
    run(engine, 1)
    cohort = engine.shards[0].cohort
    part, module = cohort.data.train, loaded(cohort, engine.shards[0].state.model)
    for i, size in enumerate(SIZES):
        mine = slice(int(part.starts[i]), int(part.starts[i]) + size)
        scores = module.teacher(look(SHAPE).double()(part.x[mine, :16].view(-1, *SHAPE)), part.y[mine]).detach()
        share = scores.softmax(dim=1)
        for _ in range(5):
            share = (scores + torch.digamma(share.sum(dim=0) + 0.5)).softmax(dim=1)
        assert cohort.train_x[mine, 16:].argmax(dim=1).tolist() == share.argmax(dim=1).tolist()
        assert cohort.train_x[mine, 16:].sum(dim=1).tolist() == [1] * size


@pytest.mark.parametrize("resident", ["all", "round"])
def test_all_samples_are_told_their_domains_at_once_and_not_again(
    resident: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(resident=resident, participation=0.2, scouts=4, **ROBUST)
    shard = engine.shards[0]
    assert not shard.state.shares.any()
    told = []
    plain = domain_labels.label
    monkeypatch.setattr(domain_labels, "label", lambda *args: told.append(args[3].tolist()) or plain(*args))
    run(engine, 3)
    assert told == [list(range(6))]  # also those who have not trained yet
    assert torch.equal(shard.state.shares, domain_labels.shares(shard.cohort.data.train, shard.cohort.train_x, 3))
    torch.testing.assert_close(shard.state.shares.sum(dim=1), torch.ones(6, dtype=torch.float64))


def test_by_sums_only_the_clients_of_a_round_in_memory_give_the_same() -> None:
    settings: dict[str, Any] = {**ROBUST, "participation": 0.4, "scouts": 4}
    whole, lean = (engine_of(resident=resident, **settings) for resident in ("all", "round"))
    assert lean.shards[0].lean
    torch.testing.assert_close(run(whole, 3), run(lean, 3), rtol=1e-9, atol=1e-9)


def test_where_nobody_is_heard_domains_are_looked_for_again() -> None:
    engine = engine_of(**ROBUST)
    shard = engine.shards[0]
    columns = Columns.of(shard.cohort.layout)
    shard.cohort.begin(torch.ones(6, dtype=torch.bool), t=1)
    shard.state = shard.method.step(1, shard.cohort, shard.state, shard.peers)
    engine.exchange.clear()
    assert not shard.state.model[columns.teacher].any()
    assert torch.isfinite(shard.state.model).all()
    engine.step(2, False)
    assert shard.state.model[columns.teacher].any()


def test_how_found_domains_match_true_ones_is_reported() -> None:
    data = {"name": "digits", "clients": 24, "new_clients": 8, "train": 40, "test": 5}
    settings = tiny_experiment(method={"name": "fedcg", "domains": 4}, data={**data, "rotate": "clients"})
    settings["data"]["split"] = {"kind": "iid"}
    row = kinfolk.run(settings, out="a").metrics[-1]
    for role in ("", "new_"):
        assert 0.1 < row[f"{role}domain_ari"] < 1  # few and small images: chance would be 0
        assert 0.1 < row[f"{role}domain_ari_clients"] <= 1
        assert f"{role}domain_ari_within" not in row  # no client has several
    assert row["domain_entropy"] > 0.9
    assert row["dead_layer"] == []


def test_too_many_numbers_for_a_look_are_refused() -> None:
    with pytest.raises(UserError, match="up to 1024 numbers"):
        look((2000,))
    assert look((3, 84, 84))[-1].num_channels == 147
    assert look((1, 8, 8))[-1].num_channels == 64


# -- k-means -------------------------------------------------------------------------------------------------------


def test_k_means_gives_every_client_one_domain() -> None:
    engine = engine_of(source="k-means", participation=0.5)
    run(engine, 2)
    shard = engine.shards[0]
    own, part = shard.state.own, shard.cohort.data.train
    assert own.unique().tolist() == [0, 1, 2]
    for x, sizes in ((shard.cohort.train_x, part.sizes), (shard.cohort.test_x, shard.cohort.data.test.sizes)):
        assert torch.equal(x[:, 16:].argmax(dim=1), torch.repeat_interleave(own, sizes))
    for i in range(6):  # one epoch of the plain net, from the common start
        module = loaded(shard.cohort, shard.cohort.initial).train()
        settings = shard.cohort.training
        task = [p for name, p in module.net.named_parameters() if name != "graph"]
        learner = torch.optim.SGD(task, settings.rate(1), settings.momentum, weight_decay=settings.weight_decay)
        for index in batches_of(shard.cohort, i, 1, "k-means")[: -(-SIZES[i] // 5)]:
            learner.zero_grad()
            scores = module.net(part.x[index, :16].view(-1, *SHAPE), torch.zeros(len(index), 3).double())
            F.cross_entropy(scores, part.y[index]).backward()
            learner.step()
        mine = shard.cohort.layout.flatten(module)[Columns.of(shard.cohort.layout).task]
        distance = (shard.state.centers - mine).norm(dim=1)
        assert int(distance.argmin()) == int(own[i])


def test_k_means_finds_heaps_and_numbers_them_by_their_first_members() -> None:
    heaps = torch.tensor([5.0, 0, 5, -5, 0, -5])[:, None] + 0.01 * torch.arange(6)[:, None]
    groups, centers = domain_labels.k_means(heaps.expand(-1, 3).contiguous(), 3, seed=0)
    assert groups.tolist() == [0, 1, 0, 2, 1, 2]
    torch.testing.assert_close(centers[0], heaps[[0, 2]].mean().expand(3))


def test_new_clients_find_the_nearest_center() -> None:
    engine = engine_of(source="k-means")
    run(engine, 1)
    shard = engine.shards[0]
    part = shard.cohort.data.train
    before = part.x.clone()
    found = shard.method.meets(shard.cohort, shard.state, part)
    assert torch.equal(part.x, before)
    assert found.accuracy.shape == (6,)


def test_from_other_sources_new_clients_use_the_one_model_as_it_is() -> None:
    shard = engine_of(source="clusters").shards[0]
    cohort, part = shard.cohort, shard.cohort.data.test
    expected = newcomers.tested(cohort, shard.state.model, part)
    assert shard.method.meets(cohort, shard.state, part).accuracy.tolist() == expected.accuracy.tolist()


def test_fewer_clients_than_domains_keep_none() -> None:
    engine = engine_of(source="k-means", domains=7)
    run(engine, 1)
    assert engine.shards[0].state.own.tolist() == [-1] * 6
    assert torch.isfinite(engine.shards[0].state.model).all()


# -- whole models --------------------------------------------------------------------------------------------------


def test_whole_models_are_averaged_domain_by_domain() -> None:
    engine = engine_of(source="clusters", layers="whole", momentum=0.0)
    shard = engine.shards[0]
    first = shard.state.model
    engine.step(1, False)
    settings, part = shard.cohort.training, shard.cohort.data.train
    after = loaded(shard.cohort, shard.state.model).net
    for domain in range(3):
        members = [i for i in range(6) if CLUSTERS[i] == domain]
        models = []
        for i in members:
            start = loaded(shard.cohort, first).net
            plain = net().double()
            layers = [(mine, theirs) for mine, theirs in zip(plain, start.layers) if list(mine.parameters())]
            for mine, theirs in layers:
                row = theirs.rows[domain].detach()
                mine.weight.data, mine.bias.data = row[:, :-1].reshape(mine.weight.shape).clone(), row[:, -1].clone()
            learner = torch.optim.SGD(plain.parameters(), settings.rate(1), weight_decay=settings.weight_decay)
            for index in batches_of(shard.cohort, i, 1, "batch"):
                learner.zero_grad()
                F.cross_entropy(plain(part.x[index, :16].view(-1, *SHAPE)), part.y[index]).backward()
                learner.step()
            models.append([torch.cat([m.weight.flatten(1), m.bias[:, None]], 1).detach() for m, _ in layers])
        sizes = torch.tensor([SIZES[i] for i in members]).double()
        for number, layer in enumerate(after.split()):
            stacked = torch.stack([model[number] for model in models])
            expected = torch.einsum("m,mfw->fw", sizes / sizes.sum(), stacked)
            torch.testing.assert_close(layer.rows[domain].detach(), expected, rtol=1e-9, atol=1e-11)


def test_a_whole_model_has_neither_graph_nor_common_part() -> None:
    whole = DomainNet(net(), Sharing(domains=2, layers="whole", agnostic=True, project=True), torch.full((2, 2), 0.5))
    assert [layer.agnostic for layer in whole.split()] == [False, False]
    assert torch.equal(whole.graph, torch.eye(2))
    assert not [name for name, _ in whole.named_parameters() if "projections" in name]


# -- what is refused or reported -----------------------------------------------------------------------------------


def test_mixed_filters_are_the_weighed_branches() -> None:
    for padding, stride, bias in ((0, 1, True), (1, 2, False), ("same", 1, True)):
        conv = torch.nn.Conv2d(2, 3, 3, padding=padding, stride=stride, bias=bias)
        module = DomainNet(torch.nn.Sequential(conv), Sharing(domains=4)).double()
        x, omega = torch.randn(5, 2, 7, 6).double(), torch.rand(5, 4).double()
        torch.testing.assert_close(module.train()(x, omega), module.eval()(x, omega))


def test_a_dead_layer_is_reported() -> None:
    engine = engine_of(source="clusters", param_relu=True)
    shard = engine.shards[0]
    model = shard.state.model.clone()
    views = shard.cohort.layout.views(model[None])
    rows = next(view for name, view in views.items() if name.endswith(".rows"))
    rows.fill_(-1.0)
    weights = next(view for name, view in views.items() if "projections" in name)
    weights.copy_(torch.eye(weights.shape[1])[None])
    report = shard.method.report(shard.cohort, dataclasses.replace(shard.state, model=model))
    assert report["dead_layer"] == [0]
    assert report["domain_zeros"] == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method.scouts=0"], "method.scouts"),
        (["method.source=nobody"], "method.source"),
        (["method.own_weight=-0.1"], "method.own_weight"),
        (["method.domains=-1"], "method.domains"),
    ],
)
def test_wrong_settings_are_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        kinfolk.run(read(tiny_experiment(method={"name": "fedcg"}), overrides), out="a")
    assert "\n" not in str(caught.value)
    assert not Path("a").exists()


@pytest.mark.parametrize(
    "settings",
    [ROBUST, {**ROBUST, "scouts": 2}, {"source": "k-means"}, {"source": "clusters", "layers": "whole"}],
)
def test_shards_give_the_same(settings: dict[str, Any]) -> None:
    method = find("fedcg")(domains=3, participation=0.7, **settings)
    found = []
    for engine_kind in (lambda parts: engines.InProcessEngine(parts), lambda parts: engines.ShardedEngine(parts, 3)):
        data = method.arrange(make_federation(SIZES, SHAPE, clusters=CLUSTERS))
        cohort = {
            "training": kinfolk.Training(epochs=1, batch_size=5, lr=0.1), "seed": 4, "device": "cpu",
            "precision": "float64",
        }  # fmt: skip
        parts = engines.Parts(
            data, lambda: kinfolk.cohort.cohort.initial_model(lambda: method.wrap(net(), SHAPE), 4), method,
            kinfolk.peers.faults.Faults(absent=0.2), cohort,
        )  # fmt: skip
        engine = engine_kind(parts)
        for t in (1, 2):
            engine.step(t, False)
        found.append(engine.shards[-1].state.model)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
