"""The tool as users start it: a process of its own, over scripted trials that take a known while."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckbench import store

ROOT = Path(__file__).parents[2]
STUDY = """\
model: {n_layers: 4, d_model: 32, n_heads: 4, vocab_size: 64}
train: {batch_size: 2, seq_len: 16}
strategies: [none, per-block, sqrt, "every-k:4", full, ffn-only]
run: {rounds: 2, min_steps: 5, max_steps: 5}
"""
SWEEP = ("sweep", "study.yaml", "--layers", "2..4", "--resume")
VOLATILE = ("record_id", "session_id", "started_at", "trial_s", "startup_s", "host_peak_bytes", "environment")


def write_study(folder: Path, *, step_s: float = 0.0, isolated: bool = False, **strategies: dict[str, Any]) -> None:
    """Write a study, and a script whose every step waits ``step_s``, whose times vary and of which one is out of memory."""
    ordinary = {
        "step_s": 0.01,
        "noise": {"process": 0.05, "step": 0.01},
        "fields": {"peak_allocated_bytes": 2**20, "saved_bytes": 2**19},
        "fail": {"hang_s": step_s},
    }
    scripted = {
        "*": ordinary,
        "ffn-only": {"fail": {"raise": "CUDA out of memory.", "type": "OutOfMemoryError"}},
        **strategies,
    }
    script = {"device_name": "scripted", "isolated": isolated, "strategies": scripted}
    (folder / "study.yaml").write_text(STUDY)
    (folder / "script.json").write_text(json.dumps(script))


def some(n_fast: int, *values: Any) -> list[Any]:
    """Leave all but the first few values of a parameter to the long proofs."""
    return [value if i < n_fast else pytest.param(value, marks=pytest.mark.prove) for i, value in enumerate(values)]


def environment(**changes: str) -> dict[str, str]:
    """Give an environment in which a child finds this package, without what a test runner may have set."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COLUMNS", "LINES"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), **changes}


def start(folder: Path, *arguments: str, **details: Any) -> "subprocess.Popen[str]":
    """Start ``ckbench ARGUMENTS`` in a session of its own."""
    command = [
        sys.executable,
        "-m",
        "ckbench",
        *arguments,
        *(["--device", "replay:script.json"] if measures(arguments) else []),
    ]
    settings: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": environment(),
        "text": True,
    }
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **{**settings, **details})


def measures(arguments: tuple[str, ...]) -> bool:
    """Tell whether a command line would measure; it gets the scripted device then."""
    return arguments[:1] in (("run",), ("sweep",)) and "--device" not in arguments


def finish(folder: Path, *arguments: str, timeout_s: float = 120.0, **details: Any) -> tuple[int, str, str]:
    """Run one command to its end; give exit code and both outputs."""
    process = start(folder, *arguments, **details)
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def lasting(text: str) -> str:
    """Give a printed table without its date."""
    return re.sub(r"\d{4}-\d\d-\d\d( to \d{4}-\d\d-\d\d)?", "DATE", text)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Give what a results folder holds, without what differs between two runs of the same study, in a fixed order."""
    records, _ = store.read(folder / "results")
    kept = [{key: value for key, value in record.items() if key not in VOLATILE} for record in records]
    return sorted(kept, key=lambda r: (json.dumps(r["model"]), r["strategy"], r["round"], r["order"], r["status"]))


def complete_lines(folder: Path) -> dict[str, list[bytes]]:
    """Give every line with its end, by file."""
    files = sorted((folder / "results").glob("*.jsonl"))
    return {
        path.name: [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        for path in files
    }


def processes_marked(mark: str, wait_s: float = 60.0) -> list[str]:
    """List living processes that have ``mark`` in their environment, after waiting for dying ones."""
    deadline = time.monotonic() + wait_s
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark.encode() in (process / "environ").read_bytes():
                    state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
