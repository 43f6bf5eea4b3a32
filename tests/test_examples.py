"""The examples run as a user would run them, and say what they promise."""

from pathlib import Path

import pytest

from processes import finished

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMISES = {
    "custom_model.py": "client 7 predicts",
    "custom_data.py": "helped",
    "custom_method.py": "of its neighbors are kin",
    "use_exported.py": "fedcg, trained on digits for 3 rounds: a blank image is a",
}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_runs(name: str) -> None:
    done = finished(EXAMPLES / name)
    assert done.code == 0, done.err
    assert PROMISES[name] in done.out
