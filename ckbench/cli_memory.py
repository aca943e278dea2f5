"""Commands that answer without running a step: estimate and explain."""

from pathlib import Path
from typing import Annotated

import typer

from ckbench import output
from ckbench.errors import EXIT_TRIAL_FAILED, CkbenchError
from ckbench.options import SetOption, StrategyOption, parse_strategies


def estimate(
    file: Annotated[Path | None, typer.Argument(help="Study file (YAML); left out: the base of a sweep.")] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help='Card it must fit, as "A100 40GB", or a size as 24GiB.')
    ] = None,
    layers: Annotated[str | None, typer.Option("--layers", help="As in sweep: 2..48.")] = None,
    width: Annotated[str | None, typer.Option("--width", help="As in sweep.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", help="As in sweep.")] = None,
    seq_len: Annotated[str | None, typer.Option("--seq-len", help="As in sweep.")] = None,
    strategy: StrategyOption = None,
    device: Annotated[str, typer.Option("--device", help="cuda or cpu: whose memory to estimate.")] = "cuda",
    set_: SetOption = None,
    method: Annotated[
        str, typer.Option("--method", help="replay, chain (equal blocks, any depth), or auto: chain from 64 layers on.")
    ] = "auto",
    format_: Annotated[str, typer.Option("--format", help="console, md or json.")] = "console",
) -> None:
    """Estimate peak memory without a GPU.

    A step is replayed on tensors that have no data.
    """
    import json

    from ckbench import estimating, examples, reporting, study, sweeping
    from ckbench.cards import card_bytes
    from ckbench.launch import Launcher

    if device not in ("cuda", "cpu"):
        raise CkbenchError(f"--device {device!r}: cuda or cpu")
    output.check_format(format_, ("console", "md", "json"))
    if method not in ("auto", "replay", "chain"):
        raise CkbenchError(f"--method {method!r}: auto, replay or chain")
    card = None if gpu is None else card_bytes(gpu)
    given = {"layers": layers, "width": width, "batch": batch, "seq-len": seq_len}
    is_swept = any(value is not None for value in given.values())
    if file is None and not is_swept:
        raise CkbenchError("give a study file, or a range such as --layers 2..48")
    loaded = study.load(
        file or examples.path("sweep_base.yaml"),
        sets=tuple(set_ or ()),
        strategies=parse_strategies(strategy),
        swept=sweeping.parse_axes(given, None) if is_swept else {},
    )
    estimated = estimating.estimate_study(
        loaded, device, Launcher(), card[0] if card else None, lambda made: output.tell(estimating.told(made)), method
    )
    drawn = estimating.table(loaded, device, estimated, card)
    if format_ == "json":
        output.write(json.dumps([row.values for row in drawn.rows], indent=1) + "\n")
    else:
        output.write(reporting.draw_table(drawn, format_=format_, width=output.width()))
    if all(each.estimate.reason is not None for each in estimated):
        raise typer.Exit(EXIT_TRIAL_FAILED)


def explain(
    file: Annotated[Path, typer.Argument(help="Study file (YAML).")],
    strategy: StrategyOption = None,
    diff: Annotated[
        tuple[str, str] | None, typer.Option("--diff", help="Two strategies: what the second keeps otherwise.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Groups to show.")] = 12,
    device: Annotated[str, typer.Option("--device", help="cuda or cpu: whose step to explain.")] = "cuda",
    real: Annotated[bool, typer.Option("--real", help="Run the step on this CPU instead of replaying it.")] = False,
    set_: SetOption = None,
    format_: Annotated[str, typer.Option("--format", help="console or json.")] = "console",
) -> None:
    """Show what autograd keeps and who owns the peak.

    Module by module, and what recomputation brings back; without a GPU.
    """
    import json

    from ckbench import explaining, study
    from ckbench.launch import Launcher

    if device not in ("cuda", "cpu"):
        raise CkbenchError(f"--device {device!r}: cuda or cpu")
    output.check_format(format_, ("console", "json"))
    kind = "real" if real else device
    asked = list(diff) if diff else strategy
    loaded = study.load(file, sets=tuple(set_ or ()), strategies=parse_strategies(asked))
    point = loaded.points("cpu" if real else device)[0]
    configs = [point.config(spec) for spec in point.strategies]
    if not diff and strategy is None:
        configs = configs[:1]
    made = explaining.explain_configs(configs, kind, Launcher(), output.tell)
    if format_ == "json":
        output.write(json.dumps(made, indent=1) + "\n")
        return
    width = output.width()
    if diff:
        output.write(explaining.draw_difference(made[0], made[1], top=top, width=width))
        return
    for i, explanation in enumerate(made):
        output.write("\n" if i else "")
        output.write(explaining.draw(explanation, kind, top=top, width=width))


COMMANDS = (estimate, explain)
