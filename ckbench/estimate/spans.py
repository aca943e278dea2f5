"""Cut a replayed step at the boundaries of its blocks: what every stretch of it adds, and how high it rises."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ckbench.devices._timeline import phase_marks
from ckbench.engine.trial import Trial
from ckbench.estimate.replay import Replayed
from ckbench.estimate.tracker import RELEASE, StorageTracker

CALL, ENTER, GRADIENT = "call", "enter", "gradient"
"""A block is called; its own forward starts, recomputation included; the gradient of its output is there, so that its
backward begins."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a step between two marks."""

    mark: str
    """What it begins with: one of the step's events, or ``call 3``, ``enter 3``, ``gradient 3`` for a block."""
    block: int | None
    """Block whose work goes on; None in embedding, head and loss."""
    phase: str
    """As records call it; empty between two micro-batches' phases and steps."""
    added_bytes: int
    """Live bytes at its end less those at its begin."""
    rise_bytes: int
    """Highest live bytes in it above those at its begin."""


def watch_blocks(tracker: StorageTracker, trial: Trial) -> None:
    """Have a replay mark where blocks begin, forward, recomputed and backward, and whose storages are whose."""

    def begin(name: str, index: int) -> None:
        tracker.mark(f"{name} {index}")
        tracker.block = index

    blocks, counts = trial.model.blocks, trial.applied.counts
    entered = counts.enter_block

    def enter_block(index: int) -> None:
        entered(index)
        begin(ENTER, index)

    def leave_block(index: int, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _gradient: begin(GRADIENT, index))
                return

    counts.enter_block = enter_block  # type: ignore[method-assign]
    counts.leave_block = leave_block  # type: ignore[method-assign]
    if len(set(blocks)) == len(blocks):
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda _module, _args, i=i: begin(CALL, i))
            tracker.assign(block.parameters(), i)
            tracker.assign(block.buffers(), i)


def spans(replayed: Replayed, bytes_of: Callable[[int, int], int] | None = None) -> list[Span]:
    """Cut the whole timeline, from the building of the model on, at every mark, and outside of blocks wherever another
    block's storages are taken or given back.

    ``bytes_of`` gives the size of a storage by its number and bytes where another than its own counts.
    """
    tracker = replayed.tracker
    timeline = tracker.timeline
    cut = _Cut(phases=dict(_phase_starts(timeline.marks)))
    events, at = timeline.events, 0
    for position, (index, mark) in enumerate(timeline.marks):
        while at < len(events) and events[at][0] < index:
            cut.take(events[at], tracker, bytes_of)
            at += 1
        cut.begin(position, mark)
    for event in events[at:]:
        cut.take(event, tracker, bytes_of)
    cut.close()
    return cut.done


def _phase_starts(marks: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Give the phase that begins with a mark, by the mark's place in the list."""
    names = [name for _, name in marks]
    return phase_marks(list(enumerate(names)))


class _Cut:
    def __init__(self, phases: dict[int, str]) -> None:
        self.done: list[Span] = []
        self.phases = phases
        self.mark, self.phase = "build", ""
        self.block: int | None = None
        self.is_outside = True
        """Whether work goes on that is no block's, as in head and optimizer; then storages tell whose it is."""
        self.before: int | None = None
        """Block whose work went on before, where this one's began with a storage taken: a loop lets go of what it
        held for one parameter while it works on the next."""
        self.live = self.highest = 0
        self.released: dict[int | None, int] | None = None
        """By block, what has been let go since casts are, while nothing is taken."""

    def begin(self, position: int, mark: str) -> None:
        self.close()
        if mark == RELEASE:
            self.released = {}
            return
        self.phase = self.phases.get(position, self.phase)
        self.mark = mark
        name, _, index = mark.partition(" ")
        self.is_outside = not index
        self.before = None
        if mark != "blocks":  # which only says that the last block's gradient is there
            self.block = int(index) if index else None
        else:
            self.is_outside = False

    def take(
        self, event: tuple[int, int, int], tracker: StorageTracker, bytes_of: Callable[[int, int], int] | None
    ) -> None:
        _, number, n_bytes = event
        if self.released is not None:
            if n_bytes < 0:
                owner = tracker.block_of.get(number)
                n_bytes = n_bytes if bytes_of is None else -bytes_of(number, -n_bytes)
                self.released[owner] = self.released.get(owner, 0) + n_bytes
                return
            self.close()
        if self.is_outside and number in tracker.block_of:
            owner = tracker.block_of[number]
            if owner != self.block and (n_bytes > 0 or owner != self.before):
                self.close()
                self.before = self.block if n_bytes > 0 else owner
                self.block = owner
        if bytes_of is not None:
            n_bytes = bytes_of(number, abs(n_bytes)) * (1 if n_bytes > 0 else -1)
        self.live += n_bytes
        self.highest = max(self.highest, self.live)

    def close(self) -> None:
        if self.released is not None:
            # Of every block at once, in no order of theirs on a CPU.
            for block in sorted(self.released, key=lambda block: -1 if block is None else block):
                self.done.append(Span(self.mark, block, self.phase, self.released[block], 0))
            self.released = None
            return
        self.done.append(Span(self.mark, self.block, self.phase, self.live, self.highest))
        self.live = self.highest = 0
