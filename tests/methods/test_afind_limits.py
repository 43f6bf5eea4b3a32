"""AFIND and AFIND+: noise, refusals, costs, and the whole way through a run."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from test_afind import N, Plain, engine_of

import kinfolk
from conftest import tiny_experiment
from kinfolk import randomness
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.noise import Noise
from kinfolk.config import read
from kinfolk.matching import cost
from kinfolk.methods.afind import AFIND, AFINDPlus
from kinfolk.methods.backbone import Backbone
from kinfolk.methods.friends import MOST, Contribution, Friends
from kinfolk.models import NETS
from kinfolk.runs import checkpoint
from kinfolk.runs.graph import read_graph

# -- noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proxy", ["grad", "delta"])
def test_noise_is_on_what_peers_send_and_as_large_as_asked(proxy: Any) -> None:
    method = AFIND(preset="paper", proxy=proxy, noise=3.0, noise_clip=0.2, backbone="full")
    engine, twin = engine_of(method), engine_of(method).shards[0].cohort
    cohort = engine.shards[0].cohort
    before = cohort.weights
    twin.train(1)
    plain = Plain(method, cohort)
    engine.step(1, False)
    seen = engine.shards[0].state.similarity
    deviation = 3.0 * 0.2 / 5  # batches of 5
    for i in range(N):
        for j in range(N):
            if i == j:
                continue
            if proxy == "grad":
                mine, sent = plain.on(before[i], before[i], i)[1], plain.on(before[i], before[j], j)[1]
                sender = j * N + i  # a noise of its own for each who asks
            else:
                mine, sent = (twin.weights[k, :30] - before[k, :30] for k in (i, j))
                sender = j
            sent = sent * min(1, 0.2 / float(sent.norm()))
            sent = sent + deviation * randomness.normal(4, "proxy noise", 1, torch.tensor([sender]), 30)[0]
            assert float(seen[i, j]) == pytest.approx(float(mine @ sent / (mine.norm() * sent.norm())), abs=1e-9)


def test_noise_drowns_the_similarities_only_when_it_is_large() -> None:
    seen = []
    for noise in (0.0, 1e-6, 1e4):
        engine = engine_of(AFIND(noise=noise, noise_clip=100.0))
        engine.step(1, False)
        seen.append(engine.shards[0].state.similarity[~torch.eye(N, dtype=torch.bool)])
    assert (seen[1] - seen[0]).abs().max() < 1e-3
    assert abs(float(seen[2].mean())) < 3 / (N * (N - 1) * 30) ** 0.5 * 1.5
    assert float(seen[2].std()) == pytest.approx(30**-0.5, rel=0.3)  # cosines with a random direction in 30 dimensions


@pytest.mark.parametrize("backbone", ["alt", "ft"])
def test_noise_in_training_is_on_every_step_and_on_nothing_else(backbone: Any) -> None:
    method = AFIND(preset="paper", noise=3.0, noise_on="training", noise_clip=0.2, backbone=backbone)
    clean = dataclasses.replace(method, noise=0.0)
    engine, twin, without = engine_of(method), engine_of(method).shards[0].cohort, engine_of(clean)
    assert twin.noise == Noise(0.2, 3.0 * 0.2 / 5)  # batches of 5
    assert without.shards[0].cohort.noise is None
    begin = twin.weights
    Backbone(backbone).train(1, twin)
    plain = Plain(method, twin)
    engine.step(1, False)
    without.step(1, False)
    torch.testing.assert_close(engine.shards[0].cohort.weights, plain.round(begin, twin.weights), rtol=1e-9, atol=1e-10)
    assert torch.equal(
        engine.shards[0].state.similarity.nan_to_num(9), without.shards[0].state.similarity.nan_to_num(9)
    )
    tested = [shards.shards[0].cohort.evaluate().loss for shards in (engine, without)]
    assert (tested[0] - tested[1]).abs().max() > 1e-3
    before = engine.shards[0].cohort.weights
    engine.shards[0].cohort.noise = None
    if backbone == "ft":  # the copy that is tested was tuned with noise too
        assert (engine.shards[0].cohort.evaluate().loss - tested[0]).abs().max() > 1e-3
    assert torch.equal(engine.shards[0].cohort.weights, before)


def test_with_noise_the_printed_threshold_lets_everybody_in_however_loud_it_is() -> None:
    """Why one row of Table 4 shows it for all levels."""
    found = []
    for noise in (2.0, 50.0):
        settings = ["data.clients=20", "run.rounds=3", "method.preset=paper", "method.threshold=literal"]
        result = kinfolk.run(read("afind/digits", settings, [f"method.noise={noise}"]), out=f"noise-{noise}")
        met = read_graph(result.folder)
        assert np.bincount(met.round).tolist() == [0, *[20 * 19] * 3]
        found.append(result.weights())
    assert torch.equal(*found)


@pytest.mark.parametrize("where", ["proxy", "training"])
def test_noise_is_never_reported_as_privacy(where: str) -> None:
    result = kinfolk.run(
        tiny_experiment(method={"name": "afind+", "noise": 2.0, "noise_on": where}, run={"rounds": 1}), out="a"
    )
    told = {*result.summary, *result.metrics[0], *result.clients[0]}
    assert not [name for name in told if "epsilon" in name or "delta" in name or "privacy" in name]


# -- refusals, costs, the whole way ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("tau", 0.0, "greater than 0"),
        ("tau", -0.5, "greater than 0"),
        ("tau", math.nan, "finite"),
        ("gamma", 1.5, "at most 1"),
        ("gamma", -0.1, "at least 0"),
        ("nu", 0.0, "greater than 0"),
        ("temperature", 0.0, "greater than 0"),
        ("temperature", -1.0, "greater than 0"),
        ("sim_memory", 1.0, "less than 1"),
        ("noise", -1.0, "at least 0"),
        ("noise_on", "weights", "'proxy' or 'training'"),
        ("noise_clip", 0.0, "greater than 0"),
        ("explore", 1.1, "at most 1"),
        ("threshold", "none", "calibrated"),
        ("count", 0, "at least 1"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(key: str, value: Any, says: str) -> None:
    with pytest.raises(kinfolk.UserError, match=says) as error:
        read(tiny_experiment(method={"name": "afind+", key: value}))
    assert f"method.{key}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("backbone", ["alt", "ft", "full"])
def test_a_model_without_a_body_is_refused(backbone: str) -> None:
    settings = tiny_experiment(method={"name": "afind+", "backbone": backbone})
    settings["model"] = {"name": "linear"}
    with pytest.raises(kinfolk.UserError, match="no body to share"):
        kinfolk.run(settings, out="a")


def test_gradients_of_the_papers_nets_are_compared_in_the_layer_before_the_head() -> None:
    for name, shape, layer in (("cnn4", (3, 32, 32), (512, 1600)), ("cnn2", (1, 28, 28), (32, 1, 5, 5))):
        module = NETS[name](shape, 10)
        layout = Layout.of(module)
        proxy = layout.divide(module).proxy
        place = layout.offsets.index(proxy.start)
        assert (layout.shapes[place], proxy.stop - proxy.start) == (layer, math.prod(layer))  # without the bias


def test_too_many_clients_are_refused_with_the_number() -> None:
    cohort = engine_of(AFIND()).shards[0].cohort
    friends = Friends(Contribution(), Backbone("alt"))
    cohort.n = MOST + 1
    with pytest.raises(kinfolk.UserError, match=f"{MOST + 1} clients"):
        friends.start(cohort)


@pytest.mark.parametrize(
    ("method", "exchanges"),
    [
        (AFINDPlus(preset="paper"), 2),
        (AFINDPlus(), 2),
        (AFIND(), 2),
        (AFINDPlus(loss_smoothing="ema", proxy="weight"), 1),
        (AFIND(proxy="delta"), 1),
    ],
)
def test_round_one_costs_what_the_formula_says_and_later_ones_less(method: AFIND, exchanges: int) -> None:
    engine = engine_of(method)
    engine.step(1, False)
    peers = engine.shards[0].peers
    assert method.nominal(1, N) == cost.Cost(exchanges * (N - 1), (N - 1) / N)
    assert peers.models_received.tolist() == [exchanges * (N - 1)] * N
    for t in (2, 3):
        engine.step(t, False)
    assert int(peers.models_received.sum()) <= method.nominal(3, N).total * N


def test_what_a_watched_client_saw_is_written_down() -> None:
    sections = tiny_experiment(method={"name": "afind+"}, run={"watch": [0], "watch_all": True})
    result = kinfolk.run(sections, out="a")
    lines = (result.folder / "similarity.csv").read_text().splitlines()
    columns = lines[0].split(",")
    noted = [dict(zip(columns, line.split(","))) for line in lines[1:]]
    assert {row["peer"] for row in noted} == {str(j) for j in range(1, 8)}  # all were asked in round 1
    assert all(-1 <= float(row["similarity"]) <= 1 for row in noted)
    state = checkpoint.load(result.folder / "checkpoint").tensors["state/similarity"]
    assert torch.isfinite(state[0, 1:]).all()


def label_overlap(result: kinfolk.Result) -> tuple[float, float]:
    """Mean share of labels that friends have in common, weighted alike over rounds, and that of any two clients."""
    part = kinfolk.load_federation(result.config).train
    shares = torch.stack(
        [
            torch.bincount(part.y[start : start + size], minlength=10) / size
            for start, size in zip(part.starts.tolist(), part.sizes.tolist())
        ]
    )
    overlap = torch.minimum(shares[:, None], shares[None]).sum(dim=2).numpy()
    found = read_graph(result.folder)
    later = found.round > 1  # in round 1 everybody is a friend
    apart = ~np.eye(len(overlap), dtype=bool)
    return float(overlap[found.client[later], found.neighbor[later]].mean()), float(overlap[apart].mean())


def test_friends_share_labels_and_friendship_pays_on_digits() -> None:
    sections = tiny_experiment(
        data={"clients": 20, "train": 40, "test": 40, "split": {"kind": "pathological", "classes_per_client": 2}},
        training={"epochs": 5, "batch_size": 40, "lr": 0.01},
        run={"rounds": 20, "evaluate_every": 20},
    )
    sections["method"] = {"name": "afind+", "backbone": "ft"}
    friends = kinfolk.run(sections, out="friends")
    sections["method"] = {"name": "gossip", "backbone": "ft"}
    gossip = kinfolk.run(sections, out="gossip")
    among_friends, by_chance = label_overlap(friends)
    assert among_friends > 2 * by_chance
    assert friends.accuracy > gossip.accuracy + 0.05
