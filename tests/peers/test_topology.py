"""Graphs by name: who is linked with whom, the same everywhere, and what is said of a graph that falls apart."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_reach import GRAPHS, pair_network, run, sets

import kinfolk
from conftest import tiny_experiment
from kinfolk.config import read
from kinfolk.errors import UserError
from kinfolk.peers import availability, reach, topology
from kinfolk.peers.access import Access, connectivity
from kinfolk.peers.reach import PairNetwork
from kinfolk.runs import folder
from kinfolk.runs.graph import read_graph

NAMED: list[dict[str, Any]] = [
    {"topology": "half"},
    {"topology": "ring"},
    {"topology": "ring", "degree": 4},
    {"topology": "line"},
    {"topology": "star"},
    {"topology": "regular", "degree": 1},
    {"topology": "regular", "degree": 3},
    {"topology": "regular", "degree": 8},
    {"topology": "random", "probability": 0.3},
]


def graph(n: int, seed: int = 0, **peers: Any) -> list[list[int]]:
    """The peers of each client."""
    network, _ = Access(**peers).network(n, seed)
    assert isinstance(network, PairNetwork)
    return sets(network, torch.arange(n))


def by_search(links: list[list[int]]) -> list[set[int]]:
    """The connected parts of a graph, one breadth-first search after another."""
    parts: list[set[int]] = []
    for start in range(len(links)):
        if any(start in part for part in parts):
            continue
        part, edge = {start}, [start]
        while edge:
            edge = [peer for client in edge for peer in links[client] if peer not in part]
            part |= set(edge)
        parts.append(part)
    return parts


@pytest.mark.parametrize("peers", NAMED, ids=str)
def test_a_graph_is_symmetric_without_loops_and_the_same_on_every_shard(peers: dict[str, Any]) -> None:
    found = graph(10, **peers)
    assert all(i in found[j] and i != j for i in range(10) for j in found[i])
    network, _ = Access(**peers).network(10, seed=0)
    assert network is not None
    parts = torch.arange(10).tensor_split(4)
    assert found == [row for ids in parts for row in sets(network, ids, t=7)] == graph(10, **peers)
    drawn = peers["topology"] not in ("ring", "line", "star")
    assert (found != graph(10, seed=1, **peers)) == drawn


def test_ring_line_and_star_are_what_they_are_called() -> None:
    assert graph(6, topology="ring") == [[1, 5], [0, 2], [1, 3], [2, 4], [3, 5], [0, 4]]
    assert graph(7, topology="ring", degree=4)[0] == [1, 2, 5, 6]
    assert graph(4, topology="line") == [[1], [0, 2], [1, 3], [2]]
    assert graph(4, topology="star") == [[1, 2, 3], [0], [0], [0]]
    assert Access(topology="full").network(9, seed=0) == (None, [])


@pytest.mark.parametrize("name", ["ring", "line", "star", "half"])
def test_few_clients_make_a_graph_too(name: str) -> None:
    assert graph(2, topology=name) == [[1], [0]]
    assert graph(1, topology=name) == [[]]


@pytest.mark.parametrize(("n", "degree"), [(2, 1), (4, 1), (5, 2), (5, 4), (6, 3), (9, 4), (10, 5), (10, 9), (50, 7)])
def test_in_a_regular_graph_all_have_as_many_peers(n: int, degree: int) -> None:
    for seed in range(5):
        assert [len(row) for row in graph(n, seed, topology="regular", degree=degree)] == [degree] * n


def test_every_regular_graph_comes_out_equally_often() -> None:
    """Six clients with four peers each: one of the 15 ways to pair them up says who is not linked."""
    found = Counter(str(topology.regular(6, 4, seed)) for seed in range(900))
    assert len(found) == 15
    assert sum((count - 60) ** 2 / 60 for count in found.values()) < 36.1  # chi-squared with 14 degrees, one in a 1000


def test_random_links_are_as_many_as_their_probability_says() -> None:
    client, peer = topology.random(300, 0.2, seed=4)
    pairs = 300 * 299 / 2
    assert abs(client.size - 0.2 * pairs) < 5 * (0.2 * 0.8 * pairs) ** 0.5
    assert (client < peer).all()
    assert graph(5, topology="random", probability=0) == [[]] * 5
    assert graph(3, topology="random", probability=1) == [[1, 2], [0, 2], [0, 1]]


def test_random_links_do_not_depend_on_the_blocks_they_are_drawn_in(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = graph(30, topology="random", probability=0.3)
    monkeypatch.setattr(topology, "BLOCK", 64)
    assert whole == graph(30, topology="random", probability=0.3)


def test_drawn_graphs_never_change() -> None:
    assert graph(6, topology="random", probability=0.5) == [[1, 2], [0, 2, 3, 5], [0, 1, 3], [1, 2, 4], [3], [1]]
    assert graph(6, topology="regular", degree=2) == [[1, 2], [0, 3], [0, 4], [1, 5], [2, 5], [3, 4]]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_half_is_always_connected_and_nobody_is_alone(n: int) -> None:
    for seed in range(40):
        found = graph(n, seed, topology="half")
        assert len(by_search(found)) == 1
        assert all(found)
        assert Access(topology="half").network(n, seed)[1] == []
    links = [sum(map(len, graph(60, seed, topology="half"))) / (60 * 59) for seed in range(10)]
    assert np.mean(links) == pytest.approx(0.5, abs=0.02)


def test_memory_grows_with_the_links() -> None:
    client, peer = topology.ring(100_000)
    assert client.size == peer.size == 100_000
    client, peer = topology.regular(20_000, 4, seed=0)
    assert client.size == 40_000


# -- connected or not ----------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(graph=GRAPHS)
def test_components_are_those_of_a_plain_search(graph: tuple[int, set[tuple[int, int]]]) -> None:
    n, pairs = graph
    both = pairs | {(b, a) for a, b in pairs}
    parts = by_search([[b for a, b in sorted(both) if a == i] for i in range(n)])
    a, b = pair_network(pairs, n).pairs()
    found = topology.components(a.numpy(), b.numpy(), n)
    assert found.tolist() == [min(part) for i in range(n) for part in parts if i in part]


def test_long_lines_in_any_order_are_one_component() -> None:
    order = np.random.default_rng(0).permutation(20_000)
    assert not topology.components(order[:-1], order[1:], 20_000).any()
    assert not topology.components(*topology.line(20_000), 20_000).any()


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ({(0, 1), (1, 0), (2, 3), (3, 2), (3, 4), (4, 3)}, ["2 components, the largest has 3 of 5 clients"]),
        ({(0, 1), (2, 1)}, ["3 components, the largest has 3 of 5 clients; 3 clients reach nobody"]),
        ({(0, 1), (1, 2), (2, 3), (3, 4)}, ["1 client reaches nobody"]),  # connected, but one-way
        ({(i, (i + 1) % 5) for i in range(5)}, []),
        (set(), ["5 components, the largest has 1 of 5 clients; 5 clients reach nobody"]),
    ],
)
def test_what_falls_apart_is_said(pairs: set[tuple[int, int]], words: list[str]) -> None:
    assert connectivity(pair_network(pairs, 5), 5, "here") == [f"here: {text}" for text in words]


def test_a_run_says_so_before_it_starts() -> None:
    _, heard = run("random", "a", {"topology": "regular", "degree": 1})
    assert heard == [
        "method.neighbors = 5, but a client has only 1 peers: using 1",
        "peers.topology = regular: 4 components, the largest has 2 of 8 clients",
    ]
    _, heard = run("random", "b", {"reachable": 0})
    assert heard[-1] == "peers.reachable = 0: 8 components, the largest has 1 of 8 clients; 8 clients reach nobody"
    _, heard = run({"name": "random", "neighbors": 2}, "c", {"topology": "ring"})
    assert heard == []


def test_half_of_the_others_in_reach_is_always_connected() -> None:
    for n in range(2, 9):
        network, notices = Access(reachable=n // 2).network(n, seed=n)
        assert notices == [] or network is None
        if network is not None:
            assert len(by_search(_both_ways(sets(network, torch.arange(n))))) == 1


def _both_ways(links: list[list[int]]) -> list[list[int]]:
    return [sorted({*row, *(j for j, other in enumerate(links) if i in other)}) for i, row in enumerate(links)]


# -- runs ----------------------------------------------------------------------------------------------------------


def test_a_full_graph_changes_nothing() -> None:
    free, _ = run("panm", "free", {})
    full, _ = run("panm", "full", {"topology": "full"})
    assert torch.equal(free.weights(), full.weights())
    assert not Path("full/reachable.csv").exists()


@pytest.mark.parametrize("peers", NAMED, ids=str)
def test_gossip_goes_along_all_links_and_no_others(peers: dict[str, Any]) -> None:
    if peers.get("degree") == 8:
        peers = {**peers, "degree": 6}
    result, _ = run({"name": "random", "neighbors": 7}, "a", peers)
    found = read_graph(result.folder)
    links = graph(8, **peers)
    assert set(zip(found.client.tolist(), found.neighbor.tolist())) == {(i, j) for i in range(8) for j in links[i]}


def test_a_run_keeps_its_graph_and_resumes_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(kinfolk.Observer):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if t == 3:
                raise KeyboardInterrupt

    settings = tiny_experiment(peers={"topology": "half"}, run={"checkpoint_every": 1})
    whole = kinfolk.run(settings, out="whole")
    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(settings, out="cut", observer=Stop())
    assert Path("cut/reachable.csv").read_bytes() == Path("whole/reachable.csv").read_bytes()
    with monkeypatch.context() as other:  # even if graphs came to be drawn in another way
        other.setattr(topology, "draw", None)
        assert torch.equal(kinfolk.resume("cut").weights(), whole.weights())


def test_a_graph_too_large_to_keep_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "KEPT", 10)
    settings = tiny_experiment(peers={"topology": "half"}, run={"rounds": 2})
    kinfolk.run(settings, out="a")
    assert not Path("a/reachable.csv").exists()
    longer = kinfolk.run(tiny_experiment(peers={"topology": "half"}), out="b")
    assert torch.equal(kinfolk.resume("a", rounds=4).weights(), longer.weights())


def test_settings_change_the_identity_of_a_run_and_their_absence_does_not() -> None:
    plain = read(tiny_experiment())
    assert plain.sections()["peers"] == {}
    given = [[f"peers.{text}"] for text in ("topology=ring", "topology=line", "away=0.1", "away_from=a.csv")]
    given += [["peers.topology=ring", "peers.degree=4"], ["peers.away=0.1", "peers.away_rounds=2"]]
    assert len({plain.identity(), *(read(tiny_experiment(), overrides).identity() for overrides in given)}) == 7


def test_a_run_folder_knows_the_names_of_what_is_kept() -> None:
    assert (folder.REACHABLE, folder.AWAY) == (reach.REACHABLE, availability.AWAY)


@pytest.mark.parametrize(
    ("peers", "most"),
    [
        *(({}, 8), ({"topology": "star"}, 8), ({"topology": "line"}, 2), ({"topology": "ring"}, 2)),
        *(({"topology": "ring", "degree": 4}, 4), ({"topology": "regular", "degree": 3}, 3)),
        *(({"reachable": 5}, 5), ({"reachable": 50}, 8), ({"reachable_from": "a.csv"}, 8)),
    ],
)
def test_the_most_peers_anybody_can_have(peers: dict[str, Any], most: int) -> None:
    assert Access(**peers).most(9) == most


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ({"topology": "rign"}, r"\[peers\] unknown topology 'rign': did you mean 'ring'\?"),
        (
            {"topology": "xyz"},
            r"\[peers\] unknown topology 'xyz': known: full, half, line, random, regular, ring, star",
        ),
        ({"topology": "ring", "reachable": 3}, r"\[peers\] both 'topology' and 'reachable' say who can reach whom"),
        ({"topology": "full", "reachable_from": "a"}, r"\[peers\] both 'topology' and 'reachable_from' say who can"),
        ({"topology": "regular"}, r"\[peers\] topology 'regular' needs 'degree'"),
        ({"topology": "random"}, r"\[peers\] topology 'random' needs 'probability'"),
        ({"topology": "ring", "degree": 3}, r"\[peers\] degree = 3: a ring has as many peers on either side"),
        ({"topology": "line", "degree": 2}, r"\[peers\] 'degree' goes with topology = \"regular\" or \"ring\""),
        ({"degree": 2}, r"\[peers\] 'degree' goes with topology"),
        ({"topology": "half", "probability": 0.5}, r"\[peers\] 'probability' goes with topology = \"random\""),
        ({"topology": "random", "probability": 1.5}, r"'peers.probability' = 1.5: must be at most 1"),
        ({"topology": "random", "probability": -0.1}, r"'peers.probability' = -0.1: must be at least 0"),
        ({"topology": "regular", "degree": 0}, r"'peers.degree' = 0: must be at least 1"),
        ({"topology": "regular", "degree": 8}, r"peers.degree = 8, but there are 8 clients: nobody has more than 7"),
        ({"topology": "ring", "degree": 10}, r"peers.degree = 10, but there are 8 clients: nobody has more than 7"),
    ],
)
def test_bad_settings_are_one_line(peers: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"^{words}") as raised:
        run("random", "a", peers)
    assert "\n" not in str(raised.value)
    assert not Path("a").exists()


def test_an_odd_number_of_clients_cannot_each_have_an_odd_number_of_peers() -> None:
    with pytest.raises(UserError, match=r"^peers.degree = 3, but an odd number of clients, 7, cannot"):
        Access(topology="regular", degree=3).network(7, seed=0)
