"""The command line: parse, call one function, print. Torch and pydantic come in only with the commands."""

import io
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer

    from ckbench import __version__, cli_claims, cli_compare, cli_plan, interrupts, output
    from ckbench.cli_memory import COMMANDS
    from ckbench.errors import EXIT_INTERRUPTED, CkbenchError
    from ckbench.options import (
        DeviceOption,
        EstimatesOption,
        FormatOption,
        MaxRoundsOption,
        NoPlotOption,
        OutOption,
        PinOption,
        QuickOption,
        ResumeOption,
        RetryOomOption,
        RoundsOption,
        SetOption,
        SkipOomOption,
        StrategyOption,
        StrictOption,
        parse_strategies,
        sets_of,
    )
    from ckbench.units import clean
except KeyboardInterrupt:  # Ctrl-C while Python still loads: main cannot catch it yet
    sys.exit(130)

app = typer.Typer(
    name="ckbench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Benchmark activation checkpointing (recomputing instead of keeping activations) for transformers.",
)


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="Study file (YAML).")],
    strategy: StrategyOption = None,
    device: DeviceOption = None,
    out: OutOption = Path("results"),
    set_: SetOption = None,
    rounds: RoundsOption = None,
    max_rounds: MaxRoundsOption = None,
    pin: PinOption = False,
    quick: QuickOption = False,
    strict: StrictOption = False,
    resume: ResumeOption = False,
    retry_oom: RetryOomOption = False,
    estimates: EstimatesOption = True,
    skip_oom: SkipOomOption = False,
    format_: FormatOption = "console",
    no_plot: NoPlotOption = False,
) -> None:
    """Measure the strategies of a study, print the table."""
    from ckbench import study

    loaded = study.load(
        file, sets=sets_of(device, set_, rounds, max_rounds, pin, quick), strategies=parse_strategies(strategy)
    )
    how = {"resume": resume, "retry_oom": retry_oom, "estimates": estimates, "skip_oom": skip_oom}
    _measure(loaded, how, out=out, strict=strict, format_=format_, charts=not no_plot)


@app.command()
def sweep(
    file: Annotated[Path | None, typer.Argument(help="Base study; left out: a built-in one.")] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="model.n_layers: 2..48 (both ends), 2..48:2, 2..48x2, 2,4,8.")
    ] = None,
    width: Annotated[str | None, typer.Option("--width", help="model.d_model, same syntax.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", help="train.batch_size, same syntax.")] = None,
    seq_len: Annotated[str | None, typer.Option("--seq-len", help="train.seq_len, same syntax.")] = None,
    heads: Annotated[str | None, typer.Option("--heads", help="model.n_heads, same syntax.")] = None,
    points: Annotated[int | None, typer.Option("--points", min=1, help="Thin each range to this many values.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the grid and how long it will take.")] = False,
    strategy: StrategyOption = None,
    device: DeviceOption = None,
    out: OutOption = Path("results"),
    set_: SetOption = None,
    rounds: RoundsOption = None,
    max_rounds: MaxRoundsOption = None,
    pin: PinOption = False,
    quick: QuickOption = False,
    strict: StrictOption = False,
    resume: ResumeOption = False,
    retry_oom: RetryOomOption = False,
    estimates: EstimatesOption = True,
    skip_oom: SkipOomOption = False,
    format_: FormatOption = "console",
    no_plot: NoPlotOption = False,
) -> None:
    """Measure over a range of sizes.

    Of the model or the training step; ranges include both ends.
    """
    from ckbench import examples, study, sweeping

    given = {"layers": layers, "width": width, "batch": batch, "seq-len": seq_len, "heads": heads}
    swept = sweeping.parse_axes(given, points)
    path = file or examples.path("sweep_base.yaml")
    loaded = study.load(
        path,
        sets=sets_of(device, set_, rounds, max_rounds, pin, quick),
        strategies=parse_strategies(strategy),
        swept=swept,
    )
    if dry_run:
        from ckbench.launch import Launcher

        output.write(sweeping.describe(loaded, Launcher()))
        return
    how = {"resume": resume, "retry_oom": retry_oom, "estimates": estimates, "skip_oom": skip_oom}
    _measure(loaded, how, out=out, strict=strict, format_=format_, charts=not no_plot)


for _command in (*COMMANDS, *cli_plan.COMMANDS, *cli_compare.COMMANDS, *cli_claims.COMMANDS):
    app.command()(_command)


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="Results folder, or one .jsonl file.")],
    format_: FormatOption = "console",
    no_plot: NoPlotOption = False,
    group_by: Annotated[
        str | None,
        typer.Option("--group-by", help="Key to make a table per value of, e.g. model.n_layers or strategy."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Strategy that ratios are to; none by default.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every session, not only the newest per configuration.")] = False,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", help='Memory to judge rows by, as 16GiB or "A100 40GB"; repeatable.'),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write instead of standard output; a folder for several.")
    ] = None,
    claims: Annotated[
        bool, typer.Option("--claims", help="Verdicts on what articles claim; --format console, md or json.")
    ] = False,
) -> None:
    """Rebuild tables, or an HTML page, from records.

    Nothing is measured.
    """
    from ckbench import reporting

    if claims:
        cli_claims.refuse_with_claims(
            {"--group-by": group_by, "--baseline": baseline, "--all": all_, "--budget": budget}
        )
        width = output.width() if out is None else None
        reporting.deliver(cli_claims.verdicts(path, format_=format_, width=width), format_=format_, out=out)
        return
    drawn = reporting.report(
        path,
        format_=format_,
        group_by=group_by,
        baseline=baseline,
        all_sessions=all_,
        budgets=budget or (),
        charts=not no_plot,
        width=output.width() if out is None else None,
    )
    reporting.deliver(drawn, format_=format_, out=out)


@app.command("list")
def list_(shelf: Annotated[str | None, typer.Argument(help="strategies, models, devices or reports.")] = None) -> None:
    """List strategies, model families, devices and report formats."""
    from ckbench import registry

    shelves = (shelf,) if shelf else registry.SHELVES
    for name in shelves:
        if name not in registry.SHELVES:
            raise CkbenchError(f"unknown shelf {name!r}{registry.did_you_mean(name, registry.SHELVES)}")
        output.write(f"{name}\n")
        for plugin in registry.names(name):
            output.write_wrapped(f"  {registry.summary(name, plugin)}\n".replace("``", "`"))


@app.command()
def doctor(device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto") -> None:
    """Say what can be measured here.

    Device, driver, versions, NVML, clocks, and what will be n/a and why.
    """
    from ckbench import doctor as examination

    output.write_wrapped(examination.examine(device))


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="Where to write the example studies.")] = Path("configs")) -> None:
    """Write the example studies into a folder.

    Existing files are left alone.
    """
    from ckbench import examples

    for line in examples.write(folder):
        output.write(line + "\n")


@app.command()
def schema() -> None:
    """Print the JSON schema of study files, for editors."""
    from ckbench import study_schema

    output.write(study_schema.text())


def _version(value: bool) -> None:
    if value:
        output.write(f"ckbench {__version__}\n")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Benchmark activation checkpointing (recomputing instead of keeping activations) for transformers."""


def _measure(loaded: Any, how: dict[str, Any], *, out: Path, strict: bool, format_: str, charts: bool) -> None:
    """Run a study, print its table, and end with the exit code that tells how it went."""
    from ckbench import reporting, session
    from ckbench.launch import Launcher
    from ckbench.progress import watcher

    reporting.text_report(format_)
    if how["retry_oom"] and not how["resume"]:
        raise CkbenchError("--retry-oom needs --resume")
    launcher = Launcher(loaded.points("cuda")[0].run.start_method)
    with watcher() as watching:
        result = session.run_session(loaded, out=out, launcher=launcher, watcher=watching, **how)
    text = reporting.draw(result.records, format_=format_, charts=charts, width=output.width())
    output.write(text)
    output.tell(f"records: {clean(str(result.path))}" if result.records else "no trial was finished")
    if result.is_interrupted:
        output.tell("interrupted: the table is incomplete; --resume goes on with it")
    code = session.exit_code(result, strict=strict)
    if code:
        raise typer.Exit(code)


def main() -> NoReturn:
    """Run the command line; errors of ours become one line each and an exit code."""
    output.open_closed_streams()
    came = interrupts.end_cleanly_on_signals()
    try:
        code = app(standalone_mode=False)
    except CkbenchError as error:
        output.tell(str(error))
        code = error.exit_code
    except OSError as error:  # what no command foresees, such as a full folder of temporary files
        where = f"{error.filename}: " if error.filename else ""
        output.tell(str(CkbenchError(f"{where}{error.strerror or error}")))
        code = CkbenchError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        output.tell("interrupted")
        code = EXIT_INTERRUPTED
    except Exception as error:
        # Typer's usage errors: it ships its own click, so they are known by what they can do
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            told = io.StringIO()
            error.show(file=told)
            output.tell("\n".join(map(clean, told.getvalue().splitlines())))
            code = error.exit_code
        elif came:  # in the middle of an import, where numpy makes an ImportError of Ctrl-C
            output.tell("interrupted")
            code = EXIT_INTERRUPTED
        else:
            raise
    sys.exit(code if isinstance(code, int) else 0)
