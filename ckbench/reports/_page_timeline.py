"""Figure: live bytes over one step, every phase equally wide under all strategies."""

from collections.abc import Sequence
from typing import Any

from ckbench.compare import Row
from ckbench.records import PHASES
from ckbench.reports._page_figures import DASHES, PHASE_NAMES, SYMBOLS, Figure, Looks, colour, guide
from ckbench.reports._page_text import label
from ckbench.reports._plot_style import memory_unit
from ckbench.units import clean

PHASE_WIDTHS = (3, 2, 4, 2)
MOST_NAMED = 9
"""Stretches of phases, and their end, that have room for their names."""
Points = Sequence[tuple[float, float, int]]
"""Share of events, bytes, number of the phase."""


def timeline(members: Sequence[Row], looks: Looks) -> Figure | None:
    """Live bytes over one step, a line per strategy, its peak marked; None where no record tells."""
    known = [(row, points) for row in members if (points := _points(row.values))]
    if not known:
        return None
    divisor, unit = memory_unit([int(n_bytes) for _, points in known for _, n_bytes, _ in points])
    data: list[Figure] = []
    for row, points in known:
        number = looks[clean(row.label)]
        look = {"legendgroup": str(number), "name": label(row.label), "type": "scatter"}
        live = [n_bytes / divisor for _, n_bytes, _ in points]
        top = max(range(len(points)), key=live.__getitem__)
        places = _places(points)
        line = {"shape": "hv", "width": 1.8, "dash": DASHES[number % len(DASHES)], "color": colour(number)}
        mark = {"size": 10, "symbol": SYMBOLS[number % len(SYMBOLS)], "color": colour(number)}
        told = f"%{{y:.4~g}} {unit}<extra>%{{fullData.name}}</extra>"
        names = [PHASE_NAMES[PHASES[phase]] for _, _, phase in points]
        step = {"x": places, "y": live, "text": names, "hovertemplate": f"%{{text}}: {told}"}
        peak = {"x": [places[top]], "y": [live[top]], "showlegend": False, "hovertemplate": f"peak: {told}"}
        data += [{**look, "mode": "lines", "line": line, **step}, {**look, "mode": "markers", "marker": mark, **peak}]
    starts = _starts(max((points for _, points in known), key=lambda points: len(_runs(points))))
    layout = {
        "xaxis": {
            "range": [-0.1, starts[-1][0] + 0.1],
            "tickvals": [(here + there) / 2 for (here, _), (there, _) in zip(starts, starts[1:], strict=False)],
            "ticktext": [PHASE_NAMES[name] for _, name in starts[:-1]] if len(starts) <= MOST_NAMED else [],
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {"title": {"text": f"live, {unit}"}, "rangemode": "tozero"},
        "shapes": [guide(at, False) for at, _ in starts[1:-1]],
        "height": 430,
    }
    return {"data": data, "layout": layout}


def _runs(points: Points) -> list[list[int]]:
    """Gather the numbers of the points of each stretch of one phase; micro-batches have several of each."""
    runs: list[list[int]] = []
    for i, (_, _, phase) in enumerate(points):
        if i and phase == points[i - 1][2]:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _starts(points: Points) -> list[tuple[float, str]]:
    """Give where each stretch of a phase begins on the axis, with its name, and where the last one ends."""
    at, starts = 0.0, []
    for run in _runs(points):
        phase = points[run[0]][2]
        starts.append((at, PHASES[phase]))
        at += PHASE_WIDTHS[phase]
    return [*starts, (at, "")]


def _places(points: Points) -> list[float]:
    """Give each point its place on the axis: its share within its stretch, stretches as wide as their phase."""
    places = []
    for run, (start, _) in zip(_runs(points), _starts(points), strict=False):
        first, last = points[run[0]][0], points[run[-1]][0]
        width = PHASE_WIDTHS[points[run[0]][2]]
        places += [start + width * (points[i][0] - first) / ((last - first) or 1) for i in run]
    return places


def _points(values: dict[str, Any]) -> Points:
    """Give the points of a timeline that are such; a stranger's file may hold anything in their place."""
    points = []
    for point in values["live_bytes_timeline"]:
        if not isinstance(point, list) or len(point) != 3 or any(type(n) not in (int, float) for n in point):
            continue
        share, n_bytes, phase = point
        if 0 <= share <= 1 and n_bytes >= 0 and phase in range(len(PHASES)):
            points.append((share, n_bytes, int(phase)))
    return points
