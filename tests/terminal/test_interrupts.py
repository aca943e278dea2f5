"""Ctrl-C at any moment, start-up included: exit 130, no traceback, and what was measured is kept."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prove import tool
from tests.terminal import screen

RUN = ("sweep", "study.yaml", "--layers", "2..3", "--device", "replay:script.json")

WHEN_IMPORTED = """
import sys

class CtrlC:
    when = sys.argv.pop(1)

    def find_spec(self, name, path=None, target=None):
        if name == self.when:
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
if __name__ == "__main__":
    from ckbench.cli import main
    main()
"""


MODULES = (
    "typer.core", "pydantic", "ckbench.reports.console", "typer", "ckbench.errors", "ckbench.study", "yaml",
    "ckbench.session", "scipy.special", "rich.console",
)  # fmt: skip


@pytest.mark.parametrize("module", tool.some(3, *MODULES))
def test_while_python_loads(study: Path, module: str) -> None:
    """Ctrl-C in the middle of an import, which takes most of a start."""
    command = [sys.executable, "-c", WHEN_IMPORTED, module, *RUN]
    done = subprocess.run(command, cwd=study, env=tool.environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 25


def interrupt(folder: Path, after_s: float) -> tuple[int, str]:
    """Send Ctrl-C to the tool some time after Python itself has started."""
    process = tool.start(folder, *RUN, "--resume")
    try:
        out, err = process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return process.returncode, out


@pytest.mark.prove
def test_at_forty_random_moments(tmp_path: Path) -> None:
    draw = random.Random(7)
    tool.write_study(tmp_path, step_s=0.004)
    codes = set()
    for i in range(40):
        if i % 5 == 0:
            tool.write_study(tmp_path, step_s=0.004 + i / 1e6)
        code, out = interrupt(tmp_path, 0.3 + 2.5 * draw.random())
        assert code in (0, 130) or (code == -signal.SIGINT and not out), "Python itself was still starting"
        codes.add(code)
        done = [line for lines in tool.complete_lines(tmp_path).values() for line in lines]
        assert len(done) == len(tool.rows(tmp_path))
    assert 130 in codes


def test_in_a_terminal_while_the_device_is_looked_for(study: Path) -> None:
    """Ctrl-C reaches every process of the terminal, the server that loads torch among them; none prints a traceback."""
    code, written = screen.run(study, "run", "study.yaml", "--device", "cpu", keys=[(1.8, b"\x03")])
    assert code in (130, -signal.SIGINT)
    assert "Traceback" not in written


@pytest.mark.prove
@pytest.mark.parametrize("after_s", [1.5, 2.0, 3.0, 4.5, 6.0, 8.0, 12.0])
def test_in_a_terminal_at_any_moment(study: Path, after_s: float) -> None:
    more = ("--set", "run.max_seconds=30", "--set", "run.max_steps=100000", "--set", "run.precision_target=0.00001")
    code, written = screen.run(study, "run", "study.yaml", "--device", "cpu", *more, keys=[(after_s, b"\x03")])
    assert code in (130, -signal.SIGINT)
    assert "Traceback" not in written
