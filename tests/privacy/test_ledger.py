"""The ledger: never above the budget, never less than was released, and quick for many clients."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kinfolk.errors import UserError
from kinfolk.privacy import Ledger, Mechanism, calibrate, epsilon
from processes import finished

PLAIN = Mechanism(8.0)
POINTS = ["before write", "half a line", "before sync", "after sync", "after release"]


def spend(ledger: Ledger, mechanism: Mechanism, rounds: int, first: int = 0) -> torch.Tensor:
    """[m] how many of the rounds each client got."""
    got = [ledger.charge(f"seed 0, round {first + t}", mechanism) for t in range(rounds)]
    return torch.stack(got).sum(dim=0)


def test_clients_stop_exactly_when_the_next_release_would_exceed_their_budget() -> None:
    budgets = torch.tensor([4.2, 4.14, 1.0, 0.2])
    ledger = Ledger([3, 5, 7, 9], budgets, 1e-3, simulated=True)
    got = spend(ledger, PLAIN, 120)
    for row, budget in enumerate(budgets.double().tolist()):
        count = int(got[row])
        spent = epsilon([replace(PLAIN, releases=count)], 1e-3)
        assert spent <= budget < epsilon([replace(PLAIN, releases=count + 1)], 1e-3)
        assert float(ledger.spent()[row]) == spent
    assert int(got[0]) > int(got[1]) == 99
    assert got.tolist() == ledger.releases().tolist()


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_a_calibrated_run_gets_all_its_rounds_and_no_more(adjacency: str) -> None:
    planned = Mechanism(1.0, 0.25, "poisson", adjacency, releases=30)  # type: ignore[arg-type]
    mechanism = replace(planned, noise_multiplier=calibrate(1.5, 1e-3, planned), releases=1)
    ledger = Ledger(range(4), 1.5, 1e-3, simulated=True)
    assert spend(ledger, mechanism, 35).tolist() == [30] * 4
    assert 1.495 < float(ledger.spent().max()) <= 1.5


def test_only_those_who_ask_are_charged_and_only_for_their_own_mechanism() -> None:
    ledger = Ledger(range(4), 5.0, torch.tensor([1e-3, 1e-3, 1e-4, 1e-4]), simulated=True)
    several = [Mechanism(8.0), Mechanism(12.0, 0.1, "poisson")]
    asked, which = torch.tensor([True, True, False, True]), torch.tensor([0, 1, 1, 0])
    assert ledger.charge("a", several, asked, which).tolist() == asked.tolist()
    assert [ledger.history(row) for row in range(4)] == [(several[0],), (several[1],), (), (several[0],)]
    expected = [epsilon([several[0]], 1e-3), epsilon([several[1]], 1e-3), 0, epsilon([several[0]], 1e-4)]
    assert ledger.spent().tolist() == expected


@pytest.mark.parametrize("seed", range(3))
def test_everybody_is_charged_as_if_alone(seed: int) -> None:
    """Against a plain loop over clients that adds up what each has released and asks the accountant every time."""
    draw, clients = random.Random(seed), 12
    kinds = [Mechanism(5.0), Mechanism(9.0, releases=2), Mechanism(4.0, 0.1, "without-replacement")]
    budgets = [draw.choice([0.8, 1.5, 2.5]) for _ in range(clients)]
    deltas = [draw.choice([1e-3, 5e-3]) for _ in range(clients)]
    limits = torch.tensor([budgets, deltas], dtype=torch.float64)
    ledger = Ledger(range(clients), limits[0], limits[1], simulated=False)
    released: list[list[Mechanism]] = [[] for _ in range(clients)]
    for t in range(40):
        wanted = torch.tensor([draw.random() < 0.8 for _ in range(clients)])
        which = torch.tensor([draw.choice([0, 0, 1, 2]) for _ in range(clients)])
        got = ledger.charge(f"{t}", kinds, wanted, which).tolist()
        for row in range(clients):
            more = [*released[row], kinds[int(which[row])]]
            fits = bool(wanted[row]) and epsilon(more, deltas[row]) <= budgets[row]
            assert got[row] == fits, (t, row)
            released[row] = more if fits else released[row]
    assert ledger.spent().tolist() == [epsilon(all, delta) for all, delta in zip(released, deltas)]
    assert not all(got)


def test_formation_and_rounds_are_added_up() -> None:
    ledger = Ledger([0], 2.0, 1e-3, simulated=True)
    assert bool(ledger.charge("formation", Mechanism(3.0)))
    rounds = int(spend(ledger, PLAIN, 60))
    assert epsilon([Mechanism(3.0), replace(PLAIN, releases=rounds)], 1e-3) <= 2.0
    assert epsilon([Mechanism(3.0), replace(PLAIN, releases=rounds + 1)], 1e-3) > 2.0
    assert rounds < int(spend(Ledger([0], 2.0, 1e-3, simulated=True), PLAIN, 60))


def test_the_nominal_rule_counts_releases() -> None:
    loud = Mechanism(0.5, 0.1, "without-replacement")
    ledger = Ledger(range(2), 15.0, 1 / 160, simulated=True, nominal=10, accountant="rdp")
    assert spend(ledger, loud, 14).tolist() == [10, 10]
    found = ledger.guarantee(nominal=15.0)
    assert (found.nominal, found.releases) == (15.0, 10)
    assert found.epsilon == epsilon([replace(loud, releases=10)], 1 / 160, "rdp")


def test_a_repeated_release_is_free_only_if_the_noise_is_the_same() -> None:
    seeded, real = (Ledger(range(2), 5.0, 1e-3, simulated=simulated) for simulated in (True, False))
    for ledger in (seeded, real):
        assert ledger.charge("round 1", PLAIN, torch.tensor([True, False])).tolist() == [True, False]
        assert ledger.charge("round 1", PLAIN).tolist() == [True, True]
    assert seeded.releases().tolist() == [1, 1]
    assert real.releases().tolist() == [2, 1]


def test_a_spent_budget_is_an_error_when_a_run_goes_on() -> None:
    ledger = Ledger(range(3), 0.5, 1e-3, simulated=True)
    ledger.refuse_if_spent(PLAIN)
    spend(ledger, PLAIN, 20)
    with pytest.raises(UserError, match=r"budget is spent: .* of 0.5 at delta 0.001"):
        ledger.refuse_if_spent(PLAIN)


@pytest.mark.parametrize(
    "mechanism", [PLAIN, Mechanism(6.0, 0.1, "poisson"), Mechanism(3.0, 0.1, "without-replacement")]
)
def test_a_thousand_clients_and_a_hundred_rounds_take_a_moment(mechanism: Mechanism) -> None:
    epsilon([mechanism], 1e-3)  # the library is imported
    ledger = Ledger(range(1000), 2.0, torch.linspace(1e-3, 5e-3, 3)[torch.arange(1000) % 3], simulated=True)
    start = time.process_time()
    spend(ledger, mechanism, 100)
    ledger.spent()
    assert time.process_time() - start < 1.5  # a third of that on an idle machine


# -- checkpoints and the file ------------------------------------------------------------------------------------


def test_state_and_restore_keep_the_larger_count(tmp_path: Path) -> None:
    sampled = Mechanism(6.0, 0.1, "poisson")
    with Ledger(range(3), 5.0, 1e-3, simulated=False, path=tmp_path / "ledger") as ledger:
        spend(ledger, PLAIN, 3)
        state = ledger.state()
        assert state.shape == (3, 8, 4)
        ledger.charge("late", PLAIN, torch.tensor([True, False, False]))
    alone = Ledger(range(3), 5.0, 1e-3, simulated=False)
    alone.restore(state)
    assert alone.releases().tolist() == [3, 3, 3]
    alone.charge("another", sampled, torch.tensor([False, True, False]))
    with Ledger(range(3), 5.0, 1e-3, simulated=False, path=tmp_path / "ledger") as ledger:
        assert ledger.releases().tolist() == [4, 3, 3]
        ledger.restore(alone.state())
        assert ledger.releases().tolist() == [4, 4, 3]
        assert set(ledger.history(1)) == {replace(PLAIN, releases=3), sampled}


def test_a_simulation_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    straight = Ledger(range(2), 0.9, 1e-3, simulated=True)
    expected = int(spend(straight, PLAIN, 20)[0])
    with Ledger(range(2), 0.9, 1e-3, simulated=True, path=tmp_path / "ledger") as first:
        spend(first, PLAIN, 4)
        checkpoint = first.state()
        spend(first, PLAIN, 2, first=4)
    with Ledger(range(2), 0.9, 1e-3, simulated=True, path=tmp_path / "ledger") as again:
        again.restore(checkpoint)
        assert again.releases().tolist() == [6, 6]
        assert int(spend(again, PLAIN, 16, first=4)[0]) == expected - 4
        assert torch.equal(again.releases(), straight.releases())


def test_other_clients_can_continue_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger([4, 9, 2], 5.0, 1e-3, simulated=False, path=path) as ledger:
        ledger.charge("a", PLAIN, torch.tensor([True, False, True]))
    with Ledger([2, 7], 5.0, 1e-3, simulated=False, path=path) as ledger:
        assert ledger.releases().tolist() == [1, 0]
        ledger.charge("b", PLAIN)
    with Ledger([9, 7, 4, 2], 5.0, 1e-3, simulated=False, path=path) as ledger:
        assert ledger.releases().tolist() == [0, 1, 1, 2]


def test_clients_with_different_histories_are_counted_once_when_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger(range(3), 5.0, 1e-3, simulated=False, path=path) as ledger:
        for t in range(6):
            ledger.charge(f"{t}", PLAIN, torch.tensor([True, t % 2 == 0, t > 2]))
        before = ledger.releases().tolist()
    with Ledger(range(3), 5.0, 1e-3, simulated=False, path=path) as ledger:
        assert ledger.releases().tolist() == before == [6, 3, 3]


def test_a_torn_last_line_is_cut_off_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger(range(2), 5.0, 1e-3, simulated=False, path=path) as ledger:
        spend(ledger, PLAIN, 2)
    content = path.read_bytes()
    second = content.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(second, len(content)):
        path.write_bytes(content[:end])
        with Ledger(range(2), 5.0, 1e-3, simulated=False, path=path) as ledger:
            assert ledger.releases().tolist() == [1, 1]
        assert path.read_bytes() == content[:second]
    with Ledger(range(2), 5.0, 1e-3, simulated=False, path=path) as ledger:
        spend(ledger, PLAIN, 1)
    with Ledger(range(2), 5.0, 1e-3, simulated=False, path=path) as ledger:
        assert ledger.releases().tolist() == [2, 2]


@pytest.mark.parametrize("harm", ["changed", "removed", "exchanged"])
def test_a_damaged_file_is_refused(harm: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger(range(2), 5.0, 1e-3, simulated=False, path=path) as ledger:
        spend(ledger, PLAIN, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    if harm == "changed":
        lines[2] = lines[2].replace(b'"c0"', b'"80"')
    elif harm == "removed":
        del lines[2]
    else:
        lines[2], lines[3] = lines[3], lines[2]
    path.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match="damaged in line 3"):
        Ledger(range(2), 5.0, 1e-3, simulated=False, path=path)


def test_other_files_data_and_noise_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    Ledger(range(2), 5.0, 1e-3, simulated=True, path=path, data="ab").close()
    for options in ({"simulated": False, "data": "ab"}, {"simulated": True, "data": "cd"}):
        with pytest.raises(UserError, match="other data or another kind of noise"):
            Ledger(range(2), 5.0, 1e-3, path=path, **options)  # type: ignore[arg-type]
    (tmp_path / "prose").write_text("once upon a time\n")
    with pytest.raises(UserError, match="damaged in line 1"):
        Ledger(range(2), 5.0, 1e-3, simulated=True, path=tmp_path / "prose")
    with pytest.raises(UserError, match="cannot open"):
        Ledger(range(2), 5.0, 1e-3, simulated=True, path=tmp_path / "nowhere" / "ledger")


def test_two_cannot_write_one_file(tmp_path: Path) -> None:
    with Ledger([0], 5.0, 1e-3, simulated=False, path=tmp_path / "ledger") as ledger:
        with pytest.raises(UserError, match="in use by another process"):
            Ledger([0], 5.0, 1e-3, simulated=False, path=tmp_path / "ledger")
        ledger.charge("a", PLAIN)
    Ledger([0], 5.0, 1e-3, simulated=False, path=tmp_path / "ledger").close()


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_nothing_is_granted_once_the_disk_has_failed(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger([0], 5.0, 1e-3, simulated=False, path=tmp_path / "ledger")
    ledger.charge("a", PLAIN)

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(UserError, match="No space left"):
            ledger.charge("b", PLAIN)
    with pytest.raises(UserError, match="nothing more may be released"):
        ledger.charge("c", PLAIN)
    ledger.close()
    with Ledger([0], 5.0, 1e-3, simulated=False, path=tmp_path / "ledger") as again:
        assert again.releases().tolist() == [1]


def test_a_release_is_on_the_disk_before_it_is_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    write, sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda *a: (calls.append("write"), write(*a))[1])
    monkeypatch.setattr(os, "fsync", lambda *a: (calls.append("sync"), sync(*a))[1])
    with Ledger([0], 5.0, 1e-3, simulated=False, path=tmp_path / "ledger") as ledger:
        calls.clear()
        ledger.charge("a", PLAIN)
    assert calls == ["write", "sync"]


# -- kills -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lives", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_process_has_charged_at_least_what_it_released(lives: int, tmp_path: Path) -> None:
    ended = finished(__file__, str(tmp_path), str(lives), timeout=250)
    assert ended.code == 0, ended.err
    seen = json.loads(ended.out)
    assert len(seen) == lives
    for life in seen:
        assert life["charged"] >= life["released"], life
        assert life["charged"] - life["released"] <= life["life"] + 1, "a kill costs one release at most"
    assert seen[-1]["released"] > lives // 3
    assert {life["point"] for life in seen} >= set(POINTS)


def live(folder: Path, point: str, rounds: int) -> None:
    """Charge and release over and over; at a point of the last round, die. A release is a byte in a file."""
    write, sync = os.write, os.fsync
    ledger = Ledger([0], 1e3, 1e-3, simulated=False, path=folder / "ledger")
    for number in range(rounds):
        if number == rounds - 1 and point != "after release":
            if point == "before write":
                os.write = lambda *_: os.kill(os.getpid(), 9)  # type: ignore[assignment, return-value]
            elif point == "half a line":
                os.write = lambda to, text: (write(to, text[:30]), os.kill(os.getpid(), 9))[0]
            elif point == "before sync":
                os.fsync = lambda _: os.kill(os.getpid(), 9)
            elif point == "after sync":
                os.fsync = lambda to: (sync(to), os.kill(os.getpid(), 9))[0]
        assert bool(ledger.charge(f"{number}", PLAIN))
        with open(folder / "released", "ab", buffering=0) as file:
            file.write(b".")
    os.kill(os.getpid(), 9)


def live_and_die(folder: Path, lives: int) -> None:
    """Print one JSON line: after every kill, what had been released and what had been charged."""
    torch.set_num_threads(1)
    epsilon([PLAIN], 1e-3)
    draw, seen = random.Random(0), []
    (folder / "released").touch()
    for number in range(lives):
        point = POINTS[number] if number < len(POINTS) else draw.choice([*POINTS, "outside"])
        child = os.fork()
        if child == 0:
            live(folder, point, draw.randint(2, 4) if point != "outside" else 10**6)
        if point == "outside":
            time.sleep(draw.uniform(0.005, 0.05))
            os.kill(child, 9)
        status = os.waitpid(child, 0)[1]
        assert os.WTERMSIG(status) == 9, f"ended otherwise: {status}"
        with Ledger([0], 1e3, 1e-3, simulated=False, path=folder / "ledger") as ledger:
            charged = int(ledger.releases())
        released = (folder / "released").stat().st_size
        seen.append({"life": number, "point": point, "charged": charged, "released": released})
    print(json.dumps(seen))


if __name__ == "__main__":
    live_and_die(Path(sys.argv[1]), int(sys.argv[2]))
