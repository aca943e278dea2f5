"""How memory grows with depth: a straight line or the root of it, fitted by least squares, with how well it fits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckbench.statistics import fit_line
from ckbench.units import format_bytes

MIN_DEPTHS = 4
"""Two depths fit any line and three nearly; from four on R² says something."""
EXPECTED_ROOT = {"none": False, "per-block": False, "sqrt": True}
"""Whether theory expects a + b·√L, by strategy name; others get the law that fits better."""


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


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """One strategy's law over the depths, and how well the other law would fit."""

    law: Law | None
    other: Law | None
    is_expected: bool
    """Whether theory names this law, and not the better fit."""


def fitted(strategy: str, depths: Sequence[int], n_bytes: Sequence[int]) -> Fitted:
    """Fit both laws; the law is the one that theory names for the strategy (as typed), or else the better one.

    No laws with fewer than four different depths.
    """
    straight, root = (_fit(depths, n_bytes, is_root) for is_root in (False, True))
    expected = EXPECTED_ROOT.get(strategy.partition(",")[0])
    is_root = expected
    if is_root is None:
        is_root = straight is not None and root is not None and root.r_squared > straight.r_squared
    law, other = (root, straight) if is_root else (straight, root)
    return Fitted(law=law, other=other, is_expected=expected is not None)


def _fit(depths: Sequence[int], n_bytes: Sequence[int], is_root: bool) -> Law | None:
    if len(set(depths)) < MIN_DEPTHS:
        return None
    line = fit_line([math.sqrt(depth) if is_root else float(depth) for depth in depths], n_bytes)
    return Law(is_root=is_root, a_bytes=line.start, b_bytes=line.slope, r_squared=line.r2)
