"""Only the clients of a round in memory: the same run, in the memory of a few."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.visit import evaluate, one_for_all, visit
from kinfolk.config import read
from kinfolk.methods import find
from kinfolk.peers.faults import Faults
from kinfolk.runs import checkpoint
from processes import finished

SIZES = [12, 6, 9, 20, 8, 8, 16, 1, 7, 30]
METHODS = ["fedavg", "fedprox", "scaffold"]


def parts(name: str, resident: str, faults: Faults | None = None, **settings: Any) -> engines.Parts:
    training = Training(epochs=2, batch_size=5, lr=0.1)
    cohort = {
        "training": training,
        "seed": 4,
        "device": "cpu",
        "precision": "float64",
        "chunk": settings.pop("chunk", None),
    }
    return engines.Parts(
        settings.pop("data", None) or make_federation(SIZES),
        lambda: initial_model(lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), 4),
        find(name)(**{"participation": 0.3, **settings}),
        faults or Faults(),
        cohort,
        resident=resident,
    )


def run(engine: engines.Engine, rounds: int = 6) -> Tensor:
    for t in range(1, rounds + 1):
        engine.step(t, t % 2 == 0)
    model: Tensor = engine.shards[0].state.model
    return model


def experiment(method: str, **sections: Any) -> dict[str, Any]:
    run_settings = {"resident": "round", **sections.pop("run", {})}
    return tiny_experiment(method={"name": method, "participation": 0.4}, run=run_settings, **sections)


# -- the same run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_it_is_the_run_in_which_everybody_is_in_memory(method: str) -> None:
    whole, lean = (engines.InProcessEngine(parts(method, resident)) for resident in ("all", "round"))
    assert lean.shards[0].lean
    assert not whole.shards[0].lean
    for t in range(1, 8):
        whole.step(t, True)
        lean.step(t, True)
        a, b = engines.results(whole), engines.results(lean)
        torch.testing.assert_close(whole.shards[0].state.model, lean.shards[0].state.model, rtol=1e-12, atol=1e-12)
        for name in ("accuracy", "before_mixing", "models_received", "bytes_received", "quarantined"):
            assert getattr(a, name).tolist() == pytest.approx(getattr(b, name).tolist()), name
        assert a.loss.tolist() == pytest.approx(b.loss.tolist())
    if method == "scaffold":
        torch.testing.assert_close(whole.shards[0].state.control, lean.shards[0].state.control, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shards", [2, 3, 10])
def test_it_does_not_depend_on_shards_though_some_have_no_visitor(method: str, shards: int) -> None:
    faults = Faults(loss=0.2, absent=0.2)
    one = engines.InProcessEngine(parts(method, "round", faults))
    many = engines.ShardedEngine(parts(method, "round", faults), shards)
    torch.testing.assert_close(run(one), run(many), rtol=1e-12, atol=1e-12)
    a, b = engines.results(one), engines.results(many)
    assert a.accuracy.tolist() == b.accuracy.tolist()
    assert a.models_received.tolist() == b.models_received.tolist()
    assert a.before_mixing.tolist() == b.before_mixing.tolist()


def test_with_losses_and_absences_the_model_is_the_same_as_with_all_in_memory() -> None:
    faults = Faults(loss=0.3, absent=0.3)
    whole, lean = (engines.InProcessEngine(parts("scaffold", resident, faults)) for resident in ("all", "round"))
    torch.testing.assert_close(run(whole), run(lean), rtol=1e-12, atol=1e-12)


def test_a_client_that_trains_to_nan_is_quarantined() -> None:
    data = make_federation(SIZES)
    data.train.x[data.train.starts[3] : data.train.starts[4]] = torch.inf
    engine = engines.InProcessEngine(parts("scaffold", "round", data=data, participation=0.8))
    assert torch.isfinite(run(engine)).all()
    counts = engine.shards[0].quarantined.tolist()
    assert counts[3] > 0
    assert sum(counts) == counts[3]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_folder_resumes_bit_exactly_and_holds_one_model(method: str) -> None:
    whole = kinfolk.run(experiment(method, run={"rounds": 5}), out="whole")
    kinfolk.run(experiment(method, run={"rounds": 3}), out="cut")
    resumed = kinfolk.resume("cut", rounds=5)
    assert torch.equal(whole.weights(), resumed.weights())
    assert whole.clients == resumed.clients
    saved = checkpoint.load(Path("whole/checkpoint")).tensors
    assert "weights" not in saved
    assert whole.weights().shape == (8, saved["shared/model"].numel())
    assert whole.accuracy == pytest.approx(
        kinfolk.run(experiment(method, run={"rounds": 5, "resident": "all"}), out="all").accuracy
    )


@pytest.mark.parametrize(("first", "then"), [("all", "round"), ("round", "all")])
def test_a_snapshot_of_either_kind_can_be_taken_up(first: str, then: str) -> None:
    one, other = (engines.InProcessEngine(parts("fedavg", resident)) for resident in (first, then))
    run(one, 3)
    engines.restore(other, engines.snapshot(one), 3)
    for t in (4, 5):
        one.step(t, False)
        other.step(t, False)
    torch.testing.assert_close(one.shards[0].cohort.weights, other.shards[0].cohort.weights, rtol=1e-12, atol=1e-12)


# -- when --------------------------------------------------------------------------------------------------------


def test_it_is_chosen_where_all_models_would_be_large() -> None:
    small = parts("fedavg", "auto")
    module = small.model()
    assert not small.lean(module)
    assert small.lean(nn.Linear(engines.MANY // len(SIZES), 1))
    assert not parts("fedavg", "all").lean(nn.Linear(engines.MANY // len(SIZES), 1))
    assert not parts("fedavg", "round", participation=1.0).lean(module)  # everybody is in every round
    for name in ("ifca", "fedavg-ft", "ditto"):
        assert not parts(name, "round").lean(module)


def test_where_it_cannot_be_it_is_ignored_with_a_word() -> None:
    said: list[str] = []

    class Listener(kinfolk.Observer):
        def notice(self, text: str) -> None:
            said.append(text)

    kinfolk.run(tiny_experiment(method={"name": "local"}, run={"resident": "round"}), out="a", observer=Listener())
    assert "run.resident = 'round' is ignored: in this run all clients have models" in said
    sections = experiment("fedavg", faults={"attackers": 0.25, "attack": "sign-flip"})
    kinfolk.run(sections, out="b", observer=Listener())
    assert "run.resident = 'round' is ignored: attackers have models of their own" in said


def test_old_runs_are_still_found() -> None:
    plain = read(tiny_experiment())
    assert read(tiny_experiment(run={"resident": "round"})).identity() != plain.identity()
    sections = plain.sections()
    assert sections["run"].pop("resident") == "auto"
    assert read(sections).identity() == plain.identity()


# -- its parts ---------------------------------------------------------------------------------------------------


def test_one_model_is_judged_as_each_client_would() -> None:
    engine = engines.InProcessEngine(parts("fedavg", "all"))
    cohort = engine.shards[0].cohort
    cohort.adopt(torch.randn(cohort.layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    expected = cohort.evaluate()
    found = evaluate(cohort, cohort.weights[0])
    assert found.accuracy.tolist() == expected.accuracy.tolist()
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-12)
    train = one_for_all(cohort, cohort.weights[0], cohort.data.train, cohort.train_x)
    torch.testing.assert_close(train.loss, cohort.train_losses(cohort.weights[:1])[:, 0], rtol=1e-12, atol=1e-12)


def test_a_visit_shares_the_samples_and_trains_like_the_whole() -> None:
    engine = engines.InProcessEngine(parts("fedavg", "all", chunk=1))
    cohort = engine.shards[0].cohort
    rows = torch.tensor([1, 4, 7])
    guests = visit(cohort, rows, rows)
    guests.begin(t=1)
    assert guests.data.train.x.data_ptr() == cohort.data.train.x.data_ptr()
    everybody, _ = cohort.trained(cohort.weights, 1)
    some, _ = guests.trained(guests.weights, 1)
    assert torch.equal(some, everybody[rows])
    assert len(cohort) == 10


# -- memory ------------------------------------------------------------------------------------------------------

MEMORY = """
import json, resource, sys
import sklearn.cluster, torch
from torch import nn
from kinfolk import Federation, Training, engines
from kinfolk.cohort.cohort import initial_model
from kinfolk.methods import find
from kinfolk.peers.faults import Faults

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def net():
    plain = nn.Sequential(nn.Linear(50, 2000), nn.ReLU(), nn.Linear(2000, 2))
    return method.wrap(plain, (50,)) if hasattr(method, "wrap") else plain

torch.set_num_threads(1)
n, name, settings = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
method = find(name)(participation=10 / n, **settings)
pair = (torch.randn(2, 50), torch.tensor([0, 1]))
data = Federation.from_arrays([pair] * n, [pair] * n)
data = method.arrange(data) if hasattr(method, "arrange") else data
cohort = {"training": Training(epochs=1, batch_size=2), "seed": 0, "device": "cpu"}
before = peak()
parts = engines.Parts(data, lambda: initial_model(net, 0), method, Faults(), cohort, resident="round")
engine = engines.InProcessEngine(parts)
for t in range(1, 4):
    engine.step(t, True)
    engines.results(engine)
assert engine.shards[0].lean
assert engines.snapshot(engine)["shared/model"].numel() >= 106_002
print(peak() - before)
"""
FEDCG = {"domains": 2}


@pytest.mark.parametrize(
    ("n", "method", "settings", "room"),
    [
        (4000, "fedavg", {}, 100),
        (4000, "fedcg", {**FEDCG, "preset": "paper"}, 100),
        (4000, "fedcg", FEDCG, 100),  # 200 of them tell sums before the first round
        pytest.param(1500, "fedcg", {**FEDCG, "source": "k-means"}, 200, marks=pytest.mark.slow),
    ],
)
def test_thousands_of_clients_run_in_the_memory_of_ten(
    n: int, method: str, settings: dict[str, Any], room: int
) -> None:
    """Models of 4,000 clients would take 1.7 GB and more, several times over; ten take 4 to 13 MB. room: in MiB.

    For k-means, 1,500 clients train 13 at a time, and 512 numbers of each are kept.
    """
    Path("memory.py").write_text(MEMORY, encoding="utf-8")
    ended = [finished("memory.py", clients, method, json.dumps(settings)) for clients in ("11", str(n))]
    assert [each.code for each in ended] == [0, 0], ended[-1].err
    few, many = (int(each.out) for each in ended)
    assert many - few < room * 2**20
