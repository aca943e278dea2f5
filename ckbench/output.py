"""Standard output and error, whatever became of them: closed, full, narrow, ASCII only, or left by their reader."""

import contextlib
import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from ckbench.errors import CkbenchError, ConfigError
from ckbench.registry import did_you_mean

READER_HAS_LEFT = (errno.EPIPE, errno.EINVAL)  # Windows says EINVAL of a closed pipe
NEAREST_ASCII = str.maketrans("─·▁▂▃▄▅▆▇█│┤└┬┐┄┆●○×", "-*.:-=+*#@||+++-:*ox")


def open_closed_streams() -> None:
    """Give a stream that the caller has closed a place to write to; else the next file opened would be it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def write(text: str) -> None:
    """Write to standard output; what an ASCII-only terminal cannot show becomes its nearest sign, never an error."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(NEAREST_ASCII).encode(encoding, "replace").decode(encoding)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _give_up(sys.stdout)
        if error.errno not in READER_HAS_LEFT:  # `| head` is no fault, a full disk is one
            raise CkbenchError(f"standard output: cannot be written ({error.strerror})") from None


def tell(line: str) -> None:
    """Write one line to standard error; there is nobody to complain to where that fails."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except OSError:
        _give_up(sys.stderr)


def width() -> int | None:
    """Give the terminal's width; None where output goes to a file or a pipe, so that nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _give_up(stream: Any) -> None:
    """Let what is still buffered go nowhere; Python would try it again, and complain, when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_wrapped(text: str) -> None:
    """Write lines, on a terminal none wider than it: what follows hangs below a line's own text."""
    room = width()
    if room is not None:
        text = "".join(f"{piece}\n" for line in text.splitlines() for piece in _wrapped(line, max(room, 30)))
    write(text)


def _wrapped(line: str, room: int) -> list[str]:
    hang = " " * (len(line) - len(line.lstrip()) + 4)
    pieces = textwrap.wrap(line, room, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
    return pieces or [""]


def check_format(format_: str, known: Sequence[str]) -> None:
    """Refuse a format that a command does not write. Raises ConfigError."""
    if format_ not in known:
        raise ConfigError(f"--format {format_!r}{did_you_mean(format_, known)}")
