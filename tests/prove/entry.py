"""The real entry point, called in this process under a time limit, and the manners every answer must have."""

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckbench import cli
from ckbench.launch import Launcher

LIMIT_S = 60.0
MAX_TRIALS = 5
MAX_LINE_CHARS = 2_000
EXIT_CODES = (0, 1, 2, 3, 130)
CAPS = (
    "--rounds=1", "--max-rounds=1", "--set=run.min_steps=1", "--set=run.max_steps=2", "--set=run.warmup_steps=1",
    "--set=run.max_seconds=1", "--set=run.pin=false",
)  # fmt: skip
"""What keeps a mutant that is still a valid study from real work: a scripted device answers in microseconds."""


@dataclass(frozen=True)
class Answer:
    """What one call of the command line left."""

    arguments: tuple[str, ...]
    code: int
    out: str
    err: str


class Hang(BaseException):
    """The time limit of one call is over; not an Exception, so that nothing takes it for a fault of its own."""


class Terminal(io.TextIOWrapper):
    """An output that says of itself that it is a terminal."""

    def isatty(self) -> bool:
        """Claim to be one."""
        return True


def call(*arguments: str, width: int | None = None, limit_s: float = LIMIT_S) -> Answer:
    """Call ``ckbench ARGUMENTS`` here; ``width`` makes standard output a terminal of that many columns.

    Whatever leaves ``main`` other than SystemExit is not caught: the test fails with it.
    """
    kind = io.TextIOWrapper if width is None else Terminal
    out, err = io.BytesIO(), io.BytesIO()
    streams = {
        "stdout": kind(out, encoding="utf-8", write_through=True),
        "stderr": io.TextIOWrapper(err, encoding="utf-8", errors="backslashreplace", write_through=True),
        "argv": ["ckbench", *arguments],
    }
    with (
        patched(sys, **streams),
        patched_environment(COLUMNS=None if width is None else str(width)),
        kept_signals(),
        time_limit(limit_s),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return Answer(arguments, code, out.getvalue().decode(errors="surrogatepass"), err.getvalue().decode())


@contextlib.contextmanager
def patched(thing: Any, **values: Any) -> Iterator[None]:
    """Set attributes for a while."""
    before = {name: getattr(thing, name) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


@contextlib.contextmanager
def patched_environment(**values: str | None) -> Iterator[None]:
    """Set environment variables for a while; None takes one away."""
    before = dict(os.environ)
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Put back the handlers that the command line installs."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Hang after a while; an alarm that was set before goes on with what it had left."""

    def ring(number: int, frame: object) -> None:
        raise Hang(f"no answer within {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, ring)
    begun = time.monotonic()
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(0.01, left - (time.monotonic() - begun)) if left else 0)
        signal.signal(signal.SIGALRM, handler)


def check_manners(answer: Answer, told: object = None) -> None:
    """Hold an answer against what every one of them promises; ``told`` is the input, for the failure's text."""
    about = (answer, told)
    assert answer.code in EXIT_CODES, about
    for text in (answer.out, answer.err):
        assert "Traceback" not in text, about
        assert steering(text) == set(), about
    is_usage = answer.err.startswith(("Usage:", "Error:"))
    for line in answer.err.splitlines():
        assert len(line) <= MAX_LINE_CHARS, about
        assert is_usage or (line.strip() and not line[0].isspace()), about
    if answer.code in (2, 3):
        assert answer.err and answer.out == "", about


def steering(text: str) -> set[str]:
    """List the characters that steer a terminal, hide or reorder text, or break a line where none was meant."""
    return {char for char in text if char != "\n" and not char.isprintable()}


def cap_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a session after a few trials, as Ctrl-C would, and do not wait for the disk."""
    run: Callable[..., Any] = Launcher.run

    class Capped(Launcher):
        n_runs = 0

        def run(self, *details: Any) -> Any:
            self.n_runs += 1
            if self.n_runs > MAX_TRIALS:
                raise KeyboardInterrupt
            return run(self, *details)

    monkeypatch.setattr("ckbench.launch.Launcher", Capped)
    monkeypatch.setattr(os, "fsync", lambda target: None)


def records_below(folder: Path) -> list[Path]:
    """List result files."""
    return sorted(folder.rglob("*.jsonl"))
