"""Show where the bytes of a step are: what autograd keeps, who owns the peak, what a strategy drops and brings back."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from ckbench.compare import Row
from ckbench.config import RunConfig
from ckbench.errors import CkbenchError
from ckbench.launch import Launcher, enter_child, last_line
from ckbench.planning import Planner
from ckbench.reporting import draw_table
from ckbench.table import Column, Table
from ckbench.units import counted, format_bytes, format_mib, format_percent

TIMEOUT_S = 3600.0
SMALLEST_BYTES = 1024
"""A difference that would be shown as nothing is left out."""
BARS = " ▁▂▃▄▅▆▇█"
WHOSE = {"cuda": "on CUDA, estimated", "cpu": "on the CPU, estimated", "real": "on the CPU, in a real step"}


def explain_configs(
    configs: Sequence[RunConfig], kind: str, launcher: Launcher, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Explain each config in a child process; ``kind`` is cuda, cpu or real.

    Raises CkbenchError where one cannot be explained.
    """
    planner = Planner("cpu" if kind == "real" else kind, launcher)
    configs = [planner.planned(config) for config in configs]
    request = json.dumps({"configs": [config.model_dump(mode="json") for config in configs], "kind": kind})
    made: list[dict[str, Any]] = []

    def follow(text: str) -> None:
        made.append(json.loads(text))
        tell(f"{made[-1]['strategy']}: {'cannot be explained' if 'reason' in made[-1] else 'explained'}")

    answer, process, tail = launcher.converse(_entry, request, TIMEOUT_S, follow)
    for explanation in made:
        if "reason" in explanation:
            raise CkbenchError(f"{explanation['strategy']} cannot be explained: {explanation['reason']}")
    if answer is None:
        raise CkbenchError(f"the process of the explanation ended: {last_line(tail, process)}")
    return made


def _entry(connection: Any, text: str, log: str) -> None:
    enter_child(connection, log)
    from ckbench.estimate.explain import serve

    serve(connection, text)


def draw(explanation: dict[str, Any], kind: str, *, top: int, width: int | None) -> str:
    """Write one strategy's explanation for people."""
    saved = explanation["saved"]
    in_blocks = sum(group["bytes"] for group in saved if group["in_blocks"])
    n_layers = explanation["n_layers"]
    peak, static = explanation["peak_bytes"], explanation["static_bytes"]
    kept = Table(
        header=[
            f"{explanation['strategy']}: what autograd keeps after forward, {WHOSE[kind]}",
            f"{format_bytes(explanation['saved_bytes'])} in all, {format_bytes(in_blocks)} of it in {n_layers} blocks",
        ],
        columns=_columns(explanation["saved_bytes"], n_layers),
        rows=_rows(saved[:top]),
        failures=[],
        doubts=[],
        skipped=[],
    )
    owners = Table(
        header=[
            f"peak {format_bytes(peak)} in {explanation['peak_phase']}, at {explanation['peak_op']}; "
            f"{format_bytes(static)} of it static" + (", before the allocator rounds" if kind == "cuda" else ""),
        ],
        columns=_columns(peak, n_layers, with_category=True),
        rows=_rows(_merged(explanation["peak"])[:top]),
        failures=[],
        doubts=[],
        skipped=[],
    )
    brought = [group for group in explanation["recomputed"] if group["in_blocks"]]
    lines = [draw_table(kept, width=width), _more(saved, top), "", draw_table(owners, width=width), ""]
    lines.append(f"live bytes over the step (highest {format_bytes(peak)}):")
    lines += timeline(explanation["timeline"], min(width or 100, 100), BARS)
    if brought:
        total = format_bytes(sum(group["bytes"] for group in brought))
        back = Table(
            header=[f"made again in backward: {total}"],
            columns=_columns(sum(group["bytes"] for group in brought), n_layers),
            rows=_rows(brought[:top]),
            failures=[],
            doubts=[],
            skipped=[],
        )
        lines += ["", draw_table(back, width=width), _more(brought, top)]
    return "\n".join(line.rstrip("\n") for line in lines if line is not None) + "\n"


def draw_difference(first: dict[str, Any], second: dict[str, Any], *, top: int, width: int | None) -> str:
    """Write what the second strategy keeps less or more than the first, group by group."""
    before, after = _by_key(first["saved"]), _by_key(second["saved"])
    changed = []
    for key in {**before, **after}:
        was, now = before.get(key), after.get(key)
        group = dict(now or was or {})
        group["bytes"] = (now["bytes"] if now else 0) - (was["bytes"] if was else 0)
        group["count"] = (now["count"] if now else 0) - (was["count"] if was else 0)
        if abs(group["bytes"]) >= SMALLEST_BYTES:
            changed.append(group)
    changed.sort(key=lambda group: group["bytes"])
    saved = second["saved_bytes"] - first["saved_bytes"]
    peak = second["peak_bytes"] - first["peak_bytes"]
    table = Table(
        header=[
            f"{second['strategy']} against {first['strategy']}",
            f"kept after forward {_signed(saved)}, peak {_signed(peak)} "
            f"({first['peak_phase']} to {second['peak_phase']})",
        ],
        columns=_columns(None, second["n_layers"]),
        rows=_rows(changed[:top]),
        failures=[],
        doubts=[],
        skipped=[],
    )
    return draw_table(table, width=width) + (_more(changed, top) or "")


def _signed(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else ''}{format_bytes(n_bytes)}"


def _by_key(groups: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(g["in_blocks"], g["module"], g["op"], tuple(g["shape"]), g["dtype"]): g for g in groups}


def _merged(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put what the training step holds anyway into one row per category, and leave the rest apart."""
    merged: dict[str, dict[str, Any]] = {}
    rest = []
    for group in groups:
        if group["category"] in ("saved", "transient"):
            rest.append(group)
            continue
        row = merged.setdefault(
            group["category"],
            {
                **group,
                "module": group["category"],
                "op": "",
                "shape": [],
                "dtype": "",
                "in_blocks": False,
                "count": 0,
                "bytes": 0,
            },
        )
        row["count"] += group["count"]
        row["bytes"] += group["bytes"]
    return sorted([*merged.values(), *rest], key=lambda group: -group["bytes"])


def _rows(groups: list[dict[str, Any]]) -> list[Row]:
    return [Row(values=group, rounds={}, group="", records=[]) for group in groups]


def _more(groups: list[dict[str, Any]], top: int) -> str | None:
    left = groups[top:]
    if not left:
        return None
    n_bytes = sum(group["bytes"] for group in left)
    return f"and {counted(len(left), 'group')} more, {format_bytes(n_bytes)}; --top shows them"


def _columns(total: int | None, n_layers: int, *, with_category: bool = False) -> list[Column]:
    def where(values: dict[str, Any]) -> str:
        if not values["in_blocks"]:
            return str(values["module"])
        n_blocks = len(values["blocks"])
        blocks = (
            "every block"
            if n_blocks == n_layers
            else f"block {values['blocks'][0]}"
            if n_blocks == 1
            else f"{n_blocks} blocks"
        )
        return f"{values['module']}, {blocks}"

    columns = [Column(key="bytes", head="MiB", text=lambda v: format_mib(v["bytes"]), priority=0)]
    if total:
        columns.append(
            Column(
                key="share", head="share", text=lambda v: format_percent(v["bytes"] / total, signed=False), priority=3
            )
        )
    if with_category:
        columns.append(
            Column(key="category", head="for", text=lambda v: str(v["category"]), priority=1, is_number=False)
        )
    columns += [
        Column(key="strategy", head="where", text=where, priority=0, is_number=False),
        Column(key="op", head="made by", text=lambda v: str(v["op"]), priority=3, is_number=False),
        Column(key="shape", head="shape", text=lambda v: "x".join(map(str, v["shape"])), priority=4, is_number=False),
        Column(key="dtype", head="type", text=lambda v: str(v["dtype"]), priority=5, is_number=False),
        Column(key="count", head="number", text=lambda v: str(v["count"]), priority=6),
    ]
    return columns


def timeline(points: list[dict[str, Any]], width: int, bars: str) -> list[str]:
    """Draw live bytes over the step as one line of bars from the smallest to the largest, and name the phases below."""
    high = max(point["live_bytes"] for point in points)
    low = min(point["live_bytes"] for point in points)
    columns = min(width, len(points))
    cells = [points[i * len(points) // columns : max((i + 1) * len(points) // columns, 1)] for i in range(columns)]
    drawn, phases = "", []
    for cell in cells:
        level = max(point["live_bytes"] for point in cell)
        drawn += bars[round((level - low) / max(1, high - low) * (len(bars) - 1))]
        phases.append(cell[0]["phase"])
    names = ""
    for i, phase in enumerate(phases):
        if i == 0 or phases[i - 1] != phase:
            names = names.ljust(i) + phase + " "
    return [drawn, names[:width].rstrip()]
