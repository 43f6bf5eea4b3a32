"""What FedCG notes in every round, and its rounds with models for few clients at a time."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from test_fedcg import engine_of, run

import kinfolk
from conftest import tiny_experiment
from kinfolk import engines
from kinfolk.methods import domain_labels
from kinfolk.parcel import Parcel
from kinfolk.peers.faults import Faults
from kinfolk.runs.rounds import read_rounds
from processes import finished

VARIANTS = [{"preset": "paper"}, {}, {"source": "k-means"}]


def experiment(method: dict[str, Any], **sections: Any) -> dict[str, Any]:
    settings = {"name": "fedcg", "domains": 3, "participation": 0.5, **method}
    return tiny_experiment(method=settings, run={"rounds": 7, **sections.pop("run", {})}, **sections)


# -- every round is noted ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", VARIANTS)
def test_domains_are_noted_in_every_round_though_few_are_evaluated(method: dict[str, Any]) -> None:
    kinfolk.run(experiment(method, run={"evaluate_every": 3}), out="a")
    measured = kinfolk.run(experiment(method, run={"evaluate_every": 1}), out="b").metrics
    noted = read_rounds(Path("a"))
    assert [row["round"] for row in noted] == list(range(1, 8))
    for row, expected in zip(noted, measured, strict=True):
        shares = [row[f"domain_occupancy_{number}"] for number in range(3)]
        assert shares == expected["domain_occupancy"]
        assert row["domain_entropy"] == expected["domain_entropy"]
        entropy = -sum(share * math.log(share) for share in shares if share > 0) / math.log(3)
        assert row["domain_entropy"] == pytest.approx(entropy, abs=1e-12)
    different = {tuple(row.values())[1:] for row in noted}
    assert (len(different) > 1) == (method != {"preset": "paper"})  # as printed all samples are in one domain
    assert Path("a/rounds.csv").read_bytes() == Path("b/rounds.csv").read_bytes()


def test_other_methods_have_no_such_file() -> None:
    kinfolk.run(tiny_experiment(method={"name": "fedavg"}), out="a")
    assert not Path("a/rounds.csv").exists()


def test_a_round_in_which_nobody_is_heard_repeats_the_last_and_before_any_it_is_undefined() -> None:
    kinfolk.run(experiment({"participation": 0.2}, faults={"absent": 0.7}, run={"evaluate_every": 100}), out="a")
    found = [row["domain_occupancy_0"] for row in read_rounds(Path("a"))]
    heard = [row is not None for row in found]
    assert heard == sorted(heard)  # first nothing, then something
    assert not heard[0]
    assert heard[-1]
    assert any(one == other for one, other in itertools.pairwise(found) if one is not None)


@pytest.mark.parametrize("settings", [{"engine": "sharded", "shards": 3}, {"resident": "round"}])
def test_shards_and_models_for_few_note_the_same(settings: dict[str, Any]) -> None:
    kinfolk.run(experiment({}, run={"evaluate_every": 4}), out="a")
    kinfolk.run(experiment({}, run={"evaluate_every": 4, **settings}), out="b")
    for one, other in zip(read_rounds(Path("a")), read_rounds(Path("b")), strict=True):
        assert one == pytest.approx(other, abs=1e-12)


def test_notes_are_fetched_once_and_kept_nowhere() -> None:
    engine = engine_of(shards=3)
    run(engine, 3)
    assert [row["round"] for row in engines.notes(engine, Parcel())()] == [1, 2, 3]
    assert not any(shard.noted for shard in engine.shards)
    assert engines.notes(engine, Parcel())() == []


DIES = """
import json, os, signal, sys
import kinfolk

class Killer(kinfolk.Observer):
    def round(self, t, row):
        if t == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    kinfolk.run(json.loads(sys.argv[1]), out="cut", observer=Killer())
"""


@pytest.mark.parametrize("killed", [4, 6])  # after the checkpoint of round 3 without, and with, an evaluation
@pytest.mark.parametrize("method", [*VARIANTS, {"source": "k-means", "resident": "round"}])
def test_a_run_that_is_killed_notes_what_one_that_is_not_does(method: dict[str, Any], killed: int) -> None:
    resident = {"resident": method["resident"]} if "resident" in method else {}
    method = {name: value for name, value in method.items() if name != "resident"}
    sections = experiment(method, run={"evaluate_every": 3, "checkpoint_every": 3 if killed < 6 else 4, **resident})
    whole = kinfolk.run(sections, out="whole")
    Path("dies.py").write_text(DIES, encoding="utf-8")
    assert finished("dies.py", json.dumps(sections), str(killed)).code == -9
    with open("cut/rounds.csv", "ab") as file:
        file.write(b"9,0.1,0.")  # killed in the middle of a line
    assert len(read_rounds(Path("cut"))) == 3 * (killed // 3)
    resumed = kinfolk.resume("cut")
    assert Path("cut/rounds.csv").read_bytes() == Path("whole/rounds.csv").read_bytes()
    assert torch.equal(whole.weights(), resumed.weights())
    assert whole.clients == resumed.clients


def test_clients_of_one_domain_keep_it_where_a_run_has_only_to_be_tested() -> None:
    whole = kinfolk.run(experiment({"source": "k-means"}), out="a")
    for name in ("summary.json", "clients.csv"):
        Path("a", name).unlink()
    for one, other in zip(kinfolk.resume("a").clients, whole.clients, strict=True):
        assert (one["accuracy"], one["loss"]) == (other["accuracy"], other["loss"])


# -- models for few clients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"preset": "robust", "scouts": 4}, {"source": "k-means"}])
@pytest.mark.parametrize("faults", [Faults(), Faults(absent=0.3, loss=0.2)])
def test_with_few_models_in_memory_it_is_the_same_run(settings: dict[str, Any], faults: Faults) -> None:
    whole, lean = (
        engine_of(participation=0.4, resident=resident, faults=faults, **settings) for resident in ("all", "round")
    )
    assert lean.shards[0].lean
    for t in range(1, 5):
        for engine in (whole, lean):
            engine.step(t, True)
        torch.testing.assert_close(whole.shards[0].state.model, lean.shards[0].state.model, rtol=1e-9, atol=1e-9)
        a, b = engines.results(whole), engines.results(lean)
        if not faults.absent:
            assert a.accuracy.tolist() == b.accuracy.tolist()
        for name in ("models_received", "bytes_received", "quarantined"):
            assert getattr(a, name).tolist() == getattr(b, name).tolist()
    assert torch.equal(whole.shards[0].state.own, lean.shards[0].state.own)
    assert (whole.shards[0].state.own >= 0).any() == (settings.get("source") == "k-means")


@pytest.mark.parametrize("settings", [{"preset": "robust", "scouts": 3}, {"source": "k-means"}])
def test_with_few_models_shards_give_the_same_though_some_have_nobody(settings: dict[str, Any]) -> None:
    one = engine_of(participation=0.2, resident="round", **settings)
    many = engine_of(participation=0.2, resident="round", shards=6, **settings)
    torch.testing.assert_close(run(one, 4), run(many, 4), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("domains", [2, 4])
@pytest.mark.parametrize("scouts", [2, 3, 5])
def test_domains_have_the_same_numbers_however_sums_are_rounded(scouts: int, domains: int) -> None:
    """Directions that end at the same split, some from the other side, differ by rounding alone."""
    one, two, many = (
        run(engine_of(preset="robust", scouts=scouts, domains=domains, participation=0.5, shards=shards), 2)
        for shards in (1, 2, 6)
    )
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one, many, rtol=1e-9, atol=1e-9)


def test_only_those_who_train_have_models(monkeypatch: pytest.MonkeyPatch) -> None:
    widest = []

    def watched(method: Any, t: int, cohort: Any, state: Any, peers: Any) -> Any:
        widest.append((len(cohort), cohort.weights.untyped_storage().nbytes() // cohort.weights[0].nbytes))
        return step(method, t, cohort, state, peers)

    step = kinfolk.methods.find("fedcg").step
    monkeypatch.setattr(kinfolk.methods.find("fedcg"), "step", watched)
    run(engine_of(preset="robust", participation=0.3, scouts=5, resident="round"), 2)
    assert widest == [(2, 2), (2, 2)]


def test_a_client_that_trains_to_nan_for_k_means_is_left_out_of_its_round() -> None:
    found = []
    for resident in ("all", "round"):
        engine = engine_of(source="k-means", participation=0.9, resident=resident)
        shard = engine.shards[0]
        part = shard.cohort.data.train
        mine = slice(int(part.starts[1]), int(part.starts[2]))
        shard.cohort.train_x[mine, :16] = torch.inf
        part.x[mine, :16] = torch.inf
        found.append(run(engine, 2))
        assert shard.quarantined.tolist() == [0, 2, 0, 0, 0, 0]
        assert shard.state.own.tolist()[1] == -1
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def test_who_is_put_into_quarantine_ahead_of_a_round_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(method: Any, t: int, cohort: Any, state: Any, peers: Any, few: bool = False) -> Any:
        cohort.round.quarantined |= cohort.ids == 3
        return state

    free = run(engine_of(source="k-means", participation=0.9, resident="round"), 1)
    monkeypatch.setattr(kinfolk.methods.find("fedcg"), "ask", bad)
    whole, lean = (engine_of(source="k-means", participation=0.9, resident=kind) for kind in ("all", "round"))
    torch.testing.assert_close(run(whole, 1), run(lean, 1), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(free, lean.shards[0].state.model)
    assert whole.shards[0].quarantined.tolist() == lean.shards[0].quarantined.tolist() == [0, 0, 0, 1, 0, 0]


# -- sketches ------------------------------------------------------------------------------------------------------


def test_a_sketch_keeps_distances() -> None:
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(40, 20_001, generator=draw) * torch.linspace(0, 3, 20_001)
    rows[:, :9000] = 0  # most of what differs lies together,
    rows += 0.3 * torch.arange(40)[:, None]  # and some of it in one direction
    sketch = domain_labels.Sketch.of(20_001, 5, torch.device("cpu"))
    assert sketch is not None
    short = sketch(rows)
    assert short.shape == (40, domain_labels.SKETCH)
    pairs = torch.triu_indices(40, 40, 1)
    ratio = (torch.cdist(short, short) / torch.cdist(rows, rows)).square()[pairs[0], pairs[1]]
    assert float((ratio.mean() - 1).abs()) < 0.03
    assert float(ratio.std()) < math.sqrt(2 / domain_labels.SKETCH) * 1.2
    assert torch.equal(domain_labels.Sketch.of(20_001, 5, torch.device("cpu"))(rows), short)  # type: ignore[misc]
    assert not torch.equal(domain_labels.Sketch.of(20_001, 6, torch.device("cpu"))(rows), short)  # type: ignore[misc]


def test_what_is_short_is_not_sketched() -> None:
    assert domain_labels.Sketch.of(domain_labels.SKETCH, 0, torch.device("cpu")) is None


def test_by_turns_clients_train_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domain_labels, "NUMBERS", 0)
    monkeypatch.setattr(domain_labels, "FEWEST", 4)
    cohort = engine_of(source="k-means").shards[0].cohort
    part = slice(9, cohort.layout.size)
    cohort.begin(torch.tensor([False, True, False, False, False, True]), t=1)
    whole = domain_labels._trained(1, cohort, part)
    torch.testing.assert_close(domain_labels._by_turns(1, cohort, part, sketched=False), whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(whole[1], cohort.initial[part])  # who is absent stays
    assert not torch.equal(whole[0], whole[1])


def test_of_sketches_k_means_finds_the_groups_of_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domain_labels, "SKETCH", 64)
    monkeypatch.setattr(domain_labels, "WHOLE", 20_000)
    sections = experiment({"source": "k-means", "domains": 2}, data={"clients": 24, "new_clients": 4, "train": 60})
    sections["data"]["split"] = {"kind": "label-swap", "clusters": 2}
    found = {}
    for resident in ("all", "round"):
        sections["run"]["resident"] = resident
        result = kinfolk.run(sections, out=resident)
        saved = kinfolk.runs.checkpoint.load(result.folder / "checkpoint").tensors
        found[resident] = saved["state/own"], saved["shared/centers"].shape[1], result.metrics[-1]["new_accuracy"]
    assert 24 * found["all"][1] > 20_000
    assert found["round"][1] == 64
    assert adjusted_rand_score(found["all"][0], found["round"][0]) == 1
    assert found["all"][2] == pytest.approx(found["round"][2])
