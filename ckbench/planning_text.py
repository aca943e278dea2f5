"""A plan for people: a picture of the stack, figures with their sources, neighbours and advice; and as plain data."""

import textwrap
from collections.abc import Sequence
from typing import Any

from ckbench.planfile import plan_data
from ckbench.planner.chain import Item
from ckbench.planner.letters import Letter
from ckbench.planner.solve import Solution
from ckbench.planning import Planned, Probed, advice, told_owner
from ckbench.units import clean, format_bytes

WIDTH = 80
CELLS = 50
"""Blocks per line of a picture."""
KEPT, RECOMPUTED, OFFLOADED, RECOMPUTED_OFFLOADED = "#", ".", "^", ","
SPAN, NESTED = "[-]", "{-}"
SELECTIVE = "abcdefghijklmnopqrstuvwxyz"


def draw(planned: Planned) -> str:
    """Give the answer as lines of at most 80 columns."""
    lines = [
        f"fastest plan within {format_bytes(planned.budget_bytes)}: {_proof(planned)}",
        "",
        *picture(planned.items),
        "",
        f"peak      {format_bytes(planned.peak_bytes)}, in {told_owner(planned.owner)}; {_checked(planned)}",
        f"step time {planned.slowdown_ratio:.3f} times that of keeping everything, predicted",
        f"floor     {format_bytes(planned.floor_bytes)}, in {told_owner(planned.floor_owner)}: no choice needs less",
    ]
    lines += [
        f"{label:<10}{_neighbour(planned, point)}"
        for label, point in (("cheaper", planned.cheaper), ("faster", planned.faster))
        if point is not None
    ]
    lines += [*_tight(planned), f"seconds   {planned.source}"]
    if planned.floor_owner in ("fixed", "head and loss"):
        lines.append(f"advice    {told_owner(planned.floor_owner)} own the floor: {advice(planned.floor_owner)}")
    elif planned.budget_bytes - planned.floor_bytes < planned.floor_bytes // 20:
        lines.append(f"advice    the budget is close to the floor: {advice(planned.floor_owner)}")
    lines += [f"left out  {text}" for text in planned.left_out]
    return "\n".join(part for line in lines for part in _wrapped(line)) + "\n"


def _wrapped(line: str) -> list[str]:
    """Break a line that is wider than a terminal below its own text."""
    indent = len(line) - len(line[10:].lstrip()) if line[:1].strip() else len(line) - len(line.lstrip()) + 2
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * min(indent, 10), drop_whitespace=True) or [""]


def _proof(planned: Planned) -> str:
    if planned.proven_optimal:
        return "proven optimal among its choices"
    return f"not proven optimal; at most {planned.gap:.2%} of a step slower than the best"


def _tight(planned: Planned) -> list[str]:
    """Say where the allocator would like to hold more than the budget; tensors fit all the same."""
    reserved = None if planned.estimate is None else planned.estimate.peak_reserved_bytes
    if reserved is None or reserved <= planned.budget_bytes:
        return []
    margin = planned.budget_bytes - planned.peak_bytes
    return [
        f"tight     {format_bytes(margin)} to spare; with what it keeps for reuse the allocator would hold "
        f"{format_bytes(reserved)}, so it has to free and try again; a smaller budget leaves a margin"
    ]


def _neighbour(planned: Planned, point: Solution) -> str:
    """Say how much less or more a neighbour takes; ratios with as many digits as tell them apart."""
    off, ratio, own = (
        (point.peak_bytes or 0) - planned.chain_peak_bytes,
        _slowdown(planned, point),
        planned.slowdown_ratio,
    )
    digits = next((n for n in range(3, 7) if f"{ratio:.{n}f}" != f"{own:.{n}f}"), 6)
    return f"{format_bytes(abs(off))} {'less' if off < 0 else 'more'} peak at {ratio:.{digits}f} times"


def _checked(planned: Planned) -> str:
    if planned.estimate is None:
        return "added up from its blocks: too deep to replay"
    return "replayed" if planned.estimate.method == "replay" else "replayed short: too deep to replay whole"


def _slowdown(planned: Planned, point: Solution) -> float:
    assert point.extra_s is not None
    return planned.chain.slowdown_ratio(point.extra_s)


def picture(items: Sequence[Item]) -> list[str]:
    """Draw one cell per block: what happens to it, and below the legend of the signs that occur.

    >>> from ckbench.plan import Region
    >>> plain = dict(kept_bytes=0, forward_peak_bytes=0, backward_peak_bytes=0, extra_s=0.0)
    >>> spans = [(0, 1, Region(start=0, stop=1)), (1, 4, Region(start=1, stop=4)), (4, 5, None)]
    >>> print(*picture([Item(start=a, stop=b, region=r, **plain) for a, b, r in spans]), sep="\\n")
      0  .[-]#
         # kept  . recomputed  [-] recomputed as one segment
    """
    names: dict[tuple[str, ...], str] = {}
    cells = "".join(_cells(item, names) for item in items)
    lines = [f"{at:>3}  {cells[at : at + CELLS]}" for at in range(0, len(cells), CELLS)]
    legend = [
        text
        for sign, text in (
            (KEPT, f"{KEPT} kept"),
            (RECOMPUTED, f"{RECOMPUTED} recomputed"),
            (OFFLOADED, f"{OFFLOADED} kept on the host"),
            (RECOMPUTED_OFFLOADED, f"{RECOMPUTED_OFFLOADED} recomputed, its input on the host"),
            (SPAN[0], f"{SPAN} recomputed as one segment"),
            (NESTED[0], f"{NESTED} segment, its blocks recomputed one by one in it"),
        )
        if sign in cells
    ]
    lines.append("     " + "  ".join(legend) if legend else "")
    for ops, sign in names.items():
        lines.append(f"     {sign} recomputed but for {', '.join(op.removeprefix('aten.') for op in ops)}")
    return [line for line in lines if line.strip()]


def _cells(item: Item, names: dict[tuple[str, ...], str]) -> str:
    region, n = item.region, item.stop - item.start
    if item.offload:
        return (OFFLOADED if region is None else RECOMPUTED_OFFLOADED) * n
    if region is None:
        return KEPT
    if region.save_ops:
        sign = names.setdefault(region.save_ops, SELECTIVE[len(names) % len(SELECTIVE)])
        return sign
    if n == 1:
        return RECOMPUTED
    signs = NESTED if region.children else SPAN
    return signs[0] + signs[1] * (n - 2) + signs[2]


def as_json(planned: Planned) -> dict[str, Any]:
    """Give the answer as plain data: bytes, ratios, the choices by block and the plan."""
    return {
        "feasible": True,
        "budget_bytes": planned.budget_bytes,
        "predicted_peak_bytes": planned.peak_bytes,
        "predicted_reserved_bytes": None if planned.estimate is None else planned.estimate.peak_reserved_bytes,
        "chain_peak_bytes": planned.chain_peak_bytes,
        "predicted_slowdown_ratio": planned.slowdown_ratio,
        "floor_bytes": planned.floor_bytes,
        "floor_owner": planned.floor_owner,
        "peak_owner": planned.owner,
        "proven_optimal": planned.proven_optimal,
        "gap": planned.gap,
        "method": planned.method,
        "checked_by": None if planned.estimate is None else planned.estimate.method,
        "seconds_from": planned.source,
        "choices": [{"start": item.start, "stop": item.stop, "choice": _name(item)} for item in planned.items],
        "cheaper": _point(planned, planned.cheaper),
        "faster": _point(planned, planned.faster),
        "left_out": list(planned.left_out),
        "plan": plan_data(planned.plan),
    }


def _name(item: Item) -> str:
    return Letter(n_blocks=item.stop - item.start, region=item.region, offload=item.offload).name


def _point(planned: Planned, point: Solution | None) -> dict[str, Any] | None:
    if point is None:
        return None
    return {"peak_bytes": point.peak_bytes, "predicted_slowdown_ratio": _slowdown(planned, point)}


MAX_FRONT_LINES = 24


def draw_front(probed: Probed, points: Sequence[Solution], measured: Sequence[dict[str, Any]] = ()) -> str:
    """Give the best plans from the lowest peak to the fastest, evenly thinned, one line each with its picture.

    ``measured``: rows of strategies, each set beside the best plan of no more peak.
    """
    shown = points
    if len(points) > MAX_FRONT_LINES:
        shown = [points[round(i * (len(points) - 1) / (MAX_FRONT_LINES - 1))] for i in range(MAX_FRONT_LINES)]
    lines = [f"{len(points)} plans that no other beats in both, {len(shown)} shown", "", "      peak   step time  plan"]
    for point in shown:
        assert point.items is not None and point.peak_bytes is not None and point.extra_s is not None
        ratio = probed.chain.slowdown_ratio(point.extra_s)
        lines.append(f"{format_bytes(point.peak_bytes):>10}  {ratio:>9.3f}x  {_short_picture(point.items)}")
    if measured:
        lines += ["", "  measured   step time  fastest plan of no more peak (predicted)"]
    for row in measured:
        beside = _beside(probed, points, row)
        peak, ratios = format_bytes(row["peak_allocated_bytes"]), ("slowdown_ratio", "front_slowdown_ratio")
        took, best = ("       n/a" if beside[key] is None else f"{beside[key]:>9.3f}x" for key in ratios)
        lines.append(f"{peak:>10}  {took} {best}  {clean(str(row['strategy']))}")
    lines += ["", f"      {LEGEND}", f"seconds: {probed.source}"]
    lines.append("peaks: added up from the blocks, before the allocator rounds")
    return "\n".join(lines) + "\n"


LEGEND = "# kept  ^ on the host  . recomputed  a-z kept in part  [-] segment  {-} nested segment"


def _beside(probed: Probed, points: Sequence[Solution], row: dict[str, Any]) -> dict[str, Any]:
    """Set a measured row beside the fastest plan whose predicted peak is no higher."""
    below = [p for p in points if p.peak_bytes is not None and p.peak_bytes <= row["peak_allocated_bytes"]]
    best = min((p.extra_s for p in below if p.extra_s is not None), default=None)
    return {
        "strategy": row["strategy"],
        "peak_allocated_bytes": row["peak_allocated_bytes"],
        "slowdown_ratio": row["slowdown_ratio"],
        "front_slowdown_ratio": None if best is None else probed.chain.slowdown_ratio(best),
    }


def _short_picture(items: Sequence[Item]) -> str:
    cells = "".join(_cells(item, {}) if item.region is None or not item.region.save_ops else "a" for item in items)
    return cells if len(cells) <= CELLS else f"{cells[: CELLS - 4]}..+{len(cells) - CELLS + 4}"


def front_json(probed: Probed, points: Sequence[Solution], measured: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Give the front as plain data."""
    return {
        "measured": [_beside(probed, points, row) for row in measured],
        "seconds_from": probed.source,
        "points": [
            {
                "peak_bytes": point.peak_bytes,
                "predicted_slowdown_ratio": probed.chain.slowdown_ratio(point.extra_s or 0.0),
                "proven_optimal": point.proven_optimal,
                "choices": [
                    {"start": item.start, "stop": item.stop, "choice": _name(item)} for item in point.items or ()
                ],
            }
            for point in points
        ],
    }
