"""Show how a session goes, on standard error: a bar in a terminal, a line per trial elsewhere."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from ckbench.output import tell
from ckbench.records import Record
from ckbench.session import Job, Watcher
from ckbench.units import format_bytes, format_duration, format_ms

ROOM_FOR_A_BAR = 100


class Lines:
    """One plain line per trial that has ended; no control characters."""

    def __init__(self) -> None:
        self.n_jobs = self.n_done = 0

    def begin(self, n_jobs: int, n_resumed: int) -> None:
        """Say how many trials there are."""
        self.n_jobs = n_jobs
        tell(opening(n_jobs, n_resumed))

    def trial(self, job: Job, phase: str) -> None:
        """Say nothing about phases."""

    def done(self, job: Job, record: Record, left_s: float | None) -> None:
        """Say how a trial ended."""
        self.n_done += 1
        tell(f"[{self.n_done}/{self.n_jobs}] {outcome(job, record)}; {format_duration(left_s)} left")

    def say(self, line: str) -> None:
        """Write the line."""
        tell(line)


class Bar:
    """A progress bar with trial, phase and time left."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        self.task: Any = None

    def begin(self, n_jobs: int, n_resumed: int) -> None:
        """Start the bar."""
        self.progress.console.print(opening(n_jobs, n_resumed), markup=False, highlight=False)
        self.task = self.progress.add_task("starting", total=n_jobs, phase="", left="")

    def trial(self, job: Job, phase: str) -> None:
        """Name the trial and its phase."""
        self.progress.update(self.task, description=title(job), phase=phase)

    def done(self, job: Job, record: Record, left_s: float | None) -> None:
        """Move on."""
        self.progress.update(self.task, advance=1, left=f"{format_duration(left_s)} left")
        if record.status != "ok":
            self.say(outcome(job, record))

    def say(self, line: str) -> None:
        """Write the line above the bar."""
        self.progress.console.print(line, markup=False, highlight=False)


def opening(n_jobs: int, n_resumed: int) -> str:
    """Say how many trials will run."""
    resumed = f", {n_resumed} are there from before" if n_resumed else ""
    return f"{n_jobs} trials to run{resumed}; the first waits for PyTorch to load"


def title(job: Job) -> str:
    """Name a trial."""
    place = f" ({job.place})" if job.place else ""
    return f"{job.config.strategy.label}{place}, round {job.round + 1} of {job.config.run.rounds}"


def outcome(job: Job, record: Record) -> str:
    """Say how a trial ended, in one line."""
    if record.status != "ok":
        return f"{title(job)}: {record.status} in {record.failed_phase or 'the trial'}"
    peak = "" if record.peak_allocated_bytes is None else f", peak {format_bytes(record.peak_allocated_bytes)}"
    return f"{title(job)}: ok, {format_ms(record.step_s_median)} ms per step{peak}"


@contextlib.contextmanager
def watcher() -> Iterator[Watcher]:
    """Give a bar where standard error is a terminal that can move its cursor, else plain lines."""
    if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
    from rich.table import Column

    console = Console(stderr=True)
    # Where space is short, the trial's name gives way: not the count, the phase or the time left
    name = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns: list[ProgressColumn] = [
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.description}", markup=False, table_column=name),
        TextColumn("{task.fields[phase]}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
    ]
    if console.width >= ROOM_FOR_A_BAR:
        columns.insert(0, BarColumn(bar_width=20))
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        yield Bar(progress)
