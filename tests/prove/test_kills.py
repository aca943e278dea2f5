"""kill -9 of the whole tool at any moment: no finished record is lost or doubled; --resume ends with the same table."""

import random
import subprocess
import time
from pathlib import Path

import pytest

from ckbench import store
from tests.prove import entry, tool

N_FAST, N_PROVE = 10, 100
MAX_ATTEMPTS = 100


def kill_until(n_kills: int, folder: Path, *more: str, step_s: float) -> int:
    """Measure a study again and again, each time killed at random moments and resumed until it is done.

    Gives how often it was done.
    """
    draw = random.Random(20261129)
    whole = folder / "whole"
    whole.mkdir()
    tool.write_study(whole, step_s=step_s)
    begun = time.monotonic()
    code, table, err = tool.finish(whole, *tool.SWEEP, *more)
    whole_s = time.monotonic() - begun
    assert code == 0, err
    killed = n_done = n_cut = 0
    while killed < n_kills:
        n_done += 1
        broken = folder / f"broken{n_done}"
        broken.mkdir()
        tool.write_study(broken, step_s=step_s)
        seen: dict[str, list[bytes]] = {}
        for _ in range(MAX_ATTEMPTS):
            process = tool.start(broken, *tool.SWEEP, *more)
            try:
                out, err = process.communicate(timeout=whole_s * (0.1 + draw.random()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                killed += 1
                seen = still_there(broken, seen)
                continue
            assert process.returncode == 0, err
            break
        else:
            pytest.fail(f"not done after {MAX_ATTEMPTS} attempts")
        still_there(broken, seen)
        n_cut += len(store.read(broken / "results")[1])
        assert tool.rows(broken) == tool.rows(whole)
        assert tool.lasting(out) == tool.lasting(table)
        shown = entry.call("report", str(broken / "results")).out
        assert tool.lasting(unused_left_out(shown)) == tool.lasting(table)
    print(f"{killed} kills, {n_done} studies of {len(tool.rows(whole))} records finished, {n_cut} lines cut, 0 lost")
    return n_done


def still_there(folder: Path, seen: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
    """Check that complete lines are all still there and readable, and that at most one line a file is cut."""
    now = tool.complete_lines(folder)
    for name, lines in seen.items():
        assert now[name][: len(lines)] == lines
    if (folder / "results").exists():
        records, skipped = store.read(folder / "results")
        assert len(records) == sum(map(len, now.values()))
        reasons = {"cut short (the write was interrupted)", "empty file"}
        assert len(skipped) <= len(now) and all(skip.reason in reasons for skip in skipped)
        done = [(r["configuration_id"], r["round"]) for r in records if r["status"] in ("ok", "oom")]
        assert len(done) == len(set(done)), "one finished record per configuration and round"
        answer = entry.call("report", str(folder / "results"))
        entry.check_manners(answer)
        assert answer.code == (0 if records else 2)
    return now


def unused_left_out(text: str) -> str:
    """Take the list of cut lines from a report; the table of the run itself has none."""
    return text.partition("\nnot used:\n")[0]


def test_ten_kills(tmp_path: Path) -> None:
    kill_until(N_FAST, tmp_path, "--rounds", "1", "--layers", "2..3", step_s=0.001)


@pytest.mark.prove
def test_a_hundred_kills(tmp_path: Path) -> None:
    n_done = kill_until(N_PROVE, tmp_path, "--layers", "2..3", step_s=0.002)
    assert n_done >= 3
