"""Rules and attacks in whole runs: every rule in methods of each kind, against plain loops, in shards, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import plain_rules as plain
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kinfolk
from conftest import tiny_experiment
from kinfolk import aggregation
from kinfolk.config import read
from kinfolk.experiment import resume
from kinfolk.methods.panm import PANM
from kinfolk.peers.attacks import ATTACKS, plan
from kinfolk.peers.base import Peers
from kinfolk.peers.faults import Faults
from kinfolk.peers.inprocess import InProcess
from kinfolk.runs.graph import read_graph

METHODS: dict[str, dict[str, Any]] = {
    "random": {"neighbors": 4},
    "gossip": {"neighbors": 4},
    "panm": {"neighbors": 4, "candidates": 5, "discover_rounds": 2},
    "afind+": {},
    "fedavg": {},
}
RULES = [name for name in aggregation.names() if name != "mean"]
FLIPPED: dict[str, Any] = {"attackers": [1, 6], "attack": "sign-flip", "attack_scale": 5.0}
Loop = Callable[[Tensor, list[Tensor]], Tensor]


def settings(method: str, rule: str, faults: dict[str, Any] | None = None, **run: Any) -> dict[str, Any]:
    sections = {"aggregation": {"rule": rule}, "faults": {} if faults is None else faults, "run": run}
    return tiny_experiment(method={"name": method, **METHODS.get(method, {})}, **sections)


@cache
def averaged(method: str, attacked: bool, precision: str, chunk: int | None) -> Tensor:
    """The models after a run with the mean, for several tests."""
    faults = FLIPPED | {"loss": 0.1, "absent": 0.1} if attacked else {"loss": 0.1}
    run = {"precision": precision, "evaluate_every": 4} | ({} if chunk is None else {"chunk": chunk, "rounds": 3})
    return kinfolk.run(settings(method, "mean", faults, **run), out="mean").weights()


@pytest.mark.parametrize("method", [name for name in METHODS if name != "random"])  # that one by plain loops
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_runs_in_every_kind_of_method_and_does_not_depend_on_shards(rule: str, method: str) -> None:
    faults = FLIPPED | {"loss": 0.1, "absent": 0.1}
    if rule == "ubar" and method == "fedavg":
        with pytest.raises(kinfolk.UserError, match="the server of method 'fedavg' does not have"):
            kinfolk.run(settings(method, rule, faults), out="one")
        return
    one = kinfolk.run(settings(method, rule, faults, precision="float64", evaluate_every=4), out="one")
    sharded = {"precision": "float64", "evaluate_every": 4, "engine": "sharded", "shards": 3}
    many = kinfolk.run(settings(method, rule, faults, **sharded), out="many")
    assert torch.isfinite(one.weights()).all()
    assert (one.weights() - many.weights()).abs().max() <= 1e-10
    edges, other = read_graph(one.folder), read_graph(many.folder)
    assert np.array_equal(edges.client, other.client)
    assert np.array_equal(edges.neighbor, other.neighbor)
    assert not torch.equal(averaged(method, True, "float64", None), one.weights())


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("method", ["panm", "afind+", "fedavg", "cfl", "fedsem"])
def test_every_attack_gives_the_same_bits_in_shards(method: str, attack: str) -> None:
    if attack == "gaming" and method not in ("panm", "afind+"):
        with pytest.raises(kinfolk.UserError, match="nobody chooses peers"):
            kinfolk.run(settings(method, "mean", {"attackers": 0.3, "attack": attack}), out="one")
        return
    faults = {"attackers": 0.3, "attack": attack, "loss": 0.1}
    chunks: dict[str, Any] = {"chunk": 2, "evaluate_every": 3, "rounds": 3}
    one = kinfolk.run(settings(method, "mean", faults, **chunks), out="one")
    two = kinfolk.run(settings(method, "mean", faults, **chunks, engine="sharded", shards=2), out="two")
    assert torch.isfinite(one.weights()).all()
    assert torch.equal(one.weights(), two.weights())
    if attack not in ("mimic", "gaming"):  # in a few rounds, a copy may change next to nothing
        assert not torch.equal(averaged(method, False, "float32", 2), one.weights())


# -- against plain loops -----------------------------------------------------------------------------------------


def judged(config: kinfolk.Config, client: int) -> Callable[[Tensor], float]:
    """The loss of a model of the tiny experiment on a client's training samples, as anybody would write it."""
    part = kinfolk.load_federation(config).train
    rows = slice(int(part.starts[client]), int(part.starts[client] + part.sizes[client]))
    x, y = part.x[rows].double().flatten(1), part.y[rows]

    def loss(model: Tensor) -> float:
        first, rest = model[: 64 * 16].view(16, 64), model[64 * 16 :]
        hidden = F.relu(F.linear(x, first, rest[:16]))
        return float(F.cross_entropy(F.linear(hidden, rest[16:176].view(10, 16), rest[176:]), y))

    return loss


def loops(config: kinfolk.Config) -> dict[str, Callable[[int], Loop]]:
    """Of each rule with its default settings, in the only round of a run, for client i."""
    return {
        "median": lambda i: plain.median,
        "trimmed-mean": lambda i: lambda own, peers: plain.trimmed_mean(own, peers, 1),
        "krum": lambda i: lambda own, peers: plain.krum(own, peers, 1, 1),
        "m-krum": lambda i: lambda own, peers: plain.krum(own, peers, 1, None),
        "clipping": lambda i: lambda own, peers: plain.clipping(own, peers, None, 1),
        "balance": lambda i: lambda own, peers: plain.balance(own, peers, 0.3, 1.0, 0.5, 1.0),
        "ubar": lambda i: lambda own, peers: plain.ubar(own, peers, 0.5, 0.5, judged(config, i)),
    }


class Everybody:
    """Peers of all eight clients, to draw what the run draws."""

    ids, seed = torch.arange(8), 0

    def silent(self) -> Tensor:
        return torch.zeros(8, dtype=torch.bool)

    away = silent


def drawn(count: int) -> list[list[int]]:
    found: list[list[int]] = Peers(8, Everybody(), InProcess()).sample(1, count).tolist()
    return found


@pytest.mark.parametrize("rule", RULES)
def test_a_round_of_gossip_is_what_a_plain_loop_gives(rule: str) -> None:
    once = {"rounds": 1, "precision": "float64"}
    config = read(settings("random", rule, FLIPPED, **once))
    trained = kinfolk.run(settings("local", "mean", **once), out="local").weights()
    first = kinfolk.run(
        tiny_experiment(method={"name": "local"}, training={"lr": 1e-30}, run=once), out="untrained"
    ).weights()
    told = torch.where(
        torch.isin(torch.arange(8), torch.tensor([1, 6]))[:, None], first - 5 * (trained - first), trained
    )
    result = kinfolk.run(config, out="run")
    found, used = result.weights(), read_graph(result.folder)
    for i, chosen in enumerate(drawn(4)):
        wanted = loops(config)[rule](i)(trained[i], [told[j] for j in chosen])
        torch.testing.assert_close(found[i], wanted, rtol=0, atol=1e-9)
        assert set(used.neighbor[used.client == i].tolist()) <= set(chosen)


@pytest.mark.parametrize("rule", [name for name in RULES if name != "ubar"])
def test_a_private_head_neither_counts_nor_changes(rule: str) -> None:
    """Only bodies are averaged, so only bodies are compared: random heads would make everybody look far away."""
    once = {"rounds": 1, "precision": "float64"}
    config = read(tiny_experiment(
        method={"name": "gossip", "neighbors": 4}, run=once, aggregation={"rule": rule}, peers={}
    ))  # fmt: skip
    alone = kinfolk.run(
        tiny_experiment(method={"name": "gossip", "neighbors": 4}, run=once, peers={"reachable": 0}), out="alone"
    ).weights()
    found = kinfolk.run(config, out="run").weights()
    body = 64 * 16 + 16
    assert torch.equal(found[:, body:], alone[:, body:])
    for i, chosen in enumerate(drawn(4)):
        wanted = loops(config)[rule](i)(alone[i, :body], [alone[j, :body] for j in chosen])
        torch.testing.assert_close(found[i, :body], wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", [name for name in RULES if name != "ubar"])
def test_a_server_combines_models_around_its_own(rule: str) -> None:
    once = {"rounds": 1, "precision": "float64"}
    trained = kinfolk.run(settings("local", "mean", **once), out="local").weights()
    first = kinfolk.run(
        tiny_experiment(method={"name": "local"}, training={"lr": 1e-30}, run=once), out="untrained"
    ).weights()[0]
    config = read(settings("fedavg", rule, **once))
    found = kinfolk.run(config, out="run").weights()
    models = list(trained)
    if rule in ("median", "trimmed-mean", "krum", "m-krum"):  # its own model takes no part
        wanted = loops(config)[rule](0)(models[0], models[1:])
    elif rule == "balance":
        wanted = loops(config)[rule](0)(first, models)
    else:  # clipping: as a client's, but its own model has no share of its own
        pulled = loops(config)[rule](0)(first, models)
        wanted = first + (pulled - first) * (len(models) + 1) / len(models)
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=1e-9)
    assert torch.equal(found, found[:1].expand_as(found))


# -- what is put down --------------------------------------------------------------------------------------------


def test_the_mean_is_what_it_was() -> None:
    plainly = tiny_experiment()
    named = tiny_experiment(aggregation={"rule": "mean"})
    assert read(plainly).identity() == read(named).identity()
    assert set(read(plainly).sections()["faults"]) == {"loss", "absent", "absent_rounds"}
    assert read(tiny_experiment(aggregation={"rule": "median"})).identity() != read(plainly).identity()
    assert torch.equal(kinfolk.run(plainly, out="a").weights(), kinfolk.run(named, out="b").weights())
    assert kinfolk.run(named, out="c").config.rule_name == "mean"


def test_edges_say_whose_models_were_really_used() -> None:
    used = read_graph(kinfolk.run(settings("random", "krum", FLIPPED), out="krum").folder)
    pairs = list(zip(used.round, used.client))
    assert len(set(pairs)) == len(pairs)  # one at most
    assert set(used.weight) == {1.0}
    config = settings("random", "balance", FLIPPED | {"attack_scale": 1e4})
    config["aggregation"]["tolerance"] = 1.0
    near = kinfolk.run(config, out="balance")
    assert not np.isin(read_graph(near.folder).neighbor, [1, 6]).any()  # always too far away
    assert near.summary["attacking_neighbors"] == 0.0
    mean = kinfolk.run(settings("random", "mean", FLIPPED), out="mean")
    assert mean.summary["attacking_neighbors"] > 0.1


def test_attackers_count_in_no_mean_and_are_marked() -> None:
    result = kinfolk.run(settings("random", "mean", {"attackers": [0, 5], "attack": "label-flip"}), out="a")
    assert [row["attacker"] for row in result.clients] == [i in (0, 5) for i in range(8)]
    for name in ("accuracy", "loss", "before_mixing"):
        honest = [row[name] for row in result.clients if not row["attacker"]]
        assert result.summary[name] == pytest.approx(np.mean(honest))
    assert result.summary["accuracy_client0"] is None
    assert "attacker" not in kinfolk.run(tiny_experiment(), out="b").clients[0]


def test_precision_and_neighbors_are_those_of_honest_clients() -> None:
    result = kinfolk.run(settings("random", "mean", {"attackers": [0, 5], "attack": "label-flip"}), out="a")
    edges = read_graph(result.folder)
    clusters = [row["cluster"] for row in result.clients]
    last = [(c, j) for t, c, j in zip(edges.round, edges.client, edges.neighbor) if t == 4]
    honest = [i for i in range(8) if i not in (0, 5)]
    found = {i: [j for c, j in last if c == i] for i in honest}
    precision = np.mean([np.mean([clusters[j] == clusters[i] for j in found[i]]) for i in honest])
    assert result.summary["neighbor_precision"] == pytest.approx(precision)
    assert result.summary["attacking_neighbors"] == pytest.approx(
        np.mean([j in (0, 5) for i in honest for j in found[i]])
    )


def test_flipped_labels_change_the_attackers_training_and_nothing_else() -> None:
    once = {"rounds": 1}
    honest = kinfolk.run(settings("local", "mean", **once), out="a").weights()
    flipped = kinfolk.run(settings("local", "mean", {"attackers": [2], "attack": "label-flip"}, **once), out="b")
    changed = (honest != flipped.weights()).any(dim=1)
    assert changed.tolist() == [i == 2 for i in range(8)]
    data = kinfolk.load_federation(read(tiny_experiment()))
    before = data.train.y.clone()
    kinfolk.run(settings("local", "mean", {"attackers": [2], "attack": "label-flip"}, **once), data=data, out="c")
    assert torch.equal(data.train.y, before)  # a user's own data stay as they are


@pytest.mark.parametrize("method", ["random", "panm", "fedavg", "cfl"])
def test_nan_never_reaches_the_mean(method: str) -> None:
    result = kinfolk.run(settings(method, "mean", {"attackers": [1, 6], "attack": "nan"}), out="a")
    assert torch.isfinite(result.weights()).all()
    assert not np.isin(read_graph(result.folder).neighbor, [1, 6]).any()
    assert [row["quarantined"] for row in result.clients] == [4 if i in (1, 6) else 0 for i in range(8)]


@pytest.mark.parametrize("attack", ["gaming", "gaussian"])
def test_an_attack_is_resumed_bit_exactly(attack: str) -> None:
    faults = {"attackers": 0.3, "attack": attack}
    whole = kinfolk.run(settings("random", "m-krum", faults, rounds=6, checkpoint_every=1), out="whole")

    class Stop(kinfolk.Observer):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if t == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(settings("random", "m-krum", faults, rounds=6, checkpoint_every=1), out="cut", observer=Stop())
    assert torch.equal(resume("cut").weights(), whole.weights())


def test_gaming_turns_in_a_run() -> None:
    faults = {"attackers": [3], "attack": "gaming", "attack_victim": 0}
    method = {"name": "random", "neighbors": 7}  # everybody averages with everybody: chosen in round 1
    game = kinfolk.run(tiny_experiment(method=method, faults=faults, run={"rounds": 2}), out="game").weights()
    copy = kinfolk.run(
        tiny_experiment(method=method, faults=faults | {"attack": "mimic"}, run={"rounds": 2}), out="mimic"
    ).weights()
    assert not torch.equal(game, copy)
    once = [
        kinfolk.run(tiny_experiment(method=method, faults=faults | {"attack": name}, run={"rounds": 1}), out=name + "1")
        for name in ("gaming", "mimic")
    ]
    assert torch.equal(once[0].weights(), once[1].weights())


def test_a_comparison_leaves_attackers_out() -> None:
    faults = {"attackers": [1, 6], "attack": "sign-flip"}
    found = kinfolk.compare(settings("random", "mean", faults), ["random"], references=True, out="c")
    local, random = found.runs["local"][0], found.runs["random"][0]
    assert [row["attacker"] for row in local.clients] == [i in (1, 6) for i in range(8)]
    honest = [i for i in range(8) if i not in (1, 6)]
    worse = 0
    for i in honest:
        mine, alone = random.clients[i]["accuracy"], local.clients[i]["accuracy"]
        error = np.sqrt((mine + alone) / 2 * (1 - (mine + alone) / 2) / 20)
        worse += mine - alone < -error
    assert found.row("random").hurt == pytest.approx(worse / 6)


# -- what cannot be ----------------------------------------------------------------------------------------------


class Heard(kinfolk.Observer):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def notices(config: dict[str, Any]) -> str:
    heard = Heard()
    kinfolk.run(config, out="run", observer=heard)
    return "\n".join(heard.notices)


def test_a_rule_that_cannot_apply_is_refused_before_the_run() -> None:
    for method, more, words in (
        ("dispfl", {}, "method 'dispfl' averages each weight with those who hold it; use 'mean'"),
        ("federico", {"form": "em"}, "method 'federico' with form 'em' never averages models"),
        ("ifca", {}, "the server of method 'ifca'"),
    ):
        config = tiny_experiment(method={"name": method, **more}, aggregation={"rule": "ubar"})
        with pytest.raises(kinfolk.UserError, match=words):
            kinfolk.run(config, out="a")
    for method, more, words in (
        ("random", {"neighbors": 2}, "then needs 5 models, but a client has 3"),
        ("fedavg", {"participation": 0.5}, "then needs 5 models, but the server hears of 4"),
    ):
        config = tiny_experiment(method={"name": method, **more}, aggregation={"rule": "krum", "byzantine": 2})
        with pytest.raises(kinfolk.UserError, match=words):
            kinfolk.run(config, out="a")
    assert not Path("a").exists()


def test_a_rule_may_need_as_many_models_as_a_method_averages_at_most() -> None:
    """PANM robust averages with all kin that it has looked at: with up to 7 peers here, as printed with 4."""
    rule = {"rule": "krum", "byzantine": 3}  # needs 7 models
    method = {"name": "panm", "neighbors": 4, "candidates": 5, "discover_rounds": 2}
    kinfolk.run(tiny_experiment(method=method, aggregation=rule), out="a")
    with pytest.raises(kinfolk.UserError, match="then needs 7 models, but a client has 5"):
        kinfolk.run(tiny_experiment(method=method | {"preset": "paper"}, aggregation=rule), out="b")
    several = PANM(neighbors=4, candidates=5), PANM(neighbors=9, candidates=5), PANM(neighbors=2, average=30)
    assert [method.most_averaged for method in several] == [10, 14, 30]


def test_what_the_user_should_know_is_said() -> None:
    assert "method 'local' averages nothing" in notices(settings("local", "median"))


def test_weights_that_a_rule_ignores_are_announced() -> None:
    assert "takes no weights" in notices(settings("afind+", "median"))


def test_more_attackers_than_a_rule_is_set_for_are_announced() -> None:
    config = settings("random", "krum", {"attackers": 0.5, "attack": "nan"})
    assert "byzantine = 1, but of 4 models 2.3 are attackers' on average" in notices(config)


def test_a_share_so_small_that_nobody_attacks_is_announced() -> None:
    assert "nobody attacks" in notices(settings("random", "mean", {"attackers": 0.01, "attack": "nan"}))
    assert plan(Faults(attackers=0.01, attack="nan"), 8, 0) is None


@pytest.mark.parametrize("every", [5, 0])
def test_a_member_that_averages_for_others_is_not_judged_by_any_rule(every: int) -> None:
    config = settings("p4", "median")
    config["method"]["rotate_every"] = every
    assert ("a member averages for its group in turn" in notices(config)) == bool(every)
