"""Faults provoked for real in worker processes: each ends as the one status it deserves, and the study goes on."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckbench.config import ModelConfig, RunConfig, RunSettings, StrategySpec, TrainConfig
from ckbench.launch import Launcher
from ckbench.records import Record

GONE_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    """One fork server for all tests of this file."""
    return Launcher()


def scripted(folder: Path, fail: dict[str, Any], **run: Any) -> RunConfig:
    """Give a trial in a process of its own that fails as told."""
    path = folder / "script.json"
    script = {"device_name": "scripted", "isolated": True, "strategies": {"none": {"fail": fail}}}
    path.write_text(json.dumps(script))
    return config(device=f"replay:{path}", **run)


def config(
    *, device: str = "cpu", d_model: int = 32, n_layers: int = 2, strategy: str = "none", **run: Any
) -> RunConfig:
    settings: dict[str, Any] = {"threads": 1, "max_steps": 6, "min_steps": 6, **run}
    return RunConfig(
        study="faults",
        model=ModelConfig(n_layers=n_layers, d_model=d_model, n_heads=4, vocab_size=64),
        train=TrainConfig(batch_size=2, seq_len=16),
        strategy=StrategySpec(name=strategy),
        run=RunSettings(device=device, **settings),
    )


def run(launcher: Launcher, trial: RunConfig) -> Record:
    return launcher.run(trial, 0, lambda phase: None)


@pytest.mark.parametrize(
    ("fail", "status", "number"),
    [
        ({"signal": 9}, "killed", 9),
        ({"signal": 11}, "killed", 11),
        ({"signal": 6}, "killed", 6),
        ({"signal": 15}, "killed", 15),
        ({"exit": 3}, "error", None),
        ({"exit": 0}, "error", None),
        ({"raise": "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"}, "error", None),
        ({"raise": "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."}, "oom", None),
    ],
    ids=str,
)
def test_a_dying_worker_becomes_a_record(
    tmp_path: Path, launcher: Launcher, fail: dict[str, Any], status: str, number: int | None
) -> None:
    record = run(launcher, scripted(tmp_path, fail))
    assert (record.status, record.signal) == (status, number)
    assert record.message
    assert run(launcher, config()).status == "ok", "the next trial is not touched"


def test_a_hung_step_is_a_timeout_and_its_children_are_gone(tmp_path: Path, launcher: Launcher) -> None:
    sleep_s = unlike_any_other()
    trial = scripted(tmp_path, {"child_s": sleep_s, "hang_s": 60}, timeout_s=3.0)
    begun = time.monotonic()
    record = run(launcher, trial)
    assert record.status == "timeout"
    assert record.failed_phase == "warm-up"
    assert time.monotonic() - begun < 3.0 + GONE_WITHIN_S
    assert processes_with(f"time.sleep({sleep_s})") == []


def test_a_child_left_by_a_finished_trial_is_gone(tmp_path: Path, launcher: Launcher) -> None:
    sleep_s = unlike_any_other()
    run(launcher, scripted(tmp_path, {"child_s": sleep_s, "raise": "done"}))
    assert processes_with(f"time.sleep({sleep_s})") == []


def unlike_any_other() -> float:
    """Give a sleeping time by which a child can be found among all processes."""
    return round(300 + random.random() * 100, 6)


def processes_with(text: str) -> list[int]:
    """List living processes whose command line holds ``text``; waits a little for dying ones."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while True:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if text in command and state != "Z":
                found.append(int(folder.name))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def test_an_allocation_beyond_the_limit_is_oom_with_phase_and_numbers(launcher: Launcher) -> None:
    record = run(launcher, config(d_model=4_000_000))
    assert record.status == "oom"
    assert record.failed_phase == "build"
    assert record.requested_bytes is not None and record.requested_bytes > 2**40
    assert "allocate" in (record.message or "")


MEMORY_LIMITED = """
import resource, sys
from ckbench.config import *
from ckbench.engine.worker import run_trial
if __name__ == "__main__":
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 1200 * 2**20, resource.RLIM_INFINITY))
    config = RunConfig(
        study="limited",
        model=ModelConfig(n_layers=12, d_model=64, n_heads=4, vocab_size=64),
        train=TrainConfig(batch_size=64, seq_len=1024),
        strategy=StrategySpec(name="none"),
        run=RunSettings(device="cpu", threads=1),
    )
    record = run_trial(config, 0, 0.0, lambda phase: None)
    print(record.status, record.failed_phase, record.requested_bytes)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="needs RLIMIT_AS")
def test_a_forward_beyond_an_rlimit_is_oom_in_forward(tmp_path: Path) -> None:
    script = tmp_path / "limited.py"
    script.write_text("import torch, torch._dynamo, torch.profiler, torch.utils.flop_counter\n" + MEMORY_LIMITED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment(), timeout=120)
    status, phase, requested = done.stdout.split()
    assert (status, phase) == ("oom", "forward")
    assert int(requested) > 2**20


def environment() -> dict[str, str]:
    """Give an environment in which a child finds this package."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}


def test_spawn_works_too(tmp_path: Path) -> None:
    assert run(Launcher("spawn"), scripted(tmp_path, {"signal": 9})).status == "killed"


INTERRUPTED = """
import sys
from ckbench.cli import main
sys.argv = ["ckbench", "run", "study.yaml", "--device", sys.argv[1]]
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_an_interrupt_keeps_finished_rows_and_ends_every_process(tmp_path: Path, sign: signal.Signals) -> None:
    sleep_s = unlike_any_other()
    strategies = {"*": {}, "every-k:2": {"fail": {"child_s": sleep_s, "hang_s": 50}}}
    script = {"device_name": "scripted", "isolated": True, "strategies": strategies}
    (tmp_path / "script.json").write_text(json.dumps(script))
    (tmp_path / "go.py").write_text(INTERRUPTED)
    (tmp_path / "study.yaml").write_text(
        "model: {n_layers: 4, d_model: 32, n_heads: 4, vocab_size: 64}\ntrain: {batch_size: 2, seq_len: 16}\n"
        "strategies: [none, per-block, every-k:2, sqrt, full]\nrun: {rounds: 1}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "go.py", f"replay:{tmp_path / 'script.json'}"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not processes_now(f"time.sleep({sleep_s})"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(sign)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "none" in out and "per-block" in out and "sqrt" not in out
    assert "interrupted: the table is incomplete" in err
    assert "Traceback" not in err
    (file,) = (tmp_path / "results").glob("*.jsonl")
    assert [json.loads(line)["strategy"] for line in file.read_text().splitlines()] == ["none", "per-block"]
    assert processes_with(f"time.sleep({sleep_s})") == []
    assert processes_with(str(tmp_path)) == []


def processes_now(text: str) -> list[int]:
    """List living processes whose command line holds ``text``, without waiting."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text in (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_tool_killed_outright_leaves_no_worker_behind(tmp_path: Path) -> None:
    """SIGKILL gives the tool no chance to clean up; its worker, and the worker's child, must notice by themselves."""
    sleep_s = unlike_any_other()
    script = {"device_name": "s", "isolated": True, "strategies": {"*": {"fail": {"child_s": sleep_s, "hang_s": 50}}}}
    (tmp_path / "script.json").write_text(json.dumps(script))
    (tmp_path / "go.py").write_text(INTERRUPTED)
    (tmp_path / "study.yaml").write_text(
        "model: {n_layers: 4, d_model: 32, n_heads: 4, vocab_size: 64}\ntrain: {batch_size: 2, seq_len: 16}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "go.py", f"replay:{tmp_path / 'script.json'}"],
        cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not processes_now(f"time.sleep({sleep_s})"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert processes_with(f"time.sleep({sleep_s})") == []
    assert processes_with(str(tmp_path)) == []
