"""Labels beside points, none on top of another, of a mark or of the frame; figures grow until there is room."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckbench.reports._plot_style import INK, TEXT_POINTS

DIRECTIONS = (0, 180, 90, 270, 45, 135, 315, 225, 20, 160, 340, 200)
"""Degrees: right of the mark first, as one reads."""
NEAR_POINTS = (4.5, 8.0, 12.0, 17.0)
FAR_POINTS = (22.0, 28.0, 35.0, 43.0, 52.0, 62.0)
LEADER_FROM_POINTS = 6.0
"""From so far on between a mark and its label, a line joins them."""
GAP_POINTS = 1.0
MARK_POINTS = 3.0


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels from the lower left."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: "Box") -> bool:
        """Tell whether the two have a point in common."""
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def holds(self, other: "Box") -> bool:
        """Tell whether the other lies inside."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.bottom <= other.bottom
            and other.top <= self.top
        )


@dataclass(frozen=True, kw_only=True)
class Label:
    """One text and the point it belongs to, in data coordinates."""

    text: str
    x: float
    y: float
    colour: str = INK


Segment = tuple[tuple[float, float], tuple[float, float]]
"""A line along one of the axes, from its lower or left end, in data coordinates."""


def place(figure: Any, axes: Any, labels: Sequence[Label], lines: Sequence[Segment] = ()) -> list[Label]:
    """Write labels, the first with the first choice; give those for which there was no room.

    ``lines`` are crossed only by a label that would otherwise be far from its mark. The layout is settled here: nothing
    that changes it may be added later.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    pixels = figure.dpi / 72
    frame = axes.get_window_extent()
    room = Box(frame.x0 + pixels, frame.y0 + pixels, _right_edge(figure) - pixels, frame.y1)
    taken = [_around(axes.transData.transform((label.x, label.y)), MARK_POINTS * pixels) for label in labels]
    drawn = [_line(axes.transData.transform(segment), pixels / 2) for segment in lines]
    left_over = []
    for label in labels:
        found = _find(figure, axes, label, room, taken, drawn)
        if found is None:
            left_over.append(label)
            continue
        box, leader = found
        taken += [box, *leader]
        _write(axes, label, box, has_leader=bool(leader))
    return left_over


def _find(
    figure: Any, axes: Any, label: Label, room: Box, taken: Sequence[Box], drawn: Sequence[Box]
) -> tuple[Box, list[Box]] | None:
    """Look for a place: near and clear of lines, near, far and clear of lines, far; None where there is none."""
    pixels = figure.dpi / 72
    size = _size(figure, axes, label.text)
    point = axes.transData.transform((label.x, label.y))
    for distances in (NEAR_POINTS, FAR_POINTS):
        for avoided in ([*taken, *drawn], taken):
            for box in _boxes(point, size, pixels, distances):
                if not room.holds(box) or any(box.meets(other) for other in avoided):
                    continue
                is_far = math.dist(point, _nearest(point, box)) >= LEADER_FROM_POINTS * pixels
                leader = list(_along(point, box, pixels)) if is_far else []
                if not _crosses(leader, taken):
                    return box, leader
    return None


def _line(ends: Any, half: float) -> Box:
    return Box(ends[0][0] - half, ends[0][1] - half, ends[1][0] + half, ends[1][1] + half)


def _right_edge(figure: Any) -> float:
    return float(figure.bbox.width)


def _around(point: Sequence[float], radius: float) -> Box:
    return Box(point[0] - radius, point[1] - radius, point[0] + radius, point[1] + radius)


def _size(figure: Any, axes: Any, text: str) -> tuple[float, float]:
    drawn = axes.text(0, 0, text, fontsize=TEXT_POINTS)
    extent = drawn.get_window_extent(figure.canvas.get_renderer())
    drawn.remove()
    return float(extent.width), float(extent.height)


def _boxes(
    point: Sequence[float], size: tuple[float, float], pixels: float, distances: Sequence[float]
) -> Iterator[Box]:
    """Yield where the label could lie, nearest first."""
    width, height = size
    gap = GAP_POINTS * pixels
    for distance in distances:
        for degrees in DIRECTIONS:
            cosine, sine = round(math.cos(math.radians(degrees)), 6), round(math.sin(math.radians(degrees)), 6)
            x = point[0] + distance * pixels * cosine - (0.0 if cosine > 0.1 else width if cosine < -0.1 else width / 2)
            y = point[1] + distance * pixels * sine - (0.0 if sine > 0.5 else height if sine < -0.5 else height / 2)
            yield Box(x - gap, y - gap, x + width + gap, y + height + gap)


def _along(point: Sequence[float], box: Box, pixels: float) -> Iterator[Box]:
    """Yield small boxes along the line from just outside the mark to the label."""
    end = _nearest(point, box)
    length = math.dist(point, end)
    first = (MARK_POINTS + 1.0) * pixels
    n_steps = max(1, int((length - first) / (2 * pixels)))
    for i in range(n_steps):
        share = (first + (length - first) * i / n_steps) / length if length else 0.0
        yield _around((point[0] + (end[0] - point[0]) * share, point[1] + (end[1] - point[1]) * share), pixels / 2)


def _nearest(point: Sequence[float], box: Box) -> tuple[float, float]:
    return min(max(point[0], box.left), box.right), min(max(point[1], box.bottom), box.top)


def _crosses(line: Sequence[Box], taken: Sequence[Box]) -> bool:
    return any(step.meets(other) for step in line for other in taken)


def _write(axes: Any, label: Label, box: Box, *, has_leader: bool) -> None:
    to_data = axes.transData.inverted().transform
    gap = GAP_POINTS * axes.figure.dpi / 72
    x, y = to_data((box.left + gap, box.bottom + gap))
    written = axes.text(x, y, label.text, color=label.colour, fontsize=TEXT_POINTS, va="bottom", ha="left", zorder=4)
    written.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": GAP_POINTS / 2})
    if has_leader:
        end = to_data(_nearest(axes.transData.transform((label.x, label.y)), box))
        axes.plot(
            [label.x, end[0]],
            [label.y, end[1]],
            color=label.colour,
            linewidth=0.4,
            zorder=2.5,
            scalex=False,
            scaley=False,
        )
