"""From a chain and a budget to the fastest plan whose peak fits, with proof; the whole front; the least peak.

Two exact methods. Labels (``solve_labels``) come first: a narrow pass gives a good plan, a wider one drops every label
that cannot beat it, and most stacks are proven optimal there. Where even the widest pass had to let labels go that
might have led to something better, HiGHS (``solve_highs``) takes over, with a time limit. The answer says which method
found it, and by how much it may miss the optimum if that is unproven.

Among plans of equal time the one of lower peak is given (by labels; HiGHS does not look for it).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckbench.planner.chain import Chain, Item, extra_s
from ckbench.planner.solve_bound import Limits
from ckbench.planner.solve_highs import solve_highs
from ckbench.planner.solve_labels import run_pass, unbeaten
from ckbench.planner.solve_table import Table

WIDTHS = (128, 2048, 16_384)
"""Labels per block that the passes of ``solve`` may hold, one pass after the other until one proves its plan."""

FRONT_WIDTHS = {1: 50_000, 2: 4_000}
"""Labels per block up to which ``front`` is found whole, by number of sums (``solve_table``)."""

FRONT_POINTS = 48
"""Budgets that ``front`` tries where the whole front is out of reach."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What was found for a budget. Where nothing fits ``items``, ``peak_bytes`` and ``extra_s`` are None."""

    items: tuple[Item, ...] | None
    peak_bytes: int | None
    extra_s: float | None
    floor_bytes: int
    """The least peak that any plan reaches."""
    proven_optimal: bool
    """No plan that fits is faster; where nothing fits, that nothing does."""
    gap: float
    """How much faster a plan that fits could be at most, as a share of this plan's step. 0.0 where proven."""
    method: str
    """Which method found it: ``labels`` or ``highs``."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least peak that any plan reaches, and which line of the peak it is (``owner``)."""

    peak_bytes: int
    owner: str


def floor(chain: Chain) -> Floor:
    """Give the least peak any plan reaches, exactly, and what owns it in a plan that reaches it."""
    lowest = _lowest(Table(chain))
    return Floor(peak_bytes=chain.peak_bytes(lowest), owner=owner(chain, lowest))


def owner(chain: Chain, items: Sequence[Item]) -> str:
    """Name the line that a plan's peak comes from.

    One of ``fixed``, ``head and loss``, ``backward of block 3``, ``forward of blocks 3 to 5``; of equal lines the
    first: what no plan changes before what a plan may.
    """
    held, released = chain.start_bytes, 0
    lines = []
    for item in items:
        last = item.stop - 1
        span = f"block {item.start}" if item.start == last else f"blocks {item.start} to {last}"
        backward = held - released + chain.later_bytes[item.stop] + item.backward_peak_bytes
        lines.append((backward, f"backward of {span}"))
        lines.append((held + item.forward_peak_bytes, f"forward of {span}"))
        held += item.kept_bytes
        released += item.released_bytes
    head = max(held + chain.head_peak_bytes, held - released + chain.head_backward_peak_bytes)
    first = [(chain.fixed_peak_bytes, "fixed"), (head, "head and loss")]
    return max(first + lines, key=lambda line: line[0])[1]


def solve(
    chain: Chain,
    budget_bytes: int,
    *,
    method: str = "auto",
    time_limit_s: float = 10.0,
    max_width: int | None = None,
) -> Solution:
    """Find the plan of least time whose peak is at most ``budget_bytes``.

    ``method``: ``auto``, ``labels`` (never HiGHS; where its widest pass proves nothing, the gap says so) or ``highs``
    (nothing else). ``time_limit_s`` is for HiGHS. ``max_width`` leaves out wider passes, for an answer soon whose gap
    may be larger. Raises ValueError for another method.
    """
    if method not in ("auto", "labels", "highs"):
        raise ValueError(f"method is auto, labels or highs, not {method!r}")
    return _Solver(chain, max_width).solve(budget_bytes, method, time_limit_s)


def front(chain: Chain, max_points: int | None = 512) -> list[Solution]:
    """Give the plans that no other plan beats in both peak and time, from the lowest peak to the fastest.

    Every one is optimal for its peak. All of them are found where no suffix has more than ``FRONT_WIDTHS`` labels, and
    given up to ``max_points``; of more, those nearest to evenly spaced peaks (None: all). Beyond that width a part: the
    fastest plan for each of ``FRONT_POINTS`` budgets evenly spaced from the floor to the peak of the fastest plan.
    """
    solver = _Solver(chain)
    done = run_pass(solver.table, FRONT_WIDTHS[solver.table.n_sums])
    if done is None:
        return _sampled_front(solver, max_points)
    peaks = np.maximum(done.peaks + chain.start_bytes, chain.fixed_peak_bytes)
    # Below what no plan changes only the fastest counts.
    labels = unbeaten(peaks[None], done.times)
    if max_points is not None and len(labels) > max_points:
        wanted = np.linspace(peaks[labels[0]], peaks[labels[-1]], max_points)
        labels = labels[np.unique(np.searchsorted(peaks[labels], wanted, side="right") - 1)]
    return [solver.solution(done.plan(label), np.inf, "labels") for label in labels.tolist()]


def _sampled_front(solver: "_Solver", max_points: int | None) -> list[Solution]:
    chain = solver.chain
    last = solver.solve(chain.peak_bytes(_fastest(chain)))
    assert last.peak_bytes is not None
    n_points = FRONT_POINTS if max_points is None else min(max_points, FRONT_POINTS)
    found: list[Solution] = []
    for budget in np.linspace(solver.floor_bytes, last.peak_bytes, n_points).astype(np.int64).tolist()[:-1]:
        new = solver.solve(budget)
        if not found or _seconds(new) < _seconds(found[-1]):
            found.append(new)
    return [*(solution for solution in found if _seconds(solution) > _seconds(last)), last]


class _Solver:
    """One chain, prepared once for any number of budgets."""

    def __init__(self, chain: Chain, max_width: int | None = None) -> None:
        self.chain, self.table = chain, Table(chain)
        self.widths = [width for width in WIDTHS if max_width is None or width <= max_width]
        self.lowest = _lowest(self.table)
        self.floor_bytes = chain.peak_bytes(self.lowest)

    def solve(self, budget_bytes: int, method: str = "auto", time_limit_s: float = 10.0) -> Solution:
        """Do what ``solve`` says."""
        if self.floor_bytes > budget_bytes:
            return Solution(
                items=None,
                peak_bytes=None,
                extra_s=None,
                floor_bytes=self.floor_bytes,
                proven_optimal=True,
                gap=0.0,
                method="labels",
            )
        if method == "highs":
            return self._by_highs(budget_bytes, time_limit_s, self.lowest, 0.0)
        items, lowest = self._by_labels(budget_bytes)
        if method == "labels" or lowest >= self._units(items):
            return self.solution(items, lowest, "labels")
        return self._by_highs(budget_bytes, time_limit_s, items, lowest)

    def solution(self, items: tuple[Item, ...], lowest: float, method: str) -> Solution:
        """Put a plan's figures together; ``lowest`` is the least time any plan that fits can have, in units."""
        seconds = extra_s(items)
        missing_s = max(0.0, self._units(items) - lowest) * self.table.unit_s
        return Solution(
            items=items,
            peak_bytes=self.chain.peak_bytes(items),
            extra_s=seconds,
            floor_bytes=self.floor_bytes,
            proven_optimal=missing_s == 0,
            gap=missing_s / (self.chain.plain_s + seconds) if missing_s else 0.0,
            method=method,
        )

    def _by_labels(self, budget_bytes: int) -> tuple[tuple[Item, ...], float]:
        """Give the best plan found and the least time that any plan that fits can have, in units."""
        limits = Limits(self.table, budget_bytes - self.chain.start_bytes)
        items, best, lowest = self.lowest, np.inf, 0.0
        for width in self.widths:
            done = run_pass(self.table, width, limits, best)
            assert done is not None
            label = done.fastest()
            if label is not None and done.times[label] <= best:
                items, best = done.plan(label), float(done.times[label])
            lowest = max(lowest, min(done.let_go, best))
            if lowest >= best:
                break
        return items, lowest

    def _by_highs(self, budget_bytes: int, time_limit_s: float, known: tuple[Item, ...], lowest: float) -> Solution:
        """Let HiGHS find the plan; ``known`` and ``lowest`` are a plan that fits and a bound on every plan's time."""
        margin = 0
        for _ in range(3):
            answer = solve_highs(self.table, budget_bytes - self.chain.start_bytes - margin, time_limit_s)
            if margin == 0:
                lowest = max(lowest, answer.bound)
            if answer.items is None:
                break
            over = self.chain.peak_bytes(answer.items) - budget_bytes
            if over <= 0:
                known = min(known, answer.items, key=lambda items: (extra_s(items), self.chain.peak_bytes(items)))
                if margin == 0 and answer.is_finished:
                    lowest = np.inf
                break
            # Its tolerance let it go a few bytes over: ask again with that much less.
            margin += 2 * over
        return self.solution(known, lowest, "highs")

    def _units(self, items: Sequence[Item]) -> int:
        return sum(self.table.units(item.extra_s) for item in items)


def _lowest(table: Table) -> tuple[Item, ...]:
    """Give a plan of the least peak."""
    done = run_pass(table, is_timeless=True)
    assert done is not None
    return done.plan(int(done.peaks.argmin()))


def _fastest(chain: Chain) -> tuple[Item, ...]:
    """Give a plan of the least time, whatever its peak."""
    best: list[tuple[float, tuple[Item, ...]]] = [(0.0, ())] * (chain.n_blocks + 1)
    for i in reversed(range(chain.n_blocks)):
        seconds, item = min(((item.extra_s + best[item.stop][0], item) for item in chain.items[i]), key=lambda o: o[0])
        best[i] = (seconds, (item, *best[item.stop][1]))
    return best[0][1]


def _seconds(solution: Solution) -> float:
    assert solution.extra_s is not None
    return solution.extra_s
