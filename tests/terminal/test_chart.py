"""The memory-time chart under the table: in a real terminal, also one that knows ASCII only, and not where unwanted."""

from pathlib import Path

import pytest

from tests.prove import entry, tool
from tests.terminal import screen

SIGN = "lower left is better"
ASCII = {"LC_ALL": "C", "LANG": "", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_measuring_and_reporting_end_with_a_chart(study: Path) -> None:
    code, written = screen.run(study, "run", "study.yaml", "--rounds", "1", columns=80)
    text = screen.plain(written)
    assert code == 0 and SIGN in text and "●" in text
    assert max(map(len, text[text.index(SIGN) :].splitlines())) <= 80


@pytest.mark.parametrize(
    "command", tool.some(1, ("report", "results"), ("run", "study.yaml", "--rounds", "1")), ids=" ".join
)
def test_it_can_be_turned_off(measured: Path, study: Path, command: tuple[str, ...]) -> None:
    folder = measured if command[0] == "report" else study
    code, written = screen.run(folder, *command, "--no-plot", columns=80)
    assert code == 0 and "none" in written and SIGN not in written


def test_an_ascii_terminal_gets_ascii(measured: Path) -> None:
    code, written = screen.run(measured, "report", "results", columns=80, **ASCII)
    chart = screen.plain(written).partition(SIGN)[2]
    assert code == 0 and chart.isascii() and "* on the front" in chart and "?" not in chart


def test_a_narrow_terminal_and_a_pipe_get_none(measured: Path) -> None:
    assert SIGN in entry.call("report", str(measured / "results"), width=60).out
    assert SIGN not in entry.call("report", str(measured / "results"), width=59).out
    assert SIGN not in entry.call("report", str(measured / "results")).out
