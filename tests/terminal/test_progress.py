"""Progress in a real terminal: trial, phase and time left; nothing of it stays, and a dumb terminal gets plain lines."""

import re
from pathlib import Path

import pytest

from tests.prove import tool
from tests.terminal import screen

RUN = ("sweep", "study.yaml", "--layers", "2..3", "--rounds", "1")


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Write a study whose steps take so long that a screen is drawn several times in each trial."""
    tool.write_study(tmp_path, step_s=0.007)
    return tmp_path


@pytest.mark.parametrize("columns", tool.some(1, 40, 60, 80, 120, 200))
def test_it_shows_trial_phase_and_time_left_and_goes_away(slow: Path, columns: int) -> None:
    code, written = screen.run(slow, *RUN, columns=columns, NO_COLOR="1" if columns == 40 else "")
    assert code == 0
    drawn = [line.strip() for line in re.split(r"[\r\n]+|\x1b\[2K", screen.plain(written))]
    bars = [line for line in drawn if re.search(r"\d+/\d+", line)]
    assert bars and max(map(len, bars)) <= columns
    assert any(re.search(r"\d+ s left", line) for line in bars), bars[-3:]
    assert any(re.search(r"timing|warm-up", line) for line in bars), bars[-3:]
    assert any("per-block" in line for line in bars), bars[-3:]
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h"), "the cursor is shown again"
    end = screen.plain(written.rpartition("\x1b[?25h")[2])
    assert not re.search(r"\d s left", end) and "slower" in end
    assert bool(screen.COLOUR.search(written)) == (columns != 40)


@pytest.mark.prove
def test_no_colour_beats_forced_colour(slow: Path) -> None:
    code, written = screen.run(slow, *RUN, NO_COLOR="1", FORCE_COLOR="1")
    assert code == 0 and not screen.COLOUR.search(written)


def test_a_dumb_terminal_gets_plain_lines(slow: Path) -> None:
    code, written = screen.run(slow, *RUN, TERM="dumb")
    assert code == 0 and "\x1b" not in written
    assert re.search(r"\[1/\d+\] none .*left\r\n", written)
