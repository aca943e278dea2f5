"""Regions inside regions over equal blocks: the exact trade-off of backward peak and time, per length of the span.

A region holds its input; its backward runs the span forward again, under a plan of its own, and then that plan's
backward. So a region is a small chain: with ``S`` what the replay has kept before an item, all above what lived before
the region's own forward and without what later blocks added, the highest point of the last ``m`` blocks of a replay is

    rise(item over j of m blocks, then the rest) =
        max(output_bytes + forward_peak(item), (m - j) * gradient_bytes + backward_peak(item), kept(item) + rise(rest)),
    seconds = forward seconds of the j blocks + extra seconds of the item + seconds(rest).

``output_bytes``: the gradient that came in waits while the replay runs forward, as large as the region's output, which
the region's figures count as kept. The replay stops early: a plain last block runs without its tail, and a last region
does not run forward at all, since its own replay follows at once. An item over one block is a way the caller has
measured. An item over ``j`` blocks is a region found before: it keeps its output, its forward rises as blocks without
autograd do, and its backward rises as its replay. ``rise`` grows with that of its parts and seconds add up, so pairs
that no other pair beats are enough (Rotor's dynamic program, Beaumont et al., hal-02352969, on exact frontiers instead
of a grid of memory slots; no bytes are rounded). Copies that live until forward has ended (``Item.released_bytes``) are
not modelled.

The first block of a replay works on the region's own input, which stays; a way that lets its input go does not there.

The planner takes its proposals from here (``nested_letters``) and replays each of them: what it then chooses among are
replayed bytes, not those of this model.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ckbench.plan import Region
from ckbench.planner.chain import Item
from ckbench.planner.letters import Letter
from ckbench.planner.solve_labels import unbeaten
from ckbench.planner.solve_table import Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to run a single block in a replay; figures as in ``chain.Item``, read where its input may be let go."""

    region: Region | None
    """Over block 0. None runs it plainly."""
    kept_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    extra_s: float
    last_forward_peak_bytes: int | None = None
    """Highest live bytes of the forward above those before it when early stop ends it; None: a region, which then has
    no forward, or as ``forward_peak_bytes``."""
    input_let_go_bytes: int = 0
    """Bytes of its input that it lets go, where nobody else holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualBlock:
    """What a block of a stack of equal blocks needs to be nested."""

    output_bytes: int
    plain_peak_bytes: int
    """Highest live bytes of its forward without autograd, above those before it."""
    gradient_bytes: int
    """What its backward leaves for those before it: ``later_bytes[i] - later_bytes[i + 1]`` of a chain."""
    forward_s: float
    tail_s: float
    """Forward seconds that early stop skips."""
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class _Front:
    """Pairs that nothing beats, and for each the first item of the plan: size, child region and the rest's index."""

    rise: Ints
    time: Ints
    first: tuple[tuple[int, Region | None, int], ...]


def nested_items(
    block: EqualBlock, start: int, n_blocks: int, *, max_depth: int = 2, max_points: int = 64
) -> list[Item]:
    """Give the regions over blocks ``start`` to ``start + n_blocks - 1`` that no other beats, by rising backward peak.

    ``max_depth``: regions of two blocks and more inside one another, this one included. Exact up to ``max_points``
    pairs per span; of more, those at evenly spaced peaks are kept, ends included. Raises ValueError for less than two
    blocks.
    """
    return regions_by_length(block, n_blocks, start=start, max_depth=max_depth, max_points=max_points)[n_blocks]


def regions_by_length(
    block: EqualBlock, n_blocks: int, *, start: int = 0, max_depth: int = 2, max_points: int = 64
) -> dict[int, list[Item]]:
    """Give ``nested_items`` for every length from 2 to ``n_blocks``, found in one go."""
    if n_blocks < 2:
        raise ValueError(f"a nested region covers two blocks or more, not {n_blocks}")
    search = _Search(block, n_blocks, max_points)
    for _ in range(max_depth):
        search.deepen()
    return {
        n: [
            Item(
                start=start,
                stop=start + n,
                region=region.moved(start),
                kept_bytes=block.output_bytes,
                forward_peak_bytes=search.plain_peak(n),
                backward_peak_bytes=rise,
                extra_s=time * search.unit_s,
            )
            for rise, time, region in search.regions[n]
        ]
        for n in range(2, n_blocks + 1)
    }


class _Search:
    """Fronts of replays and regions by length; each ``deepen`` lets regions hold those of the round before."""

    def __init__(self, block: EqualBlock, n_blocks: int, max_points: int) -> None:
        self.block, self.n_blocks, self.max_points = block, n_blocks, max_points
        # A block is run again once by every region around it, twice where one of them is its own.
        longest = 2 * n_blocks * n_blocks * (block.forward_s + max(way.extra_s for way in block.ways))
        self.unit_s = 10.0 ** (math.ceil(math.log10(longest)) - 13) if longest > 0 else 1.0
        self.forward = round(block.forward_s / self.unit_s)
        self.tail = round(block.tail_s / self.unit_s)
        self.regions: dict[int, list[tuple[int, int, Region]]] = {}

    def plain_peak(self, n: int) -> int:
        """Give how far ``n`` blocks without autograd rise: from the second on, the input of each lives too."""
        return self.block.plain_peak_bytes + (self.block.output_bytes if n > 1 else 0)

    def deepen(self) -> None:
        """Find the regions of every length that hold those known so far."""
        rests: dict[int, _Front] = {}
        found: dict[int, list[tuple[int, int, Region]]] = {}
        for m in range(1, self.n_blocks + 1):
            if m > 1:
                whole = self._front(m, rests, is_first=True)
                found[m] = [
                    (int(rise), int(time), self._region(m, first, rests))
                    for rise, time, first in zip(whole.rise, whole.time, whole.first, strict=True)
                ]
            rests[m] = self._front(m, rests, is_first=False)
        self.regions = found

    def _front(self, m: int, rests: dict[int, _Front], *, is_first: bool) -> _Front:
        """Give the pairs of the last ``m`` blocks of a replay; ``is_first``: they are the whole of it."""
        rises: list[Ints] = []
        times: list[Ints] = []
        firsts: list[tuple[int, Region | None, int]] = []

        def add(size: int, region: Region | None, kept: int, forward: int, backward: int, time: int) -> None:
            rest, after = rests[m - size], (m - size) * self.block.gradient_bytes
            own = max(self.block.output_bytes + forward, after + backward)
            rises.append(np.maximum(own, kept + rest.rise))
            times.append(size * self.forward + time + rest.time)
            firsts.extend((size, region, k) for k in range(len(rest.rise)))

        for way in self.block.ways:
            extra = round(way.extra_s / self.unit_s)
            held = way.input_let_go_bytes if is_first else 0
            if m > 1:
                add(1, way.region, way.kept_bytes + held, way.forward_peak_bytes, way.backward_peak_bytes + held, extra)
                continue
            top, time = way.backward_peak_bytes + held, extra
            if way.region is None:
                forward = way.last_forward_peak_bytes
                top = max(top, self.block.output_bytes + (way.forward_peak_bytes if forward is None else forward))
                time += self.forward - self.tail
            rises.append(np.array([top], dtype=np.int64))
            times.append(np.array([time], dtype=np.int64))
            firsts.append((1, way.region, 0))
        for size in range(2, m):
            for rise, time, region in self.regions.get(size, []):
                add(size, region, self.block.output_bytes, self.plain_peak(size), rise, time)
        all_rises, all_times = np.concatenate(rises), np.concatenate(times)
        picked = unbeaten(all_rises[None], all_times)
        if len(picked) > self.max_points:
            wanted = np.linspace(all_rises[picked[0]], all_rises[picked[-1]], self.max_points)
            picked = picked[np.unique(np.searchsorted(all_rises[picked], wanted, side="right") - 1)]
        return _Front(all_rises[picked], all_times[picked], tuple(firsts[k] for k in picked.tolist()))

    def _region(self, n: int, first: tuple[int, Region | None, int], rests: dict[int, _Front]) -> Region:
        """Build the region over ``n`` blocks whose replay begins with ``first``."""
        children, at = [], 0
        while True:
            size, child, k = first
            if child is not None:
                children.append(child.moved(at))
            at += size
            if at == n:
                return Region(start=0, stop=n, children=tuple(children))
            first = rests[n - at].first[k]


def nested_letters(block: EqualBlock, lengths: Sequence[int], known: Collection[Letter]) -> list[Letter]:
    """Give regions worth a replay that are not ``known``: of each length's front both ends and the middle.

    What they take is then replayed, so that figures of ``block`` which leave something out only cost a better choice.
    """
    by_length = regions_by_length(block, max(lengths))
    found = []
    for n in lengths:
        front = by_length[n]
        for at in sorted({0, len(front) // 2, len(front) - 1}):
            letter = Letter(n_blocks=n, region=front[at].region)
            if letter.region is not None and letter.region.children and letter not in known:
                found.append(letter)
    return found
