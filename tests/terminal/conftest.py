"""A folder with a study, a script and a measured session, for tests of what terminals and files get to see."""

import sys
from pathlib import Path

import pytest

from tests.prove import tool

# They kill, limit and watch processes by means that Windows has not
collect_ignore_glob = ["test_*.py"] if sys.platform == "win32" else []


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Write a study whose steps take two milliseconds."""
    tool.write_study(tmp_path, step_s=0.002)
    return tmp_path


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure a sweep once; tests only read it."""
    folder = tmp_path_factory.mktemp("measured")
    tool.write_study(folder)
    code, _, err = tool.finish(folder, "sweep", "study.yaml", "--layers", "2..12:5", "--rounds", "2")
    assert code == 0, err
    return folder
