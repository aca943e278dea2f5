"""Two tools on one results folder: one measures, the other is told so in one line, and no lines mix."""

import json
import time
from pathlib import Path

import pytest

from tests.prove import tool

TOLD = "results: another ckbench is writing there; wait for it or use --out elsewhere\n"
SWEEP = ("sweep", "study.yaml", "--layers", "2..4", "--rounds", "1")


def test_the_second_is_told_and_the_first_goes_on(tmp_path: Path) -> None:
    tool.write_study(tmp_path, step_s=0.006)
    first = tool.start(tmp_path, *SWEEP)
    deadline = time.monotonic() + 60
    while not any(tool.complete_lines(tmp_path).values()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    code, out, err = tool.finish(tmp_path, *SWEEP, "--resume")
    assert (code, out, err) == (2, "", TOLD)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    ((name, lines),) = tool.complete_lines(tmp_path).items()
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert len(lines) == len(tool.rows(tmp_path)) > 10


@pytest.mark.prove
def test_four_at_once(tmp_path: Path) -> None:
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        tool.write_study(folder, step_s=0.01)
        racing = [tool.start(folder, *SWEEP) for _ in range(4)]
        ended = [(*process.communicate(timeout=120), process.returncode) for process in racing]
        codes = sorted(code for *_, code in ended)
        assert codes[0] == 0 and set(codes) <= {0, 2}
        assert all((out, err) == ("", TOLD) for out, err, code in ended if code == 2)
        winners = codes.count(0)  # more than one where a slow starter came after the first had ended
        assert len(tool.complete_lines(folder)) == winners
        for lines in tool.complete_lines(folder).values():
            assert len({json.loads(line)["session_id"] for line in lines}) == 1
            assert len(lines) == len(tool.rows(folder)) // winners
