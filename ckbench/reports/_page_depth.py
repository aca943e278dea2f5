"""Memory against depth: a figure and its laws for each sweep of depths among the rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from ckbench.compare import Row
from ckbench.reports._laws import Fitted
from ckbench.reports._page_figures import DASHES, SYMBOLS, Figure, Looks, colour
from ckbench.reports._page_text import label
from ckbench.reports._pareto import name_of_group
from ckbench.reports._plot_depth import DEPTH_KEY, Line, sweeps
from ckbench.reports._plot_style import memory_unit
from ckbench.units import clean

QUANTITIES = (
    ("activation_peak_bytes", "activations at the peak"),
    ("saved_bytes", "kept for backward"),
    ("peak_allocated_bytes", "whole peak"),
)
"""Parameters, optimizer state and gradients grow with depth under every strategy: laws of recomputation are about what
is left without them."""
CURVE_POINTS = 60


@dataclass(frozen=True, kw_only=True)
class Depths:
    """One quantity of one sweep."""

    quantity: str
    sweep: str
    """What its rows share that other sweeps do not; empty where there is one."""
    figure: Figure
    laws: list[tuple[str, Fitted]]
    """By strategy."""


def depths(rows: Sequence[Row], varied: Sequence[str], looks: Looks) -> list[Depths]:
    """Give every sweep of depths with every quantity that its records hold; none without a sweep."""
    others = [key for key in varied if key != DEPTH_KEY]
    found = []
    for field, quantity in QUANTITIES:
        for values, lines in sweeps(rows, varied, field):
            figure = _figure(lines, quantity, looks)
            laws = [(line.label, line.fitted) for line in lines]
            sweep = clean(name_of_group(values, others))
            found.append(Depths(quantity=quantity, sweep=sweep, figure=figure, laws=laws))
    return sorted(found, key=lambda each: each.sweep)  # quantities of one sweep stay together, in their order


def _figure(lines: Sequence[Line], quantity: str, looks: Looks) -> Figure:
    divisor, unit = memory_unit([n_bytes for line in lines for n_bytes in line.n_bytes])
    data: list[Figure] = []
    for line in lines:
        number = looks[line.label]
        look = {"legendgroup": str(number), "name": label(line.label), "type": "scatter"}
        data.append(
            {
                **look,
                "mode": "markers",
                "x": line.depths,
                "y": [n_bytes / divisor for n_bytes in line.n_bytes],
                "marker": {"size": 9, "symbol": SYMBOLS[number % len(SYMBOLS)], "color": colour(number)},
                "hovertemplate": f"%{{x}} layers: %{{y:.4~g}} {unit}<extra>%{{fullData.name}}</extra>",
            }
        )
        law = line.fitted.law
        if law is None:
            continue
        first, last = line.depths[0], line.depths[-1]
        curve = [first + (last - first) * i / CURVE_POINTS for i in range(CURVE_POINTS + 1)]
        data.append(
            {
                **look,
                "mode": "lines",
                "x": curve,
                "y": [law.at(depth) / divisor for depth in curve],
                "line": {"width": 1.6, "dash": DASHES[number % len(DASHES)], "color": colour(number)},
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
    layout = {
        "xaxis": {"title": {"text": "layers L"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": f"{quantity}, {unit}"}, "rangemode": "tozero"},
        "height": 430,
    }
    return {"data": data, "layout": layout}
