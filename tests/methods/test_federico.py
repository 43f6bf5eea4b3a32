"""FedeRiCo against its definition, in both forms."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import last_edges, make_federation, tiny_experiment
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.matching import friendly
from kinfolk.matching.cost import Cost
from kinfolk.methods.federico import MOST, FedeRiCo
from kinfolk.peers.faults import Faults

SIZES = [12, 6, 9, 20, 8, 8, 16, 1]


def engine_of(shards: int = 1, faults: Faults | None = None, **settings: Any) -> engines.Engine:
    cohort = {"training": Training(epochs=1, batch_size=5, lr=0.1), "seed": 4, "device": "cpu", "precision": "float64"}
    parts = engines.Parts(
        make_federation(SIZES),
        lambda: initial_model(lambda: nn.Linear(6, 3), 4),
        FedeRiCo(**{"backbone": "full", **settings}),
        faults or Faults(),
        cohort,
    )
    return engines.InProcessEngine(parts) if shards == 1 else engines.ShardedEngine(parts, shards)


def shares_of(engine: engines.Engine) -> Tensor:
    """[8, 8] what each client took of each peer's model."""
    edges, table = last_edges(engine), torch.zeros(8, 8, dtype=torch.float64)
    for client, neighbor, weight in zip(edges.client, edges.neighbor, edges.weight):
        table[client, neighbor] = float(weight)
    return table


def test_models_count_by_the_exponent_of_their_remembered_losses() -> None:
    engine = engine_of(neighbors=3, memory=0.6)
    shard = engine.shards[0]
    cohort = shard.cohort
    known: dict[tuple[int, int], float] = {}
    for t in (1, 2, 3, 4):
        before = cohort.weights
        engine.step(t, False)
        mixed, trained = cohort.weights, cohort.trained(before, t)[0]
        losses = cohort.train_losses(trained).tolist()  # [client][model]
        tried = shard.state.neighbors.tolist()
        for i in range(8):
            assert len({*tried[i]} - {i, -1}) == 3
            for j in (i, *tried[i]):
                known[i, j] = 0.4 * known[i, j] + 0.6 * losses[i][j] if (i, j) in known else losses[i][j]
            weights = {j: math.exp(-known[i, j]) for j in (i, *tried[i])}
            total = sum(weights.values())
            expected = sum(weight / total * trained[j] for j, weight in weights.items())
            torch.testing.assert_close(mixed[i], expected, rtol=1e-10, atol=1e-10)
            assert all(shares_of(engine)[i, j] == pytest.approx(weights[j] / total) for j in tried[i])
    table = shard.state.loss
    assert {(i, j) for i, j in torch.nonzero(~table.isnan()).tolist()} == set(known)
    assert all(float(table[i, j]) == pytest.approx(value, rel=1e-10) for (i, j), value in known.items())


def tried_often(loss: Tensor, count: int, rounds: int = 800, **settings: Any) -> Tensor:
    """[8, 8] how often each peer is tried out, when losses [8, 8] are remembered."""
    shard = engine_of(**settings).shards[0]
    times = torch.zeros(8, 8)
    for t in range(1, rounds + 1):
        tried = shard.method.tried(t, shard.cohort, loss, shard.peers, count)
        assert tried.shape == (8, count)
        assert not (tried == torch.arange(8)[:, None]).any()
        assert all(len(set(row)) == count for row in tried.tolist())
        times.scatter_add_(1, tried, torch.ones(tried.shape))
    return times / rounds


def test_without_exploring_peers_are_drawn_in_proportion_to_what_they_explain() -> None:
    loss = torch.tensor([torch.nan, 0.2, 0.5, 1.0, 2.0, torch.nan, 9.0, 0.2], dtype=torch.float64).repeat(8, 1)
    loss.fill_diagonal_(0.0)  # a client's own loss is known too, and never drawn
    often = tried_often(loss, 1, explore=0.0)
    for i in range(8):
        odds = torch.where(torch.arange(8) == i, 0.0, torch.exp(-loss[i])).nan_to_num(0.0)
        assert (often[i] - odds / odds.sum()).abs().max() < 0.06
    assert often[0, 5] == 0
    pairs = tried_often(loss, 2, rounds=100, explore=0.0)
    torch.testing.assert_close(pairs[[1, 7]].sum(dim=1), torch.tensor([2.0, 2.0]))
    assert pairs[0, 1] + pairs[0, 7] > often[0, 1] + often[0, 7]  # the second place goes to somebody else


def test_places_left_to_chance_go_to_anybody() -> None:
    loss = torch.full((8, 8), torch.nan, dtype=torch.float64)
    loss[:, 3] = loss[:, 4] = loss[:, 5] = 0.1
    everybody = tried_often(loss, 2, rounds=400, explore=1.0)
    assert (everybody + torch.eye(8) * 2 / 7 - 2 / 7).abs().max() < 0.09
    some = tried_often(loss, 2, rounds=600, explore=0.3)
    strangers = some[0][[1, 2, 6, 7]].sum()
    # of the two places 0.6 are free on average; a free one goes to one of the 4 strangers, or to whom is left of 3
    expected = 2 * 0.3 * 0.7 * 4 / 6 + 0.09 * 2 * 4 / 7
    assert float(strangers) == pytest.approx(expected, abs=0.06)


def test_whoever_is_not_known_yet_is_filled_in() -> None:
    loss = torch.full((8, 8), torch.nan, dtype=torch.float64)
    loss[0, 6] = 5.0
    often = tried_often(loss, 3, rounds=60, explore=0.0)
    assert often[0, 6] == 1
    assert (often[0, 1:6] > 0).all()
    assert often[1].sum() == 3


def test_answers_that_are_lost_are_neither_averaged_with_nor_remembered() -> None:
    engine = engine_of(neighbors=7, faults=Faults(loss=0.4))
    engine.step(1, False)
    lost = engine.shards[0].peers.faults.lost(4, 1, torch.arange(8)[:, None], torch.arange(8).expand(8, 8))
    arrived = ~lost & ~torch.eye(8, dtype=torch.bool)
    assert 0 < int(arrived.sum()) < 56
    assert torch.equal(~engine.shards[0].state.loss.isnan(), arrived | torch.eye(8, dtype=torch.bool))
    assert torch.equal(shares_of(engine) > 0, arrived)


def test_a_loss_that_is_not_finite_is_forgotten_and_has_no_weight() -> None:
    shard = engine_of(memory=0.5).shards[0]
    table = torch.full((8, 8), torch.nan, dtype=torch.float64)
    table[:, 1] = 2.0
    tried = torch.tensor([[1, 2, 3]] * 8)
    losses = torch.tensor([[torch.inf, torch.nan, 4.0]] * 8, dtype=torch.float64)
    own = torch.tensor([1.0] + [torch.inf] * 7, dtype=torch.float64)
    after, seen, mine = friendly.smoothed(table, shard.cohort.ids, tried, losses, own, 0.5)
    assert after[0, :4].tolist()[:2] == [1.0, 2.0]
    assert after[0, 2].isnan()
    assert after[0, 3] == 4.0
    assert seen[0].isnan().tolist() == [True, True, False]
    assert after[5, 5].isnan()
    assert mine.isnan().tolist() == [False] + [True] * 7


def test_too_many_clients_are_refused_with_the_number() -> None:
    cohort = engine_of().shards[0].cohort
    cohort.n = MOST + 1
    with pytest.raises(kinfolk.UserError, match=f"{MOST + 1} clients"):
        FedeRiCo().start(cohort)


def test_what_either_form_costs() -> None:
    assert FedeRiCo().nominal(500, 100) == Cost(5000, 0.1)
    assert FedeRiCo(form="em").nominal(500, 100) == Cost(3000, 0.99)  # three models there, three changes back


# -- the full form -----------------------------------------------------------------------------------------------


def test_every_model_moves_by_the_changes_of_all_who_use_it() -> None:
    engine = engine_of(form="em", components=2)
    shard = engine.shards[0]
    cohort = shard.cohort
    for t in (1, 2, 3):
        before, remembered = cohort.weights, shard.state.loss
        losses = cohort.train_losses(before)
        engine.step(t, False)
        after, tried = cohort.weights, shard.state.neighbors.tolist()
        steps, totals = torch.zeros_like(before), torch.zeros(8, dtype=torch.float64)
        for i in range(8):
            used = [i, *tried[i]]
            average = {}
            for j in used:
                old, new = float(remembered[i, j]), float(losses[i, j])
                average[j] = new if math.isnan(old) else 0.4 * old + 0.6 * new
            weights = {j: math.exp(-average[j] - float(losses[i, j])) for j in used}
            for place, j in enumerate(used):
                share = weights[j] / sum(weights.values())
                copies = before[j].expand(8, -1).clone()
                purpose = "batch" if place == 0 else f"copy {place - 1}"
                steps[j] += share * (cohort.trained(copies, t, purpose=purpose)[0][i] - before[j])
                totals[j] += share
                if j != i:
                    assert shares_of(engine)[i, j] == pytest.approx(share)
        assert totals.sum() == pytest.approx(8)
        assert totals.max() > 1 > totals.min()
        torch.testing.assert_close(after, before + steps / totals.clamp(min=1)[:, None], rtol=1e-10, atol=1e-10)


def test_a_client_predicts_with_the_models_it_used() -> None:
    engine = engine_of(form="em", components=2)
    for t in (1, 2):
        received = engine.shards[0].cohort.weights
        engine.step(t, False)
    cohort, shares = engine.shards[0].cohort, shares_of(engine)
    part = cohort.data.test
    for i in range(8):
        rows = slice(int(part.starts[i]), int(part.starts[i] + part.sizes[i]))
        module, own, mean = nn.Linear(6, 3).double(), 1.0, torch.zeros(7, 3, dtype=torch.float64)
        for j in torch.nonzero(shares[i]).flatten().tolist():
            cohort.layout.load(received[j], module)
            mean += shares[i, j] * module(part.x[rows]).softmax(dim=1)
            own -= float(shares[i, j])
        cohort.layout.load(cohort.weights[i], module)
        mean += own * module(part.x[rows]).softmax(dim=1)
        picked = mean.gather(1, part.y[rows, None])
        assert float(cohort.evaluate().loss[i]) == pytest.approx(float(-picked.detach().log().mean()), abs=1e-10)


def em(out: str, **sections: Any) -> kinfolk.Result:
    sections = {"run": {"precision": "float64", "rounds": 4}} | sections
    sections["run"] = {"precision": "float64", "rounds": 4} | sections["run"]
    return kinfolk.run(tiny_experiment(method={"name": "federico", "form": "em"}, **sections), out=out)


@pytest.mark.parametrize("peers", [{}, {"reachable": 3}, {"topology": "random", "probability": 0.3, "away": 0.3}])
def test_the_full_form_is_the_same_over_shards_with_losses_and_absences(peers: dict[str, Any]) -> None:
    faults = {"loss": 0.2, "absent": 0.2}
    one = em("one", faults=faults, peers=peers)
    many = em("many", faults=faults, peers=peers, run={"engine": "sharded", "shards": 3})
    assert torch.isfinite(one.weights()).all()
    assert (one.weights() - many.weights()).abs().max() <= 1e-10
    for a, b in zip(one.metrics, many.metrics):
        assert all(a[key] == pytest.approx(b[key], abs=1e-9) for key in ("accuracy", "loss", "models_received"))
        assert a["nominal_models"] >= a["models_received"]


def test_the_full_form_resumes_bit_exactly_and_is_local_training_alone() -> None:
    whole = em("whole")
    em("cut", run={"rounds": 2})
    resumed = kinfolk.resume("cut", rounds=4)
    assert torch.equal(whole.weights(), resumed.weights())
    assert [row["accuracy"] for row in whole.clients] == [row["accuracy"] for row in resumed.clients]
    alone = em("alone", peers={"reachable": 0})
    local = kinfolk.run(tiny_experiment(method={"name": "local"}, run={"precision": "float64"}), out="local")
    torch.testing.assert_close(alone.weights(), local.weights(), rtol=1e-12, atol=1e-12)
    assert alone.accuracy == local.accuracy


def test_both_forms_learn_from_the_right_peers_on_digits() -> None:
    settings = {
        "data": {"clients": 20, "train": 40},
        "training": {"epochs": 3, "lr": 0.1},
        "run": {"rounds": 20, "evaluate_every": 20},
    }
    method = {"name": "federico", "backbone": "full"}
    local = kinfolk.run(tiny_experiment(method={"name": "local"}, **settings), out="local")
    averaged = kinfolk.run(tiny_experiment(method=method, **settings), out="averaged")
    mixed = kinfolk.run(tiny_experiment(method={**method, "form": "em"}, **settings), out="mixed")
    assert averaged.summary["neighbor_precision"] > 0.65  # by chance 0.47
    assert averaged.accuracy > local.accuracy + 0.08
    assert mixed.accuracy > local.accuracy + 0.08
