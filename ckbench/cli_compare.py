"""The command that compares two sets of results, for people and for continuous integration."""

from pathlib import Path
from typing import Annotated

import typer

from ckbench import output
from ckbench.units import clean

EXIT_WORSE = 1
FORMATS = ("console", "md", "json")


def compare(
    a: Annotated[Path, typer.Argument(help="Results before: a folder, or one .jsonl file.")],
    b: Annotated[Path, typer.Argument(help="Results after.")],
    fail_above: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-above",
            help="Exit 1 where B is above A by more than this beyond doubt: step:3% or peak:1%; repeatable.",
        ),
    ] = None,
    allow_different_device: Annotated[
        bool, typer.Option("--allow-different-device", help="Pair rows of devices with different names.")
    ] = False,
    format_: Annotated[str, typer.Option("--format", help="console, md or json.")] = "console",
) -> None:
    """Compare two sets of results row by row.

    Exit 1 only where an interval lies wholly above a threshold.
    """
    from ckbench import comparing, comparing_text, store

    output.check_format(format_, FORMATS)
    thresholds = comparing.parse_thresholds(fail_above or ())
    sets, skipped = [], []
    for path in (a, b):
        records, passed_over = store.read_some(path)
        sets.append(records)
        skipped += passed_over
    paired = comparing.compare_sets(sets[0], sets[1], thresholds, allow_different_device=allow_different_device)
    output.write(comparing_text.draw(paired, (a, b), skipped, format_=format_, width=output.width()))
    if thresholds:
        output.tell(clean(comparing_text.summary(paired)))
    if paired.is_failed:
        raise typer.Exit(EXIT_WORSE)


COMMANDS = (compare,)
