"""How memory grows with depth: a straight line or the root of it, fitted by least squares, with how well it fits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckbench.units import format_bytes

MIN_DEPTHS = 4
"""Two depths fit any line and three nearly; from four on R² says something."""


@dataclass(frozen=True, kw_only=True)
class Law:
    """bytes = a + b·L, or a + b·√L, over the depths L that were measured."""

    is_root: bool
    a_bytes: float
    b_bytes: float
    r_squared: float
    """1 where every point lies on the curve."""

    def at(self, depth: float) -> float:
        """Give the bytes at a depth."""
        return self.a_bytes + self.b_bytes * (math.sqrt(depth) if self.is_root else depth)

    def __str__(self) -> str:
        sign = "-" if self.b_bytes < 0 else "+"
        a, b = format_bytes(round(self.a_bytes)), format_bytes(round(abs(self.b_bytes)))
        return f"{a} {sign} {b}·{'√L' if self.is_root else 'L'}, R² {self.r_squared:.4f}"


def fit(depths: Sequence[int], n_bytes: Sequence[int]) -> Law | None:
    """Fit both laws and give the better; the straight line where the root fits no better.

    None with fewer than four different depths. Ordinary least squares on two coefficients, as in any textbook.
    """
    laws = [law for law in (fit_as(depths, n_bytes, is_root=False), fit_as(depths, n_bytes, is_root=True)) if law]
    return max(laws, key=lambda law: law.r_squared, default=None)


def fit_as(depths: Sequence[int], n_bytes: Sequence[int], *, is_root: bool) -> Law | None:
    """Fit one of the two laws; None with fewer than four different depths."""
    if len(set(depths)) < MIN_DEPTHS:
        return None
    return _fit([math.sqrt(depth) if is_root else float(depth) for depth in depths], n_bytes, is_root)


def _fit(x: Sequence[float], y: Sequence[float], is_root: bool) -> Law:
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((value - mean_x) ** 2 for value in x)
    b = math.fsum((u - mean_x) * (v - mean_y) for u, v in zip(x, y, strict=True)) / spread
    a = mean_y - b * mean_x
    off = math.fsum((v - a - b * u) ** 2 for u, v in zip(x, y, strict=True))
    whole = math.fsum((v - mean_y) ** 2 for v in y)
    # What does not grow at all is on its line, up to rounding
    return Law(is_root=is_root, a_bytes=a, b_bytes=b, r_squared=1 - off / whole if whole else 1.0)
