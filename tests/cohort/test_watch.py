"""What watched clients saw: the right numbers, the same on shards and after a resume; looking changes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import models
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.layout import Layout
from kinfolk.config import read
from kinfolk.matching.similarity import cosines, inverse_loss
from kinfolk.runs.graph import read_graph
from kinfolk.runs.similarity import Similarity, read_similarity

PANM = {"name": "panm", "neighbors": 2, "candidates": 3, "discover_rounds": 3}
VARIANTS = [
    {**PANM, "similarity": similarity, "preset": preset}
    for similarity in ("loss", "gradient")
    for preset in ("paper", "robust")
]
PENS = {"name": "pens", "neighbors": 2, "candidates": 3, "discover_rounds": 3}
METHODS = [*VARIANTS, PENS]


def name_of(method: dict[str, Any]) -> str:
    return "-".join(str(method[key]) for key in ("name", "similarity", "preset") if key in method)


def run(method: dict[str, Any], out: str, observer: kinfolk.Observer | None = None, **settings: Any) -> kinfolk.Result:
    options = {"rounds": 6, "precision": "float64", "watch": [1, 6], **settings}
    return kinfolk.run(tiny_experiment(method=method, run=options), out=out, observer=observer)


def pairs(seen: Similarity, mask: Any) -> list[tuple[int, int, int]]:
    return list(zip(seen.round[mask].tolist(), seen.client[mask].tolist(), seen.peer[mask].tolist()))


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_watched_clients_leave_what_they_saw_and_nobody_else_does(method: dict[str, Any]) -> None:
    result = run(method, "a", watch_rounds=[1, 3, 5])
    seen, cluster = read_similarity(result.folder), np.array([client["cluster"] for client in result.clients])
    assert set(seen.client.tolist()) == {1, 6}
    assert set(seen.round.tolist()) == ({1, 3} if method is PENS else {1, 3, 5})
    assert not np.isnan(seen.similarity).any()
    assert seen.looked_at.all()
    assert (seen.client != seen.peer).all()
    assert (seen.kin == (cluster[seen.client] == cluster[seen.peer])).all()
    keys = pairs(seen, slice(None))
    assert keys == sorted(set(keys))


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_in_stage_one_the_chosen_are_those_it_averaged_with(method: dict[str, Any]) -> None:
    alone = {"mingle": False} if method["name"] == "panm" else {}  # who mingles averages with others beside its list
    result = run({**method, **alone}, "a", watch_rounds=[1, 2, 3])
    seen, graph = read_similarity(result.folder), read_graph(result.folder)
    mixed = {e for e in zip(graph.round.tolist(), graph.client.tolist(), graph.neighbor.tolist()) if e[0] <= 3}
    assert set(pairs(seen, seen.chosen)) == {e for e in mixed if e[1] in (1, 6)}
    listed, chosen = set(pairs(seen, seen.listed)), set(pairs(seen, seen.chosen))
    if method is PENS:
        assert not listed  # stage one keeps no list
    else:
        assert listed == {(t + 1, client, peer) for t, client, peer in chosen if t < 3}


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_the_most_similar_are_chosen_in_stage_one(method: dict[str, Any]) -> None:
    seen = read_similarity(run({**method, **({} if method is PENS else {"confirm": False})}, "a").folder)
    first = (seen.round == 1) & (seen.client == 6)
    order = np.argsort(seen.similarity[first] if method is PENS else -seen.similarity[first])
    assert seen.chosen[first][order].tolist() == [True, True, False]


@pytest.mark.parametrize("method", METHODS, ids=name_of)
@pytest.mark.parametrize("everybody", [False, True])
def test_the_file_is_the_same_whatever_the_shards(method: dict[str, Any], everybody: bool) -> None:
    run(method, "one", watch_all=everybody)
    run(method, "three", watch_all=everybody, engine="sharded", shards=3)
    assert Path("one/similarity.csv").read_bytes() == Path("three/similarity.csv").read_bytes()


@pytest.mark.parametrize("everybody", [False, True])
def test_a_resumed_run_has_every_row_once(everybody: bool) -> None:
    class Stop(kinfolk.Observer):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if t == 4:
                raise KeyboardInterrupt  # round 4 is in the file, but in no checkpoint

    options = {"checkpoint_every": 3, "watch_rounds": [2, 3, 4, 5], "watch_all": everybody}
    whole = run(PANM, "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        run(PANM, "cut", Stop(), **options)
    assert 4 in read_similarity(Path("cut")).round
    with open("cut/similarity.csv", "ab") as file:
        file.write(b"4,1,")  # and half a line on top
    resumed = kinfolk.resume("cut")
    assert (resumed.folder / "similarity.csv").read_bytes() == (whole.folder / "similarity.csv").read_bytes()


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_watching_changes_nothing(method: dict[str, Any]) -> None:
    plain = run(method, "plain", watch=[])
    watched = run(method, "watched", watch_all=True)
    assert torch.equal(plain.weights(), watched.weights())
    assert plain.summary["models_received"] == watched.summary["models_received"]
    assert plain.summary["bytes_received"] == watched.summary["bytes_received"]
    assert plain.config.identity() == watched.config.identity()
    assert not (plain.folder / "similarity.csv").exists()


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_an_observer_sees_everybody_and_agrees_with_what_the_client_saw(method: dict[str, Any]) -> None:
    own = read_similarity(run(method, "own").folder)
    everybody = read_similarity(run(method, "all", watch_all=True).folder)
    for t in set(own.round.tolist()):
        assert pairs(everybody, everybody.round == t) == [(t, i, j) for i in (1, 6) for j in range(8) if j != i]
    there = everybody.looked_at
    assert pairs(everybody, there) == pairs(own, slice(None))
    assert everybody.similarity[there] == pytest.approx(own.similarity, rel=1e-7)
    for name in ("listed", "chosen", "kin"):
        assert getattr(everybody, name)[there].tolist() == getattr(own, name).tolist()


def test_the_numbers_are_the_method_s_own_similarity() -> None:
    """Round 1 of `paper`: 1 / loss, and the cosine of the first updates."""
    config = read(tiny_experiment(run={"precision": "float64"}))
    config = config.with_method("local").with_run(rounds=1)
    trained = kinfolk.run(config, out="local").weights()
    loss = read_similarity(run(VARIANTS[0], "loss", rounds=1, watch_all=True).folder)
    gradient = read_similarity(run(VARIANTS[2], "gradient", rounds=1, watch_all=True).folder)

    data = kinfolk.load_federation(config)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    rows = slice(int(data.train.starts[6]), int(data.train.starts[6] + data.train.sizes[6]))
    x, y = data.train.x[rows].double(), data.train.y[rows]
    expected = []
    for peer in (0, 1, 2, 3, 4, 5, 7):
        Layout.of(module.double()).load(trained[peer], module)
        expected.append(torch.nn.functional.cross_entropy(module(x), y).detach())
    assert loss.similarity[loss.client == 6] == pytest.approx(inverse_loss(torch.stack(expected)).numpy(), rel=1e-6)

    initial = initial_model(lambda: models.find("mlp")((1, 8, 8), 10, hidden=16, layers=1), 0)
    start = torch.cat([p.detach().reshape(-1) for p in initial.parameters()]).double()
    others = torch.tensor([[j for j in range(8) if j != 6]])
    angle = cosines(trained[6:7], trained, others, start)[0]
    assert gradient.similarity[gradient.client == 6] == pytest.approx(angle.numpy(), rel=1e-6)


def test_faults_leave_gaps_and_an_absent_client_sees_nothing() -> None:
    faults = {"loss": 0.4, "absent": 0.4}
    settings = {"rounds": 8, "watch": list(range(8)), "watch_rounds": list(range(1, 9))}
    own = kinfolk.run(tiny_experiment(method=PANM, run=settings, faults=faults), out="own")
    everybody = kinfolk.run(tiny_experiment(method=PANM, run={**settings, "watch_all": True}, faults=faults), out="all")
    seen, observed = read_similarity(own.folder), read_similarity(everybody.folder)
    assert len(seen.round) < len(observed.round)
    assert set(pairs(observed, observed.looked_at)) == set(pairs(seen, slice(None)))
    gone = {(t, i) for t in range(1, 9) for i in range(8)} - set(zip(observed.round.tolist(), observed.client.tolist()))
    assert gone
    assert not {(t, j) for t, j in gone if (t, j) in set(zip(observed.round.tolist(), observed.peer.tolist()))}


def test_without_true_clusters_kin_is_unknown() -> None:
    data = make_federation([10] * 6)
    settings = tiny_experiment(method=PANM, run={"watch": [0]})
    factory = lambda shape, classes: torch.nn.Linear(*shape, classes)  # noqa: E731
    result = kinfolk.run(settings, data=data, model=factory, out="a")
    assert set(read_similarity(result.folder).kin.tolist()) == {-1}
    assert ",false,,true," in Path("a/similarity.csv").read_text()


def test_without_rounds_the_evaluated_ones_are_watched() -> None:
    seen = read_similarity(run(PANM, "a", evaluate_every=4).folder)
    assert set(seen.round.tolist()) == {1, 4, 6}


def test_a_method_that_compares_nothing_says_so() -> None:
    heard: list[str] = []

    class Listen(kinfolk.Observer):
        def notice(self, text: str) -> None:
            heard.append(text)

    run({"name": "random", "neighbors": 2}, "a", Listen())
    assert heard == ["run.watch: in the rounds watched the method compared no models: there is no similarity.csv"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.watch=[8]", r"'run.watch' names client 8, but there are only 8: 0 to 7"),
        ("run.watch=[-1]", r"'run.watch' = \[-1\]: must be at least 0"),
        ("run.watch=3", r"'run.watch' = 3: input should be a valid list"),
        ('run.watch=["a"]', r"'run.watch' = \['a'\]: input should be a valid integer"),
        ("run.watch_rounds=[0]", r"'run.watch_rounds' = \[0\]: must be at least 1"),
    ],
)
def test_bad_settings_are_one_line(override: str, words: str) -> None:
    with pytest.raises(kinfolk.UserError, match=words):
        kinfolk.run(tiny_experiment(), [override], out="a")
    assert not Path("a").exists()
