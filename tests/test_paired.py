"""benchmarks/paired.py: rows of a study, compared client by client."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinfolk.reproduce import reproduce

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "paired.py"
STUDY = """
study = "tiny"
experiment = "p4/digits"
seeds = 2
set = ["data.clients=6", "run.rounds=2"]

[columns]
half = ["data.split.gamma=0.5"]

[rows]
Local = ["method.name=local"]
Other = ["method.name=dp-fedavg"]
Missing = ["method.name=proxyfl"]
"""


@pytest.fixture
def paired(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not PROGRAM.is_file():
        pytest.skip("benchmarks/ is not part of an installation")
    spec = importlib.util.spec_from_file_location("paired", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "paired", module)
    spec.loader.exec_module(module)
    return module


def test_differences_are_paired_by_client_and_seed(
    paired: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("tiny.toml").write_text(STUDY)
    done = reproduce("tiny.toml", rows=["Local", "Other"], out="here")
    gains = []
    for seed in (0, 1):
        cells = {cell.row: done.result(cell) for cell in done.cells if cell.seed == seed}
        local, other = cells["Local"], cells["Other"]
        assert local is not None
        assert other is not None
        gains += [100 * (a["accuracy"] - b["accuracy"]) for a, b in zip(other.clients, local.clients)]
    monkeypatch.setattr(sys, "argv", ["paired.py", "tiny.toml", "--out", "here"])
    paired.main()
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in capsys.readouterr().out.splitlines()]
    mean, error = np.mean(gains), np.std(gains, ddof=1) / len(gains) ** 0.5
    assert lines[0] == ["minus Local", "half"]
    assert lines[2][0] == "Other"
    assert lines[2][1].startswith(f"{mean:+.1f} ± {error:.1f} (2)")
    assert lines[2][1].endswith("*") == bool(abs(mean) > 2 * error)
    assert lines[3] == ["Missing", "–"]


def test_a_row_that_is_not_there_is_named(paired: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tiny.toml").write_text(STUDY)
    monkeypatch.setattr(sys, "argv", ["paired.py", "tiny.toml", "--against", "Locale"])
    with pytest.raises(SystemExit, match="no row 'Locale' in this study: Local, Other, Missing"):
        paired.main()
