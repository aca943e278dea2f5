"""A folder of its own for each proof, with a scripted device that answers at once."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prove import entry

# They kill, limit and watch processes by means that Windows has not
collect_ignore_glob = ["test_*.py"] if sys.platform == "win32" else []

SCRIPT = {"device_name": "scripted", "strategies": {"*": {"step_s": 0.01, "fields": {"peak_allocated_bytes": 2**20}}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give an empty current folder whose ``replay:script.json`` measures in microseconds."""
    monkeypatch.chdir(tmp_path)
    entry.cap_trials(monkeypatch)
    Path("script.json").write_text(json.dumps(SCRIPT))
    yield tmp_path
