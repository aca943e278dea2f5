"""What a block does, operation by operation, and which of its results are worth keeping inside a recomputed block.

Kept bytes and avoided work add up over the operations whose results a region keeps, as long as candidates exclude
views, what is later written in place, and what early stop never runs again. So the corners of what no choice beats are
the operations taken by seconds avoided per byte.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckbench.config import RunConfig
from ckbench.plan import split_save_op

SELECTIVE_POINTS = 6
"""Choices of kept operations per kind of block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one operation computes and moves."""

    name: str
    """As ``aten.addmm``, without its overload."""
    overload: str
    flops: int
    """By PyTorch's formulas; 0 for what has none."""
    moved_bytes: int
    """Read and written; 0 for views and for what only reserves memory."""
    dtype: str
    """Of its first floating input (or output): float32, bfloat16, ...; empty where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation(Work):
    """One dispatched operation of a block's forward."""

    call: int
    """Which call of ``name`` in this block's forward, from 1."""
    out_bytes: int
    """New storage that it makes."""
    kept_bytes: int
    """What keeping its result adds: its new storage but for the block's own output, which lives anyway."""
    is_view: bool
    """Whether it makes no storage and writes nothing."""
    is_mutated: bool
    """Whether something writes into its result later on, so that it cannot be kept."""
    is_rerun: bool
    """Whether a recomputation runs it: what comes after the last tensor that backward needs is not."""

    @property
    def save_op(self) -> str:
        """Name this call as ``Region.save_ops`` does."""
        return f"{self.name}@{self.call}"

    @property
    def is_candidate(self) -> bool:
        """Whether keeping its result is possible and spares a recomputation anything."""
        return self.out_bytes > 0 and not self.is_mutated and self.is_rerun


@dataclass(frozen=True, kw_only=True)
class BlockOperations:
    """A block's forward and backward under ``none``, operation by operation, for one micro-batch."""

    operations: tuple[Operation, ...]
    """Forward, in order, as a policy of selective checkpointing sees them."""
    backward: tuple[Work, ...]
    plain_bytes: int
    """What keeping everything that backward needs adds to what the block keeps when all of it is recomputed."""
    n_parameters: int

    @property
    def candidates(self) -> tuple[int, ...]:
        """Indices of the operations whose results may be kept."""
        return tuple(i for i, operation in enumerate(self.operations) if operation.is_candidate)


@dataclass(frozen=True, kw_only=True)
class StepOperations:
    """A training step under ``none``: its blocks, by place in the stack, and everything else."""

    blocks: tuple[BlockOperations, ...]
    """One for each block of the stack; equal blocks are one object."""
    rest: tuple[Work, ...]
    """Embedding, head and loss, forward and backward, of one micro-batch."""
    update: tuple[Work, ...]
    """The optimizer's, for the parameters of the traced model."""
    update_share: float
    """Parameters of the whole model over those of the traced one, which may have fewer blocks."""
    n_micro_batches: int


@dataclass(frozen=True, kw_only=True)
class SelectiveSet:
    """One choice of results to keep inside a recomputed block."""

    save_ops: tuple[str, ...]
    """As ``Region.save_ops`` takes them."""
    kept_bytes: int
    """What it adds to what the block keeps when all of it is recomputed."""
    avoided_s: float
    """What it takes off the recomputation of one micro-batch, in the unit of the costs it was chosen by."""


def step_operations(config: RunConfig, kind: str) -> StepOperations:
    """Trace a step without data in the semantics of ``cpu`` or ``cuda``. The strategy of ``config`` does not matter.

    Our own families are traced at the least depth that shows every kind of block, other models as they are. Loads
    torch.
    Raises NotEstimated where a step cannot run without data.
    """
    from ckbench.estimate.traced import trace_step

    return trace_step(config, kind)


def kept_calls(operations: BlockOperations, save_ops: Sequence[str]) -> frozenset[int]:
    """Give the indices of the operations whose results a region with these ``save_ops`` keeps."""
    wanted = [split_save_op(text) for text in save_ops]
    n_calls: Counter[str] = Counter()
    kept = set()
    for i, operation in enumerate(operations.operations):
        for name in (operation.name, f"{operation.name}.{operation.overload}"):
            n_calls[name] += 1
            if any(name == asked and call in (None, n_calls[name]) for asked, call in wanted):
                kept.add(i)
    return frozenset(kept)


def rerun(operations: BlockOperations, save_ops: Sequence[str] = ()) -> tuple[int, ...]:
    """Give the indices of the operations that run again when the block is recomputed with early stop."""
    kept = kept_calls(operations, save_ops)
    return tuple(i for i, operation in enumerate(operations.operations) if operation.is_rerun and i not in kept)


def spell(operations: BlockOperations, chosen: Sequence[int]) -> tuple[str, ...]:
    """Name a choice of operations as ``Region.save_ops`` does: a whole operation where all its calls are chosen."""
    n_calls = Counter(operation.name for operation in operations.operations)
    n_chosen = Counter(operations.operations[i].name for i in chosen)
    named = {
        operations.operations[i].name
        if n_chosen[operations.operations[i].name] == n_calls[operations.operations[i].name]
        else operations.operations[i].save_op
        for i in chosen
    }
    return tuple(sorted(named, key=lambda text: (split_save_op(text)[0], split_save_op(text)[1] or 0)))


def hull(operations: BlockOperations, op_s: Sequence[float]) -> list[SelectiveSet]:
    """Give the corners of the hull of all choices' bytes and avoided seconds, by rising bytes; the first is empty.

    Exact without trying them: sums of independent items have their corners where items are taken by value per byte.
    """
    worth = [i for i in operations.candidates if op_s[i] > 0]
    worth.sort(key=lambda i: (operations.operations[i].kept_bytes / op_s[i], i))
    corners, avoided = [_set(operations, (), 0.0)], 0.0
    for n, i in enumerate(worth, 1):
        avoided += op_s[i]
        corners.append(_set(operations, worth[:n], avoided))
    return corners


def selective_sets(operations: BlockOperations, op_s: Sequence[float], n: int = SELECTIVE_POINTS) -> list[SelectiveSet]:
    """Choose at most ``n`` sets between recomputing a block and keeping all of it, by rising bytes.

    ``op_s`` costs every operation, in seconds or any other unit of work. The sets are corners of the hull that keeping
    everything does not beat, thinned so that the least area is lost between the corners that stay.
    """
    everything_s = sum(op_s[i] for i in rerun(operations))
    corners = hull(operations, op_s)
    points: list[tuple[float, float]] = [(corner.kept_bytes, corner.avoided_s) for corner in corners]
    end = (float(operations.plain_bytes), everything_s)
    n_below = next((i for i in range(len(points)) if _is_beaten(points, i, end)), len(points))
    # what keeping everything does not beat is one run of corners: slopes fall, so once below its line, ever below
    chosen = _thinned([*points[:n_below], end], n + 2)
    return [corners[i] for i in chosen if 0 < i < n_below]


def _is_beaten(points: Sequence[tuple[float, float]], i: int, end: tuple[float, float]) -> bool:
    """Tell whether corner ``i`` lies on or below the line from the corner before it to keeping everything."""
    if i == 0:
        return False
    (x, y), (before_x, before_y) = points[i], points[i - 1]
    if x >= end[0]:
        return True
    return (y - before_y) * (end[0] - before_x) <= (end[1] - before_y) * (x - before_x)


def _thinned(points: Sequence[tuple[float, float]], n: int) -> list[int]:
    """Choose ``n`` corners of a hull, both ends among them, that lose the least area below it; give their indices."""
    m = len(points)
    if m <= n:
        return list(range(m))
    areas = [0.0]
    for (x, y), (next_x, next_y) in pairwise(points):
        areas.append(areas[-1] + (next_x - x) * (y + next_y) / 2)

    def lost(i: int, j: int) -> float:
        (x, y), (next_x, next_y) = points[i], points[j]
        return areas[j] - areas[i] - (next_x - x) * (y + next_y) / 2

    best: list[tuple[float, list[int]]] = [(lost(0, j), [0, j]) if j else (0.0, [0]) for j in range(m)]
    for _ in range(n - 2):
        best = [
            min([best[j], *((best[i][0] + lost(i, j), [*best[i][1], j]) for i in range(1, j))], key=lambda b: b[0])
            for j in range(m)
        ]
    return best[-1][1]


def _set(operations: BlockOperations, chosen: Sequence[int], avoided_s: float) -> SelectiveSet:
    return SelectiveSet(
        save_ops=spell(operations, chosen),
        kept_bytes=sum(operations.operations[i].kept_bytes for i in chosen),
        avoided_s=avoided_s,
    )
