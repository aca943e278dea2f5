"""Run the command line in this process, over scripted devices where nothing needs measuring."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckbench import cli

STUDY = """\
model: {n_layers: 4, d_model: 32, n_heads: 4, vocab_size: 64}
train: {batch_size: 2, seq_len: 16}
strategies: [none, per-block, every-k:2]
run: {rounds: 2, max_steps: 10}
"""


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code and both streams."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def ckbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["ckbench", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        code = caught.value.code
        return Outcome(code if isinstance(code, int) else int(bool(code)), captured.out, captured.err)

    return run


@pytest.fixture
def replay(tmp_path: Path) -> Callable[..., str]:
    """Write a study and a script for the replay device; give the device's name."""
    (tmp_path / "study.yaml").write_text(STUDY)

    def make(strategies: dict[str, Any] | None = None, **top: Any) -> str:
        scripted = {"*": {"step_s": 0.01, "fields": {"peak_allocated_bytes": 2**20}}, **(strategies or {})}
        path = tmp_path / "script.json"
        path.write_text(json.dumps({"device_name": "scripted", "strategies": scripted, **top}))
        return f"replay:{path}"

    return make
