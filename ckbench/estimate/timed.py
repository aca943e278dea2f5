"""Time the pieces of a step on its device: blocks, operations inside them, and what a region costs beside its replay.

Three measurements: steps under ``none``, stamped where blocks begin and end; steps in which every operation of a block
is timed by itself, for its share of the block; and steps with every block recomputed, for every set of results that a
planner may keep. What blocks take in them beyond ``none`` and beyond the predicted, backward included, is what regions
cost by themselves. Of all repeats the shortest counts: whatever else a machine does only ever adds, and an operation of
a millisecond is either disturbed or it is not.
"""

import time
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckbench.config import ModelConfig, RunConfig
from ckbench.engine.selective import UNASKED
from ckbench.engine.trial import NoObserver, Trial
from ckbench.engine.worker import open_device
from ckbench.errors import CkbenchError
from ckbench.estimate.follow import Follower
from ckbench.estimate.traced import least_depth
from ckbench.plan import Plan, Region
from ckbench.planner.costs import BlockCosts, StepCosts, rerun_s
from ckbench.planner.operations import BlockOperations, StepOperations, selective_sets

WARMUP_STEPS = 3
N_REPEATS = 6
N_TURNS = 3
"""Times that every plan comes up; its repeats are shared among them."""
CACHE_BYTES = 64 * 2**20
"""What a processor's or a card's cache holds, about: few hold more."""
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

    def began(self, phase: str) -> None:
        """Stamp the optimizer and the end; what begins otherwise is no block's yet."""
        self._note({"optimizer": "optimizer", "end": "end"}.get(phase, "rest"))

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

    def began(self, phase: str) -> None:
        """Phases are not looked at."""


def measured(config: RunConfig, operations: StepOperations, n_repeats: int = N_REPEATS) -> StepCosts:
    """Measure on the device that the trial names. Runs steps in this process, so call it in one of its own.

    Raises DeviceUnavailable, and CkbenchError where the device is scripted or runs other operations than were traced.
    """
    device = open_device(config.run.device, config.run.threads)
    if device.kind not in ("cpu", "cuda"):
        raise CkbenchError(f"nothing can be timed on {device.label()}; name a card or a real device")
    return time_step(config, operations, device.torch_device, device.label(), n_repeats)  # type: ignore[attr-defined]


def time_step(
    config: RunConfig, operations: StepOperations, device: torch.device, label: str, n_repeats: int = N_REPEATS
) -> StepCosts:
    """Measure the pieces of a trial's step on a device; ``operations`` is its trace, ``label`` names the device.

    A stack that shows every kind of block is run, and the whole stack's seconds follow from its. Raises CkbenchError
    where a block runs other operations on the device than in the trace.
    """
    asked, stands_for = _stack_to_time(config, operations)
    trial = Trial(asked, device)
    stamps: Stamps = CudaStamps(device) if device.type == "cuda" else CpuStamps()
    traced = {place: operations.blocks[i] for place, i in enumerate(stands_for or range(len(trial.model.blocks)))}
    for _ in range(WARMUP_STEPS):
        trial.step(NoObserver())
    kinds = _alike(traced)
    op_s = _operation_seconds(trial, stamps, traced, n_repeats)
    sets = _sets([(traced[alike[0]], _mean(op_s[place] for place in alike)) for alike in kinds])
    plans = [Plan(n_layers=len(traced)), *(_recomputing(kinds, kept) for kept in sets)]
    plain, *recomputed = _pieces_of_each(trial, plans, stamps, n_repeats)
    blocks = {}
    for alike in kinds:
        forward_s, backward_s = (_each_s(plain, piece, alike) for piece in ("forward", "backward"))
        shares = _mean(op_s[place] for place in alike)
        scaled = tuple(seconds * forward_s / sum(shares) for seconds in shares)
        blocks[alike[0]] = BlockCosts(forward_s=forward_s, backward_s=backward_s, op_s=scaled)
    beyond = [
        (saved, _whole_s(pieces, alike) - _whole_s(plain, alike) - rerun_s(blocks[alike[0]], traced[alike[0]], saved))
        for pieces, kept in zip(recomputed, sets, strict=True)
        for alike, saved in zip(kinds, kept, strict=True)
    ]
    region_s = mean(seconds for saved, seconds in beyond if not saved)
    selective = [seconds - region_s for saved, seconds in beyond if saved]
    selective_s = max(0.0, mean(selective)) if selective else 0.0
    n = config.train.grad_accumulation
    costs = {id(traced[place]): _times(block, n, region_s, selective_s) for place, block in blocks.items()}
    return StepCosts(
        blocks=tuple(costs[id(block)] for block in operations.blocks),
        rest_s=n * plain.get("rest", 0.0) + operations.update_share * plain.get("optimizer", 0.0),
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


def _stack_to_time(config: RunConfig, operations: StepOperations) -> tuple[RunConfig, list[int]]:
    """Give a stack with every kind of block, and for each of its blocks one of the real stack that is like it.

    Kinds are repeated, as far as the real stack goes, until what they keep no longer fits a cache: in one that does,
    backward finds everything at hand, as it never does in a deep stack. Models of others come as they are, and no
    places are given.
    """
    asked, places = least_depth(config)
    if not places or not isinstance(asked.model, ModelConfig):
        return asked, []
    kinds = [places.index(place) for place in sorted(set(places) - {0})]
    n_bytes = sum(operations.blocks[i].plain_bytes for i in kinds)
    n_times = min(-(-CACHE_BYTES // max(1, n_bytes)), (len(places) - 1) // len(kinds)) if kinds else 1
    d_ff = asked.model.d_ff
    repeated = (d_ff[0], *d_ff[1:] * n_times) if isinstance(d_ff, tuple) else d_ff
    model = asked.model.model_copy(update={"n_layers": 1 + len(kinds) * n_times, "d_ff": repeated})
    return asked.model_copy(update={"model": model}), [0, *kinds * n_times]


def _sets(kinds: Sequence[tuple[BlockOperations, Sequence[float]]]) -> list[list[tuple[str, ...]]]:
    """List what regions may keep, a set for each kind of block at a time: nothing, then every trade-off point."""
    of_kinds = [[chosen.save_ops for chosen in selective_sets(block, op_s) if chosen.save_ops] for block, op_s in kinds]
    n_sets = max(map(len, of_kinds))
    return [
        [()] * len(kinds),
        *([sets[min(i, len(sets) - 1)] if sets else () for sets in of_kinds] for i in range(n_sets)),
    ]


def _recomputing(kinds: Sequence[list[int]], kept: Sequence[tuple[str, ...]]) -> Plan:
    """Recompute every block by itself, but for the results that its kind keeps."""
    save_ops = {place: saved for alike, saved in zip(kinds, kept, strict=True) for place in alike}
    regions = (Region(start=place, stop=place + 1, save_ops=save_ops[place]) for place in sorted(save_ops))
    return Plan(n_layers=len(save_ops), regions=tuple(regions))


def _each_s(pieces: dict[str, float], piece: str, alike: Sequence[int]) -> float:
    """Give what a piece takes in one of some equal blocks: the mean, for their places in the stack differ."""
    return sum(pieces.get(f"{piece} {place}", 0.0) for place in alike) / len(alike)


def _whole_s(pieces: dict[str, float], alike: Sequence[int]) -> float:
    """Give what one of some equal blocks takes in a step. Backward belongs to it: it unpacks what a region holds."""
    return sum(_each_s(pieces, piece, alike) for piece in ("forward", "replay", "backward"))


def _mean(rows: Iterable[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def _pieces_of_each(trial: Trial, plans: Sequence[Plan], stamps: Stamps, n_repeats: int) -> list[dict[str, float]]:
    """Give a step's seconds by piece under each plan, the plans in turn, so that a slow stretch spoils none of them."""
    found: list[dict[str, float]] = [{} for _ in plans]
    n_turns = min(N_TURNS, n_repeats)
    for turn in range(n_turns):
        for shortest, plan in zip(found, plans, strict=True):
            n_now = (n_repeats - turn - 1) // n_turns + 1
            for what, seconds in _pieces_of(trial, plan, stamps, n_now).items():
                shortest[what] = min(seconds, shortest.get(what, seconds))
    return found


def _pieces_of(trial: Trial, plan: Plan, stamps: Stamps, n_repeats: int) -> dict[str, float]:
    """Give a step's seconds by piece, each the shortest."""
    found = []
    pieces = _Pieces(stamps)
    follower = Follower(trial, plan, pieces)
    follower.on = True
    trial.step(follower)  # the first under a plan is slower
    for _ in range(n_repeats):
        stamps.wait()
        pieces.noted.clear()
        trial.step(follower)
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


def _alike(traced: dict[int, BlockOperations]) -> list[list[int]]:
    """Group places by the trace that their blocks share."""
    groups: dict[int, list[int]] = {}
    for place, operations in traced.items():
        groups.setdefault(id(operations), []).append(place)
    return list(groups.values())
