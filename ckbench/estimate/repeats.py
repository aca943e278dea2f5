"""Repeats in a plan: a deep stack of equal blocks is replayed with few of each run, and its step put together again.

A plan is a sequence of items: blocks that run plainly, and regions with what is inside them. Where a pattern of items
stands many times in a row, at the top or inside a region, a few of them are enough: what one in the middle adds to a
step and how high it rises is the same for each. That it is so is checked on two neighbours in every pass over the
stack, forward, recomputed, backward and in the optimizer, and NotAChain raised where it is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckbench.errors import CkbenchError
from ckbench.estimate.spans import Span
from ckbench.plan import Plan, Region

KEPT = (4, 5)
"""Of each run so many stay: the first, two in the middle that are compared, the last. One more is needed where a pass
ends before the last one, as the replay of a region whose last child has a replay of its own."""
MAX_PATTERN = 16
"""Longest pattern of items that is looked for."""


class NotAChain(CkbenchError):
    """A step whose repeats are not equal; it can only be replayed whole."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A pattern of blocks that stands several times in a row: where in the short stack, and how often in truth."""

    start: int
    n_blocks: int
    """Blocks of one pattern, in the short stack."""
    n_real: int
    """How often it stands in the real stack."""
    n_kept: int
    """How often it stands in the short one."""

    def unit(self, block: int | None) -> int | None:
        """Tell which of the kept patterns a block of the short stack belongs to."""
        if block is None or not self.start <= block < self.start + self.n_kept * self.n_blocks:
            return None
        return (block - self.start) // self.n_blocks


Shape = tuple[object, ...]
"""What makes two items equal: an item's region without its place, and its children's shapes."""


@dataclass(frozen=True, kw_only=True)
class Short:
    """A plan with few of each run, and the runs, inner ones first."""

    plan: Plan
    runs: tuple[Run, ...]


def shorten(plan: Plan, n_kept: int = KEPT[0]) -> Short:
    """Take out of every run all but a few of its patterns. Raises NotAChain for spans on the host."""
    if plan.offload_spans:
        raise NotAChain("what lies on the host at one time is known only of a whole replay")
    runs: list[Run] = []
    regions = {region.start: region for region in plan.regions if region.part == "block"}
    of_parts: dict[int, list[Region]] = {}
    for region in plan.regions:
        if region.part != "block":
            of_parts.setdefault(region.start, []).append(region)
    items: list[list[Region] | Region | None] = []
    at = 0
    while at < plan.n_layers:
        found = regions.get(at)
        items.append(found or of_parts.get(at))
        at += found.n_blocks if found else 1
    short: list[Region] = []
    n_layers = _lay_out(items, 0, short, runs, n_kept)
    by_part = sorted(short, key=lambda region: (region.start, region.part))
    return Short(plan=replace(plan, n_layers=n_layers, regions=tuple(by_part)), runs=tuple(runs))


def _lay_out(
    items: Sequence[list[Region] | Region | None], start: int, regions: list[Region], runs: list[Run], n_kept: int
) -> int:
    """Put items one after the other from block ``start`` on, short; give the block after the last."""
    shapes = [_shape(item) for item in items]
    at, place = start, 0
    while place < len(items):
        length, times = _repeat(shapes, place, n_kept)
        kept = min(times, n_kept)
        begin, width = at, 0
        for i in range(kept * length):
            # Runs inside an item are noted for each of its copies: the copies are compared, and each is lengthened.
            at = _put(items[place + i], at, regions, runs, n_kept)
            width = (at - begin) if i == length - 1 else width
        if times > kept:
            runs.append(Run(start=begin, n_blocks=width, n_real=times, n_kept=kept))
        place += times * length
    return at


def _put(item: list[Region] | Region | None, at: int, regions: list[Region], runs: list[Run], n_kept: int) -> int:
    if item is None:
        return at + 1
    if isinstance(item, list):
        regions.extend(replace(region, start=at, stop=at + 1) for region in item)
        return at + 1
    inner: list[Region] = []
    contents: list[list[Region] | Region | None] = [
        child if isinstance(child, Region) else None for child in item.items()
    ]
    stop = _lay_out(contents, at, inner, runs, n_kept)
    regions.append(replace(item, start=at, stop=stop, children=tuple(inner)))
    return stop


def _repeat(shapes: Sequence[Shape], place: int, n_kept: int) -> tuple[int, int]:
    """Give length and number of the repeats from ``place`` on that save most; (1, 1) where nothing repeats enough."""
    best, saved = (1, 1), 0
    for length in range(1, min(MAX_PATTERN, (len(shapes) - place) // (n_kept + 1)) + 1):
        pattern, times = shapes[place : place + length], 1
        while shapes[place + times * length : place + (times + 1) * length] == pattern:
            times += 1
        if (times - n_kept) * length > saved:
            best, saved = (length, times), (times - n_kept) * length
    return best


def _shape(item: list[Region] | Region | None) -> Shape:
    if item is None:
        return ()
    if isinstance(item, list):
        return tuple((region.part, region.save_ops, region.save_every, region.mode) for region in item)
    inside = tuple(_shape(child) if isinstance(child, Region) else () for child in item.items())
    return (item.save_ops, item.save_every, item.mode, inside)


def lengthen(spans: Sequence[Span], runs: Sequence[Run], *, checked: bool = True) -> list[Span]:
    """Put back into a short step what was taken out.

    Raises NotAChain where two neighbours in a run differ, unless not ``checked``.
    """
    longer = list(spans)
    for run in runs:
        longer = _lengthen(longer, run, checked)
    return longer


def _lengthen(spans: Sequence[Span], run: Run, checked: bool) -> list[Span]:
    groups: list[tuple[int | None, list[Span]]] = []
    for span in spans:
        unit = run.unit(span.block)
        if groups and groups[-1][0] == unit:
            groups[-1][1].append(span)
        else:
            groups.append((unit, [span]))
    longer: list[Span] = []
    n_more = run.n_real - run.n_kept
    for i, (unit, stretch) in enumerate(groups):
        longer.extend(stretch)
        after = groups[i + 1] if i + 1 < len(groups) else (None, [])
        if {unit, after[0]} != {1, 2}:
            continue
        if checked and _relative(run, unit, stretch) != _relative(run, after[0], after[1]):
            raise NotAChain(f"two equal blocks in a row differ: {_difference(stretch, after[1])}")
        longer.extend(stretch * n_more)
    return longer


def _relative(run: Run, unit: int | None, stretch: Sequence[Span]) -> list[tuple[object, ...]]:
    """Give a stretch without the places of its blocks."""
    first = run.start + (unit or 0) * run.n_blocks
    return [
        (span.mark.partition(" ")[0], (span.block or 0) - first, span.phase, span.added_bytes, span.rise_bytes)
        for span in stretch
    ]


def _difference(one: Sequence[Span], other: Sequence[Span]) -> str:
    for a, b in zip(one, other, strict=False):
        if (a.added_bytes, a.rise_bytes) != (b.added_bytes, b.rise_bytes):
            return f"{a.mark} adds {a.added_bytes} bytes, {b.mark} adds {b.added_bytes}"
    return f"{len(one)} stretches against {len(other)}"
