"""Exact dynamic programming over labels (peak, seconds), from the last block to the first, with no rounding of bytes.

**State.** Let a suffix plan cover the blocks from ``i`` on. All that an earlier part of the plan does to it is shift
it by ``S``, the bytes kept before block ``i``. So one number says how high it rises: its *rise*, the peak above ``S``,

    rise(n) = what head and loss need
    rise(item, then the rest) = max(need(item), kept_bytes(item) + rise(rest)),
    need(item) = max(forward_peak_bytes, later_bytes[stop] + backward_peak_bytes).

``rise`` never falls when that of the rest grows, and seconds add up. So of two suffix plans from ``i`` one that neither
rises higher nor takes longer replaces the other in every plan, and the pairs that no other pair beats (the labels)
are enough: those at block 0 are the whole Pareto front of (peak, seconds), ties included, for every budget at once.

**Two sums** (``solve_table``): a label has a rise above each, ``f`` and ``b``, and one beats another in both and in
seconds. Before block ``i`` the sums differ by what a prefix releases, at least ``r`` and at most ``R``. So the first
limit implies the second wherever ``b <= f + r``, and the second the first wherever ``f <= b - R``: a smaller ``b`` or
``f`` is raised to that, which changes no plan's peak and makes most labels differ in one rise only.

**One budget.** With ``room`` what it leaves above ``start_bytes``, a label is kept only if

* ``rise <= room - least``, where ``least`` is the smallest ``S`` of any prefix that itself fits, and
* ``seconds + bound(room - rise) <= best``, where ``best`` is a known plan's time and ``bound(X)`` is at most the time
  of any prefix that fits with ``S <= X`` (``solve_bound``).

**Width.** A pass may hold at most ``width`` labels per block; it then lets go those whose ``seconds + bound`` are
largest and remembers the smallest it let go. A plan whose time is no larger than that is proven optimal all the same.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckbench.planner.chain import Item
from ckbench.planner.solve_bound import Limits
from ckbench.planner.solve_table import Ints, Table

MAX_LEVELS = 48
"""Differences of the two rises that ``unbeaten`` tells apart; with more, some beaten labels stay."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of one suffix: rises, shape (sums, labels), times in units, and each one's place among the candidates,
    which are all pairs of an item that starts here and a label of what follows it, in order."""

    rise: Ints
    time: Ints
    origin: Ints


@dataclass(frozen=True)
class Pass:
    """What one pass over the stack found: labels by block, and at block 0 those of whole plans."""

    table: Table
    stages: list[Labels]
    let_go: float
    """The least time, in units, that any label let go for want of width might have led to; infinite if none was."""

    @property
    def peaks(self) -> Ints:
        """Highest rise of each whole plan."""
        peaks: Ints = self.stages[0].rise.max(axis=0)
        return peaks

    @property
    def times(self) -> Ints:
        """Time of each whole plan, units."""
        return self.stages[0].time

    def fastest(self) -> int | None:
        """Give the whole plan of least time, of those the one of least peak, since beaten ones are out; or None."""
        return int(self.times.argmin()) if len(self.times) else None

    def plan(self, label: int) -> tuple[Item, ...]:
        """Give the items of a whole plan."""
        at, items = 0, []
        while at < self.table.n_blocks:
            place = int(self.stages[at].origin[label])
            for group in self.table.groups[at]:
                width = len(self.stages[group.stop].time)
                if place < width * len(group.items):
                    break
                place -= width * len(group.items)
            choice, label = divmod(place, width)
            items.append(group.items[choice])
            at = group.stop
        return tuple(items)


def run_pass(
    table: Table,
    width: int | None = None,
    limits: Limits | None = None,
    best: float = np.inf,
    *,
    is_timeless: bool = False,
) -> Pass | None:
    """Find the labels of every suffix; without ``limits`` for all budgets at once.

    ``best`` is a known plan's time in units; labels that cannot come down to it are dropped. Without ``limits`` nothing
    says which labels to let go, so None is returned where more than ``width`` would be needed. ``is_timeless``: all
    items take no time, which leaves the plans of least peak.
    """
    n, d = table.n_blocks, table.n_sums
    none, zero = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    stages = [Labels(none.reshape(1, 0).repeat(d, axis=0), none, none)] * n + [Labels(table.head[:, None], zero, zero)]
    let_go = np.inf
    for i in reversed(range(n)):
        least = None if limits is None else limits.least[i]
        if limits is not None and least is None:
            continue
        rises, times = [], []
        for group in table.groups[i]:
            rest = stages[group.stop]
            rises.append(np.maximum(group.kept[:, :, None] + rest.rise[:, None], group.need[:, :, None]).reshape(d, -1))
            own = np.zeros_like(group.time) if is_timeless else group.time
            times.append((own[:, None] + rest.time).ravel())
        rise = rises[0] if len(rises) == 1 else np.concatenate(rises, axis=1)
        time = times[0] if len(rises) == 1 else np.concatenate(times)
        origin: Ints | None = None
        if d == 2:
            released_least, released_most = table.released[i]
            np.maximum(rise[1], rise[0] + released_least, out=rise[1])
            np.maximum(rise[0], rise[1] - released_most, out=rise[0])
        if limits is not None and least is not None:
            origin = np.all(rise <= limits.room - least, axis=0).nonzero()[0]
            rise, time = rise[:, origin], time[origin]
        picked = unbeaten(rise, time)
        rise, time = rise[:, picked], time[picked]
        origin = picked if origin is None else origin[picked]
        if limits is not None and i and len(time):
            total = time + limits.seconds(i, rise)
            keep = (total <= best).nonzero()[0]
            if width is not None and len(keep) > width:
                ranked = keep[np.lexsort((rise.max(axis=0)[keep], total[keep]))]
                let_go = min(let_go, float(total[ranked[width]]))
                keep = np.sort(ranked[:width])
            rise, time, origin = rise[:, keep], time[keep], origin[keep]
        elif limits is None and width is not None and len(picked) > width:
            return None
        stages[i] = Labels(rise, time, origin)
    return Pass(table, stages, let_go)


def unbeaten(rise: Ints, time: Ints) -> Ints:
    """Index the labels that no other beats, one of equal labels; ``rise`` has shape (sums, labels).

    With one sum they come by rising ``rise``. With two, let ``d = b - f``: a label of larger or equal ``d`` beats
    another if its ``b`` and time are no larger, one of smaller ``d`` if its ``f`` and time are. So labels are compared
    level by level of ``d``; with more than ``MAX_LEVELS`` of them some beaten labels stay.
    """
    if rise.shape[0] == 1 or not len(time):
        return _unbeaten_in_order(rise[0].argsort(kind="stable"), rise[0], time)
    d = rise[1] - rise[0]
    levels = np.unique(d)
    if len(levels) == 1:
        return _unbeaten_in_order(rise[0].argsort(kind="stable"), rise[0], time)
    if len(levels) > MAX_LEVELS:
        levels = levels[np.linspace(0, len(levels) - 1, MAX_LEVELS).astype(np.int64)]
    # Level k holds what lies above level k - 1, up to and including its own value.
    level = levels.searchsorted(d)
    is_exact = levels[level] == d
    stays = np.ones(len(time), dtype=bool)
    for which, upwards in ((1, False), (0, True)):
        order = np.lexsort((time, rise[1 - which], rise[which]))
        stays[order] &= _stay(level[order], is_exact[order], time[order], len(levels), upwards)
    picked: Ints = stays.nonzero()[0]
    return picked


def _stay(level: Ints, is_exact: NDArray[np.bool_], time: Ints, n_levels: int, upwards: bool) -> NDArray[np.bool_]:
    """Say which labels, in order of one rise, no earlier one beats that lies on a level before theirs or on their own.

    ``upwards``: lower levels come before higher ones. On its own level a label is compared if its ``d`` is the level's:
    with all of the level upwards, as their ``d`` is no larger, else with those of the same ``d``.
    """
    never = np.iinfo(np.int64).max
    stays = np.ones(len(time), dtype=bool)
    lowest = np.full(len(time) + 1, never)
    for k in range(n_levels) if upwards else reversed(range(n_levels)):
        at = (level == k).nonzero()[0]
        stays[at] = lowest[at] > time[at]
        mine = np.full(len(time) + 1, never)
        exact = at[is_exact[at]]
        own = at if upwards else exact
        mine[own + 1] = time[own]
        stays[exact] &= np.minimum.accumulate(mine)[exact] > time[exact]
        mine[at + 1] = time[at]
        np.minimum(lowest, np.minimum.accumulate(mine), out=lowest)
    return stays


def _unbeaten_in_order(order: Ints, rise: Ints, time: Ints) -> Ints:
    """Give the labels of ``order``, sorted by ``rise``, that no other beats."""
    if not len(order):
        return order
    sorted_time = time[order]
    lowest = np.minimum.accumulate(sorted_time)
    first = np.ones(len(order), dtype=bool)
    np.less(sorted_time[1:], lowest[:-1], out=first[1:])
    order = order[first]
    rises = rise[order]
    last = np.ones(len(order), dtype=bool)
    np.not_equal(rises[1:], rises[:-1], out=last[:-1])
    return order[last]
