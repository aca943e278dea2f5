"""How figures for papers look and are written: one column wide, 7 point letters, the same bytes every time."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckbench.errors import ConfigError
from ckbench.reports._pareto import Standing
from ckbench.units import GIB_BYTES, MIB_BYTES

COLUMN_INCHES = 3.3
"""Width of one of two columns (ICML 3.25, IEEE 3.5)."""
PNG_DPI = 300
TEXT_POINTS = 7
POINTS_PER_INCH = 72
INK, DIM = "#222222", "#767676"
"""DIM still has a contrast of 4.5 on white: dimmed is not hidden."""
BLUE, ORANGE, SKY, GREEN, VERMILION, PINK, GREY = (
    "#0072b2",
    "#e69f00",
    "#56b4e9",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#b8b8b8",
)
"""Colours that also people with a colour-blindness tell apart. Source: Okabe and Ito, Color universal design, 2008."""
COLOURS = (INK, BLUE, VERMILION, GREEN, PINK, ORANGE, SKY)
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
LINES = ("-", "--", "-.", ":")
STANDING_COLOURS: dict[Standing, str] = {"front": BLUE, "undecided": INK, "dominated": DIM}
MIB_AXIS_LIMIT_BYTES = 10 * GIB_BYTES
WRAP_CHARS = 26
RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "font.size": TEXT_POINTS,
    "axes.titlesize": TEXT_POINTS,
    "axes.labelsize": TEXT_POINTS,
    "axes.linewidth": 0.6,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": TEXT_POINTS,
    "ytick.labelsize": TEXT_POINTS,
    "legend.fontsize": TEXT_POINTS,
    "legend.frameon": False,
    "lines.linewidth": 1.0,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "svg.hashsalt": "ckbench",
    "text.parse_math": False,
    "axes.formatter.useoffset": False,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw inside this: our settings alone count, not those of a user's matplotlibrc.

    Raises ConfigError where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('--format plots needs matplotlib: pip install "ckbench[report]"') from None
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in a script that the font lacks
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def new_figure(height_inches: float, below_inches: float = 0.0) -> tuple[Any, Any]:
    """Give a figure one column wide with one pair of axes; whatever is put on it, the layout makes room for it.

    ``below_inches`` of its height at the lower edge are left free.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    share = below_inches / height_inches
    layout = ConstrainedLayoutEngine(rect=(0, share, 1, 1 - share))
    figure = Figure(figsize=(COLUMN_INCHES, height_inches), dpi=PNG_DPI, layout=layout)
    FigureCanvasAgg(figure)  # measures text where it will be drawn
    return figure, figure.add_subplot()


def save(figure: Any, name: str) -> dict[str, bytes]:
    """Give the figure as PNG and as SVG whose text stays text; no date, no version, no random names in either."""
    files = {}
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": "ckbench"})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=metadata)
        files[f"{name}.{kind}"] = buffer.getvalue()
    return files


def memory_unit(n_bytes: Sequence[float]) -> tuple[int, str]:
    """Choose MiB or GiB for an axis: the divisor and its name."""
    return (GIB_BYTES, "GiB") if max(n_bytes) >= MIB_AXIS_LIMIT_BYTES else (MIB_BYTES, "MiB")
