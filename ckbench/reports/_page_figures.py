"""Figures of one group of comparable rows, as plotly's own JSON; colours are names that the page's theme resolves.

Every string from a record goes through ``label``, and none into a template.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckbench.cards import CARDS_MIB, usable_bytes
from ckbench.compare import Row
from ckbench.records import PHASES
from ckbench.reports._page_text import label
from ckbench.reports._pareto import Standing, front, is_measured, standings
from ckbench.reports._plot_phases import split
from ckbench.reports._plot_style import memory_unit
from ckbench.reports._verdicts import needed_bytes
from ckbench.reports.base import Budget
from ckbench.table import Column
from ckbench.units import MIB_BYTES, clean

Figure = dict[str, Any]
Looks = Mapping[str, int]
"""Number of each strategy, which gives its colour and its sign on the whole page."""

N_COLOURS = 8
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
DIMMED = 0.4
MOST_POINTS_SHOWN = 400
ROW_PX = 44
AROUND_PX = 130
LOG_FROM = 6
"""Step times that differ by more than this factor are drawn on a logarithmic axis."""
WHISKER_ROOM = 0.6
"""Whiskers may make the axis of time this much longer than its points alone, beyond that they leave the chart."""
PHASE_NAMES = {"forward": "forward", "loss": "head and loss", "backward": "backward", "optimizer": "optimizer"}
CATEGORIES = (
    ("static", "parameters, buffers, optimizer state", "static"),
    ("gradients", "gradients", "c1"),
    ("saved", "kept for backward (at most)", "c0"),
    ("transient", "recomputed and temporary", "c2"),
    ("activations", "activations and temporary", "c2"),
    ("unknown", "not attributed", "muted"),
)


def colour(name: str | int) -> str:
    """Name a colour of the theme; a number is a strategy's."""
    return f"theme:c{name % N_COLOURS}" if isinstance(name, int) else f"theme:{name}"


def pareto(members: Sequence[Row], looks: Looks, columns: Sequence[Column], budgets: Sequence[Budget]) -> Figure | None:
    """Peak against step time, the front joined, dominated rows dimmed, whiskers the 95 % interval of the median."""
    rows = [row for row in members if is_measured(row)]
    if not rows:
        return None
    divisor, unit = memory_unit([row.values["peak_allocated_bytes"] for row in rows])
    judged = dict(zip([row.label for row in rows], standings(rows), strict=True))
    best = front(rows)
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [row.values["peak_allocated_bytes"] / divisor for row in best],
            "y": [row.values["step_s_median"] * 1e3 for row in best],
            "line": {"shape": "hv", "dash": "dot", "width": 1.5, "color": colour("muted")},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]
    lines = _budget_lines(rows, budgets, divisor)
    edges = [row.values["peak_allocated_bytes"] / divisor for row in rows] + [at for at, _, _ in lines]
    low, high = min(edges), max(edges)
    room = (high - low) * 0.09 or high * 0.1
    order = (*best, *(row for row in rows if row not in best))  # the front's labels find their places first
    data += [_point(row, looks, columns, judged[row.label], divisor) for row in order]
    return {
        "data": data,
        "layout": {
            "xaxis": {"title": {"text": f"peak memory of a step, {unit}"}, "range": [low - room, high + room]},
            "yaxis": {"title": {"text": "step time, ms"}, "range": _time_range(rows)},
            "meta": {"placesLabels": True},
            "shapes": [guide(at, is_asked) for at, _, is_asked in lines],
            "annotations": [_line_name(at, name) for at, name, _ in lines],
            "height": 430,
        },
    }


def _point(row: Row, looks: Looks, columns: Sequence[Column], standing: Standing | None, divisor: int) -> Figure:
    values, number = row.values, looks[clean(row.label)]
    time_ms, low_s, high_s = values["step_s_median"] * 1e3, values["step_s_low"], values["step_s_high"]
    dim = standing == "dominated"
    trace: Figure = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [values["peak_allocated_bytes"] / divisor],
        "y": [time_ms],
        "name": label(row.label),
        "text": [label(row.label)],
        "textposition": "top right",
        "hovertext": [_told(row, columns, standing)],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "opacity": DIMMED if dim else 1.0,
        "meta": {"standing": standing},
        "marker": {
            "size": 9 if dim else 12,
            "symbol": SYMBOLS[number % len(SYMBOLS)] + ("-open" if standing == "undecided" else ""),
            "color": colour(number),
            "line": {"width": 2 if standing == "undecided" else 0, "color": colour(number)},
        },
    }
    if low_s is not None and high_s is not None:
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, high_s * 1e3 - time_ms)],
            "arrayminus": [max(0.0, time_ms - low_s * 1e3)],
            "thickness": 1.3,
            "width": 4,
            "color": colour(number),
        }
    return trace


def _told(row: Row, columns: Sequence[Column], standing: Standing | None) -> str:
    """Write the whole row for the pointer that rests on it."""
    lines = [f"<b>{label(row.label)}</b>"]
    lines += [
        f"{label(column.head)}: {label(clean(column.text(row.values)))}"
        for column in columns
        if column.key != "strategy"
    ]
    return "<br>".join([*lines, f"trade-off: {standing or 'not judged'}"])


def _time_range(rows: Sequence[Row]) -> list[float]:
    """Give the axis of time: all points, and whiskers as far as they do not press the points together."""
    times = [row.values["step_s_median"] * 1e3 for row in rows]
    ends = [(row.values["step_s_low"], row.values["step_s_high"]) for row in rows]
    lows = [low * 1e3 for low, _ in ends if low is not None]
    highs = [high * 1e3 for _, high in ends if high is not None]
    span = (max(times) - min(times)) or max(times) * 0.2
    low = max(min([*times, *lows]), min(times) - span * WHISKER_ROOM)
    high = min(max([*times, *highs]), max(times) + span * WHISKER_ROOM)
    room = (high - low) * 0.1 or high * 0.1
    return [max(0.0, low - room), high + room * 1.4]


def _budget_lines(rows: Sequence[Row], budgets: Sequence[Budget], divisor: int) -> list[tuple[float, str, bool]]:
    """Give budgets to draw: those asked about, and cards that lie among the rows or not far beyond."""
    lines = [(budget.usable_bytes / divisor, budget.name, True) for budget in budgets]
    needs = [needed_bytes(row) for row in rows]
    by_size: dict[int, list[str]] = {}
    for card, mib in CARDS_MIB.items():
        usable = usable_bytes(mib * MIB_BYTES)
        if min(needs) * 0.8 <= usable <= max(needs) * 1.3:
            by_size.setdefault(usable, []).append(card)
    return lines + [(usable / divisor, " / ".join(cards), False) for usable, cards in by_size.items()]


def guide(at: float, is_asked: bool) -> Figure:
    """Give a dashed line from top to bottom; one that a reader asked for stands out."""
    look = {"color": colour("ink" if is_asked else "muted"), "width": 1.5 if is_asked else 1, "dash": "dash"}
    return {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": look, "layer": "below"}


def _line_name(at: float, name: str) -> Figure:
    return {
        "x": at,
        "y": 1,
        "yref": "paper",
        "yanchor": "top",
        "xanchor": "right",
        "text": label(name),
        "textangle": -90,
        "showarrow": False,
        "font": {"size": 11, "color": colour("muted")},
    }


def phases(members: Sequence[Row], looks: Looks) -> Figure | None:
    """How high each phase of the step reaches, a bar each; what is static lies at the bottom of every bar."""
    rows = [row for row in members if any(row.values[f"peak_{phase}_bytes"] for phase in PHASES)]
    if not rows:
        return None
    divisor, unit = memory_unit([row.values[f"peak_{phase}_bytes"] or 0 for row in rows for phase in PHASES])
    static = [(row.values["static_bytes"] or 0) / divisor for row in rows]
    width = 0.8 / len(PHASES)
    data: list[Figure] = []
    base: dict[str, list[float]] = {"x": [], "y": []}
    owned: dict[str, list[float]] = {"x": [], "y": []}
    for lane, phase in enumerate(PHASES):
        known = [(i, row.values[f"peak_{phase}_bytes"]) for i, row in enumerate(rows)]
        known = [(i, n_bytes / divisor) for i, n_bytes in known if n_bytes is not None]
        places = [i + (lane - (len(PHASES) - 1) / 2) * width for i, _ in known]
        bars = {
            "x": [max(0.0, peak - static[i]) for i, peak in known],
            "y": places,
            "base": [min(static[i], peak) for i, peak in known],
            "customdata": [peak for _, peak in known],
        }
        told = f"{PHASE_NAMES[phase]}: %{{customdata:.4~g}} {unit}<extra></extra>"
        data.append(_bars(PHASE_NAMES[phase], f"p{lane}", width * 0.92, told, bars))
        base["x"] += [min(static[i], peak) for i, peak in known]
        base["y"] += places
        owned["x"] += [peak for i, peak in known if rows[i].values["peak_phase"] == phase]
        owned["y"] += [at for (i, _), at in zip(known, places, strict=True) if rows[i].values["peak_phase"] == phase]
    told = f"static: %{{x:.4~g}} {unit}<extra></extra>"
    data.insert(0, _bars("static below it", "static", width * 0.92, told, {**base, "base": 0}))
    mark = {"symbol": "triangle-left", "size": 9, "color": colour("ink")}
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "owner of the peak",
            "marker": mark,
            "hovertemplate": f"peak of the step: %{{x:.4~g}} {unit}<extra></extra>",
            "cliponaxis": False,
            **owned,
        }
    )
    return {"data": data, "layout": _by_strategy(rows, f"highest in each phase, {unit}", ROW_PX + 12)}


def categories(members: Sequence[Row], looks: Looks) -> Figure | None:
    """What lies in memory at the instant of the peak, stacked."""
    found = [(row, parts) for row in members if (parts := _parts(row.values)) is not None]
    if not found:
        return None
    divisor, unit = memory_unit([row.values["peak_allocated_bytes"] for row, _ in found])
    data, below = [], [0.0] * len(found)
    for key, name, shade in CATEGORIES:
        known = [(i, parts[key] / divisor) for i, (_, parts) in enumerate(found) if parts.get(key)]
        if not known:
            continue
        bars = {
            "x": [size for _, size in known],
            "y": [i for i, _ in known],
            "base": [below[i] for i, _ in known],
        }
        data.append(_bars(name, shade, 0.62, f"{name}: %{{x:.4~g}} {unit}<extra></extra>", bars))
        for i, size in known:
            below[i] += size
    return {"data": data, "layout": _by_strategy([row for row, _ in found], f"at the peak, {unit}", ROW_PX)}


def _parts(values: dict[str, Any]) -> dict[str, int] | None:
    """Divide a peak as ``split`` does, and its activations by whether they were kept.

    Bytes kept at the turn to backward are there at the most; only in the phases beside the turn can they be.
    """
    parts = split(values)
    if parts is None or "activations" not in parts:
        return parts
    saved = values["saved_bytes"]
    if saved is None or values["peak_phase"] not in ("loss", "backward"):
        return parts
    activations = parts.pop("activations")
    return {**parts, "saved": min(saved, activations), "transient": activations - min(saved, activations)}


def times(members: Sequence[Row], looks: Looks) -> Figure | None:
    """Every timed step of every round, a box per strategy."""
    rows = [row for row in members if row.is_ok and row.values["step_samples_s"]]
    if not rows:
        return None
    data = []
    for i, row in enumerate(rows):
        samples, number = row.values["step_samples_s"], looks[clean(row.label)]
        data.append(
            {
                "type": "box",
                "orientation": "h",
                "x": [sample * 1e3 for sample in samples],
                "y0": i,
                "width": 0.6,
                "name": label(row.label),
                "boxpoints": "all" if len(samples) <= MOST_POINTS_SHOWN else "outliers",
                "jitter": 0.5,
                "pointpos": 0,
                "line": {"width": 1.4, "color": colour(number)},
                "fillcolor": "rgba(0,0,0,0)",
                "marker": {"size": 4, "opacity": 0.45, "color": colour(number)},
                "showlegend": False,
            }
        )
    layout = _by_strategy(rows, "time of one step, ms", ROW_PX)
    everything = [sample for row in rows for sample in row.values["step_samples_s"] if sample > 0]
    if everything and max(everything) > LOG_FROM * min(everything):
        ticks = _log_ticks(min(everything) * 1e3, max(everything) * 1e3)
        layout["xaxis"] = {
            "title": {"text": "time of one step, ms (logarithmic)"},
            "type": "log",
            "tickmode": "array",
            "tickvals": ticks,
            "ticktext": [f"{tick:g}" for tick in ticks],
        }
    else:
        layout["xaxis"]["rangemode"] = "normal"
    return {"data": data, "layout": layout}


def _log_ticks(low: float, high: float) -> list[float]:
    """Give round numbers over a range, written out: Plotly leaves the powers of ten between them to the reader.

    >>> _log_ticks(7, 60)
    [10.0, 20.0, 50.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
    return [tick for tick in found if low <= tick <= high] or [low, high]


def _bars(name: str, shade: str, width: float, told: str, values: Figure) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "width": width,
        "marker": {"color": colour(shade), "line": {"width": 0}},
        "hovertemplate": told,
        **values,
    }


def _by_strategy(rows: Sequence[Row], title: str, row_px: int) -> Figure:
    """Give the layout of a chart with one line per strategy, the first on top."""
    return {
        "barmode": "overlay",
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {
            "tickvals": list(range(len(rows))),
            "ticktext": [label(row.label) for row in rows],
            "range": [len(rows) - 0.4, -0.6],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
        "height": AROUND_PX + row_px * len(rows),
    }
