"""Reproducing a study: what is run, what is shared, what a stop leaves, and what is written."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from kinfolk.errors import UserError
from kinfolk.experiment import Interrupted, run
from kinfolk.reproduce import _counted, look, reproduce
from kinfolk.runs.folder import RunFolder
from tiny_study import STUDY, Ran, cells, one, results, write_files, write_study


@pytest.fixture(autouse=True)
def _files() -> None:
    write_files()


# -- what is run -------------------------------------------------------------------------------------------------


def test_every_run_is_done_once_and_never_again() -> None:
    first = Ran()
    found = reproduce("mine.toml", observer=first)
    # Alone is the same in both columns: 2 seeds of it, 4 of Gossip, 2 of Oracle.
    assert len(first.cells) == len(cells()) == len(found.results) == 8
    assert first.cells[0] == "1/8 Alone, two, seed 0"
    assert one("Alone", "two")["ours"] == one("Alone", "four")["ours"] != ""
    again = Ran()
    reproduce("mine.toml", observer=again)
    assert again.cells == []


def test_one_cell_alone_and_the_table_has_all_that_is_there() -> None:
    ran = Ran()
    reproduce("mine.toml", rows=["Gossip"], columns=["four"], seeds=1, observer=ran)
    assert ran.cells == ["1/1 Gossip, four, seed 0"]
    assert (one("Gossip", "four")["seeds"], one("Gossip", "two")["seeds"]) == ("1", "0")
    reproduce("mine.toml", rows=["Oracle"], seeds=1, seed=1, observer=ran)
    assert ran.cells[1:] == ["1/1 Oracle, two, seed 1"]
    assert one("Gossip", "four")["seeds"] == one("Oracle", "two")["seeds"] == "1"
    text = Path("runs/reproduce/mine.md").read_text(encoding="utf-8")
    assert re.search(r"\| Gossip +\| +99.9±0.1 \| +– \| +– \| +98.0 \| +\d+\.\d\d \(1\) \|", text)
    assert "- runs: 2 of 8 finished" in text


def test_studies_that_ask_for_the_same_share_their_runs() -> None:
    reproduce("mine.toml", rows=["Alone"])
    Path("other.toml").write_text(
        tomli_w.dumps(
            {**STUDY, "columns": {"again": []}, "rows": {"By itself": ["method.name=local"]}, "published": {}}
        )
    )
    ran = Ran()
    found = reproduce("other.toml", observer=ran)
    assert ran.cells == []
    assert len(found.results) == 2


def test_overrides_make_other_runs_and_a_table_of_their_own() -> None:
    reproduce("mine.toml", rows=["Alone"])
    ran = Ran()
    found = reproduce("mine.toml", ["run.rounds=1"], rows=["Alone"], observer=ran)
    assert len(ran.cells) == 2
    assert found.files[0].name == "mine-run.rounds=1.md"
    found = reproduce("mine.toml", ["run.device=cpu", "run.evaluate_every=2"], rows=["Alone"], observer=Ran())
    assert found.files[0].name == "mine.md"
    with pytest.raises(UserError, match=r"chosen with --seeds and --seed, not with run.seed"):
        look("mine.toml", ["run.seed=3"])
    with pytest.raises(UserError, match=r"row 'Alone', column 'two': unknown key 'method.neighbors'"):
        look("mine.toml", ["method.neighbors=3"])


def test_an_unknown_row_or_column_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no row 'Gosip' in this study: did you mean 'Gossip'\?"):
        reproduce("mine.toml", rows=["Gosip"])
    with pytest.raises(UserError, match=r"no column 'for' in this study: did you mean 'four'\?"):
        reproduce("mine.toml", columns=["for"])
    assert not Path("runs").exists()


def test_more_neighbors_than_peers_are_lowered_and_the_run_is_found_again() -> None:
    write_study(rows={"Gossip": ["method.name=random", "method.neighbors=50"]}, columns={"two": []}, published={})
    reproduce("mine.toml", seeds=1)
    ran = Ran()
    reproduce("mine.toml", seeds=1, observer=ran)
    assert ran.cells == []
    Path("runs/reproduce/cells", cells()[0], "summary.json").unlink()  # stopped just before its end
    reproduce("mine.toml", seeds=1, observer=ran)
    assert ran.started_at == [2]


# -- stopped and moved -------------------------------------------------------------------------------------------


def test_a_stop_in_the_last_round_of_a_cell_does_not_begin_the_next() -> None:
    class Stop(Ran):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if t == 2:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        reproduce("mine.toml", rows=["Gossip"], observer=Stop())
    assert stopped.value.round == 2
    assert [state for _, state in look("mine.toml").states()].count("finished") == 1
    assert len(cells()) == 1
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    reproduce("mine.toml", rows=["Gossip"], columns=["two"], seeds=1, observer=Stop())  # of the last one: all is done


@pytest.mark.parametrize("moment", ["cell", "started"])
def test_a_stop_while_a_cell_is_being_prepared_ends_after_its_first_round(moment: str) -> None:
    class Stop(Ran):
        def cell(self, number: int, of: int, name: str) -> None:
            super().cell(number, of, name)
            self.now("cell")

        def started(self, *about: Any) -> None:
            self.now("started")

        def now(self, place: str) -> None:
            if (place, len(self.cells)) == (moment, 2):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        reproduce("mine.toml", rows=["Gossip"], observer=Stop())
    assert stopped.value.round == 1
    assert [state for _, state in look("mine.toml").states()].count("unfinished, 1 of 2 rounds") == 1
    assert len(cells()) == 2


def test_a_stop_within_a_cell_loses_nothing() -> None:
    class Stop(Ran):
        def round(self, t: int, row: dict[str, Any] | None) -> None:
            if len(self.cells) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        reproduce("mine.toml", rows=["Gossip"], observer=Stop())
    assert stopped.value.round == 1
    assert (one("Gossip", "two")["seeds"], len(cells())) == ("1", 2)  # the finished one is in the table
    states = dict.fromkeys(state for _, state in look("mine.toml").states())
    assert list(states) == ["missing", "finished", "unfinished, 1 of 2 rounds"]
    ran = Ran()
    reproduce("mine.toml", rows=["Gossip"], observer=ran)
    assert ran.started_at == [1, 0, 0]
    shutil.move("runs", "stopped")
    reproduce("mine.toml", rows=["Gossip"])
    straight, resumed = (
        [r.accuracy for r in look("mine.toml", out=out).results.values()]
        for out in ("runs/reproduce", "stopped/reproduce")
    )
    assert straight == resumed


def test_a_stop_between_cells_loses_nothing() -> None:
    class Crash(Ran):
        def cell(self, number: int, of: int, name: str) -> None:
            super().cell(number, of, name)
            if number == 3:
                raise RuntimeError("the power is out")

    with pytest.raises(RuntimeError):
        reproduce("mine.toml", observer=Crash())
    assert one("Alone", "two")["seeds"] == "2"
    ran = Ran()
    reproduce("mine.toml", observer=ran)
    assert len(ran.cells) == 6


def test_cells_computed_elsewhere_are_found_when_they_are_copied_here() -> None:
    reproduce("mine.toml", rows=["Gossip"], out="there")
    for path in Path("there/cells").iterdir():
        text = (path / "config.toml").read_text(encoding="utf-8")
        (path / "config.toml").write_text(text.replace('device = "cpu"', 'device = "Abacus"'), encoding="utf-8")
    reproduce("mine.toml", rows=["Alone"])
    shutil.copytree("there/cells", "runs/reproduce/cells", dirs_exist_ok=True)
    ran = Ran()
    reproduce("mine.toml", rows=["Alone", "Gossip"], observer=ran)
    assert ran.cells == []
    text = Path("runs/reproduce/mine.md").read_text(encoding="utf-8")
    assert "device: Abacus (4 runs), cpu (2 runs)" in text
    assert _counted(["cpu", "b", "cpu", "a", 3]) == "cpu (2 runs), 3 (1 run), a (1 run), b (1 run)"
    assert _counted(["cpu", "cpu"]) == "cpu"


def test_where_best_rounds_are_told_it_is_said_how_often_runs_were_looked_at() -> None:
    reproduce("mine.toml", ["run.evaluate_every=1"], rows=["Oracle"], out="both")
    Path("best.toml").write_text(tomli_w.dumps({**STUDY, "measures": ["best_accuracy"], "published": {}}))
    reproduce("best.toml", ["run.evaluate_every=2"], rows=["Oracle", "Gossip"], out="both")
    (page,) = Path("both").glob("best*.md")
    assert "- evaluated: every 2 rounds (4 runs), every round (2 runs)" in page.read_text(encoding="utf-8")
    (page,) = Path("both").glob("mine*.md")
    assert "- evaluated" not in page.read_text(encoding="utf-8")


def test_a_run_under_a_former_name_is_found_by_what_it_is() -> None:
    reproduce("mine.toml", rows=["Oracle"], seeds=1)
    (name,) = cells()
    former = Path("runs/reproduce/cells") / f"{name[:-10]}0123456789"
    Path("runs/reproduce/cells", name).rename(former)
    ran = Ran()
    found = reproduce("mine.toml", rows=["Oracle"], seeds=1, observer=ran)
    assert ran.cells == []
    assert list(found.results) == [former]


def test_a_folder_that_holds_something_else_is_refused() -> None:
    reproduce("mine.toml", rows=["Oracle"], seeds=1)
    (name,) = cells()
    path = Path("runs/reproduce/cells", name)
    shutil.rmtree(path)
    run("tiny.toml", out=path)
    (path / "summary.json").unlink()
    with pytest.raises(UserError, match=r"holds another experiment"):
        reproduce("mine.toml", rows=["Oracle"], seeds=1)


# -- what is written ---------------------------------------------------------------------------------------------


def test_markdown_and_csv_say_it_all() -> None:
    found = reproduce("mine.toml")
    text = Path("runs/reproduce/mine.md").read_text(encoding="utf-8")
    assert text.startswith("# Gossip, in a nutshell\n\n**accuracy, %**\n\n| method |")
    assert "| two: published |" in text
    assert "| four: published |" in text
    line = one("Gossip", "two")
    ours = [100 * result.accuracy for cell in found.cells if (cell.row, cell.column) == ("Gossip", "two")
            if (result := found.result(cell)) is not None]  # fmt: skip
    mean, half = sum(ours) / 2, abs(ours[0] - ours[1]) / 2
    assert float(line["ours"]) == pytest.approx(mean)
    assert float(line["ours_std"]) == pytest.approx(half * 2**0.5)
    assert float(line["difference"]) == pytest.approx(mean - 99.9)
    pooled = ((0.1**2 + 2 * half**2) / 2) ** 0.5
    assert float(line["pooled_std"]) == pytest.approx(pooled)
    assert line["flagged"] == ("true" if 99.9 - mean > 3 * pooled else "false")
    assert one("Gossip", "four")["flagged"] == ""  # no published deviation
    assert one("Oracle", "two")["published"] == ""
    assert not any(line["row"] == "Oracle" and line["column"] == "four" for line in results())
    for words in (
        "Only a test.",
        "Not stated in the paper, and chosen here:\n\n- the weather: fine",
        "- command: `kinfolk reproduce mine.toml`",
        "- runs: 8 of 8 finished",
        "- seeds: 0, 1",
        "- device: cpu",
        "- kinfolk: ",
        "- torch: ",
        "- date: 2",
        "(!) where it is more than 3 pooled standard deviations",
        "the published deviation alone where we have one seed",
    ):
        assert words in text, words


def test_a_study_of_one_column_has_its_measures_side_by_side() -> None:
    write_study(
        columns={"two": []},
        measures=["accuracy", "nominal_total", "nominal_peak", "received_total", "received_peak"],
        rows={"Gossip": ["method.name=random"], "FedAvg": ["method.name=fedavg"]},
        published={"nominal_total": {"Gossip": ["4"]}},
    )
    text = reproduce("mine.toml", seeds=1).tables()
    assert len(re.findall(r"^\|-", text, re.MULTILINE)) == 2
    assert re.search(r"\| Gossip +\| +\d+\.\d\d \(1\) \| +4 \| +4 \(1\) \| +\+0 \| +0\.25 \(1\) \|", text)
    # Two neighbors a round for two rounds; of eight clients two at once.
    assert re.search(r"\| Gossip +\| +4\.0 \(1\) \| +0\.25 \(1\) \|", text)
    assert re.search(r"\| FedAvg +\| +\d+\.\d\d \(1\) \| +– \| +4 \(1\) \| +– \| +1\.00 \(1\) \|", text)


def test_nominal_costs_are_those_of_the_paper() -> None:
    from kinfolk.studies import read_study

    study = read_study("panm/table6")
    for cell in study.cells([], [0]):
        cost = cell.config.method.nominal(cell.config.run.rounds, cell.config.data.clients)
        for measure, ours in (("nominal_total", cost.total), ("nominal_peak", cost.peak)):
            value = study.value(measure, cell.row, cell.column)
            assert value is None or value.mean == pytest.approx(ours)


def test_a_cell_is_an_ordinary_run_folder() -> None:
    reproduce("mine.toml", rows=["Oracle"], seeds=1)
    folder = RunFolder.open(Path("runs/reproduce/cells", cells()[0]))
    assert folder.status().state == "finished"
    assert folder.config()["method"]["name"] == "oracle"
