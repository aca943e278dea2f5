"""Figure: activations at the peak against depth, one line per strategy with the law that fits it."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ckbench.compare import Row, look_up
from ckbench.reports._laws import Fitted, fitted
from ckbench.reports._plot_style import COLOURS, LINES, MARKS, memory_unit, new_figure
from ckbench.units import clean

DEPTH_KEY = "model.n_layers"
MIN_DEPTHS = 3
AXES_INCHES = 2.3
LEGEND_LINE_INCHES = 0.14
LEGEND_CHARS = 52
CURVE_POINTS = 100


@dataclass(frozen=True, kw_only=True)
class Line:
    """One strategy over several depths."""

    label: str
    depths: list[int]
    n_bytes: list[int]

    @property
    def fitted(self) -> Fitted:
        """Its law."""
        return fitted(self.label, self.depths, self.n_bytes)


def sweeps(
    rows: Iterable[Row], varied: Sequence[str], field: str = "activation_peak_bytes"
) -> list[tuple[dict[str, Any], list[Line]]]:
    """Gather rows that differ in depth alone: per such sweep the values they share and a line per strategy.

    Rows that ended ok count. By itself it is about the activations that a peak holds: parameters grow with depth under
    every strategy and are left out. Sweeps of fewer than three depths are none.
    """
    others = [key for key in varied if key != DEPTH_KEY]
    found: dict[str, tuple[dict[str, Any], dict[str, dict[int, int]]]] = {}
    for row in rows:
        depth, n_bytes = look_up(row.values, DEPTH_KEY), row.values[field]
        if not row.is_ok or type(depth) is not int or n_bytes is None:
            continue
        name = repr([look_up(row.values, key) for key in others])
        _, lines = found.setdefault(name, (row.values, {}))
        lines.setdefault(clean(row.label), {})[depth] = n_bytes
    swept = []
    for values, lines in found.values():
        drawn = [
            Line(label=label, depths=sorted(at), n_bytes=[at[depth] for depth in sorted(at)])
            for label, at in lines.items()
            if len(at) >= MIN_DEPTHS
        ]
        if drawn:
            swept.append((values, drawn))
    return swept


def draw(lines: Sequence[Line], title: str) -> Any:
    """Give the figure: points as measured, curves as fitted, the laws in the legend."""
    texts = ["\n".join(textwrap.wrap(_told(line), LEGEND_CHARS, subsequent_indent="    ")) for line in lines]
    n_legend_lines = sum(text.count("\n") + 1 for text in texts)
    figure, axes = new_figure(AXES_INCHES + n_legend_lines * LEGEND_LINE_INCHES)
    divisor, unit = memory_unit([n_bytes for line in lines for n_bytes in line.n_bytes])
    for i, (line, text) in enumerate(zip(lines, texts, strict=True)):
        look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)]}
        law = line.fitted.law
        axes.plot(line.depths, [n / divisor for n in line.n_bytes], linestyle="none", label=text, **look)
        if law is not None:
            first, last = line.depths[0], line.depths[-1]
            curve = [first + (last - first) * j / CURVE_POINTS for j in range(CURVE_POINTS + 1)]
            axes.plot(
                curve,
                [law.at(depth) / divisor for depth in curve],
                color=look["color"],
                linestyle=LINES[i % len(LINES)],
                linewidth=0.8,
            )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layers L")
    axes.set_ylabel(f"activations at the peak, {unit}")
    axes.set_title("\n".join(textwrap.wrap(title, LEGEND_CHARS)), loc="left")
    figure.legend(loc="outside lower left", ncols=1, handletextpad=0.4, labelspacing=0.25)
    return figure


def _told(line: Line) -> str:
    law = line.fitted.law
    return f"{line.label}: {law if law is not None else 'too few depths for a law'}"
