"""Options that several commands share, and how they are read."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ckbench.errors import ConfigError

StrategyOption = Annotated[
    list[str] | None,
    typer.Option("--strategy", "-s", help="Measure this strategy instead of the file's; repeat for more."),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
OutOption = Annotated[Path, typer.Option("--out", help="Results folder.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a key: section.key=value; repeatable.")]
RoundsOption = Annotated[int | None, typer.Option("--rounds", help="Fresh processes per strategy.")]
MaxRoundsOption = Annotated[
    int | None, typer.Option("--max-rounds", help="Add rounds up to this many until slowdowns are precise enough.")
]
PinOption = Annotated[bool, typer.Option("--pin", help="Pin workers to as many CPUs as they have threads.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="One round, few steps: a first look, not a result.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Count out of memory as a failure (exit 1).")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Skip trials that ended ok or oom before.")]
RetryOomOption = Annotated[bool, typer.Option("--retry-oom", help="With --resume: try again what ended oom before.")]
EstimatesOption = Annotated[
    bool, typer.Option("--estimates/--no-estimates", help="Put an estimated peak beside each measured one.")
]
SkipOomOption = Annotated[
    bool, typer.Option("--skip-oom", help="Do not start trials that by their estimate cannot fit.")
]
NoPlotOption = Annotated[
    bool, typer.Option("--no-plot", help="No memory-time chart under the table (pipes and files never get one).")
]
FormatOption = Annotated[
    str, typer.Option("--format", help="console, md, latex, csv or json; of stored results also html and plots.")
]

QUICK = ("run.rounds=1", "run.max_rounds=1", "run.min_steps=6", "run.max_steps=60", "run.max_seconds=1")


def sets_of(
    device: str | None, given: list[str] | None, rounds: int | None, max_rounds: int | None, pin: bool, quick: bool
) -> tuple[str, ...]:
    """Gather overrides; what is said most specifically comes last and wins. Raises ConfigError for no device."""
    if device is not None and not re.fullmatch(r"auto|cpu|cuda(:\d+)?|replay:.+", device):
        raise ConfigError(f"--device {device!r}: auto, cpu, cuda or cuda:N")
    sets = [*(QUICK if quick else ()), *(given or [])]
    asked = {"rounds": rounds, "max_rounds": max_rounds, "pin": "true" if pin else None, "device": device}
    sets += [f"run.{key}={value}" for key, value in asked.items() if value is not None]
    return tuple(sets)


def parse_strategies(texts: list[str] | None) -> tuple[Any, ...]:
    """Read --strategy values: a spec as typed, or a YAML mapping in braces."""
    from ckbench.marked_yaml import read_value

    return tuple(read_value(text) if text.lstrip().startswith("{") else text for text in texts or ())
