"""Draw the benchmarks' figures as SVG; matplotlib comes with the extra ``bench``."""

from collections.abc import Mapping, Sequence
from pathlib import Path

INK, ACCENT, LIMIT = "#333333", "#0072b2", "#d55e00"  # Okabe and Ito's colour-blind-safe palette
POINTS_PER_INCH = 72


def ratios(
    path: Path,
    title: str,
    groups: Mapping[str, Sequence[float]],
    limits: dict[str, float],
    labels: tuple[str, str] = ("step time; band: the limit, bar: the median", "ckbench / bare loop"),
) -> None:
    """Draw every pair's ratio as a dot, the median as a bar, and the allowed band, per group."""
    figure, axes = _figure(title)
    for place, (name, values) in enumerate(groups.items()):
        middle = sorted(values)[len(values) // 2]
        axes.fill_between([place - 0.35, place + 0.35], 1 - limits[name], 1 + limits[name], color=LIMIT, alpha=0.15)
        spread = [place + 0.25 * ((i * 0.618) % 1 - 0.5) for i in range(len(values))]
        axes.plot(spread, values, "o", color=ACCENT, alpha=0.5, markersize=4)
        axes.plot([place - 0.3, place + 0.3], [middle, middle], color=INK, linewidth=2)
    axes.axhline(1.0, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    _save(figure, path)


def line(path: Path, title: str, x: Sequence[float], y: Sequence[float], labels: tuple[str, str]) -> None:
    """Draw one measured line from zero."""
    figure, axes = _figure(title)
    axes.plot(x, y, "o-", color=ACCENT)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    _save(figure, path)


def intervals(path: Path, title: str, results: Sequence[tuple[float, float, float]]) -> None:
    """Draw intervals in order of their ratio; those that miss 1.00 in another colour."""
    figure, axes = _figure(title)
    for place, (ratio, low, high) in enumerate(sorted(results)):
        colour = ACCENT if low <= 1.0 <= high else LIMIT
        axes.plot([place, place], [low, high], color=colour, linewidth=0.9)
        axes.plot([place], [ratio], ".", color=colour, markersize=2)
    axes.axhline(1.0, color=INK, linewidth=0.8)
    axes.set_xlabel("studies, by their ratio; other colour: 1.00 is missed")
    axes.set_ylabel("none / none")
    _save(figure, path)


def _figure(title: str):  # type: ignore[no-untyped-def]
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "svg.hashsalt": "ckbench", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure, path: Path) -> None:  # type: ignore[no-untyped-def]
    figure.savefig(path, metadata={"Date": None})
    print(f"drawn: {path}")
