"""What a fresh process per trial costs, and that it is one."""

import statistics
from pathlib import Path

from ckbench.launch import Launcher
from tests.launch.test_faults import config, run

CHEAPER = 3.0
"""Least gain of a fork of the warm server over a cold interpreter; docs/reliability.md has what was measured."""


def test_a_warm_fork_is_far_cheaper_than_a_cold_interpreter() -> None:
    warm, cold = Launcher(), Launcher("spawn")
    warm.probe("cpu")
    forked = [run(warm, config()).startup_s for _ in range(5)]
    spawned = [run(cold, config()).startup_s for _ in range(2)]
    assert all(s is not None for s in (*forked, *spawned))
    middle = statistics.median(s for s in forked if s)
    print(f"from request to first step: forked {middle:.3f} s, spawned {min(s for s in spawned if s):.3f} s")
    assert middle * CHEAPER < min(s for s in spawned if s)


def test_the_parent_touches_no_device_and_imports_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    from tests.launch.test_faults import environment

    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\n"
        "from ckbench.launch import Launcher\n"
        "if __name__ == '__main__':\n"
        "    Launcher().probe('cpu')\n"
        "    print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, str(script)], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
