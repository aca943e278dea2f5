"""plots: figures for papers as PNG and SVG, one column wide: memory against time, what a peak is made of, depth."""

from collections.abc import Iterable, Iterator
from typing import Any

from ckbench.errors import ConfigError
from ckbench.reports import _plot_depth, _plot_pareto, _plot_phases
from ckbench.reports._pareto import by_group, name_of_group
from ckbench.reports._plot_style import save, style
from ckbench.reports.base import FileReport, Findings
from ckbench.store import slug
from ckbench.units import clean

MIN_ROWS = 2


def files(findings: Findings) -> dict[str, bytes]:
    """Draw every figure that the rows allow: ``pareto-STUDY.png`` and the like, by name.

    Raises ConfigError where matplotlib is missing or where there is nothing to draw.
    """
    made: dict[str, bytes] = {}
    with style():
        for name, figure in _figures(findings):
            made |= save(figure, _unused(name, made))
    if not made:
        raise ConfigError("nothing to draw: a figure needs two rows of one configuration that ended ok")
    return made


def _figures(findings: Findings) -> Iterator[tuple[str, Any]]:
    varied = findings.comparison.varied
    for _, members in by_group(findings.rows):
        if len(members) < MIN_ROWS:
            continue
        title = clean(name_of_group(members[0].values, varied))
        yield _name("pareto", members[0].values, title), _plot_pareto.draw(members, title)
        peaks = _plot_phases.draw(members, title)
        if peaks is not None:
            yield _name("peak", members[0].values, title), peaks
    others = [key for key in varied if key != _plot_depth.DEPTH_KEY]
    for values, lines in _plot_depth.sweeps(findings.rows, varied):
        title = clean(name_of_group(values, others))
        yield _name("depth", values, title), _plot_depth.draw(lines, title)


def _name(kind: str, values: dict[str, Any], title: str) -> str:
    return "-".join([kind, slug(values["study"]), *([slug(title)] if title else [])])


def _unused(name: str, made: Iterable[str]) -> str:
    """Number a name that was given before: the same configuration on another version of torch, say."""
    taken = {made_name.rpartition(".")[0] for made_name in made}
    number, free = 2, name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


PLUGIN = FileReport(files=files)
