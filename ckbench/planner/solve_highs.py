"""The same problem as a mixed-integer program for HiGHS (``scipy.optimize.milp``): for stacks with too many labels.

One 0/1 variable per item, and per block ``i`` and sum (``solve_table``) a continuous ``S_i``: bytes kept by the chosen
items that end at or before ``i``. As a variable of its own it keeps rows short (one over all items would be dense):

    items that start at i = items that stop at i               (the chosen items cover the stack without gaps)
    S_i = S_{i-1} + sum over items that stop at i of kept * y
    S_i + sum over items that start at i, or lie across i, of need * y <= room
    S_n + what head and loss need <= room

For an item across ``i``, ``S_i`` is what was kept before its start, so its own limit holds there too. Stacks of equal
blocks have as many equal plans as ways to order them; where trading two neighbours' items is shown never to raise the
peak (``may_sort``), plans are asked to keep more and more towards the end, which loses nothing.

HiGHS works in floats: bytes are scaled to the room, seconds to the longest plan, and it stops at a difference of 1e-10
of that plan. Its answer is rebuilt as whole items, and the caller judges it by the chain's own integers.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array, vstack

from ckbench.planner.chain import Item
from ckbench.planner.solve_table import Table

SCALE = 1e4
"""What the room, in bytes, and the longest plan, in seconds, become: HiGHS' tolerances are absolute, 1e-6 and 1e-7."""

Entries = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What HiGHS found: a plan or None, the least time any plan can have in units, and whether it finished."""

    items: tuple[Item, ...] | None
    bound: float
    is_finished: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One item as numbers, bytes and units of time."""

    item: Item
    kept: tuple[int, ...]
    """By sum, as ``need``."""
    need: tuple[int, ...]
    time: int


@dataclass
class Rows:
    """Rows of a sparse matrix with their right-hand sides, built one by one."""

    at: list[tuple[int, int, float]] = field(default_factory=list)
    sides: list[float] = field(default_factory=list)

    def add(self, entries: Entries, side: float) -> None:
        """Add a row: the sum of coefficient times variable, and what it is compared with."""
        self.at += [(len(self.sides), column, value) for column, value in entries]
        self.sides.append(side)

    def matrix(self, n_columns: int) -> csr_array:
        """Give the rows as one matrix."""
        row, column, value = zip(*self.at, strict=True) if self.at else ((), (), ())
        return coo_array((value, (row, column)), shape=(len(self.sides), n_columns)).tocsr()


class Program:
    """The program of one table and room: variables are the items in order, then ``S_0`` to ``S_n`` of each sum."""

    def __init__(self, table: Table, room: int) -> None:
        self.table, self.room = table, room
        self.choices = [
            Choice(item, tuple(g.kept[:, k].tolist()), tuple(g.need[:, k].tolist()), int(g.time[k]))
            for groups in table.groups
            for g in groups
            for k, item in enumerate(g.items)
        ]
        self.bytes_scale = SCALE / max(1, abs(room))
        longest = sum(max(int(g.time.max()) for g in groups) for groups in table.groups)
        self.time_scale = SCALE / max(1, longest)
        n, n_choices = table.n_blocks, len(self.choices)
        self.first = [n_choices + k * (n + 1) for k in range(table.n_sums)]
        """The place of each sum's ``S_0``."""
        self.n_columns = n_choices + table.n_sums * (n + 1)
        self.cost = np.zeros(self.n_columns)
        self.cost[:n_choices] = [choice.time * self.time_scale for choice in self.choices]
        self.low = np.concatenate([np.zeros(n_choices), np.full(self.n_columns - n_choices, -np.inf)])
        self.high = np.concatenate([np.ones(n_choices), np.full(self.n_columns - n_choices, np.inf)])
        self.low[self.first] = self.high[self.first] = 0.0
        self.starts: list[list[int]] = [[] for _ in range(n + 1)]
        self.stops: list[list[int]] = [[] for _ in range(n + 1)]
        self.across: list[list[int]] = [[] for _ in range(n + 1)]
        for k, choice in enumerate(self.choices):
            self.starts[choice.item.start].append(k)
            self.stops[choice.item.stop].append(k)
            for i in range(choice.item.start + 1, choice.item.stop):
                self.across[i].append(k)

    def equal(self) -> Rows:
        """Give the rows that hold exactly: cover without gaps, and the running sums."""
        rows = Rows()
        for i in range(self.table.n_blocks):
            rows.add([*((k, 1.0) for k in self.starts[i]), *((k, -1.0) for k in self.stops[i])], float(i == 0))
            for which, s in enumerate(self.first):
                kept = [(k, self.choices[k].kept[which] * self.bytes_scale) for k in self.stops[i + 1]]
                rows.add([*kept, (s + i, 1.0), (s + i + 1, -1.0)], 0.0)
        return rows

    def limits(self) -> Rows:
        """Give the rows of the budget, by sum, block and then head: at most their right-hand sides."""
        rows = Rows()
        for which, s in enumerate(self.first):
            for i in range(self.table.n_blocks):
                there = self.starts[i] + self.across[i]
                need = [(k, self.choices[k].need[which] * self.bytes_scale) for k in there]
                rows.add([*need, (s + i, 1.0)], self.room * self.bytes_scale)
            side = (self.room - int(self.table.head[which])) * self.bytes_scale
            rows.add([(s + self.table.n_blocks, 1.0)], side)
        return rows

    def order(self) -> Rows:
        """Give rows that ask neighbours which may trade to keep no more in the first: at most 0."""
        rows = Rows()
        for i in range(self.table.n_blocks - 1):
            if self.across[i] or self.across[i + 1] or not may_sort(self.table, i):
                continue
            for level in sorted({self.choices[k].kept[0] for k in self.starts[i]})[:-1]:
                low: Entries = [(k, -1.0) for k in self.starts[i] if self.choices[k].kept[0] <= level]
                low += [(k, 1.0) for k in self.starts[i + 1] if self.choices[k].kept[0] <= level]
                rows.add(low, 0.0)
        return rows


def solve_highs(table: Table, room: int, time_limit_s: float) -> Answer:
    """Ask HiGHS for the fastest plan whose rise is at most ``room`` bytes, with no gap."""
    program = Program(table, room)
    s, width = len(program.choices), program.n_columns
    equal, limits, order = program.equal(), program.limits(), program.order()
    at_most = vstack([limits.matrix(width), order.matrix(width)])
    with silent_stdout():
        result = milp(
            program.cost,
            constraints=[
                LinearConstraint(equal.matrix(width), equal.sides, equal.sides),
                LinearConstraint(at_most, -np.inf, limits.sides + order.sides),
            ],
            integrality=np.concatenate([np.ones(s), np.zeros(width - s)]),
            bounds=Bounds(program.low, program.high),
            options={"mip_rel_gap": 0.0, "time_limit": time_limit_s},
        )
    dual = getattr(result, "mip_dual_bound", None)
    bound = -np.inf if dual is None or not np.isfinite(dual) else dual / program.time_scale
    if result.x is None:
        return Answer(None, bound, result.status == 2)
    items = tuple(choice.item for choice, y in zip(program.choices, result.x[:s], strict=True) if y > 0.5)
    return Answer(items, bound, result.status == 0)


@contextmanager
def silent_stdout() -> Iterator[None]:
    """Keep what HiGHS prints of its inner workings, past Python and whatever its options say, off standard output."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def may_sort(table: Table, i: int) -> bool:
    """Tell whether blocks ``i`` and ``i + 1`` may trade items so that the later one keeps more, whatever the rest does.

    They must offer the same items (bytes kept, seconds), and for each pair ``high`` before ``low`` the traded pair must
    rise no higher above any sum: ``max(need_i(low), kept(low) + need_j(high))`` at most
    ``max(need_i(high), kept(high) + need_j(low))``. Both then keep the same bytes for the rest. Trading neighbours one
    after the other sorts any plan.
    """
    first, second = table.groups[i], table.groups[i + 1]
    if len(first) != 1 or len(second) != 1 or first[0].stop != i + 1 or second[0].stop != i + 2:
        return False
    a, b = first[0], second[0]
    if a.kept.shape != b.kept.shape:
        return False
    in_a, in_b = np.lexsort((a.time, a.kept[0])), np.lexsort((b.time, b.kept[0]))
    kept = a.kept[:, in_a]
    if (kept != b.kept[:, in_b]).any() or (a.time[in_a] != b.time[in_b]).any() or (np.diff(kept[0]) == 0).any():
        return False
    need_a, need_b = a.need[:, in_a], b.need[:, in_b]
    # [sum, high, low] with kept[high] > kept[low]: the lower triangle.
    now = np.maximum(need_a[:, :, None], kept[:, :, None] + need_b[:, None, :])
    traded = np.maximum(need_a[:, None, :], kept[:, None, :] + need_b[:, :, None])
    high, low = np.tril_indices(kept.shape[1], -1)
    return bool((traded <= now)[:, high, low].all())
