"""Who may import whom, and what must not stand anywhere in the source."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kinfolk"
BOTTOM = {"errors", "settings", "version", "randomness"}
# Each room and the rooms it may look into (itself and the bottom layer always).
MAY_IMPORT = {
    "data": set(),
    "kernels": set(),
    "randomness": {"kernels"},
    "models": {"kernels"},
    "peers": {"kernels"},
    "cohort": {"data", "kernels", "models", "peers.base"},
    "aggregation": {"cohort", "peers.base"},
    "bench": {"cohort", "models", "peers", "data"},
    "matching": {"cohort", "kernels", "peers.base"},
    "privacy": {"cohort.layout", "cohort.room", "cohort.workers", "models"},
    "methods": {"matching", "models", "privacy", "cohort", "peers.base", "data"},
    "metrics": set(),
    "runs": set(),
    "report": {"runs"},
    "measures": {"experiment"},
    "studies": {"config", "measures"},
    "pictures": {"studies", "measures", "experiment", "matching", "report", "runs"},
    "carry": {"assembly", "studies", "pictures", "measures", "config", "experiment", "runs"},
    "worker": {"cohort.room", "comparison", "config", "experiment"},
    "parallel": {"data", "experiment", "stopping", "studies"},
    "reproduce": {
        *("assembly", "carry", "studies", "pictures", "measures", "parallel", "comparison", "config", "experiment"),
        *("report", "runs", "stopping"),
    },
    "visits": {"cohort", "peers"},
    "parcel": set(),
    "findings": {"cohort", "metrics", "parcel"},
    "engines": {"aggregation", "cohort", "peers", "data", "findings", "metrics", "parcel", "visits"},
    "threats": {"aggregation", "config", "data", "peers"},
    "config": {"aggregation", "methods", "models", "cohort", "data", "peers"},
    "records": {"config", "data", "engines", "findings", "metrics"},
    "logbook": {"engines", "findings", "metrics", "parcel", "records", "runs"},
    "origins": {"cohort.layout", "config", "data", "models", "runs"},
    "assembly": {"config", "engines", "threats", "models", "cohort", "data", "peers"},
    "experiment": {
        *("assembly", "config", "engines", "logbook", "origins", "records", "stopping", "warmup"),
        *("models", "cohort", "data", "runs"),
    },
    "exporting": {"assembly", "config", "models", "cohort", "data", "origins", "runs"},
    "comparison": {
        *("assembly", "config", "experiment", "data", "methods", "metrics", "models", "origins", "runs", "stopping"),
        "cohort.layout",
    },
    "progress": {"config", "experiment", "parallel"},
}
FREE = {"__init__", "__main__", "cli", "commands"}  # the public surface and the command line may use everything


def imports(path: Path) -> set[str]:
    """Modules of kinfolk that a file imports, as 'room' or 'room.module'."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "kinfolk" else [node.module]
            )
        found |= {name.removeprefix("kinfolk.") for name in names if name.startswith("kinfolk.")}
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_rooms_look_only_where_they_may(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in FREE:
        return
    allowed = MAY_IMPORT.get(room, set()) | BOTTOM | {room}
    for name in imports(path):
        assert any(name == a or name.startswith(a + ".") for a in allowed), f"{room} must not import {name}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_pickle_and_no_torch_load(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^\s*(import|from) (pickle|cloudpickle|dill|shelve)\b", text, re.MULTILINE)
    assert not re.search(r"torch\.(load|save)\(|allow_pickle\s*=\s*True", text)


def test_no_path_of_a_particular_machine_anywhere() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(rb"(^|[^A-Za-z0-9_.])/(work|root|home|Users)/[a-z]")
    for name in listed.stdout.split(b"\0"):
        path = ROOT / name.decode()
        if name and path.is_file() and path.suffix not in (".png", ".npz", ".gz"):
            assert not pattern.search(path.read_bytes()), f"{name.decode()} names a path of one machine"


def test_modules_stay_small() -> None:
    long = {str(p.relative_to(SOURCE)): n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long
