"""What a budget rules out before any search: items that never fit, and a lower bound on the time of earlier blocks.

**Bound.** What a prefix plan that ends before block ``i`` takes at least when it may keep ``X`` bytes. By Lagrange, for
every price ``p >= 0`` in time per byte, any plan with ``S <= X`` takes at least its time plus ``p * (S - X)``, so

    bound(i, X) = max over p of V(i, p) - p * X,     V(i, p) = least sum of (time + p * kept) over prefix plans.

``V`` is a shortest path over the stack, found for a whole grid of prices at once. It is concave in ``p``, so the best
price for an ``X`` is found by bisection. The grid only makes the bound a little lower than it could be. With two sums
``S`` is a mixture of both, which is valid too: ``share`` of the first, the rest of the second.
"""

import numpy as np

from ckbench.planner.solve_table import Floats, Group, Ints, Table

SHARES = {1: (1.0,), 2: (0.0, 0.5, 1.0)}
"""Mixtures that are tried, by number of sums."""


class Limits:
    """What ``room`` bytes leave of a table: the items that some prefix that fits can still take, and bounds."""

    def __init__(self, table: Table, room: int) -> None:
        self.room = room
        self.least: list[Ints | None] = [np.zeros((table.n_sums, 1), dtype=np.int64)] + [None] * table.n_blocks
        """By block: the fewest bytes that prefixes that fit keep, each sum by itself; None where none ends there."""
        self.usable: list[list[Group]] = []
        for i, groups in enumerate(table.groups):
            at = self.least[i]
            self.usable.append([])
            for group in groups if at is not None else []:
                assert at is not None
                fits = np.all(group.need <= room - at, axis=0)
                if not fits.any():
                    continue
                if not fits.all():
                    group = group.only(fits)
                self.usable[i].append(group)
                known, new = self.least[group.stop], at + group.kept.min(axis=1, keepdims=True)
                self.least[group.stop] = new if known is None else np.minimum(known, new)
        self._bounds = [Bound(self, table.head, share) for share in SHARES[table.n_sums]]

    def seconds(self, block: int, rise: Ints) -> Floats:
        """Bound the time, in units, of what lies before ``block`` when what follows rises that far above it."""
        first, *others = (bound.seconds(block, self.room - rise) for bound in self._bounds)
        for other in others:
            np.maximum(first, other, out=first)
        return first


class Bound:
    """The bound above for one mixture of sums, over the prefixes that ``limits`` leaves."""

    def __init__(self, limits: Limits, head: Ints, share: float) -> None:
        self._mixture = np.array([share, 1 - share])[: len(head)]
        self._usable = [[(g.stop, self._mixture @ g.kept, g.time) for g in groups] for groups in limits.usable]
        prices = self._grid()
        # Made fine around the price that suits the whole stack: labels that matter lie there.
        best = int(np.argmax(self._values(prices)[-1] - prices * float(self._mixture @ (limits.room - head))))
        near = np.linspace(prices[max(best - 1, 0)], prices[min(best + 1, len(prices) - 1)], 65)
        self._prices = np.unique(np.concatenate([prices, near]))
        self._at = self._values(self._prices)
        with np.errstate(invalid="ignore"):
            slopes = np.diff(self._at, axis=1) / np.diff(self._prices)
        self._falls = np.maximum.accumulate(-slopes, axis=1)

    def seconds(self, block: int, keep: Ints) -> Floats:
        """Bound the time, in units, of what lies before ``block`` when its sums may be ``keep``, shape (sums, N)."""
        # The slopes of V fall with the price: the best one is the first whose next slope is no more than X.
        mixed = self._mixture @ keep
        best = self._falls[block].searchsorted(-mixed)
        value, paid = self._at[block][best], self._prices[best] * mixed
        rounding = 1.0 + 1e-12 * (np.abs(value) + np.abs(paid))
        bound: Floats = value - paid - rounding
        return bound

    def _values(self, prices: Floats) -> Floats:
        """Give ``V`` by block and price; infinite at blocks where no prefix that fits ends."""
        values = np.full((len(self._usable) + 1, len(prices)), np.inf)
        values[0] = 0.0
        for i, usable in enumerate(self._usable):
            for stop, kept, time in usable:
                cost = (time[:, None] + kept[:, None] * prices).min(axis=0)
                np.minimum(values[stop], values[i] + cost, out=values[stop])
        return values

    def _grid(self) -> Floats:
        """Give prices from 0 over the least to the largest at which some block would change its item."""
        slopes: list[Floats] = []
        for _, mixed, time in (group for usable in self._usable for group in usable):
            order = mixed.argsort()
            kept, times = mixed[order], time[order]
            step, fall = kept[1:] - kept[:-1], times[:-1] - times[1:]
            good = (step > 0) & (fall > 0)
            slopes.append(fall[good] / step[good])
        every = np.concatenate(slopes) if slopes else np.zeros(0)
        if not len(every):
            return np.array([0.0, 1.0])
        return np.concatenate([[0.0], np.geomspace(every.min() / 4, every.max() * 4, 96)])
