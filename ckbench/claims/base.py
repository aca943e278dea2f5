"""What a claim and a verdict are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ckbench.claims.evidence import Evidence
from ckbench.units import UNKNOWN, format_count

Outcome = Literal["holds", "holds only if", "does not hold", "undecided", "not measured here"]
OUTCOMES: tuple[Outcome, ...] = ("holds", "holds only if", "does not hold", "undecided", "not measured here")
"""Undecided: the figures are there and cannot tell."""
Unit = Literal["bytes", "x", "share", "count", "FLOPs", "bytes/FLOP"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number behind a verdict, with its 95 % interval where it has one."""

    what: str
    value: float | None
    unit: Unit
    low: float | None = None
    high: float | None = None

    def text(self) -> str:
        """Write the figure for people.

        >>> Figure(what="slower", value=1.3, unit="x", low=1.2, high=1.4).text()
        'slower 1.30 x (95 %: 1.20 to 1.40)'
        """
        told = f"{self.what} {write(self.value, self.unit)}"
        if self.low is None or self.high is None:
            return told
        return f"{told} (95 %: {self.low:.2f} to {self.high:.2f})"


def write(value: float | None, unit: Unit) -> str:
    """Write a number with its unit; bytes in powers of ten, as the literature counts them.

    >>> write(154_618_822_656, "bytes"), write(0.7, "share"), write(None, "x")
    ('154.6 GB', '70.0 %', 'n/a')
    """
    if value is None:
        return UNKNOWN
    if unit == "share":
        return f"{value * 100:.1f} %"
    if unit == "x":
        return f"{value:.2f} x"
    if unit == "bytes/FLOP":
        return f"{value:.3g} bytes/FLOP"
    if unit == "count":
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    number, _, prefix = format_count(value).partition(" ")
    return f"{number} {prefix}{'B' if unit == 'bytes' else 'FLOPs'}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the figures say of a claim."""

    outcome: Outcome
    reason: str
    """Why, in one or two sentences for people."""
    figures: tuple[Figure, ...] = ()
    condition: str = ""
    """What ``holds only if`` goes on with."""

    def __post_init__(self) -> None:
        assert bool(self.condition) == (self.outcome == "holds only if"), "a condition belongs to holds only if"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence that people repeat, where it comes from, and how it is put to the test."""

    name: str
    text: str
    source: str
    """Who says so; an article that is not to be found by a number is described."""
    formula: str
    """What the figures are held against."""
    studies: tuple[str, ...]
    """Names of the studies in configs/articles that measure or estimate it."""
    judge: Callable[[Evidence], Verdict]


class Undecided(Exception):
    """Figures are there, and cannot tell: what is missing, as a sentence."""
