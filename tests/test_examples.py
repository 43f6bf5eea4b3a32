"""The examples run as a user would run them, and say what they promise."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMISES = {
    "custom_model.py": "client 7 predicts",
    "custom_data.py": "helped",
    "custom_method.py": "of its neighbors are kin",
    "use_exported.py": "fedcg, trained on digits for 3 rounds: a blank image is a",
}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout
