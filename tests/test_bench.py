"""`kinfolk bench` and the programs in benchmarks/: what is counted, what is checked, what is shown."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from kinfolk import cli
from kinfolk.bench import JOBS, measure, peaks, precisions, recommend, seconds_by_chunk, timing
from kinfolk.bench.jobs import sides
from kinfolk.bench.timing import WORST, difference
from kinfolk.bench.work import flops, layer_products, traffic
from kinfolk.methods.panm import PANM
from kinfolk.report.speed import figure, speed_table

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PEAKS = {"float32": 1e11, "bf16": 2e11, "copy": 1e10}


def small(name: str, clients: int = 3, samples: int = 12) -> Any:
    """A job with few clients, and few samples in two unequal batches."""
    job = JOBS[name]
    training = replace(job.training, batch_size=8)
    return replace(job, clients=clients, samples=samples, training=training, candidates=2 if job.candidates else 0)


# -- what is counted ---------------------------------------------------------------------------------------------


def test_products_of_a_layer_are_outputs_times_inputs() -> None:
    assert layer_products(JOBS["M"].module(), (784,)) == [784 * 200, 200 * 200, 200 * 10]
    first, second, third = 30 * 30 * 32 * 3 * 9, 13 * 13 * 64 * 32 * 9, 4 * 4 * 64 * 64 * 9
    assert layer_products(JOBS["C"].module(), (3, 32, 32)) == [first, second, third, 256 * 64, 64 * 10]


def test_flops_of_training_leave_out_the_gradient_of_the_data() -> None:
    assert flops(JOBS["L"]) == 2 * 2 * 7840 * 100 * 200
    assert flops(JOBS["M"]) == 2 * (2 * 784 * 200 + 3 * (200 * 200 + 200 * 10)) * 100 * 200 * 3
    assert flops(JOBS["C"]) == 1_526_492_160_000


def test_flops_of_judging_are_forward_only() -> None:
    assert flops(JOBS["X"]) == 2 * 4_499_456 * 100 * 10 * 200


def test_traffic_counts_models_and_momentum_each_step_and_samples_once() -> None:
    assert traffic(JOBS["L"]) == 4 * 100 * (10 * 4 * 7850 + 200 * 784)
    assert traffic(JOBS["M"]) == 4 * 100 * (6 * 4 * 199_210 + 3 * 200 * 784)
    assert traffic(JOBS["X"]) == 4 * 100 * (10 * 73_418 + 200 * 3072)


# -- what is checked and timed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_every_job_agrees_with_the_plain_loop(name: str) -> None:
    heard: list[str] = []
    rows = measure(small(name), CPU, rounds=2, peaks=PEAKS, tell=heard.append)
    assert [row["precision"] for row in rows] == precisions(CPU)
    assert heard == ["warming up", "round 1 of 2", "round 2 of 2"]
    for row in rows:
        assert row["agrees"], row
        assert 0 <= row["difference"] <= row["bound"]
        assert row["bound"] == timing.CLOSE or row["precision"] != "float32"
        assert len(row["all_plain_s"]) == len(row["all_kinfolk_s"]) == row["rounds"] == 2
        assert row["plain_loop_s"] > 0
        assert row["kinfolk_s"] > 0
        assert row["warm_up_s"] >= 0
        assert row["of_product_peak"] > 0
        assert row["of_copy_peak"] > 0
    json.dumps(rows)


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small("L")
    data = job.federation()
    loop, ours = sides(job, data, CPU, ["float32"])
    expected, found = loop.first(), ours["float32"].first()
    assert difference(found, expected).max() < 1e-5
    assert difference(found.roll(1, dims=0), expected).min() > WORST  # everybody has somebody else's result
    assert difference(torch.zeros_like(found), expected).min() > WORST  # nobody trained
    found[1] = torch.nan
    assert difference(found, expected)[1] == torch.inf
    monkeypatch.setattr(timing, "CLOSE", -1.0)
    assert not measure(job, CPU, rounds=1, wanted=["float32"])[0]["agrees"]


def test_no_round_is_begun_after_the_budget() -> None:
    assert measure(small("L"), CPU, rounds=5, wanted=["float32"], budget=0)[0]["rounds"] == 1


def test_peaks_are_of_every_precision_and_of_a_copy() -> None:
    found = peaks(CPU, ["float32", "bf16"], scale=0.02)
    assert set(found) == {"float32", "bf16", "copy"}
    assert min(found.values()) > 0


# -- what is shown -----------------------------------------------------------------------------------------------


def row(job: str = "M", precision: str = "float32", **other: Any) -> dict[str, Any]:
    base = {
        "job": job, "precision": precision, "clients": 100, "plain_loop_s": 1.5, "kinfolk_s": 1.0, "ratio": 1.5,
        "difference": 1e-6, "agrees": True, "warm_up_s": 0.1, "of_product_peak": 0.25, "of_copy_peak": 0.0123,
    }  # fmt: skip
    return {**base, **other}


def test_precision_is_recommended_only_if_it_is_faster_and_right() -> None:
    fast = row(precision="bf16", kinfolk_s=0.5, difference=0.05)
    assert "run.precision=bf16: 2 times as fast as float32" in recommend([row(), fast], "cuda")[0]
    assert "run.precision=float32" in recommend([row(), {**fast, "kinfolk_s": 0.95}], "cpu")[0]
    wrong = recommend([row(), {**fast, "agrees": False}], "cpu")
    assert "run.precision=float32" in wrong[0]
    assert "M in bf16" in wrong[-1]


def test_chunk_is_recommended_only_if_it_is_faster() -> None:
    assert "Leave run.chunk unset" in recommend([row()], "cpu", {None: 1.0, 8: 0.95})[1]
    assert "Set run.chunk=8" in recommend([row()], "cpu", {None: 1.0, 8: 0.5})[1]


def test_device_is_recommended_by_the_job_on_both() -> None:
    assert "run.device=cuda (the MLP job takes 20 times" in recommend([row()], "cuda", cpu=20.0)[0]
    assert "run.device=cpu for models as small" in recommend([row()], "cuda", cpu=0.5)[0]


def test_chunks_are_tried_in_turns() -> None:
    assert set(seconds_by_chunk(small("M"), CPU, [None, 2], rounds=1)) == {None, 2}


def test_table_fits_eighty_columns_and_marks_what_is_wrong() -> None:
    rows = [row(), row(precision="bf16", agrees=False), row("X", clients=11, plain_loop_s=123.4, ratio=1234.5)]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(speed_table(rows, {name: job.what for name, job in JOBS.items()}, "CPU"))
    text = console.export_text()
    assert "…" not in text
    assert "bf16 !" in text
    assert "(M bf16)" in text
    assert "X: the loss of 10 candidates" in text
    assert "C:" not in text
    assert "fewer clients" in text


def test_figures_have_three_digits() -> None:
    values = {
        0: "0",
        0.00001: "1.0e-05",
        0.001234: "0.00123",
        0.12345: "0.123",
        1.5: "1.5",
        12.345: "12.3",
        1234.5: "1234",
        -4.04: "-4.04",
        -0.001234: "-0.00123",
    }
    assert {value: figure(value) for value in values} == values


def test_bench_prints_one_json_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kinfolk.bench.machine.SIDE", {"cpu": 64})
    monkeypatch.setattr("kinfolk.bench.machine.COPY", {"cpu": 1000})
    out, err = call("bench", "--jobs", "l", "--rounds", "1", "--device", "cpu", "--json", monkeypatch, capsys)
    found = json.loads(out)
    assert [(r["job"], r["precision"]) for r in found["rows"]] == [("L", "float32"), ("L", "bf16")]
    assert found["recommendation"][0].startswith("Use run.device=cpu")
    assert "job L: round 1 of 1" in err


def test_an_unknown_job_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call("bench", "--jobs", "M,Q", monkeypatch, capsys, code=2)
    assert out == ""
    assert err.startswith("kinfolk: unknown job 'Q'")
    assert err.count("\n") == 1


def call(*words: Any, code: int = 0) -> tuple[str, str]:
    """Call the command line: words, then monkeypatch and capsys."""
    *arguments, monkeypatch, capsys = words
    monkeypatch.setattr(sys, "argv", ["kinfolk", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code or 0) == code
    streams = capsys.readouterr()
    return streams.out, streams.err


# -- the programs ------------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a program of benchmarks/ by its name."""
    if not BENCHMARKS.is_dir():
        pytest.skip("benchmarks/ is not part of an installation")
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *words])
    module.main()


def test_tables_of_the_readme_are_made_from_the_results(program: Any) -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    tables = program("tables")
    assert tables.fill(text) == text, "run: python benchmarks/tables.py --write"
    assert {f"<!-- table: {mark} -->" in text for mark in tables.TABLES} == {True}


def test_a_table_shows_every_row_and_where_it_was_measured(program: Any, tmp_path: Path) -> None:
    facts = {"device": "a machine", "torch": "2", "python": "3", "threads": 2, "kinfolk": "1", "command": "python x.py",
             "measured": "2026-01-02T03:04:05"}  # fmt: skip
    rows = [row(target=1.2), row("C", "bf16", target=None)]
    (tmp_path / "training-cpu.json").write_text(json.dumps({"facts": facts, "peaks": PEAKS, "rows": rows}))
    tables = program("tables")
    text = tables.table("training", tmp_path)
    assert "| a machine | M | float32 | 1.5 s | 1 s | 1.5× | ≥ 1.2× | 25 % | 1.23 % | 0.1 s | 1e-06 |" in text
    assert "- a machine: torch 2, Python 3, 2 threads, kinfolk 1, 2026-01-02, `python x.py`" in text
    assert "| a machine | 0.1 TFLOP/s | – | 0.2 TFLOP/s | 10 GB/s |" in tables.table("peaks", tmp_path)
    assert tables.table("large", tmp_path) == "Not measured yet: `python benchmarks/large.py`."


def test_training_keeps_rows_with_targets(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinfolk.bench.machine.SIDE", {"cpu": 64})
    monkeypatch.setattr("kinfolk.bench.machine.COPY", {"cpu": 1000})
    words = ["--device", "cpu", "--jobs", "L", "--clients", "2", "--rounds", "1", "--out", str(tmp_path)]
    run(program("training"), monkeypatch, *words)
    kept = json.loads((tmp_path / "training-cpu.json").read_text())
    assert [r["target"] for r in kept["rows"]] == [10, 10]
    assert "--out" not in kept["facts"]["command"]
    assert "L | bf16" in program("tables").table("training", tmp_path)


def test_large_runs_to_the_end(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(program("large"), monkeypatch, "--device", "cpu", "--clients", "7", "--rounds", "1", "--out", str(tmp_path))
    found = json.loads((tmp_path / "large-cpu.json").read_text())["rows"][0]
    assert found["clients"] == 7
    assert found["peak_GB"] > 0
    assert "| 7 | float32 | 1 |" in program("tables").table("large", tmp_path)


def test_a_round_is_taken_apart_without_a_rest(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = program("experiments")
    before = experiments.Cohort.train
    monkeypatch.setattr(experiments, "load_federation", no_data)
    monkeypatch.setattr(experiments, "made_up", lambda shape, n, *_: experiments_data(program, shape, n))
    words = ["--experiments", "fmnist", "--clients", "8", "--rounds", "3", "--device", "cpu", "--out", str(tmp_path)]
    run(experiments, monkeypatch, *words)
    assert experiments.Cohort.train is before
    rows = json.loads((tmp_path / "experiments-cpu.json").read_text())["rows"]
    assert [row["preset"] for row in rows] == ["paper", "robust"]
    for found in rows:
        assert sum(found["share"].values()) == pytest.approx(1, abs=1e-3)
        judged = found["share"].pop("judge")
        assert (judged > 0) == (found["preset"] == "robust")
        assert min(found["share"].values()) > 0
        assert found["wall_s"] > found["rounds_s"] > 0
        share = 1 - found["training_and_evaluation_s"] / found["rounds_s"]
        assert found["beside_them"] == pytest.approx(share, abs=0.02)
        assert found["data"] == "made-up"
    assert "| fmnist (made-up) | 8 | 3 |" in program("tables").table("experiments", tmp_path)


def no_data(config: Any) -> None:
    from kinfolk.errors import UserError

    raise UserError("the data are not here")


def experiments_data(program: Any, shape: tuple[int, ...], n: int) -> Any:
    return program("experiments").made_up(shape, n, 20, 10, CPU)


def test_scale_is_drawn_with_the_loop_as_a_line(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = program("scale")
    rows = [scale.measure(n, 1, CPU) for n in (10, 20)]
    loop = scale.plain_loop(8, 1, CPU)
    assert loop > 0
    assert rows[0]["us_per_client_round"] > 0
    kept = {"facts": {"device": "here"}, "plain_loop_us_per_client_round": loop, "rows": rows}
    (tmp_path / "scale-cpu.json").write_text(json.dumps(kept))
    run(program("plot"), monkeypatch, "--results", str(tmp_path))
    assert (tmp_path / "scale.png").stat().st_size > 10_000


def test_panm_is_timed_in_its_second_stage(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = program("scale")
    found = []
    match = PANM._match
    monkeypatch.setattr(PANM, "_match", lambda self, t, *rest: found.append(t) or match(self, t, *rest))
    row = scale.measure(30, 2, CPU, "panm")
    assert row["us_per_client_round"] > 0
    assert found == [scale.WARM_UP + 1, scale.WARM_UP + 2]
    (tmp_path / "panm-scale-cpu.json").write_text(
        json.dumps({"facts": {"device": "here"}, "rows": [row | {"time_ratio": 1}]})
    )
    tables = program("tables")
    assert "| here | 30 |" in tables.scale(tables.read("panm-scale", tmp_path))
    assert tables.read("scale", tmp_path) == []


def test_a_coarser_precision_is_never_held_to_less_than_float32() -> None:
    class Exact:
        """Rounds nothing, whatever it is told."""

        def __call__(self, t: int) -> None: ...

        def first(self) -> torch.Tensor:
            return torch.ones(2, 3)

    assert timing._checked(Exact(), {"bf16": Exact()}, CPU)["bf16"].bound == timing.CLOSE
