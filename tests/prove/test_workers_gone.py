"""kill -9 of the tool takes its worker processes with it, whatever they were doing."""

import random
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.prove import tool

N_PROVE = 6

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def kill_among_workers(folder: Path, n_times: int, longest_s: float) -> None:
    """Kill the tool while its fork server loads torch or a worker of its hangs in a step; look for survivors."""
    draw = random.Random(n_times)
    tool.write_study(folder, step_s=0.03, isolated=True)
    for i in range(n_times):
        mark = f"CKBENCH_MARK_{uuid.uuid4().hex}"
        process = tool.start(folder, *tool.SWEEP, env=tool.environment(CKBENCH_TEST=mark))
        if i == 0:  # at least once when a worker is surely at work
            wait_for_a_record(folder)
        else:
            time.sleep(longest_s * draw.random())
        assert tool.processes_marked(mark, wait_s=0)
        process.kill()
        process.communicate()
        assert tool.processes_marked(mark) == []


def wait_for_a_record(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not any(tool.complete_lines(folder).values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_worker_survives(tmp_path: Path) -> None:
    kill_among_workers(tmp_path, 1, 0)


@pytest.mark.prove
def test_no_worker_survives_at_any_moment(tmp_path: Path) -> None:
    kill_among_workers(tmp_path, N_PROVE, 12.0)
