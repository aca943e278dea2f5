"""The command that measures what articles and papers claim, and the verdicts over stored records."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ckbench import output
from ckbench.errors import EXIT_INTERRUPTED
from ckbench.options import DeviceOption, PinOption, ResumeOption, RoundsOption, SetOption, sets_of


def claims(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Measure this study of configs/articles alone; repeatable.")
    ] = None,
    device: DeviceOption = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of records and estimates.")] = Path("results/claims"),
    set_: SetOption = None,
    rounds: RoundsOption = None,
    pin: PinOption = False,
    resume: ResumeOption = False,
    format_: Annotated[str, typer.Option("--format", help="console, md or json.")] = "console",
) -> None:
    """Put what articles and papers claim to the test.

    Measures and estimates, and prints a verdict on each claim.
    """
    from ckbench.claims import making
    from ckbench.claims.drawing import FORMATS
    from ckbench.launch import Launcher
    from ckbench.progress import watcher
    from ckbench.session import exit_code

    output.check_format(format_, FORMATS)
    names = making.chosen(only)
    launcher = Launcher()
    sets = sets_of(device, set_, rounds, None, pin, False)
    sessions = making.measure(
        names, out=out, sets=sets, launcher=launcher, watching=watcher, tell=output.tell, resume=resume
    )
    codes = [exit_code(session, strict=False) for session in sessions]
    if EXIT_INTERRUPTED not in codes:
        making.estimate(names, out=out, launcher=launcher, tell=output.tell)
    output.write(verdicts(out, format_=format_, width=output.width()))
    if any(codes):
        raise typer.Exit(max(codes))


def refuse_with_claims(given: dict[str, Any]) -> None:
    """Refuse options that shape tables and would do nothing to verdicts. Raises CkbenchError."""
    from ckbench.errors import CkbenchError

    named = [name for name, value in given.items() if value]
    if named:
        raise CkbenchError(f"--claims judges by whole studies; leave {' and '.join(named)} out")


def verdicts(path: Path, *, format_: str, width: int | None) -> str:
    """Judge every claim by what is stored below a folder. Raises StoreError and ConfigError."""
    from ckbench.claims import drawing, evidence
    from ckbench.claims.catalogue import judge

    output.check_format(format_, drawing.FORMATS)
    found, skipped = evidence.read(path)
    judged = [(each, judge(each)) for each in found]
    return drawing.draw(judged, format_=format_, source=path.as_posix(), skipped=skipped, width=width)


COMMANDS = (claims,)
