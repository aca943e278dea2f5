"""A real terminal for the tool: a pseudo-terminal of a given width, and what was written to it."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from tests.prove import tool

TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Run by the child: makes the terminal its own, so that Ctrl-C typed there reaches it, and becomes the tool."""
ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


def run(
    folder: Path,
    *arguments: str,
    columns: int = 80,
    keys: Sequence[tuple[float, bytes]] = (),
    timeout_s: float = 120.0,
    program: Sequence[str] = ("-m", "ckbench"),
    **environment: str,
) -> tuple[int, str]:
    """Run ``ckbench ARGUMENTS`` in a terminal of its own; ``keys`` are typed after so many seconds.

    Gives the exit code and everything written.
    """
    command = [sys.executable, *program, *arguments]
    if tool.measures(arguments):
        command += ["--device", "replay:script.json"]
    variables = tool.environment(**{"TERM": "xterm-256color", "LANG": "C.UTF-8", **environment})
    variables = {name: value for name, value in variables.items() if value != ""}
    terminal, inside = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    starter = [sys.executable, "-I", "-S", "-c", TAKE_TERMINAL, *command]
    process = subprocess.Popen(
        starter, cwd=folder, env=variables, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
    )
    os.close(inside)
    written = b""
    begun = time.monotonic()
    waiting = list(keys)
    while time.monotonic() - begun < timeout_s:
        if waiting and time.monotonic() - begun > waiting[0][0]:
            os.write(terminal, waiting.pop(0)[1])
        if not select.select([terminal], [], [], 0.05)[0]:
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not data:
            break
        written += data
    os.close(terminal)
    return process.wait(timeout=timeout_s), written.decode("utf-8", "replace")


def plain(written: str) -> str:
    """Take the control sequences out."""
    return ESCAPE.sub("", written).replace("\r\n", "\n")
