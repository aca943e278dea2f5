"""The command plan: the fastest plan within a budget, the whole front, or the largest size that fits."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ckbench import output
from ckbench.errors import CkbenchError, NothingFits
from ckbench.options import DeviceOption, OutOption, SetOption, StrategyOption, parse_strategies, sets_of
from ckbench.units import clean, format_bytes


def plan(
    file: Annotated[Path, typer.Argument(help="Study file (YAML).")],
    budget: Annotated[
        str | None,
        typer.Option("--budget", help='Peak to stay within: 16GiB, "A100 40GB", or 80% of what none takes.'),
    ] = None,
    front: Annotated[bool, typer.Option("--front", help="Show the best plan for every peak.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Measure the answer beside none; with --front the study's strategies.")
    ] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Write the plan to this file (YAML).")] = None,
    costs: Annotated[
        str, typer.Option("--costs", help="Where seconds come from: auto, measured, a card, or a results folder.")
    ] = "auto",
    max_: Annotated[
        str | None, typer.Option("--max", help="batch, seq-len or layers: instead, find the largest that fits.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="With --max: between sizes; 1, and 64 for seq-len.")
    ] = None,
    by_estimate: Annotated[
        bool, typer.Option("--estimate", help="With --max: search by estimates, without running a step.")
    ] = False,
    strategy: StrategyOption = None,
    device: DeviceOption = None,
    out: OutOption = Path("results"),
    set_: SetOption = None,
    format_: Annotated[str, typer.Option("--format", help="console or json; with --max also md.")] = "console",
) -> None:
    """Find the fastest plan within a memory budget.

    With --max the largest batch, sequence or depth that fits it.
    """
    if max_ is not None:
        _misplaced("--max", {"--front": front, "--verify": verify, "--save": save, "--costs": costs != "auto"})
        _largest(file, max_, budget, step, by_estimate, strategy, device, out, set_, format_)
        return
    _misplaced("a plan", {"--step": step is not None, "--estimate": by_estimate})
    if strategy and not (front and verify):
        raise CkbenchError("--strategy has nothing to do here: a plan is no strategy's; it goes with --front --verify")
    output.check_format(format_, ("console", "json"))
    if budget is None and not front:
        raise CkbenchError('give --budget, as 16GiB, 80% or "A100 40GB"; or --front, or --max')
    if front:
        _misplaced("--front", {"--save": save, "--budget": budget})
        _front(file, costs, device, out, set_, format_, parse_strategies(strategy) if verify else None)
        return
    assert budget is not None
    _planned(file, budget, costs, device, out, set_, format_, save, verify)


def _misplaced(beside: str, given: dict[str, Any]) -> None:
    idle = [name for name, value in given.items() if value]
    if idle:
        raise CkbenchError(f"{' and '.join(idle)} has nothing to do beside {beside}; leave it out")


def _kind(device: str | None) -> str:
    kind = (device or "cuda").partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise CkbenchError(f"--device {device!r}: a plan is for cuda or cpu")
    return kind


def _planner(kind: str, costs: str, budget: str | None) -> Any:
    """Give a planner for the card that the budget names, or else the costs."""
    from ckbench import store
    from ckbench.cards import CARDS_MIB, card_name
    from ckbench.launch import Launcher
    from ckbench.planning import Planner
    from ckbench.registry import did_you_mean

    records, of_costs = None, card_name(costs)
    if costs not in ("auto", "measured") and of_costs is None:
        if not Path(costs).exists():
            hint = did_you_mean(costs, ("auto", "measured", *CARDS_MIB))
            raise CkbenchError(f"--costs {costs!r}: auto, measured, the name of a card, or a results folder{hint}")
        records, _ = store.read(Path(costs))
    of_budget = None if budget is None else card_name(budget)  # where it names one, that is the one it runs on
    return Planner(kind, Launcher(), card=of_budget or of_costs, costs=costs, records=records)


def _first_config(file: Path, kind: str, set_: list[str] | None) -> Any:
    from ckbench import study

    loaded = study.load(file, sets=tuple(set_ or ()), strategies=("none",))
    points = loaded.points(kind)
    if len(points) > 1:
        output.tell(f"{file.name} has {len(points)} points; the plan is for the first, --set chooses another")
    return points[0].config(points[0].strategies[0])


def _planned(
    file: Path,
    budget: str,
    costs: str,
    device: str | None,
    out: Path,
    set_: list[str] | None,
    format_: str,
    save: Path | None,
    verify: bool,
) -> None:
    import json

    from ckbench import planfile, planning_text
    from ckbench.cards import read_budget

    kind = _kind(device)
    read_budget(budget, 1)  # refused before anything is said of probing; a share is of what that finds
    config = _first_config(file, kind, set_)
    planner = _planner(kind, costs, budget)
    if save is not None and (save.is_dir() or not save.absolute().parent.is_dir()):
        raise CkbenchError(f"--save {clean(str(save))}: a directory, or in none")
    output.tell("probing what every way to run a block keeps and takes")
    budget_bytes = planner.budget_of(config, budget)
    try:
        found = planner.plan(config, budget_bytes)
    except NothingFits as error:
        if format_ == "json":
            told = {"feasible": False, "budget_bytes": budget_bytes, "least_budget_bytes": error.least_bytes}
            output.write(json.dumps({**told, "reason": str(error)}, indent=1) + "\n")
        raise
    if save is not None:
        made_for = {
            **{"model": config.model.model_dump(mode="json"), "train": config.train.model_dump(mode="json")},
            **{"device": kind, "budget_bytes": budget_bytes, "predicted_peak_bytes": found.peak_bytes},
            **{"predicted_slowdown_ratio": round(found.slowdown_ratio, 6), "seconds_from": found.source},
        }
        planfile.write_plan(save, found.plan, made_for)
        output.tell(f"plan: {clean(str(save))}")
    if format_ != "json":
        output.write(planning_text.draw(found))
    measured = _verified(file, f"budget:{budget.strip()}", planner, device, out, set_) if verify else None
    if format_ == "json":
        output.write(json.dumps(planning_text.as_json(found) | {"measured": measured}, indent=1) + "\n")
    elif measured is not None:
        peak = measured["peak_allocated_bytes"]
        within = "within" if peak <= found.budget_bytes else "ABOVE"
        output.write(
            f"measured  peak {format_bytes(peak)} ({peak - found.peak_bytes:+d} bytes), {within} the budget;\n"
            f"          step time {_told_ratio(measured)}\n"
        )
        output.tell(f"records: {clean(str(out))}; `ckbench report {clean(str(out))}` shows them with their doubts")


def _verified(
    file: Path, label: str, planner: Any, device: str | None, out: Path, set_: list[str] | None
) -> dict[str, Any]:
    """Measure the plan beside none; give what the prediction is about, the first step's peak included."""
    rows = _measured(file, ("none", label), planner, device, out, set_)
    row = next(row for row in rows if row["strategy"] == label)
    if row["status"] != "ok":
        raise CkbenchError(f"measured: {row['status']}: {row['message']}")
    peaks = [row[key] for key in ("peak_allocated_bytes", "first_step_peak_bytes") if row[key] is not None]
    told = ("slowdown_ratio", "slowdown_low", "slowdown_high", "rounds", "parity")
    return {"peak_allocated_bytes": max(peaks), **{key: row[key] for key in told}}


def _told_ratio(measured: dict[str, Any]) -> str:
    """Say how much slower the plan was, and how well that is known."""
    ratio, low, high = (measured[key] for key in ("slowdown_ratio", "slowdown_low", "slowdown_high"))
    if ratio is None:
        return "n/a"
    known = f"95 %: {low:.3f} to {high:.3f}" if low is not None else "one round has no interval"
    return f"{ratio:.3f} times that of none ({known})"


def _measured(
    file: Path, strategies: tuple[Any, ...], planner: Any, device: str | None, out: Path, set_: list[str] | None
) -> list[dict[str, Any]]:
    """Measure strategies, the file's own where none are given, on the kind of device that the plan is for.

    Raises CkbenchError for a study of several points: the plan is for one.
    """
    from ckbench import study
    from ckbench.compare import compare
    from ckbench.progress import watcher
    from ckbench.session import run_session

    sets = sets_of(device or planner.kind, set_, None, None, False, False)
    loaded = study.load(file, sets=sets, strategies=strategies)
    if len(loaded.points(planner.kind)) > 1:
        raise CkbenchError(f"{file.name} varies something, and --verify measures one point: choose it with --set")
    with watcher() as watching:
        session = run_session(loaded, out=out, launcher=planner.launcher, watcher=watching, planner=planner)
    return [row.values for row in compare(session.records).rows]


def _front(
    file: Path,
    costs: str,
    device: str | None,
    out: Path,
    set_: list[str] | None,
    format_: str,
    verified: tuple[Any, ...] | None,
) -> None:
    """Draw the front; ``verified`` are strategies to measure beside it, the file's own where empty, None for no."""
    import json

    from ckbench import planning_text
    from ckbench.planner.solve import front

    kind = _kind(device)
    config = _first_config(file, kind, set_)
    planner = _planner(kind, costs, None)
    rows = [] if verified is None else _measured(file, verified, planner, device, out, set_)
    measured = [row for row in rows if row["status"] == "ok"]
    probed = planner.probed(config)
    points = front(probed.chain)
    if format_ == "json":
        output.write(json.dumps(planning_text.front_json(probed, points, measured), indent=1) + "\n")
    else:
        output.write(planning_text.draw_front(probed, points, measured))


def _largest(
    file: Path,
    max_: str,
    budget: str | None,
    step: int | None,
    by_estimate: bool,
    strategy: list[str] | None,
    device: str | None,
    out: Path,
    set_: list[str] | None,
    format_: str,
) -> None:
    """Find, per strategy, the largest size that fits, and its throughput."""
    import json

    from ckbench import largest, registry, reporting, study
    from ckbench.launch import Launcher

    if max_ not in largest.AXES:
        raise CkbenchError(f"--max {max_!r}{registry.did_you_mean(max_, largest.AXES)}")
    output.check_format(format_, ("console", "md", "json"))
    card, budget_bytes = _budget(budget)
    sets = sets_of(None if by_estimate else device, set_, None, None, False, False)
    loaded = study.load(file, sets=sets, strategies=parse_strategies(strategy))
    session = None
    if by_estimate:
        kind = (device or "cuda").partition(":")[0]
        if kind not in ("cuda", "cpu"):
            raise CkbenchError(f"--device {device!r}: estimates are for cuda or cpu")
        if budget_bytes is None:
            raise CkbenchError('--estimate needs --budget, a size or a card, for example --budget "A100 40GB"')
        answers = largest.estimate_largest(
            loaded,
            max_,
            kind,
            budget_bytes=budget_bytes,
            card=card,
            step=step,
            launcher=Launcher(),
            tell=output.tell,
        )
    else:
        answers, session = largest.find_largest(
            loaded, max_, budget_bytes=budget_bytes, step=step, out=out, launcher=Launcher(), tell=output.tell
        )
    drawn = largest.table(answers, max_, session, budget_bytes)
    if format_ == "json":
        output.write(json.dumps([row.values for row in drawn.rows], indent=1) + "\n")
    else:
        output.write(reporting.draw_table(drawn, format_=format_, width=output.width()))
    if session is not None:
        output.tell(f"records: {clean(str(session.path))}")


def _budget(text: str | None) -> tuple[str | None, int | None]:
    """Read the budget of a size: no share of none's peak, which is another for every size."""
    from ckbench.cards import room
    from ckbench.errors import ConfigError

    if text is None:
        return None, None
    try:
        return room(text)
    except ConfigError as error:
        raise CkbenchError(f"--budget: {error}") from None


COMMANDS = (plan,)
