"""Ctrl-C at any moment, start-up included: exit 130, no traceback, and what was measured is kept."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.prove import tool
from tests.terminal import screen

N_MOMENTS = 24
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


SWAP = """
    def swap(self):
        import os, signal, time
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            raise ImportError("failed to import") from None

"""

LOSE = """
    def lose(self):
        class Lost:
            def __del__(self):
                import os, signal, time
                os.kill(os.getpid(), signal.{signal})
                time.sleep(1)
        Lost()

"""

MODULES = (
    "typer.core", "pydantic", "ckbench.reports.console", "typer", "ckbench.errors", "ckbench.study", "yaml",
    "ckbench.session",
)  # fmt: skip


@pytest.mark.parametrize("module", tool.some(3, *MODULES))
def test_while_python_loads(study: Path, module: str) -> None:
    """Ctrl-C in the middle of an import, which takes most of a start."""
    command = [sys.executable, "-c", WHEN_IMPORTED, module, *RUN]
    done = subprocess.run(command, cwd=study, env=tool.environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 25


def test_where_an_import_makes_another_error_of_it(study: Path) -> None:
    """As compiled packages do, numpy for one: Ctrl-C comes out of them as an ImportError."""
    raising = WHEN_IMPORTED.replace("raise KeyboardInterrupt", "self.swap()").replace(
        "    def find_spec", SWAP + "    def find_spec"
    )
    command = [sys.executable, "-c", raising, "ckbench.reports.console", *RUN]
    done = subprocess.run(command, cwd=study, env=tool.environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 130 and done.stderr.endswith("interrupted\n"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_where_python_can_raise_nothing(study: Path, name: str) -> None:
    """In a destructor, or compiled code that asks Python for something: Python prints the interrupt and would go on."""
    losing = WHEN_IMPORTED.replace("raise KeyboardInterrupt", "self.lose()").replace(
        "    def find_spec", LOSE.replace("{signal}", name) + "    def find_spec"
    )
    command = [sys.executable, "-c", losing, "ckbench.session", *RUN]
    done = subprocess.run(command, cwd=study, env=tool.environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


@pytest.mark.parametrize("told", tool.some(1, ("HUP", 0), ("INT", 0), ("", 130)), ids=str)
def test_what_is_ignored_stays_ignored(tmp_path: Path, told: tuple[str, int]) -> None:
    """As nohup does for a closed terminal, and shells do with Ctrl-C for what runs in the background."""
    ignored, code = told
    tool.write_study(tmp_path, step_s=0.005)
    script = f"trap '' {ignored or 'USR1'}; exec {sys.executable} -m ckbench {' '.join(RUN)} --rounds 1"
    process = subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env=tool.environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not any(tool.complete_lines(tmp_path).values()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT if ignored == "INT" else signal.SIGHUP)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert ("interrupted: the table is incomplete" in err) == (code == 130)


@pytest.mark.prove
def test_at_random_moments(tmp_path: Path) -> None:
    draw = random.Random(7)
    tool.write_study(tmp_path, step_s=0.004)
    begun = time.monotonic()
    assert tool.finish(tmp_path, *RUN)[0] == 0
    whole_s = time.monotonic() - begun
    codes = []
    for i in range(N_MOMENTS):
        process = tool.start(tmp_path, *RUN, "--resume", "--set", f"run.seed={i // 3}")
        try:
            _, err = process.communicate(timeout=whole_s * (0.15 + 0.9 * draw.random()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert "Traceback" not in err, err
        assert process.returncode in (0, 130, -signal.SIGINT), "the last where Python itself was starting or ending"
        codes.append(process.returncode)
        lines = [line for lines in tool.complete_lines(tmp_path).values() for line in lines]
        assert len(lines) == len(tool.rows(tmp_path))
    assert codes.count(130) >= N_MOMENTS // 4
    print(f"{len(codes)} starts, {codes.count(130)} of them interrupted")


@pytest.mark.prove
@pytest.mark.parametrize("after_s", [1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 8.0, 12.0])
def test_in_a_terminal_at_any_moment(study: Path, after_s: float) -> None:
    """Ctrl-C reaches every process of the terminal, the server that loads torch among them; none prints a traceback."""
    more = ("--set", "run.max_seconds=30", "--set", "run.max_steps=100000", "--set", "run.precision_target=0.00001")
    code, written = screen.run(study, "run", "study.yaml", "--device", "cpu", *more, keys=[(after_s, b"\x03")])
    assert code in (130, -signal.SIGINT)
    assert "Traceback" not in written
