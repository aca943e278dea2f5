"""Memory against time in the terminal: a small chart in plain characters, no label on top of another.

Drawn here and not by a library: the only live one, plotext, changed its whole interface with version 6 (2026), draws
into one figure per process, and places no labels; what takes the care here, it leaves to the caller.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from ckbench.compare import Row, varied_keys
from ckbench.reports._pareto import WORDS, Standing, by_group, name_of_group, standings
from ckbench.units import MIB_BYTES, clean

MIN_WIDTH = 60
MAX_WIDTH = 100
MIN_ROWS = 3
MARKS: dict[Standing, str] = {"front": "●", "undecided": "○", "dominated": "×"}
"""Told apart by shape, not by colour; ``output`` knows the nearest ASCII of each."""
HEIGHTS = ((6, 9), (12, 12), (20, 15))
MAX_HEIGHT = 18
KEYS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
NOTHING = ""
"""A cell beside a label: other labels may keep the same distance, the traced front goes round it."""
ROOM_RATIO = 0.04
LEAST_SPAN_RATIO = 0.04
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One mark: what stands in one character cell."""

    column: int
    line: int
    """From the top."""
    label: str
    standing: Standing


def draw(rows: Sequence[Row], width: int | None) -> list[str]:
    """Give the chart's lines, none wider than ``width``.

    Nothing where the terminal is narrower than 60 columns or unknown (a pipe or file), or where no group of
    comparable rows has three measured ones. Of several groups the one with the largest peak is drawn, and said so.
    """
    groups = [members for _, members in by_group(rows) if len(members) >= MIN_ROWS]
    if width is None or width < MIN_WIDTH or not groups:
        return []
    members = max(groups, key=lambda group: max(row.values["peak_allocated_bytes"] for row in group))
    varied = varied_keys(rows)
    name = clean(name_of_group(members[0].values, varied))
    lines = ["memory against time" + (f", {name}" if name else "") + ": lower left is better"]
    if len(groups) > 1:
        key = varied[0] if varied else "study"
        lines.append(f"largest of {len(groups)} configurations; `report --group-by {key}` draws one chart per value")
    lines = [piece for line in lines for piece in textwrap.wrap(line, width, subsequent_indent="  ")]
    return [*lines, *Chart(members, min(width, MAX_WIDTH)).lines()]


class Chart:
    """One group of rows on a grid of characters."""

    def __init__(self, members: Sequence[Row], width: int) -> None:
        self.width = width
        n_rows = len(members)
        self.n_lines = next((lines for most, lines in HEIGHTS if n_rows <= most), MAX_HEIGHT)
        self.peaks = Axis([row.values["peak_allocated_bytes"] / MIB_BYTES for row in members], n_ticks=5)
        self.times = Axis([row.values["step_s_median"] * 1e3 for row in members], n_ticks=4)
        self.gutter = max(len("ms"), *(len(text) for _, text in self.times.ticks))
        self.n_columns = width - self.gutter - 2
        self.grid = [[" "] * self.n_columns for _ in range(self.n_lines)]
        self.points = self._points(members)
        self.keys: list[tuple[str, str]] = []

    def lines(self) -> list[str]:
        """Draw marks, then labels, then the front where there is still room."""
        for point in self.points:
            self.grid[point.line][point.column] = MARKS[point.standing]
        for point in self.points:
            self._label(point)
        self._front()
        return [*self._framed(), *self._axis(), *self._legend()]

    def _points(self, members: Sequence[Row]) -> list[Point]:
        """Gather rows by cell, the front's first: they get the best places for their labels."""
        order: tuple[Standing, ...] = ("front", "undecided", "dominated")
        cells: dict[tuple[int, int], list[tuple[Standing, str]]] = {}
        for row, standing in zip(members, standings(members), strict=True):
            if standing is None:
                continue
            column = self.peaks.cell(row.values["peak_allocated_bytes"] / MIB_BYTES, self.n_columns)
            line = self.n_lines - 1 - self.times.cell(row.values["step_s_median"] * 1e3, self.n_lines)
            cells.setdefault((column, line), []).append((standing, clean(row.label)))
        points = []
        for (column, line), inside in cells.items():
            best = min((standing for standing, _ in inside), key=order.index)
            label = " / ".join(text for _, text in sorted(inside, key=lambda item: order.index(item[0])))
            points.append(Point(column=column, line=line, label=label, standing=best))
        return sorted(points, key=lambda point: (order.index(point.standing), point.column, point.line))

    def _label(self, point: Point) -> None:
        """Write the label beside its mark; where it does not fit, a letter that is explained under the chart."""
        if len(point.label) == cell_len(point.label) and self._write(point, point.label):
            return
        key = KEYS[len(self.keys) % len(KEYS)]
        self.keys.append((key, point.label))
        if not self._write(point, key):
            self.grid[point.line][point.column] = key

    def _write(self, point: Point, text: str) -> bool:
        for line, start in _places(point, len(text)):
            if (
                0 <= line < self.n_lines
                and 0 <= start <= self.n_columns - len(text)
                and self._is_free(line, start, text)
            ):
                self.grid[line][start : start + len(text)] = text
                self._keep_apart(line, start - 1)
                self._keep_apart(line, start + len(text))
                return True
        return False

    def _is_free(self, line: int, start: int, text: str) -> bool:
        """Tell whether text fits there with a blank on either side; its own mark may stand one cell further."""
        return all(cell in (" ", NOTHING) for cell in self.grid[line][max(0, start - 1) : start + len(text) + 1])

    def _keep_apart(self, line: int, column: int) -> None:
        if 0 <= column < self.n_columns and self.grid[line][column] == " ":
            self.grid[line][column] = NOTHING

    def _front(self) -> None:
        """Trace the front: to the right of the line through its marks, everything costs more."""
        steps = sorted((p for p in self.points if p.standing == "front"), key=lambda p: (p.column, p.line))
        for here, there in zip(steps, steps[1:], strict=False):
            for column in range(here.column + 1, there.column):
                self._trace(here.line, column, "┄")
            for line in range(here.line + 1, there.line):
                self._trace(line, there.column, "┆")
            if here.line != there.line:
                self._trace(here.line, there.column, "┐")

    def _trace(self, line: int, column: int, sign: str) -> None:
        if self.grid[line][column] == " ":
            self.grid[line][column] = sign

    def _framed(self) -> Iterator[str]:
        ticks = {self.n_lines - 1 - self.times.cell(at, self.n_lines): text for at, text in self.times.ticks}
        yield "ms".rjust(self.gutter)
        for number, cells in enumerate(self.grid):
            text = ticks.get(number, "")
            yield f"{text:>{self.gutter}} {'┤' if text else '│'}{''.join(cell or ' ' for cell in cells)}".rstrip()

    def _axis(self) -> Iterator[str]:
        """Give the line under the chart and its numbers, as many as stand apart, the unit at the end."""
        unit = "peak MiB"
        rule, numbers = ["─"] * self.n_columns, [" "] * (self.n_columns + self.gutter + 2)
        free_from, last = 0, len(numbers) - len(unit) - 1
        for at, text in self.peaks.ticks:
            column = self.peaks.cell(at, self.n_columns)
            start = max(0, column + self.gutter + 2 - len(text) // 2)
            if start < free_from or start + len(text) > last:
                continue
            rule[column] = "┬"
            numbers[start : start + len(text)] = text
            free_from = start + len(text) + 2
        numbers[-len(unit) :] = unit
        yield " " * (self.gutter + 1) + "└" + "".join(rule)
        yield "".join(numbers)

    def _legend(self) -> list[str]:
        used = {point.standing for point in self.points}
        marks = "   ".join(f"{mark} {WORDS[standing]}" for standing, mark in MARKS.items() if standing in used)
        keys = "; ".join(f"{key}: {label}" for key, label in self.keys)
        return [marks, *textwrap.wrap(keys, self.width, subsequent_indent="  ", break_on_hyphens=False)]


class Axis:
    """A range of values with room at both ends, and round numbers inside it."""

    def __init__(self, values: Sequence[float], *, n_ticks: int) -> None:
        low, high = min(values), max(values)
        # A difference of a few bytes, or none, is not spread over the whole chart
        room = max((high - low) * ROOM_RATIO, (high * LEAST_SPAN_RATIO - (high - low)) / 2)
        self.low, self.high = max(0.0, low - room), high + room
        self.ticks = list(self._ticks(n_ticks))

    def cell(self, value: float, n_cells: int) -> int:
        """Give the number of the cell, from the low end, that a value falls in."""
        return min(n_cells - 1, max(0, round((value - self.low) / (self.high - self.low) * (n_cells - 1))))

    def _ticks(self, wanted: int) -> Iterator[tuple[float, str]]:
        rough = (self.high - self.low) / wanted
        scale: float = 10.0 ** math.floor(math.log10(rough))
        step = next(scale * factor for factor in STEPS if scale * factor >= rough * 0.999)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        if not math.isclose(round(step, decimals), step):
            decimals += 1
        first = math.ceil(self.low / step - 1e-9)
        for number in range(first, math.floor(self.high / step + 1e-9) + 1):
            yield number * step, f"{number * step:.{decimals}f}"


def _places(point: Point, length: int) -> Iterator[tuple[int, int]]:
    """Yield where a label may start: right and left of its mark, then above and below it, then beyond."""
    right, left, middle = point.column + 2, point.column - 1 - length, point.column - length // 2
    yield point.line, right
    yield point.line, left
    for away in (-1, 1):
        yield point.line + away, middle
        yield point.line + away, point.column + 1
        yield point.line + away, point.column - length
