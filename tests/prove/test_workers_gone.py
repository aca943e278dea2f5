"""kill -9 of the tool takes its worker processes with it; of the server that starts them, one trial at most."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from multiprocessing import forkserver
from pathlib import Path

import pytest

from ckbench.launch import Launcher
from tests.prove import tool

N_PROVE = 6
N_SERVERS = 3

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def kill_among_workers(folder: Path, n_times: int, longest_s: float) -> None:
    """Kill the tool while its fork server loads torch, or while a worker with a child of its own hangs in a step."""
    draw = random.Random(n_times)
    tool.write_study(folder, isolated=True, none={"fail": {"child_s": 600, "hang_s": 600}})
    for i in range(n_times):
        mark = f"CKBENCH_MARK_{uuid.uuid4().hex}"
        process = tool.start(folder, *tool.SWEEP, env=tool.environment(CKBENCH_TEST=mark))
        if i == 0:  # at least once when a worker is surely at work
            wait_for_a_grandchild(mark)
        else:
            time.sleep(longest_s * draw.random())
        assert tool.processes_marked(mark, wait_s=0)
        process.kill()
        process.communicate()
        assert tool.processes_marked(mark) == []


def wait_for_a_grandchild(mark: str) -> None:
    deadline = time.monotonic() + 120
    while not any("time.sleep" in command for command in tool.processes_marked(mark, wait_s=0)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.prove
def test_no_worker_survives_at_any_moment(tmp_path: Path) -> None:
    kill_among_workers(tmp_path, N_PROVE, 12.0)


def servers(process: "subprocess.Popen[str]", mark: str) -> list[int]:
    """List the fork servers of one tool."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            is_marked = mark.encode() in (folder / "environ").read_bytes()
            if is_marked and int(parent) == process.pid and b"forkserver" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.prove
def test_a_study_goes_on_when_its_fork_server_is_killed(tmp_path: Path) -> None:
    """As the kernel does where memory is short: a trial may be lost, the rest is measured, and --resume fills the gap."""
    tool.write_study(tmp_path, step_s=0.02, isolated=True)
    mark = f"CKBENCH_MARK_{uuid.uuid4().hex}"
    process = tool.start(tmp_path, *tool.SWEEP, "--rounds", "1", env=tool.environment(CKBENCH_TEST=mark))
    n_killed = n_lines = 0
    while process.poll() is None:
        time.sleep(0.05)
        there = sum(map(len, tool.complete_lines(tmp_path).values()))
        if there == n_lines or n_killed == N_SERVERS:
            continue
        n_lines = there  # each server is left the time to load torch and finish a trial
        for server in servers(process, mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
                n_killed += 1
    out, err = process.communicate()
    assert n_killed >= 2 and process.returncode in (0, 1) and "Traceback" not in err, err
    assert {row["status"] for row in tool.rows(tmp_path)} <= {"ok", "oom", "error", "killed"}
    assert tool.processes_marked(mark) == []
    code, out, err = tool.finish(tmp_path, *tool.SWEEP, "--rounds", "1")
    assert code == 0, err


@pytest.mark.prove
def test_a_server_killed_while_a_trial_starts_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_signed = forkserver.read_signed
    n_reads = 0

    def killed_once(target: int) -> int:
        nonlocal n_reads
        n_reads += 1
        if n_reads == 1:
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
            raise EOFError("unexpected EOF")
        return int(read_signed(target))

    monkeypatch.setattr(forkserver, "read_signed", killed_once)
    tool.write_study(tmp_path, isolated=True)
    assert Launcher().probe(f"replay:{tmp_path / 'script.json'}")["name"] == "scripted"
    assert n_reads > 1
