"""What is recomputed, as data: a Plan is a tree of Regions over a stack of blocks.

A strategy decides a Plan from the shape of the stack. The engine, the estimator and the planner all
read the same Plan, so they cannot disagree about what a strategy means. No tensors live here.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckbench.errors import PlanError

PARTS = ("block", "ffn", "attention", "core")
MODES = ("recompute", "invert")


@dataclass(frozen=True, kw_only=True)
class StackShape:
    """What a strategy may know of a model: how many blocks, which parts each one has, what else it can do."""

    n_layers: int
    parts: frozenset[str] = frozenset({"ffn", "attention", "core"})
    block_saved_bytes: tuple[int, ...] | None = None
    """What autograd keeps inside each block, measured on the device; None until it is."""
    precision: str = "fp32"
    """Arithmetic of the step, as ``train.precision`` names it."""
    is_invertible: bool = False
    """Whether blocks can rebuild their input from their output."""
    has_native: bool = False
    """Whether the model's library brings checkpointing of its own."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A span that one checkpoint call covers: blocks ``start`` to ``stop - 1``, or a part of one block.

    ``children`` are regions inside this one. Blocks of the span that no child covers run plainly
    inside the region; they are recomputed with it. ``save_ops`` names operations whose results are kept nevertheless:
    all calls (``aten.mm``), or single ones in the order they run, from 1 (``aten.mm@2``, in a region inside one block).
    Of every ``save_every`` results one is kept. ``mode``: recompute forward from the input, or invert, which rebuilds
    inputs from outputs.
    """

    start: int
    stop: int
    part: str = "block"
    children: tuple["Region", ...] = ()
    save_ops: tuple[str, ...] = ()
    save_every: int = 1
    mode: str = "recompute"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError(f"a region's mode is one of {', '.join(MODES)}, not {self.mode!r}")
        if self.save_every < 1:
            raise PlanError(f"save_every is at least 1, got {self.save_every}")
        if self.mode == "invert" and (self.part != "block" or self.children or self.save_ops):
            raise PlanError("a region that inverts covers whole blocks and has nothing inside")
        if self.part not in PARTS:
            raise PlanError(f"a region covers one of {', '.join(PARTS)}, not {self.part!r}")
        if self.start < 0 or self.stop <= self.start:
            raise PlanError(f"a region needs at least one block, got {self.start} to {self.stop}")
        if self.part != "block" and (self.stop - self.start != 1 or self.children):
            raise PlanError("a region over a part lies inside one block and has no children")
        if any(call is not None for _, call in map(split_save_op, self.save_ops)):
            if self.n_blocks > 1 or self.children:
                raise PlanError("single calls are kept in a region inside one block, where they can be counted")
            if self.save_every > 1:
                raise PlanError("save_every counts results, and single calls are counted already; drop one")
        check_apart(self.children, self.start, self.stop)

    @property
    def n_blocks(self) -> int:
        """Blocks in the span."""
        return self.stop - self.start

    def items(self) -> list["Region | int"]:
        """List what the region runs, in order: child regions, and blocks that no child covers."""
        items: list[Region | int] = []
        at = self.start
        for child in self.children:
            items.extend(range(at, child.start))
            items.append(child)
            at = child.stop
        items.extend(range(at, self.stop))
        return items

    def moved(self, by: int) -> "Region":
        """Give the same region, and all inside it, ``by`` blocks further on."""
        children = tuple(child.moved(by) for child in self.children)
        return replace(self, start=self.start + by, stop=self.stop + by, children=children)

    def walk(self) -> Iterator["Region"]:
        """Yield this region and all inside it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision for one model.

    ``early_stop`` ends a recomputation once every dropped tensor is back. ``preserve_rng`` restores
    the random state so that dropout draws the same masks again. ``reentrant`` selects PyTorch's older
    variant, which has no early stop. ``offload`` moves what the stack keeps for backward to the host, or
    ``offload_spans`` what spans of it keep, each from its first block to before its second number: behind a span's last
    block the step waits for its copies, and nothing of a span comes back before its own backward.
    ``native``: the model's library does it, block by block. ``compile_budget``: torch.compile's partitioner decides
    inside each block, for this share of what keeping everything would hold. ``tolerance``: largest relative
    difference of a gradient from none's that is no fault; 0 asks for bit-identity.
    """

    n_layers: int
    regions: tuple[Region, ...] = ()
    early_stop: bool = True
    preserve_rng: bool = True
    reentrant: bool = False
    offload: bool = False
    offload_spans: tuple[tuple[int, int], ...] = ()
    native: bool = False
    compile_budget: float | None = None
    tolerance: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if (self.native or self.compile_budget is not None) and self.regions:
            raise PlanError("where the library or the compiler decides, a plan has no regions of its own")
        if self.offload and self.offload_spans:
            raise PlanError("offload covers the whole stack; leave offload_spans out")
        at = 0
        for start, stop in self.offload_spans:
            if not at <= start < stop <= self.n_layers:
                raise PlanError(f"offload_spans: {start} to {stop} overlaps another or leaves 0 to {self.n_layers}")
            at = stop
        by_part: dict[str, list[Region]] = {}
        for region in self.regions:
            by_part.setdefault(region.part, []).append(region)
        if "block" in by_part and len(by_part) > 1:
            raise PlanError("a plan covers whole blocks or parts of blocks, not both")
        for regions in by_part.values():
            check_apart(tuple(regions), 0, self.n_layers)
        if self.reentrant and any(region.children for region in self.regions):
            raise PlanError("reentrant checkpoints cannot be nested; drop reentrant or choose a flat strategy")
        if self.reentrant and any(region.save_ops or region.mode != "recompute" for region in self.walk()):
            raise PlanError("reentrant checkpoints keep nothing inside and recompute everything; drop reentrant")
        if self.reentrant and by_part.keys() - {"block"}:
            # It adds up the gradient of the region's input on its own, before the residual's share comes to it.
            # That is another order of summing than without a checkpoint, so no run could be proven bit-identical.
            raise PlanError("reentrant checkpoints of a part of a block sum gradients in another order; drop reentrant")

    def walk(self) -> Iterator[Region]:
        """Yield every region, outermost first."""
        for region in self.regions:
            yield from region.walk()

    @property
    def is_active(self) -> bool:
        """Whether the plan does anything at all: keeping everything on the device needs nothing."""
        return bool(self.regions or self.host_spans) or self.native or self.compile_budget is not None

    @property
    def host_spans(self) -> tuple[tuple[int, int], ...]:
        """Spans of blocks whose kept tensors wait on the host."""
        return ((0, self.n_layers),) if self.offload else self.offload_spans

    @property
    def n_regions(self) -> int:
        """Regions in the plan, nested ones included."""
        return sum(1 for _ in self.walk())

    def without_last_leaf(self) -> "Plan":
        """Drop the last region that has no children (the option ``skip_last``).

        Its recomputation would start at once, so keeping what is inside costs no peak
        unless the head owns it.
        """
        return replace(self, regions=_without_last_leaf(self.regions))

    def block_calls_backward(self) -> tuple[int, ...]:
        """Predict how often each block's forward starts during backward, by block."""
        calls = [int(self.native)] * self.n_layers
        for region in self.regions:
            if region.part == "block":
                self._count_replay(region, calls)
        return tuple(calls)

    def part_calls_backward(self, part: str) -> int:
        """Predict how often a part (``ffn`` or ``attention``) runs again on its own, over all blocks."""
        return sum(1 for region in self.regions if region.part == part)

    def region_calls_backward(self) -> int:
        """Predict how often a region's body starts during backward, a parent's replay included."""
        return sum(self._region_starts(region) for region in self.regions)

    def _count_replay(self, region: Region, calls: list[int]) -> None:
        """Count one backward through ``region``: its own replay, then those of its children."""
        for item in self._replayed(region):
            for block in range(item.start, item.stop) if isinstance(item, Region) else (item,):
                calls[block] += 1
        for child in region.children:
            self._count_replay(child, calls)

    def _region_starts(self, region: Region) -> int:
        starts = 1
        for item in self._replayed(region):
            if isinstance(item, Region):
                starts += item_starts(item)
        return starts + sum(self._region_starts(child) for child in region.children)

    def _replayed(self, region: Region) -> list[Region | int]:
        """List the items that a replay of ``region`` starts.

        A child region saves only its input for its parent, so with early stop the parent's replay
        ends before a last child starts: that child's own replay follows and does the work.
        """
        items = region.items()
        if self.early_stop and not self.reentrant and isinstance(items[-1], Region):
            return items[:-1]
        return items

    def to_json(self) -> dict[str, Any]:
        """Give the plan as plain data for a record."""
        return asdict(self)


def plan_from_json(data: dict[str, Any]) -> Plan:
    """Make a plan of what ``to_json`` gave; what is left out has its default. Raises PlanError where it is no plan."""
    try:
        spans = tuple((start, stop) for start, stop in data.get("offload_spans", ()))
        return Plan(**{**data, "regions": tuple(map(region_from_json, data["regions"])), "offload_spans": spans})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"this is no plan: {error}") from None


def region_from_json(data: dict[str, Any]) -> Region:
    """Make a region of plain data. Raises KeyError or TypeError where it is none."""
    children = tuple(map(region_from_json, data.get("children", ())))
    return Region(**{**data, "children": children, "save_ops": tuple(data.get("save_ops", ()))})


def split_save_op(text: str) -> tuple[str, int | None]:
    """Split one of ``Region.save_ops`` into the operation's name and which call of it, None for all.

    >>> split_save_op("aten.mm@2"), split_save_op("aten.mm")
    (('aten.mm', 2), ('aten.mm', None))

    Raises PlanError where what follows @ is no number from 1.
    """
    name, is_single, number = text.partition("@")
    if not is_single:
        return name, None
    if not re.fullmatch(r"[1-9][0-9]{0,5}", number):
        raise PlanError(f"operation {text!r}: after @ comes the number of the call, from 1, as in {name}@2")
    return name, int(number)


def item_starts(region: Region) -> int:
    """Count region bodies that start when ``region`` runs forward once: itself and all inside."""
    return sum(1 for _ in region.walk())


def check_apart(regions: tuple[Region, ...], start: int, stop: int) -> None:
    """Refuse regions that overlap, are out of order, or leave ``start`` to ``stop``."""
    at = start
    for region in regions:
        if region.start < at or region.stop > stop:
            raise PlanError(f"region {region.start} to {region.stop} overlaps another or leaves {start} to {stop}")
        at = region.stop


def near_equal(n_layers: int, n_regions: int) -> list[tuple[int, int]]:
    """Split a stack into spans whose lengths differ by at most one, longer ones first.

    >>> near_equal(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    n_regions = max(1, min(n_regions, n_layers))
    short, longer = divmod(n_layers, n_regions)
    spans, at = [], 0
    for i in range(n_regions):
        length = short + (1 if i < longer else 0)
        spans.append((at, at + length))
        at += length
    return spans


def _without_last_leaf(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    if not regions:
        return ()
    *head, last = regions
    if not last.children:
        return tuple(head)
    return (*head, replace(last, children=_without_last_leaf(last.children)))
