"""The public surface: every name is there, and asking for the version does not load torch."""

import subprocess
import sys

import pytest

import kinfolk


@pytest.mark.parametrize("name", kinfolk.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(kinfolk, name) is not None


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kinfolk.nonsense  # noqa: B018


def test_help_and_version_do_not_wait_for_torch() -> None:
    code = "import sys; import kinfolk.cli; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
