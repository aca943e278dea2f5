"""Estimate a study's peaks without its device, and lay them out like a measured table."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckbench.cards import usable_bytes, workspace_bytes
from ckbench.compare import Row
from ckbench.config import RunConfig
from ckbench.errors import NothingFits, PlanError
from ckbench.estimate.allocator import has_expandable_segments
from ckbench.estimates import Estimate
from ckbench.launch import Launcher, enter_child, last_line
from ckbench.planning import Planner
from ckbench.study import Study
from ckbench.table import HEADER_KEYS, Column, Table, cell
from ckbench.units import UNKNOWN, format_bytes, format_count, format_mib, format_percent

TIMEOUT_S = 3600.0
ENDED = "the process of the estimate ended"


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """One strategy at one point of a study, and what it would take."""

    config: RunConfig
    varied: tuple[tuple[str, Any], ...]
    estimate: Estimate


def estimate_configs(
    configs: Sequence[RunConfig],
    kind: str,
    launcher: Launcher,
    card: str | None,
    tell: Callable[[Estimate], None],
    method: str = "auto",
    planner: Planner | None = None,
) -> list[Estimate]:
    """Estimate in a child process; one that takes the child down is given a reason, and the rest goes on in another."""
    configs, refused = _planned(configs, planner or Planner(kind, launcher, card=card))
    done: list[Estimate] = []
    library_bytes = workspace_bytes(card) if kind == "cuda" else 0
    while len(done) < len(configs):
        left = [config.model_dump(mode="json") for config in configs[len(done) :]]
        request = json.dumps({"configs": left, "kind": kind, "workspace_bytes": library_bytes, "method": method})

        def follow(text: str) -> None:
            done.append(Estimate(**json.loads(text)))
            tell(done[-1])

        answer, process, tail = launcher.converse(_entry, request, TIMEOUT_S, follow)
        if answer is None and len(done) < len(configs):
            reason = f"{ENDED}: {last_line(tail, process)}"
            done.append(Estimate(strategy=configs[len(done)].strategy.label, reason=reason))
            tell(done[-1])
    for place, estimate in sorted(refused.items()):
        done.insert(place, estimate)
        tell(estimate)
    return done


def _planned(configs: Sequence[RunConfig], planner: Planner) -> tuple[list[RunConfig], dict[int, Estimate]]:
    """Give the configs with the planner's plans, and by its place an estimate without figures where it has none."""
    found, refused = [], {}
    for place, config in enumerate(configs):
        try:
            found.append(planner.planned(config))
        except (NothingFits, PlanError) as error:
            refused[place] = Estimate(strategy=config.strategy.label, reason=str(error))
    return found, refused


def told(estimate: Estimate) -> str:
    """Give a line about a finished estimate."""
    if estimate.reason is not None:
        return f"{estimate.strategy}: not estimated: {estimate.reason}"
    return f"{estimate.strategy}: {format_bytes(estimate.peak_allocated_bytes)} in {estimate.peak_phase}"


def _entry(connection: Any, text: str, log: str) -> None:
    enter_child(connection, log)
    from ckbench.estimate.worker import serve

    serve(connection, text)


def estimate_study(
    study: Study,
    kind: str,
    launcher: Launcher,
    card: str | None,
    tell: Callable[[Estimate], None],
    method: str = "auto",
) -> list[Estimated]:
    """Estimate every strategy at every point; ``method`` is auto, replay or chain."""
    asked = [(point.config(spec), point.varied) for point in study.points(kind) for spec, _, _ in point.plans()]
    estimates = estimate_configs([config for config, _ in asked], kind, launcher, card, tell, method)
    return [
        Estimated(config=config, varied=varied, estimate=estimate)
        for (config, varied), estimate in zip(asked, estimates, strict=True)
    ]


def table(study: Study, kind: str, estimated: list[Estimated], card: tuple[str, int] | None) -> Table:
    """Lay estimates out; with a card each row says whether it fits."""
    base = {e.varied: e.estimate.peak_allocated_bytes for e in estimated if e.config.strategy.label == "none"}
    rows = [Row(values=row_json(e, base.get(e.varied), card), rounds={}, group="", records=[]) for e in estimated]
    failures = [
        f"{e.config.strategy.label}: not estimated: {e.estimate.reason}" for e in estimated if e.estimate.reason
    ]
    keys = tuple(key for key, _ in estimated[0].varied)
    return Table(
        header=_header(study, kind, estimated, card, keys),
        columns=_columns(keys, kind, card),
        rows=rows,
        failures=failures,
        doubts=[],
        skipped=[],
    )


def _header(
    study: Study, kind: str, estimated: list[Estimated], card: tuple[str, int] | None, keys: tuple[str, ...]
) -> list[str]:
    first = estimated[0].config
    lines = [f"study {study.name}, estimated: no step was run"]
    for section, names in HEADER_KEYS.items():
        values = getattr(first, section).model_dump(mode="json")
        told = [
            f"{name} {cell(values.get(name))}"
            for name in names
            if f"{section}.{name}" not in keys and values.get(name) is not None
        ]
        lines.append(f"{section}: {', '.join(told)}")
    n_parameters = next((e.estimate.n_parameters for e in estimated if e.estimate.n_parameters), None)
    if n_parameters is not None:
        lines[1] += f"; {format_count(n_parameters)} parameters"
    if kind == "cuda":
        modelled = "allocator modelled" + (" with expandable segments" if has_expandable_segments() else "")
        lines.append(f"CUDA: {modelled}, {format_bytes(workspace_bytes(card[0] if card else None))} for cuBLAS")
    else:
        lines.append("CPU: tensor bytes; kernels' own scratch memory is not in them")
    if card is not None:
        lines.append(f"card: {card[0]}, {format_bytes(usable_bytes(card[1]))} for tensors of {format_bytes(card[1])}")
    return lines


def _columns(keys: tuple[str, ...], kind: str, card: tuple[str, int] | None) -> list[Column]:
    def mib(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda values: format_mib(values[key])

    columns = [
        Column(key=key, head=key.partition(".")[2], text=lambda v, key=key: cell(v[key]), priority=0)  # type: ignore[misc]
        for key in keys
    ]
    columns += [
        Column(key="strategy", head="strategy", text=lambda v: str(v["strategy"]), priority=0, is_number=False),
        Column(key="peak_allocated_bytes", head="est. peak MiB", text=mib("peak_allocated_bytes"), priority=1),
        Column(key="peak_phase", head="owner", text=lambda v: v["peak_phase"] or UNKNOWN, priority=4, is_number=False),
        Column(key="change", head="change", text=lambda v: format_percent(v["change"]), priority=3),
        Column(key="static_bytes", head="static MiB", text=mib("static_bytes"), priority=6),
        Column(key="gradient_bytes", head="gradients MiB", text=mib("gradient_bytes"), priority=8),
        Column(key="saved_bytes", head="saved MiB", text=mib("saved_bytes"), priority=5),
        Column(key="transient_bytes", head="transient MiB", text=mib("transient_bytes"), priority=7),
        Column(key="first_step_peak_bytes", head="first step MiB", text=mib("first_step_peak_bytes"), priority=9),
    ]
    if kind == "cuda":
        columns.append(
            Column(key="peak_reserved_bytes", head="reserved MiB", text=mib("peak_reserved_bytes"), priority=5)
        )
    if card is not None:
        columns += [
            Column(key="fits", head="fits", text=lambda v: v["fits"] or UNKNOWN, priority=2, is_number=False),
            Column(key="margin_bytes", head="margin MiB", text=mib("margin_bytes"), priority=3),
        ]
    return columns


def row_json(estimated: Estimated, base_bytes: int | None, card: tuple[str, int] | None) -> dict[str, Any]:
    """Give one estimate as plain data.

    ``transient_bytes`` is what the peak holds besides static bytes, and besides what is saved where the blocks still
    hold it: in the loss phase all of it, in backward less and less, so there it counts from nothing saved.
    """
    values: dict[str, Any] = {**dict(estimated.varied), **vars(estimated.estimate)}
    peak, static, saved = (values[key] for key in ("peak_allocated_bytes", "static_bytes", "saved_bytes"))
    values["change"] = peak / base_bytes - 1 if peak is not None and base_bytes else None
    kept = saved if values["peak_phase"] == "loss" else 0
    values["transient_bytes"] = None if peak is None else max(0, peak - static - kept)
    values["fits"] = values["margin_bytes"] = None
    if card is not None:
        values["fits"], values["margin_bytes"] = verdict(estimated.estimate, card[1])
    return values


def verdict(estimate: Estimate, total_bytes: int) -> tuple[str | None, int | None]:
    """Say whether a trial fits a card (yes, tight, no) and how much of it is left.

    Tight: tensors fit, and what the allocator would like to hold besides does not, so it has to free and try again.
    """
    needed = estimate.needed_bytes()
    if needed is None:
        return None, None
    usable = usable_bytes(total_bytes)
    if needed > usable:
        return "no", usable - needed
    is_tight = estimate.peak_reserved_bytes is not None and estimate.peak_reserved_bytes > usable
    return "tight" if is_tight else "yes", usable - needed
