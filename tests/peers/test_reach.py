"""Limited accessibility: who can reach whom, and that nobody ever talks to anybody else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_peers import Host
from torch import Tensor

import kinfolk
from conftest import tiny_experiment
from kinfolk.errors import UserError
from kinfolk.methods.pens import PENS
from kinfolk.peers.access import Access, read_network
from kinfolk.peers.base import Peers
from kinfolk.peers.inprocess import InProcess
from kinfolk.peers.reach import Listed, Network, PairNetwork, RandomNetwork
from kinfolk.runs.graph import read_graph
from kinfolk.runs.similarity import read_similarity


def sets(network: Network, ids: Tensor, t: int = 1) -> list[list[int]]:
    """The reachable set of each client, as its list holds it."""
    lists = network.reach(ids).at(t)
    rows = lists.padded(torch.arange(ids.numel()))
    found = [[j for j in row if j >= 0] for row in rows.tolist()]
    assert [len(row) for row in found] == lists.sizes.tolist()
    return found


def peers_with(network: Network, n: int, ids: Tensor | None = None, seed: int = 0) -> Peers:
    here = torch.arange(n) if ids is None else ids
    return Peers(n, Host(here, seed), InProcess(), None, network.reach(here))


def pair_network(pairs: set[tuple[int, int]], n: int) -> PairNetwork:
    both = torch.tensor(sorted(pairs), dtype=torch.int64).view(-1, 2)
    return PairNetwork(n, both[:, 0], both[:, 1])


GRAPHS = st.integers(1, 14).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.sets(
            st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda pair: pair[0] != pair[1]), max_size=60
        ),
    )
)


# -- the sets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "count"), [(2, 0), (2, 1), (3, 1), (7, 3), (7, 6), (40, 0), (40, 5), (40, 20), (40, 38)])
def test_random_sets_have_the_right_size_are_sorted_and_never_hold_the_client(n: int, count: int) -> None:
    found = sets(RandomNetwork(n, count, seed=5), torch.arange(n))
    for i, row in enumerate(found):
        assert len(row) == count
        assert row == sorted(set(row))
        assert i not in row
        assert all(0 <= j < n for j in row)


def test_random_sets_are_the_same_in_every_round_on_every_shard_and_differ_by_seed() -> None:
    network, everybody = RandomNetwork(30, 4, seed=2), torch.arange(30)
    whole = sets(network, everybody)
    assert whole == sets(network, everybody, t=99)
    assert whole == [row for ids in everybody.tensor_split(4) for row in sets(network, ids)]
    assert sets(network, torch.tensor([17, 3])) == [whole[17], whole[3]]
    assert whole != sets(RandomNetwork(30, 4, seed=3), everybody)


def test_random_sets_never_change() -> None:
    assert sets(RandomNetwork(8, 3, seed=0), torch.arange(4)) == [[2, 4, 7], [0, 3, 6], [3, 4, 6], [4, 5, 7]]


@pytest.mark.parametrize("count", [3, 6])
def test_every_other_client_is_reached_equally_often(count: int) -> None:
    n, seeds = 9, 3000
    reached = torch.zeros(n)
    for seed in range(seeds):
        reached[sets(RandomNetwork(n, count, seed), torch.arange(n))[4]] += 1
    expected = seeds * count / (n - 1)
    assert reached[4] == 0
    assert (reached[torch.arange(n) != 4] - expected).abs().max() < 5 * expected**0.5


def test_reach_is_directed() -> None:
    found = sets(RandomNetwork(40, 5, seed=0), torch.arange(40))
    assert any(i not in found[j] for i in range(40) for j in found[i])


def test_memory_grows_with_the_pairs_and_not_with_their_square() -> None:
    lists = RandomNetwork(100_000, 2, seed=0).reach(torch.arange(100_000)).at(1)
    tensors = [value for value in vars(lists).values() if isinstance(value, Tensor)]
    assert sum(tensor.numel() for tensor in tensors) <= 100_000 * (2 + 3)


# -- sampling ------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(graph=GRAPHS, count=st.integers(0, 8), extra=st.integers(0, 5), grouped=st.booleans(), seed=st.integers(0, 99))
def test_a_sample_stays_within_reach_with_exclude_and_within(
    graph: tuple[int, set[tuple[int, int]]], count: int, extra: int, grouped: bool, seed: int
) -> None:
    n, pairs = graph
    generator = torch.Generator().manual_seed(seed)
    barred = torch.randint(-1, n, (n, extra), generator=generator)
    labels = torch.randint(3, (n,), generator=generator)
    peers = peers_with(pair_network(pairs, n), n, seed=seed)
    chosen = peers.sample(2, count, exclude=barred, within=labels if grouped else None)
    for i in range(n):
        free = {j for client, j in pairs if client == i} - set(barred[i].tolist())
        if grouped:
            free = {j for j in free if labels[j] == labels[i]}
        row = [j for j in chosen[i].tolist() if j >= 0]
        assert set(row) <= free
        assert len(row) == len(set(row)) == min(count, len(free))
    assert peers.others().tolist() == [sum(client == i for client, _ in pairs) for i in range(n)]


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 20), count=st.integers(0, 6), seed=st.integers(0, 99), grouped=st.booleans())
def test_reaching_everybody_draws_as_if_nothing_had_been_said(n: int, count: int, seed: int, grouped: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    exclude = torch.randint(-1, n, (n, 3), generator=generator)
    within = torch.randint(3, (n,), generator=generator) if grouped else None
    network = pair_network({(i, j) for i in range(n) for j in range(n) if i != j}, n)
    free = Peers(n, Host(torch.arange(n), seed), InProcess())
    assert torch.equal(
        peers_with(network, n, seed=seed).sample(3, count, exclude, within), free.sample(3, count, exclude, within)
    )


def test_every_reachable_peer_is_drawn_equally_often() -> None:
    peers = peers_with(pair_network({(0, j) for j in (2, 3, 5, 8)}, 9), 9)
    counts = torch.zeros(9)
    for t in range(4000):
        counts += torch.bincount(peers.sample(t, 2)[0], minlength=9)
    assert counts[[0, 1, 4, 6, 7]].sum() == 0
    assert (counts[[2, 3, 5, 8]] - 2000).abs().max() < 5 * 1000**0.5


def test_pulling_from_somebody_out_of_reach_is_a_mistake_in_the_method() -> None:
    peers = peers_with(pair_network({(0, 1), (2, 0)}, 3), 3)
    peers.publish(1, weights=torch.zeros(3, 2))
    peers.pull(1, torch.tensor([[1, -1], [-1, -1], [0, -1]]))
    with pytest.raises(RuntimeError, match="cannot reach"):
        peers.pull(1, torch.tensor([[1, 2], [-1, -1], [0, -1]]))
    with pytest.raises(RuntimeError, match="cannot reach"):
        peers.pull(1, torch.tensor([[0], [-1], [-1]]))  # not even oneself


def test_empty_lists_can_be_asked_for_anything() -> None:
    lists = Listed(4, 2, torch.zeros(0, dtype=torch.int64))
    ids = torch.tensor([[0, -1], [3, 1]])
    assert not lists.contains(ids).any()
    assert (lists.places(ids) == 4).all()
    assert lists.padded(torch.tensor([1])).shape == (1, 0)
    assert not lists.alike(torch.zeros(4), torch.tensor([0, 1])).sizes.any()


# -- from a file ---------------------------------------------------------------------------------------------------


def write(text: str) -> Path:
    Path("reach.csv").write_text(text, encoding="utf-8")
    return Path("reach.csv")


def test_a_file_says_who_can_reach_whom() -> None:
    network, notices = read_network(write("client,peer\n0,2\n0,1\n\n2,0\n0,2\n1, 0\n"), 3)
    assert notices == []
    assert sets(network, torch.arange(3)) == [[1, 2], [0], [0]]
    again, _ = read_network(write(network.csv()), 3)
    assert sets(again, torch.arange(3)) == [[1, 2], [0], [0]]


def test_oneself_is_ignored_and_the_lonely_are_counted_with_a_notice() -> None:
    network, notices = Access(reachable_from=str(write("client,peer\n0,0\n0,1\n1,1\n"))).network(4, seed=0)
    assert network is not None
    assert sets(network, torch.arange(4)) == [[1], [], [], []]
    assert notices == [
        "reach.csv: 2 lines in which a client reaches itself are ignored",
        "reach.csv: 3 components, the largest has 2 of 4 clients; 3 clients reach nobody",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"reach.csv: the first line must be client,peer"),
        ("a,b\n0,1\n", r"reach.csv: the first line must be client,peer"),
        ("client,peer\n0,1\n0,4\n", r"reach.csv, line 3: there is no client 4, only 0 to 3"),
        ("client,peer\n-1,1\n", r"reach.csv, line 2: there is no client -1, only 0 to 3"),
        ("client,peer\n0,1,2\n", r"reach.csv, line 2: '0,1,2' must be two clients' numbers"),
        ("client,peer\n0\n", r"reach.csv, line 2: '0' must be two clients' numbers"),
        ("client,peer\n0,x\n", r"reach.csv, line 2: '0,x' must be two clients' numbers"),
        ("client,peer\n0,1.5\n", r"reach.csv, line 2: '0,1.5' must be two clients' numbers"),
    ],
)
def test_a_bad_file_is_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError, match=f"^{words}$"):
        read_network(write(text), 4)


def test_a_file_that_cannot_be_read_is_one_line() -> None:
    with pytest.raises(UserError, match=r"nowhere.csv cannot be read: No such file"):
        read_network(Path("nowhere.csv"), 4)
    Path("bytes.csv").write_bytes(b"client,peer\n\xff\xfe,1\n")
    with pytest.raises(UserError, match=r"bytes.csv is not a CSV file"):
        read_network(Path("bytes.csv"), 4)


# -- runs ----------------------------------------------------------------------------------------------------------


class Listen(kinfolk.Observer):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def notice(self, text: str) -> None:
        self.heard.append(text)


def run(method: str | dict[str, Any], out: str, peers: dict[str, Any], **sections: Any) -> tuple[Any, list[str]]:
    settings = {"name": method} if isinstance(method, str) else method
    observer = Listen()
    result = kinfolk.run(tiny_experiment(method=settings, peers=peers, **sections), out=out, observer=observer)
    return result, observer.heard


def edges(result: kinfolk.Result) -> set[tuple[int, int]]:
    graph = read_graph(result.folder)
    return set(zip(graph.client.tolist(), graph.neighbor.tolist()))


def test_the_oracle_averages_within_its_cluster_and_its_reach() -> None:
    result, _ = run({"name": "oracle", "neighbors": 9}, "a", {"reachable": 3})
    reach = sets(RandomNetwork(8, 3, seed=0), torch.arange(8))
    cluster = [client["cluster"] for client in result.clients]
    assert edges(result) == {(i, j) for i in range(8) for j in reach[i] if cluster[i] == cluster[j]}


def test_random_gossip_uses_all_of_its_reach_and_nothing_else() -> None:
    result, _ = run({"name": "random", "neighbors": 2}, "a", {"reachable": 3}, run={"rounds": 20})
    reach = sets(RandomNetwork(8, 3, seed=0), torch.arange(8))
    assert edges(result) == {(i, j) for i in range(8) for j in reach[i]}


def test_settings_beyond_the_reach_are_lowered_with_a_notice() -> None:
    method = {"name": "pens", "neighbors": 5, "candidates": 10, "discover_rounds": 2}
    result, heard = run(method, "a", {"reachable": 3})
    assert heard == [
        "method.candidates = 10, but a client has only 3 peers: using 3",
        "method.neighbors = 5, but a client has only 3 peers: using 3",
    ]
    assert result.summary["peak_received"] == 3


@pytest.mark.parametrize(
    "method", [{"name": "afind+"}, {"name": "gossip", "choice": "afind"}, {"name": "ditto", "consensus": "fedavg"}]
)
def test_settings_that_are_not_in_use_are_not_spoken_of(method: dict[str, Any]) -> None:
    _, heard = run(method, "a", {"reachable": 3})
    assert not [line for line in heard if line.startswith("method.")]


@pytest.mark.parametrize("method", ["fedavg", "ifca", "cfl", "fedsem", "centralized"])
def test_a_server_reaches_everybody_and_says_so(method: str) -> None:
    limited, heard = run(method, "limited", {"reachable": 0})
    assert heard == [f"method '{method}' has a server that reaches everybody: [peers] is ignored"]
    free, _ = run(method, "free", {})
    assert torch.equal(limited.weights(), free.weights())


def test_reaching_as_many_as_there_are_changes_nothing() -> None:
    free, _ = run("panm", "free", {})
    wide, heard = run("panm", "wide", {"reachable": 7})
    assert torch.equal(free.weights(), wide.weights())
    assert "peers.reachable = 7, but a client has only 7 peers: it reaches all" in heard
    pairs = "".join(f"{i},{j}\n" for i in range(8) for j in range(8))
    named, _ = run("panm", "named", {"reachable_from": str(write("client,peer\n" + pairs))})
    assert torch.equal(free.weights(), named.weights())


def test_a_run_keeps_the_file_and_resumes_without_it() -> None:
    class Stop(kinfolk.Observer):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if t == 3:
                raise KeyboardInterrupt

    path = write("client,peer\n" + "".join(f"{i},{(i + 1) % 8}\n{i},{(i + 3) % 8}\n" for i in range(8)))
    settings = tiny_experiment(peers={"reachable_from": str(path)}, run={"checkpoint_every": 1})
    whole = kinfolk.run(settings, out="whole")
    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(settings, out="cut", observer=Stop())
    path.unlink()
    assert torch.equal(kinfolk.resume("cut").weights(), whole.weights())
    assert edges(whole) == {(i, j) for i in range(8) for j in ((i + 1) % 8, (i + 3) % 8)}


def test_an_observer_compares_with_the_reachable_only() -> None:
    method = {"name": "panm", "neighbors": 1, "candidates": 1, "discover_rounds": 2}
    result, _ = run(method, "a", {"reachable": 4}, run={"watch": [2, 5], "watch_all": True})
    seen = read_similarity(result.folder)
    reach = sets(RandomNetwork(8, 4, seed=0), torch.arange(8))
    for client in (2, 5):
        for t in (1, 2, 4):
            assert seen.peer[(seen.client == client) & (seen.round == t)].tolist() == reach[client]


def test_pens_expects_what_a_random_choice_among_the_reachable_gives() -> None:
    method = PENS(candidates=4, neighbors=2, discover_rounds=12)
    selected = torch.tensor([[0, 6, 5, 4, 3, 7, 0, 0, 0, 0]], dtype=torch.int16)
    assert method.permanent(selected, selected, torch.tensor([4])).tolist() == [[5]]  # more than 12 * 2 / 4
    assert method.permanent(selected, selected, torch.tensor([9])).tolist() == [[1, 2, 3, 4, 5]]  # more than 12 * 2 / 9
    assert method.permanent(selected, selected).tolist() == [[1, 2, 3, 4, 5]]


def test_a_run_of_pens_tells_its_rule_how_many_are_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    plain = PENS.permanent

    def permanent(self: PENS, selected: Tensor, sampled: Tensor, others: Tensor) -> Tensor:
        told.append(others.tolist())
        return plain(self, selected, sampled, others)

    monkeypatch.setattr(PENS, "permanent", permanent)
    run({"name": "pens", "discover_rounds": 2}, "a", {"reachable": 4})
    assert told == [[4] * 8]


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ({"reachable": -1}, r"'peers.reachable' = -1: must be at least 0"),
        ({"reachable": "few"}, r"'peers.reachable' = 'few': input should be a valid integer"),
        ({"reach": 3}, r"unknown key 'peers.reach': did you mean 'reachable'"),
        ({"reachable": 3, "reachable_from": "a.csv"}, r"\[peers\] both 'reachable' and 'reachable_from'"),
        ({"reachable_from": "a.csv"}, r"a.csv cannot be read: No such file"),
    ],
)
def test_bad_settings_are_one_line(peers: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run("random", "a", peers)
    assert not Path("a").exists()


def test_by_default_everybody_reaches_everybody_and_nothing_is_built() -> None:
    assert Access().network(10, 0) == (None, [])
    assert np.array_equal(Peers(3, Host(torch.arange(3)), InProcess()).others(), [2, 2, 2])
