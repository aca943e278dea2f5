"""Figure: what is live at each strategy's peak, stacked, and how high each phase of the step reaches.

Phases' peaks are maxima at different moments, so their sum means nothing: what is stacked is what lies in memory at the
one instant of the peak, and each phase's own peak is a mark on it.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

from ckbench.compare import Row
from ckbench.records import PHASES
from ckbench.reports._plot_style import GREY, INK, ORANGE, SKY, WRAP_CHARS, memory_unit, new_figure
from ckbench.units import clean

ROW_INCHES = 0.21
EXTRA_LINE_INCHES = 0.11
AROUND_INCHES = 1.05
BAR = 0.72
PHASE_MARKS = {"forward": ">", "loss": "D", "backward": "<", "optimizer": "s"}
PARTS = (
    ("static", "parameters, optimizer state", GREY, ""),
    ("gradients", "gradients", ORANGE, "////"),
    ("activations", "activations", SKY, ""),
    ("unknown", "not attributed", "white", "...."),
)


def split(values: dict[str, Any]) -> dict[str, int] | None:
    """Divide a peak into what is live at that instant; None where the peak or what always lies there is unknown.

    Activations are counted there storage by storage, static bytes are always there, and the rest is gradients. Where
    activations could not be counted, all that is not static is not attributed.
    """
    peak, static, activations = (
        values[key] for key in ("peak_allocated_bytes", "static_bytes", "activation_peak_bytes")
    )
    if not peak or static is None or static > peak:
        return None
    if activations is None or static + activations > peak:
        return {"static": static, "unknown": peak - static}
    return {"static": static, "gradients": peak - static - activations, "activations": activations}


def draw(rows: Sequence[Row], title: str) -> Any | None:
    """Give the figure of one group, a bar per row in their order; None where no row's peak can be divided."""
    drawn = [(row, parts) for row in rows if (parts := split(row.values)) is not None]
    if not drawn:
        return None
    names = ["\n".join(textwrap.wrap(clean(row.label), WRAP_CHARS)) for row, _ in drawn]
    extra = sum(name.count("\n") for name in names)
    figure, axes = new_figure(AROUND_INCHES + len(drawn) * ROW_INCHES + extra * EXTRA_LINE_INCHES)
    divisor, unit = memory_unit([row.values["peak_allocated_bytes"] for row, _ in drawn])
    for key, label, colour, hatch in PARTS:
        shown = [(place, parts) for place, (_, parts) in enumerate(drawn) if parts.get(key)]
        if shown:
            axes.barh(
                [place for place, _ in shown],
                [parts[key] / divisor for _, parts in shown],
                BAR,
                left=[_before(parts, key) / divisor for _, parts in shown],
                color=colour,
                edgecolor=INK,
                linewidth=0.3,
                hatch=hatch,
                label=label,
            )
    _phases(axes, [row for row, _ in drawn], divisor)
    axes.set_yticks(range(len(drawn)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"memory, {unit}")
    if title:
        figure.suptitle("\n".join(textwrap.wrap(title, 58)), fontsize=7, x=0.02, ha="left")
    figure.legend(loc="outside lower left", ncols=2, handletextpad=0.4, columnspacing=1.5, labelspacing=0.25)
    return figure


def _before(parts: dict[str, int], key: str) -> int:
    """Add up what is stacked below a part."""
    names = list(parts)
    return sum(parts[name] for name in names[: names.index(key)])


def _phases(axes: Any, rows: Sequence[Row], divisor: int) -> None:
    """Mark each phase's peak, each on a lane of its own so that equal ones do not hide each other."""
    for lane, phase in enumerate(PHASES):
        known = [(i, row.values[f"peak_{phase}_bytes"]) for i, row in enumerate(rows)]
        known = [(i, n_bytes) for i, n_bytes in known if n_bytes is not None]
        offset = ((lane + 0.5) / len(PHASES) - 0.5) * BAR
        axes.plot(
            [n_bytes / divisor for _, n_bytes in known],
            [i + offset for i, _ in known],
            PHASE_MARKS[phase],
            color=INK,
            markersize=2.6,
            markeredgewidth=0.4,
            linestyle="none",
            label=f"peak of {phase}",
        )
