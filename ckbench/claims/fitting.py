"""A straight line through a few points, and how well it lies."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Line:
    """y = start + slope·x, with the share of the scatter that it explains."""

    start: float
    slope: float
    r2: float


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Fit by least squares; needs two different x. R² is 1 where all y are equal.

    >>> fit_line([1, 2, 3], [3, 5, 7])
    Line(start=1.0, slope=2.0, r2=1.0)
    """
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    start = mean_y - slope * mean_x
    left = sum((y - start - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    total = sum((y - mean_y) ** 2 for y in ys)
    return Line(start=start, slope=slope, r2=1.0 if total == 0 else 1 - left / total)
