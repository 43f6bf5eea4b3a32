"""Who is out of reach in which round: it trains on, but nobody hears of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_peers import Host
from test_reach import pair_network, run
from torch import Tensor

import kinfolk
from conftest import tiny_experiment
from kinfolk.errors import UserError
from kinfolk.peers.access import Access, read_trace
from kinfolk.peers.availability import ChangingNetwork, Spells, Trace
from kinfolk.peers.base import Peers
from kinfolk.peers.inprocess import InProcess
from kinfolk.runs.graph import read_graph
from kinfolk.runs.similarity import read_similarity

CPU = torch.device("cpu")


def trace(n: int, *spells: tuple[int, int, int]) -> Trace:
    columns = torch.tensor(spells, dtype=torch.int64).view(-1, 3)
    return Trace(n, columns[:, 0], columns[:, 1], columns[:, 2])


def peers_with(network: ChangingNetwork, n: int, ids: Tensor | None = None, seed: int = 0) -> Peers:
    here = torch.arange(n) if ids is None else ids
    return Peers(n, Host(here, seed), InProcess(), None, network.reach(here))


def ring(n: int) -> Any:
    return pair_network({(i, (i + step) % n) for i in range(n) for step in (1, -1)}, n)


def write(text: str) -> Path:
    Path("trace.csv").write_text(text, encoding="utf-8")
    return Path("trace.csv")


# -- who is away ---------------------------------------------------------------------------------------------------


def test_spells_are_as_many_and_as_long_as_they_should_be() -> None:
    spells = Spells(500, 0.3, 4, seed=1)
    away = torch.stack([spells.away(t, CPU) for t in range(1, 81)])  # [rounds, clients]
    assert abs(away.double().mean() - 0.3) < 0.03
    changes = (away[1:] != away[:-1]).double().mean()
    assert changes == pytest.approx(2 * 0.3 * 0.7 / 4, abs=0.02)
    assert not torch.equal(away, torch.stack([Spells(500, 0.3, 4, seed=2).away(t, CPU) for t in range(1, 81)]))


def test_a_trace_says_when_a_client_is_away() -> None:
    found = read_trace(write("client,first,last\n2,1,3\n0,2,2\n\n2,3,4\n1,4,\n"), 3)
    assert [torch.nonzero(found.away(t, CPU)).flatten().tolist() for t in range(1, 7)] == [
        *([2], [0, 2], [2], [1, 2], [1], [1]),
    ]
    again = read_trace(write(found.files()["away.csv"]), 3)
    assert all(torch.equal(again.away(t, CPU), found.away(t, CPU)) for t in range(1, 9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"trace.csv: the first line must be client,first,last"),
        ("round,client\n", r"trace.csv: the first line must be client,first,last"),
        ("client,first,last\n0,1,2\n4,1,2\n", r"trace.csv, line 3: there is no client 4, only 0 to 3"),
        ("client,first,last\n\n0,1\n", r"trace.csv, line 3: '0,1' must be a client's number and two rounds"),
        ("client,first,last\n0,1,2,3\n", r"trace.csv, line 2: '0,1,2,3' must be a client's number and two rounds"),
        ("client,first,last\n0,,2\n", r"trace.csv, line 2: '0,,2' must be a client's number and two rounds"),
        ("client,first,last\n0,a,2\n", r"trace.csv, line 2: '0,a,2' must be a client's number and two rounds"),
        ("client,first,last\n0,0,2\n", r"trace.csv, line 2: '0,0,2' must have a first round of at least 1 and a .*"),
        (
            "client,first,last\n0,3,2\n",
            r"trace.csv, line 2: '0,3,2' must have a first round of .* a last not before it",
        ),
        (f"client,first,last\n0,{10**30},\n", r"trace.csv, line 2: .* must have a first round of .*"),
    ],
)
def test_a_bad_trace_is_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError, match=f"^{words}$"):
        read_trace(write(text), 4)


# -- what a method sees of it --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 14),
    count=st.integers(0, 6),
    linked=st.booleans(),
    grouped=st.booleans(),
    seed=st.integers(0, 99),
    shards=st.integers(1, 3),
)
def test_nobody_draws_or_is_drawn_while_away(
    n: int, count: int, linked: bool, grouped: bool, seed: int, shards: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    barred = torch.randint(-1, n, (n, 2), generator=generator)
    labels = torch.randint(3, (n,), generator=generator)
    links = {(i, j) for i in range(n) for j in range(n) if i != j and (not linked or (i * j + seed) % 3)}
    availability = Spells(n, 0.4, 2, seed)
    network = ChangingNetwork(pair_network(links, n) if linked else None, availability)
    for t in (1, 2, 5):
        away = availability.away(t, CPU).tolist()
        drawn: list[list[int]] = []
        reached: list[list[int]] = []
        for ids in torch.arange(n).tensor_split(min(shards, n)):
            peers = peers_with(network, n, ids, seed)
            drawn += peers.sample(t, count, barred[ids], labels if grouped else None).tolist()
            reached += peers.reach.at(t).padded(torch.arange(ids.numel())).tolist()  # type: ignore[union-attr]
        for i in range(n):
            free = {j for j in range(n) if (i, j) in links and not away[i] and not away[j]}
            assert {j for j in reached[i] if j >= 0} == free
            free -= set(barred[i].tolist())
            if grouped:
                free = {j for j in free if labels[j] == labels[i]}
            row = [j for j in drawn[i] if j >= 0]
            assert set(row) <= free
            assert len(row) == len(set(row)) == min(count, len(free))


def test_when_nobody_is_away_draws_are_as_if_nothing_had_been_said() -> None:
    free = Peers(9, Host(torch.arange(9), 3), InProcess())
    peers = peers_with(ChangingNetwork(None, trace(9)), 9, seed=3)
    labels = torch.arange(9) % 2
    assert torch.equal(peers.sample(2, 4), free.sample(2, 4))
    assert torch.equal(peers.sample(2, 4, within=labels), free.sample(2, 4, within=labels))


def test_round_zero_is_before_anybody_left() -> None:
    network = ChangingNetwork(ring(5), trace(5, (1, 1, 99)))
    peers = peers_with(network, 5)
    assert (peers.sample(0, 2) >= 0).all()
    assert (peers.sample(1, 2)[1] < 0).all()
    assert peers.others().tolist() == [2] * 5  # in this round or another
    assert (peers_with(ChangingNetwork(None, Spells(5, 0.9, 1, 0)), 5).sample(0, 4) >= 0).all()


@pytest.mark.parametrize("linked", [True, False])
def test_who_is_out_of_reach_now_gives_no_answer_and_is_not_counted(linked: bool) -> None:
    network = ChangingNetwork(ring(4) if linked else None, trace(4, (1, 2, 2)))
    peers = peers_with(network, 4)
    asked = torch.tensor([[1, 3], [0, 2], [1, 3], [2, -1]])
    for t, answers in ((1, [2, 2, 2, 1]), (2, [1, 0, 1, 1]), (3, [2, 2, 2, 1])):
        peers.models_received.zero_()
        peers.publish(t, weights=torch.zeros(4, 2))
        pool = peers.pull(t, asked)
        assert peers.models_received.tolist() == answers
        assert (pool.rows(asked) >= 0).sum(dim=1).tolist() == answers


def test_who_is_never_in_reach_is_a_mistake_in_the_method_still() -> None:
    peers = peers_with(ChangingNetwork(ring(5), trace(5, (1, 1, 1))), 5)
    peers.publish(1, weights=torch.zeros(5, 2))
    peers.pull(1, torch.tensor([[1], [0], [1], [2], [3]]))
    with pytest.raises(RuntimeError, match="cannot reach"):
        peers.pull(1, torch.tensor([[2], [0], [1], [2], [3]]))


def test_without_a_graph_memory_grows_with_the_clients_only() -> None:
    lists = ChangingNetwork(None, Spells(50_000, 0.3, 1, 0)).reach(torch.arange(50_000)).at(1)
    tensors = [value for value in vars(lists).values() if isinstance(value, Tensor)]
    assert sum(tensor.numel() for tensor in tensors) <= 6 * 50_000


# -- runs ----------------------------------------------------------------------------------------------------------


def test_a_client_that_is_always_away_trains_as_if_alone() -> None:
    write("client,first,last\n3,1,\n")
    result, heard = run({"name": "random", "neighbors": 3}, "a", {"away_from": "trace.csv"}, run={"chunk": 1})
    local, _ = run("local", "local", {}, run={"chunk": 1})
    assert heard == []
    assert torch.equal(result.weights()[3], local.weights()[3])
    assert not torch.equal(result.weights()[2], local.weights()[2])
    found = read_graph(result.folder)
    assert 3 not in found.client
    assert 3 not in found.neighbor
    assert result.clients[3]["models_received"] == 0


def test_to_be_away_is_not_to_be_absent() -> None:
    """An absent client does not even train."""
    away, _ = run("local", "away", {"away": 0.5})
    free, _ = run("local", "free", {})
    absent, _ = run("local", "absent", {}, faults={"absent": 0.5})
    assert torch.equal(away.weights(), free.weights())
    assert not torch.equal(absent.weights(), free.weights())


def test_fixed_peers_are_kept_through_an_absence() -> None:
    write("client,first,last\n" + "".join(f"{i},2,2\n" for i in range(8)))
    result, _ = run({"name": "fixed", "neighbors": 2}, "a", {"away_from": "trace.csv"})
    found = read_graph(result.folder)
    rounds = [set(zip(found.client[found.round == t], found.neighbor[found.round == t])) for t in (1, 2, 3)]
    assert rounds[0] == rounds[2]
    assert len(rounds[0]) == 16
    assert rounds[1] == set()


def test_the_share_that_is_away_neither_asks_nor_answers() -> None:
    method = {"name": "random", "neighbors": 1}
    result, _ = run(method, "a", {"away": 0.3, "away_rounds": 2}, run={"rounds": 40, "evaluate_every": 40})
    assert result.summary["models_received"] / (40 * 8) == pytest.approx(0.7, abs=0.1)
    spells, found = Spells(8, 0.3, 2, seed=0), read_graph(result.folder)
    for t in range(1, 41):
        present = torch.nonzero(~spells.away(t, CPU)).flatten().tolist()
        assert sorted(found.client[found.round == t].tolist()) == (present if len(present) > 1 else [])


def test_nobody_away_is_as_if_nothing_had_been_said() -> None:
    free, _ = run("pens", "free", {})
    for name, peers in (("zero", {"away": 0}), ("none", {"away_from": str(write("client,first,last\n"))})):
        assert torch.equal(run("pens", name, peers)[0].weights(), free.weights())
    assert Access(away=0).network(5, seed=0) == (None, [])


def test_an_observer_compares_with_those_in_reach_now() -> None:
    write("client,first,last\n4,2,2\n")
    method = {"name": "panm", "neighbors": 1, "candidates": 1, "discover_rounds": 9}
    watch = {"watch": [2, 4], "watch_all": True, "watch_rounds": [1, 2]}
    seen = read_similarity(run(method, "a", {"away_from": "trace.csv"}, run=watch)[0].folder)
    for client, t, count in ((2, 1, 7), (2, 2, 6), (4, 1, 7), (4, 2, 0)):
        assert ((seen.client == client) & (seen.round == t)).sum() == count


@pytest.mark.parametrize("method", ["fedavg", "centralized"])
def test_a_server_reaches_those_who_are_away(method: str) -> None:
    result, heard = run(method, "a", {"away": 0.5})
    assert heard == [f"method '{method}' has a server that reaches everybody: [peers] is ignored"]
    assert torch.equal(result.weights(), run(method, "free", {})[0].weights())


@pytest.mark.parametrize("peers", [{"away": 0.4, "away_rounds": 2}, {"topology": "ring", "away_from": "trace.csv"}])
def test_a_run_resumes_bit_exactly_and_without_the_trace(peers: dict[str, Any]) -> None:
    class Stop(kinfolk.Observer):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if t == 3:
                raise KeyboardInterrupt

    path = write("client,first,last\n0,1,2\n5,3,\n6,4,4\n")
    method = {"name": "panm", "discover_rounds": 2, "neighbors": 2, "candidates": 2}
    settings = tiny_experiment(method=method, peers=peers, run={"rounds": 6, "checkpoint_every": 1})
    whole = kinfolk.run(settings, out="whole")
    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(settings, out="cut", observer=Stop())
    path.unlink()
    assert torch.equal(kinfolk.resume("cut").weights(), whole.weights())
    assert Path("cut/away.csv").exists() == ("away_from" in peers)


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ({"away": 1.0}, r"'peers.away' = 1.0: must be less than 1"),
        ({"away": -0.5}, r"'peers.away' = -0.5: must be at least 0"),
        ({"away": 0.1, "away_from": "a.csv"}, r"\[peers\] both 'away' and 'away_from' say who is out of reach when"),
        ({"away_rounds": 3}, r"\[peers\] 'away_rounds' goes with 'away'"),
        ({"away_from": "nowhere.csv"}, r"nowhere.csv cannot be read: No such file"),
    ],
)
def test_bad_settings_are_one_line(peers: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"^{words}"):
        run("random", "a", peers)
    assert not Path("a").exists()
