"""The ways to run a span of blocks that a planner chooses among, and what each takes in time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt

from ckbench.plan import Region
from ckbench.planner.costs import StepCosts, rerun_s, tail_s
from ckbench.planner.operations import StepOperations, selective_sets

SEGMENTS = (2, 3, 4)
"""Blocks of a region over several blocks."""


MAX_WHOLE = 48
"""Deepest stack that is tried as one region: its replay is that of the whole stack. It holds one input, which is least
where head and loss own the peak."""
OFFLOADED = (1, 2, 4, 8)
"""Blocks of a span whose kept tensors wait on the host."""


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A way to run ``n_blocks`` blocks: plainly (None), or under a region that begins at block 0.

    What plain blocks keep, or the region, stays on the device or waits on the host (``offload``).
    """

    n_blocks: int
    region: Region | None
    offload: bool = False

    def at(self, start: int) -> Region | None:
        """Give the region for a span that begins at block ``start``."""
        return None if self.region is None else self.region.moved(start)

    @property
    def name(self) -> str:
        """Say in a word or two what happens in the span."""
        region = self.region
        if self.offload:
            return f"offload {self.n_blocks}" if region is None else "recompute, offload"
        if region is None:
            return "save"
        if region.save_ops:
            return "keep " + "+".join(op.removeprefix("aten.") for op in region.save_ops)
        if self.n_blocks == 1:
            return "recompute"
        return f"{'nested' if region.children else 'segment'} {self.n_blocks}"


PLAIN = Letter(n_blocks=1, region=None)
FULL = Letter(n_blocks=1, region=Region(start=0, stop=1))
FULL_OFFLOADED = replace(FULL, offload=True)


def letters(
    operations: StepOperations, costs: StepCosts, n_layers: int, *, spans: bool, all_lengths: bool
) -> list[Letter]:
    """Give the ways worth trying: plain, recomputed, the trade-off points of every kind of block, spans, nested spans.

    ``spans``: whether a region may cover several blocks of this model. ``all_lengths``: whether spans of all lengths
    are worth their replays, or one plain and one nested. Offloaded ones come last, and only where a link's speed is
    known.
    """
    found = [PLAIN, FULL]
    for kind in {id(block): i for i, block in enumerate(operations.blocks)}.values():
        for chosen in selective_sets(operations.blocks[kind], costs.blocks[kind].op_s):
            if chosen.save_ops:
                found.append(Letter(n_blocks=1, region=Region(start=0, stop=1, save_ops=chosen.save_ops)))
    if spans:
        lengths, nested = (SEGMENTS, (*SEGMENTS, root(n_layers))) if all_lengths else (SEGMENTS[:1], SEGMENTS[-1:])
        for k in lengths:
            found.append(Letter(n_blocks=k, region=Region(start=0, stop=k)))
        if n_layers <= MAX_WHOLE:
            found.append(Letter(n_blocks=n_layers, region=Region(start=0, stop=n_layers)))
        for k in dict.fromkeys((*nested, *((n_layers,) if n_layers <= MAX_WHOLE else ()))):
            inner = tuple(Region(start=i, stop=i + 1) for i in range(k))
            found.append(Letter(n_blocks=k, region=Region(start=0, stop=k, children=inner)))
    if costs.link_bytes_per_s is not None:
        offloaded = OFFLOADED if all_lengths else OFFLOADED[:2]
        found += [*(Letter(n_blocks=k, region=None, offload=True) for k in offloaded), FULL_OFFLOADED]
    return [letter for letter in dict.fromkeys(found) if letter.n_blocks <= n_layers]


def root(n_layers: int) -> int:
    """Give the length of nested spans beside the short ones: about as many blocks as there are spans."""
    return max(isqrt(n_layers), SEGMENTS[-1])


def extra_s(letter: Letter, start: int, operations: StepOperations, costs: StepCosts) -> float:
    """Give the seconds that the backward of a span takes beyond that of kept blocks, early stop included."""
    region = letter.at(start)
    return 0.0 if region is None else _region_s(region, operations, costs)


def _region_s(region: Region, operations: StepOperations, costs: StepCosts) -> float:
    """Add up a region's replay and those of its children.

    The replay runs every item forward once; of a last block early stop skips the tail, a last child it never starts.
    What a region takes besides is paid per saved tensor for the most part, so every block in it takes its own.
    """
    if region.n_blocks == 1 and not region.children:
        return rerun_s(costs.blocks[region.start], operations.blocks[region.start], region.save_ops)
    items = region.items()
    last = items[-1]
    total = sum(_forward_s(item, costs) for item in items[:-1])
    if not isinstance(last, Region):
        total += costs.blocks[last].forward_s - tail_s(costs.blocks[last], operations.blocks[last])
    plain = [item for item in items if not isinstance(item, Region)] or [region.start]
    own_s = sum(costs.blocks[block].region_s for block in plain)
    return total + own_s + sum(_region_s(child, operations, costs) for child in region.children)


def _forward_s(item: Region | int, costs: StepCosts) -> float:
    blocks: Sequence[int] = range(item.start, item.stop) if isinstance(item, Region) else (item,)
    return sum(costs.blocks[block].forward_s for block in blocks)
