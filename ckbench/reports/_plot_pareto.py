"""Figure: peak memory against step time of one group of rows, what is dominated dimmed, intervals of time as bars."""

import textwrap
from collections.abc import Sequence
from typing import Any

from ckbench.compare import Row
from ckbench.reports._pareto import WORDS, Standing, standings
from ckbench.reports._plot_labels import Label, Segment, place
from ckbench.reports._plot_style import BLUE, POINTS_PER_INCH, STANDING_COLOURS, memory_unit, new_figure
from ckbench.units import clean

HEIGHTS_INCHES = (2.4, 3.0, 3.7, 4.5)
LINE_POINTS = 9.0
KEY_CHARS = 56
BEYOND = 0.3
"""How far, in spans of the medians, an interval may push the axis; a longer one ends in an arrow at the frame."""
MARGIN = 0.12
ORDER: tuple[Standing, ...] = ("front", "undecided", "dominated")
KEYS = "abcdefghijklmnopqrstuvwxyz"


def draw(rows: Sequence[Row], title: str) -> Any:
    """Give the figure of measured rows of one group; it grows until every label has room of its own.

    Labels that find none even then are letters, explained under the axis.
    """
    points = _points(rows)
    for height in HEIGHTS_INCHES:
        figure, left_over = _draw(points, title, height, {})
        if not left_over:
            return figure
    short = set(left_over)
    while True:
        keys = {label: _key(i) for i, label in enumerate(sorted(short))}
        figure, left_over = _draw(points, title, HEIGHTS_INCHES[-1], keys)
        if not left_over:
            return figure
        if short.issuperset(left_over):
            return _draw(points, title, HEIGHTS_INCHES[-1], keys, left_over)[0]
        short.update(left_over)


def _key(number: int) -> str:
    return KEYS[number] if number < len(KEYS) else str(number)


def _points(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Gather rows at one place under one label, the front's first."""
    at: dict[tuple[float, float], dict[str, Any]] = {}
    for row, standing in zip(rows, standings(rows), strict=True):
        if standing is None:
            continue
        values = row.values
        where = values["peak_allocated_bytes"], values["step_s_median"]
        if where in at:
            at[where]["label"] += f" = {clean(row.label)}"
            continue
        at[where] = {
            "label": clean(row.label),
            "standing": standing,
            "peak_bytes": where[0],
            "ms": where[1] * 1e3,
            "low_ms": None if values["step_s_low"] is None else values["step_s_low"] * 1e3,
            "high_ms": None if values["step_s_high"] is None else values["step_s_high"] * 1e3,
        }
    return sorted(at.values(), key=lambda point: (ORDER.index(point["standing"]), point["peak_bytes"], point["ms"]))


def _draw(
    points: list[dict[str, Any]], title: str, height: float, keys: dict[str, str], unnamed: Sequence[str] = ()
) -> tuple[Any, list[str]]:
    told = "; ".join(f"{key}:\N{NO-BREAK SPACE}{label}" for label, key in keys.items() if label not in unnamed)
    told += f"; not labelled, too close to others: {', '.join(unnamed)}" if unnamed else ""
    lines = textwrap.wrap(told, KEY_CHARS, break_on_hyphens=False)
    below = len(lines) * LINE_POINTS / POINTS_PER_INCH
    figure, axes = new_figure(height + below, below)
    figure.text(0.02, 0.01, "\n".join(lines), va="bottom", linespacing=1.1)
    divisor, unit = memory_unit([point["peak_bytes"] for point in points])
    for point in points:
        point["x"] = point["peak_bytes"] / divisor
    axes.set_xlabel(f"peak memory, {unit}")
    axes.set_ylabel("step time, ms")
    axes.set_title("\n".join(textwrap.wrap(title, KEY_CHARS)), loc="left")
    bars = _limits(axes, points)
    for point in points:
        _mark(axes, point)
    for x, low, high in bars:
        axes.plot([x, x], [low, high], color="#888888", linewidth=0.7, zorder=2)
    _arrows(axes, points)
    traced = _front(axes, points)
    _legend(figure, points)
    lines_ = [((x, low), (x, high)) for x, low, high in bars] + traced
    labels = [
        Label(
            text=keys.get(point["label"], point["label"]),
            x=point["x"],
            y=point["ms"],
            colour=STANDING_COLOURS[point["standing"]],
        )
        for point in sorted(points, key=lambda point: point["label"] not in keys)
        if point["label"] not in unnamed
    ]
    names = {key: label for label, key in keys.items()}
    return figure, [names.get(label.text, label.text) for label in place(figure, axes, labels, lines_)]


def _limits(axes: Any, points: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """Set both axes' ranges; give the bars as far as they are inside."""
    xs, times = [point["x"] for point in points], [point["ms"] for point in points]
    span = max(times) - min(times) or max(times) * 0.2
    lowest = max(0.0, min(times) - BEYOND * span)
    highest = max(times) + BEYOND * span
    lows = [max(lowest, p["low_ms"]) for p in points if p["low_ms"] is not None]
    highs = [min(highest, p["high_ms"]) for p in points if p["high_ms"] is not None]
    bottom, top = min([*times, *lows]), max([*times, *highs])
    room = MARGIN * (top - bottom or span)
    axes.set_ylim(max(0.0, bottom - room), top + room)
    wide = max(xs) - min(xs) or max(xs) * 0.2
    axes.set_xlim(max(0.0, min(xs) - MARGIN * wide), max(xs) + MARGIN * wide)
    bottom, top = axes.get_ylim()
    return [
        (point["x"], max(bottom, point["low_ms"]), min(top, point["high_ms"]))
        for point in points
        if point["low_ms"] is not None and point["high_ms"] is not None
    ]


def _arrows(axes: Any, points: list[dict[str, Any]]) -> None:
    """Say of an interval that it goes on beyond the frame."""
    bottom, top = axes.get_ylim()
    for point in points:
        for is_beyond, at, sign in (
            (point["high_ms"] is not None and point["high_ms"] > top, top, "^"),
            (point["low_ms"] is not None and point["low_ms"] < bottom, bottom, "v"),
        ):
            if is_beyond:
                axes.plot(
                    point["x"], at, sign, color="#888888", markersize=3, clip_on=False, scalex=False, scaley=False
                )


def _mark(axes: Any, point: dict[str, Any]) -> None:
    """Draw one mark: shape and filling tell the standing too, for those who see no colours."""
    colour = STANDING_COLOURS[point["standing"]]
    shape = {"front": "o", "undecided": "o", "dominated": "x"}[point["standing"]]
    axes.plot(
        point["x"],
        point["ms"],
        shape,
        color=colour,
        markerfacecolor="white" if point["standing"] == "undecided" else colour,
        zorder=3,
    )


def _front(axes: Any, points: list[dict[str, Any]]) -> list[Segment]:
    """Trace the front: above and to the right of the line, everything costs more. Gives what was drawn."""
    steps = sorted((p for p in points if p["standing"] == "front"), key=lambda p: p["x"])
    axes.step(
        [p["x"] for p in steps], [p["ms"] for p in steps], where="post", color=BLUE, linewidth=0.6, alpha=0.5, zorder=1
    )
    pairs = list(zip(steps, steps[1:], strict=False))
    level: list[Segment] = [((here["x"], here["ms"]), (there["x"], here["ms"])) for here, there in pairs]
    return level + [((there["x"], there["ms"]), (there["x"], here["ms"])) for here, there in pairs]


def _legend(figure: Any, points: list[dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for standing in ORDER:
        if any(point["standing"] == standing for point in points):
            colour = STANDING_COLOURS[standing]
            handles.append(
                Line2D(
                    [],
                    [],
                    linestyle="none",
                    marker="x" if standing == "dominated" else "o",
                    color=colour,
                    markerfacecolor="white" if standing == "undecided" else colour,
                    label=WORDS[standing],
                )
            )
    figure.legend(handles=handles, loc="outside upper left", ncols=3, handletextpad=0.2, columnspacing=1.2)
