"""A chain's items as arrays of whole numbers, which is what every solver reads.

Bytes are held in one running sum or two, the first axis of every array of bytes. Where no item releases anything before
backward begins there is one, and an item has one need: the larger of its forward's and its backward's. Otherwise the
first sum is that of the forward (``kept_bytes``), the second that of the backward (less ``released_bytes``).

Seconds become whole units of a power of ten, 10**12 to 10**13 of them to the longest plan, so sums are exact and ties
are ties. That moves a plan's time by at most half a unit per item.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckbench.planner.chain import Chain, Item

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Group:
    """The items that share first and last block; shapes (sums, items) and (items,).

    ``need``: what an item needs at its worst moment above what the sum held before it, with what later blocks'
    gradients added.
    """

    stop: int
    kept: Ints
    need: Ints
    time: Ints
    items: tuple[Item, ...]

    def only(self, which: NDArray[np.bool_]) -> "Group":
        """Give the group of those items alone."""
        items = tuple(item for item, is_in in zip(self.items, which.tolist(), strict=True) if is_in)
        return Group(self.stop, self.kept[:, which], self.need[:, which], self.time[which], items)


class Table:
    """A chain's items by first block, grouped by last; items that another one beats in every number are left out."""

    def __init__(self, chain: Chain) -> None:
        self.n_blocks = chain.n_blocks
        self.n_sums = 2 if any(item.released_bytes for items in chain.items for item in items) else 1
        heads = [chain.head_peak_bytes, chain.head_backward_peak_bytes]
        self.head: Ints = np.array(heads if self.n_sums == 2 else [max(heads)], dtype=np.int64)
        """What head and loss need above each sum."""
        self.unit_s = unit_of_time(chain)
        self._known: dict[tuple[tuple[int, ...], ...], tuple[list[int], Ints]] = {}
        self.groups: list[list[Group]] = []
        for items in chain.items:
            by_stop: dict[int, list[Item]] = {}
            for item in items:
                by_stop.setdefault(item.stop, []).append(item)
            self.groups.append([self._group(chain, stop, same) for stop, same in sorted(by_stop.items())])
        self.released = self._released() if self.n_sums == 2 else []
        """By block: the least and the most that any prefix releases, with two sums."""

    def units(self, seconds: float) -> int:
        """Give seconds in whole units."""
        return round(seconds / self.unit_s)

    def _group(self, chain: Chain, stop: int, items: list[Item]) -> Group:
        """Make one group; equal blocks, whose items cost the same, are looked through once."""
        rows = tuple(
            (
                i.kept_bytes,
                i.kept_bytes - i.released_bytes,
                i.forward_peak_bytes,
                i.backward_peak_bytes,
                self.units(i.extra_s),
            )
            for i in items
        )
        if rows not in self._known:
            picked: list[int] = []
            for k in sorted(range(len(rows)), key=rows.__getitem__):
                if not any(all(a <= b for a, b in zip(rows[other], rows[k], strict=True)) for other in picked):
                    picked.append(k)
            self._known[rows] = picked, np.array([rows[k] for k in picked], dtype=np.int64).T
        picked, (kept, held, forward, backward, time) = self._known[rows]
        backward = chain.later_bytes[stop] + backward
        if self.n_sums == 2:
            sums, need = np.stack([kept, held]), np.stack([forward, backward])
        else:
            sums, need = kept[None], np.maximum(forward, backward)[None]
        return Group(stop, sums, need, time, tuple(items[k] for k in picked))

    def _released(self) -> list[tuple[int, int]]:
        least, most = [0] + [2**62] * self.n_blocks, [0] + [-(2**62)] * self.n_blocks
        for i, groups in enumerate(self.groups):
            for group in groups:
                released = group.kept[0] - group.kept[1]
                least[group.stop] = min(least[group.stop], least[i] + int(released.min()))
                most[group.stop] = max(most[group.stop], most[i] + int(released.max()))
        return list(zip(least, most, strict=True))


def unit_of_time(chain: Chain) -> float:
    """Give the power of ten, in seconds, of which the longest plan has 10**12 to 10**13."""
    longest = sum(max(item.extra_s for item in items) for items in chain.items)
    return 10.0 ** (math.ceil(math.log10(longest)) - 13) if longest > 0 else 1.0
