"""Time the pieces of a step on its device: blocks, operations inside them, and what a region costs beside its replay.

Three measurements: steps under ``none``, stamped where blocks begin and end; steps in which every operation of a block
is timed by itself, for its share of the block; and steps with every block recomputed, without and with kept results,
whose time beyond the predicted is what regions cost by themselves. Of all repeats the shortest counts: whatever else a
machine does only ever adds, and an operation of a millisecond is either disturbed or it is not.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckbench.config import RunConfig
from ckbench.engine.selective import UNASKED
from ckbench.engine.trial import NoObserver, Trial
from ckbench.engine.worker import open_device
from ckbench.errors import CkbenchError
from ckbench.estimate.follow import Both, Follower
from ckbench.estimate.traced import least_depth
from ckbench.plan import Plan, Region
from ckbench.planner.costs import BlockCosts, StepCosts, rerun_s
from ckbench.planner.operations import BlockOperations, StepOperations, selective_sets

WARMUP_STEPS = 3
AHEAD_CYCLES = 50_000_000
"""Cycles that a CUDA device waits before a block, so that its queue is filled and no operation waits for the host."""


class CpuStamps:
    """Moments by perf_counter; the processor is never behind."""

    def stamp(self) -> Any:
        """Note the moment."""
        return time.perf_counter()

    def between_s(self, first: Any, second: Any) -> float:
        """Give the seconds between two moments."""
        return float(second - first)

    def get_ahead(self) -> None:
        """Nothing is queued."""

    def wait(self) -> None:
        """Nothing is queued."""


class CudaStamps:
    """Moments in the device's queue, by events; they are known once ``wait`` returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stamp(self) -> Any:
        """Put an event into the queue."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between_s(self, first: Any, second: Any) -> float:
        """Give the seconds between two events."""
        return float(first.elapsed_time(second)) / 1000

    def get_ahead(self) -> None:
        """Keep the device busy while the host fills its queue."""
        torch.cuda._sleep(AHEAD_CYCLES)

    def wait(self) -> None:
        """Wait for the queue."""
        torch.cuda.synchronize(self.device)


Stamps = CpuStamps | CudaStamps


class _Pieces:
    """Stamps where blocks begin and end, both ways, and the step's events."""

    def __init__(self, stamps: Stamps) -> None:
        self.stamps = stamps
        self.noted: list[tuple[str, Any]] = []

    def _note(self, what: str) -> None:
        self.noted.append((what, self.stamps.stamp()))

    def entered(self, block: int, is_replay: bool, args: Any) -> None:
        """A block begins, or begins again."""
        self._note(f"{'replay' if is_replay else 'forward'} {block}")

    def left(self, block: int, is_replay: bool, output: Any) -> None:
        """A block ended."""
        self._note(f"backward {block}" if is_replay else "rest")

    def turned(self, block: int | None) -> None:
        """A block's backward begins, or another's ends."""
        self._note("rest" if block is None else f"backward {block}")

    def at(self, event: str) -> None:
        """Follow the step."""
        if event in ("forward", "turn", "optimizer", "end"):
            self._note({"optimizer": "optimizer", "end": "end"}.get(event, "rest"))

    def seconds(self) -> dict[str, float]:
        """Add up, by piece."""
        found: dict[str, float] = {}
        for (what, begin), (_, end) in zip(self.noted, self.noted[1:], strict=False):
            found[what] = found.get(what, 0.0) + self.stamps.between_s(begin, end)
        return found


class _OperationClock(TorchDispatchMode):
    """Times every operation of the blocks' forwards by itself."""

    def __init__(self, stamps: Stamps) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stamps = stamps
        self.block: int | None = None
        self.noted: dict[int, list[tuple[str, Any, Any]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.block is None or func in UNASKED or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        begin = self.stamps.stamp()
        result = func(*args, **(kwargs or {}))
        end = self.stamps.stamp()
        self.noted[self.block].append((str(func._overloadpacket), begin, end))
        return result

    def entered(self, block: int, is_replay: bool, args: Any) -> None:
        """A block begins."""
        if not is_replay:
            self.stamps.get_ahead()
            self.block = block
            self.noted[block] = []

    def left(self, block: int, is_replay: bool, output: Any) -> None:
        """A block ended."""
        self.block = None

    def turned(self, block: int | None) -> None:
        """Backward is not looked at."""


def measured(config: RunConfig, operations: StepOperations, n_repeats: int = 7) -> StepCosts:
    """Measure on the device that the trial names. Runs steps in this process, so call it in one of its own.

    Raises DeviceUnavailable, and CkbenchError where the device is scripted or runs other operations than were traced.
    """
    device = open_device(config.run.device, config.run.threads)
    if device.kind not in ("cpu", "cuda"):
        raise CkbenchError(f"nothing can be timed on {device.label()}; name a card or a real device")
    return time_step(config, operations, device.torch_device, device.label(), n_repeats)  # type: ignore[attr-defined]


def time_step(
    config: RunConfig, operations: StepOperations, device: torch.device, label: str, n_repeats: int = 7
) -> StepCosts:
    """Measure the pieces of a trial's step on a device; ``operations`` is its trace, ``label`` names the device.

    The least depth that shows every kind of block is run, and the stack's seconds follow from its. Raises CkbenchError
    where a block runs other operations on the device than in the trace.
    """
    asked, places = least_depth(config)
    trial = Trial(asked, device)
    places = places or list(range(len(trial.model.blocks)))
    stamps: Stamps = CudaStamps(device) if device.type == "cuda" else CpuStamps()
    traced = {place: operations.blocks[i] for i, place in enumerate(places)}
    for _ in range(WARMUP_STEPS):
        trial.step(NoObserver())
    pieces = _pieces_of(trial, Plan(n_layers=len(trial.model.blocks)), stamps, n_repeats)
    shares = _operation_seconds(trial, stamps, traced, n_repeats)
    kinds: dict[int, list[int]] = {}
    for place, block in traced.items():
        kinds.setdefault(id(block), []).append(place)
    blocks: dict[int, BlockCosts] = {}
    for alike in kinds.values():
        forward_s = min(pieces[f"forward {place}"] for place in alike)
        op_s = [min(values) for values in zip(*(shares[place] for place in alike), strict=True)]
        made = BlockCosts(
            forward_s=forward_s,
            backward_s=min(pieces.get(f"backward {place}", 0.0) for place in alike),
            op_s=tuple(seconds * forward_s / sum(op_s) for seconds in op_s),
        )
        blocks |= dict.fromkeys(alike, made)
    region_s, selective_s = _overheads(trial, stamps, traced, blocks, n_repeats)
    n = config.train.grad_accumulation
    grown = {id(b): _times(b, n, region_s, selective_s) for b in blocks.values()}
    return StepCosts(
        blocks=tuple(grown[id(blocks[place])] for place in places),
        rest_s=n * pieces.get("rest", 0.0) + operations.update_share * pieces.get("optimizer", 0.0),
        source=f"measured on {label}, best of {n_repeats}",
    )


def _times(costs: BlockCosts, n: int, region_s: float, selective_s: float) -> BlockCosts:
    return BlockCosts(
        forward_s=n * costs.forward_s,
        backward_s=n * costs.backward_s,
        op_s=tuple(n * seconds for seconds in costs.op_s),
        region_s=n * region_s,
        selective_s=n * selective_s,
    )


def _pieces_of(trial: Trial, plan: Plan, stamps: Stamps, n_repeats: int) -> dict[str, float]:
    """Give a step's seconds by piece, each the shortest."""
    found = []
    pieces = _Pieces(stamps)
    follower = Follower(trial, plan, pieces)
    follower.on = True
    trial.step(Both(pieces, follower))  # the first under a plan is slower
    for _ in range(n_repeats):
        stamps.wait()
        pieces.noted.clear()
        trial.step(Both(pieces, follower))
        stamps.wait()
        found.append(pieces.seconds())
    follower.remove()
    return {what: min(each[what] for each in found) for what in found[0]}


def _operation_seconds(
    trial: Trial, stamps: Stamps, traced: dict[int, BlockOperations], n_repeats: int
) -> dict[int, list[float]]:
    """Give each block's seconds by operation, and see that they are the trace's."""
    found: dict[int, list[list[float]]] = {place: [] for place in traced}
    clock = _OperationClock(stamps)
    follower = Follower(trial, Plan(n_layers=len(trial.model.blocks)), clock)
    follower.on = True
    for _ in range(n_repeats):
        with clock:
            trial.step(follower)
        stamps.wait()
        for place, block in traced.items():
            _compare([name for name, _, _ in clock.noted[place]], [o.name for o in block.operations], place)
            found[place].append([stamps.between_s(begin, end) for _, begin, end in clock.noted[place]])
    follower.remove()
    return {place: [min(each) for each in zip(*runs, strict=True)] for place, runs in found.items()}


def _compare(ran: Sequence[str], traced: Sequence[str], place: int) -> None:
    if list(ran) == list(traced):
        return
    at = next((i for i, (a, b) in enumerate(zip(ran, traced, strict=False)) if a != b), min(len(ran), len(traced)))
    here, there = (names[at] if at < len(names) else "nothing more" for names in (ran, traced))
    raise CkbenchError(f"block {place} ran {here} as operation {at + 1} on the device, where its trace has {there}")


def _overheads(
    trial: Trial, stamps: Stamps, traced: dict[int, BlockOperations], blocks: dict[int, BlockCosts], n_repeats: int
) -> tuple[float, float]:
    """Give what a region takes beside its replay, and what it takes besides where it keeps results, per block.

    That is a block's forward inside a region and its replay, less what its operations take by themselves.
    """

    def beyond(kept: dict[int, tuple[str, ...]]) -> float:
        regions = tuple(Region(start=i, stop=i + 1, save_ops=save_ops) for i, save_ops in sorted(kept.items()))
        pieces = _pieces_of(trial, Plan(n_layers=len(kept), regions=regions), stamps, n_repeats)
        extra_s = []
        for alike in _alike(traced):
            # The shortest of all equal blocks on both sides, else noise would count as overhead.
            took_s = sum(min(pieces.get(f"{piece} {i}", 0.0) for i in alike) for piece in ("forward", "replay"))
            i = alike[0]
            extra_s.append(took_s - blocks[i].forward_s - rerun_s(blocks[i], traced[i], kept[i]))
        return max(0.0, sum(extra_s) / len(extra_s))

    region_s = beyond(dict.fromkeys(traced, ()))
    kept = {place: _middle_set(block, blocks[place]) for place, block in traced.items()}
    return region_s, max(0.0, beyond(kept) - region_s) if all(kept.values()) else 0.0


def _alike(traced: dict[int, BlockOperations]) -> list[list[int]]:
    """Group places by the trace that their blocks share."""
    groups: dict[int, list[int]] = {}
    for place, operations in traced.items():
        groups.setdefault(id(operations), []).append(place)
    return list(groups.values())


def _middle_set(operations: BlockOperations, costs: BlockCosts) -> tuple[str, ...]:
    sets = [chosen.save_ops for chosen in selective_sets(operations, costs.op_s) if chosen.save_ops]
    return sets[len(sets) // 2] if sets else ()
