"""Which rows are worth their memory and time: the front of a group of comparable rows, with the interval of time.

Peaks are exact or read from an allocator, so they are compared as they are. Times scatter: what is slower by the
medians alone is not called worse, only undecided.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ckbench.compare import Row, first_stage, look_up
from ckbench.statistics import paired_ratio
from ckbench.table import cell

Standing = Literal["front", "undecided", "dominated"]
"""front: no comparable row is better by peak and median time. dominated: one needs no more memory and is faster
beyond doubt. undecided: one is better by the medians, but the interval does not exclude that it is slower."""

WORDS: dict[Standing, str] = {
    "front": "on the front",
    "undecided": "undecided",
    "dominated": "dominated",
}


def is_measured(row: Row) -> bool:
    """Tell whether a row has a place in a memory-time chart: it ended ok, and both figures are known and positive."""
    # Estimates and plans are tables too, but nothing was recorded for their rows
    return bool(row.records and row.is_ok and row.values["peak_allocated_bytes"] and row.values["step_s_median"])


def standings(rows: Sequence[Row]) -> list[Standing | None]:
    """Judge every row against the measured rows of its own group; None for a row that was not measured.

    A group is what ``compare`` makes ratios in: same model and training step, same device, same versions.
    """
    groups = {group: members for group, members in by_group(rows)}
    return [_standing(row, groups[row.group]) if is_measured(row) else None for row in rows]


def by_group(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Gather measured rows by group, groups and rows in the order they come."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if is_measured(row):
            groups.setdefault(row.group, []).append(row)
    return list(groups.items())


def front(rows: Sequence[Row]) -> list[Row]:
    """Give the rows on the front of one group, by peak: each next one needs more memory and less time."""
    chosen = [row for row, standing in zip(rows, standings(rows), strict=True) if standing == "front"]
    return sorted(chosen, key=lambda row: (row.values["peak_allocated_bytes"], row.values["step_s_median"]))


def _standing(row: Row, members: Sequence[Row]) -> Standing:
    peak, time_s = row.values["peak_allocated_bytes"], row.values["step_s_median"]
    standing: Standing = "front"
    for other in members:
        other_peak, other_s = other.values["peak_allocated_bytes"], other.values["step_s_median"]
        if other_peak > peak:
            continue
        if is_faster(other, row):
            return "dominated"
        if other_s <= time_s and (other_peak < peak or other_s < time_s):
            standing = "undecided"
    return standing


def is_faster(one: Row, other: Row) -> bool:
    """Tell whether the 95 % interval excludes that ``one`` is as slow as ``other``.

    Rounds of one session are paired, as in every ratio; rows without two common rounds are faster where their
    intervals of time do not meet.
    """
    paired = sorted(set(one.rounds) & set(other.rounds))
    if one.values["session_id"] == other.values["session_id"] and len(paired) > 1:
        times = [one.rounds[i] for i in paired], [other.rounds[i] for i in paired]
        high = paired_ratio(*times, first_stage(one.values["run"], paired))[2]
        if high is not None:
            return high < 1.0
    high, low = one.values["step_s_high"], other.values["step_s_low"]
    return high is not None and low is not None and high < low


def name_of_group(values: dict[str, Any], varied: Iterable[str]) -> str:
    """Name a row's group by what varies between groups: ``n_layers 12, seq_len 128``; empty where nothing does."""
    return ", ".join(f"{key.partition('.')[2] or key} {cell(look_up(values, key))}" for key in varied)
