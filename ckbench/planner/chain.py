"""The chain that plans are searched on: blocks, what every way to run a span of them costs, and the rest of a step.

All bytes. Blocks run one after the other forward and in reverse backward, so what lives at any moment is a running sum.
With ``S`` the sum of ``kept_bytes`` of all items before one and ``R`` that of ``released_bytes``, a plan's peak is the
largest of

* ``start_bytes + S + forward_peak_bytes`` in the forward of each item,
* ``start_bytes + S_all + head_peak_bytes`` in the forward of head and loss,
* ``start_bytes + S_all - R_all + head_backward_peak_bytes`` in their backward,
* ``start_bytes + S - R + later_bytes[stop] + backward_peak_bytes`` in the backward of each item,
* ``fixed_peak_bytes``: embedding, its backward, the optimizer; no plan changes it.

All are upper bounds on prefix sums, which is what makes exact dynamic programming over (bytes, seconds) possible. Where
nothing is released there is one sum; autocast makes two, because its copies of weights live until forward has ended,
whatever the plan, and only kept blocks hold on to them in backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ckbench.plan import Region


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One way to run the blocks ``start`` to ``stop - 1``: plainly (one block, no region), or under one region."""

    start: int
    stop: int
    region: Region | None
    """None keeps everything; a region may have children, kept operations or a mode of its own."""
    kept_bytes: int
    """Live bytes after its forward less live bytes before: its output and what it holds, less an input let go."""
    forward_peak_bytes: int
    """Highest live bytes during its forward, above those before its forward."""
    backward_peak_bytes: int
    """Highest live bytes during its backward, recomputation included, above what is held of earlier items then and
    without what later blocks' gradients added (``later_bytes``)."""
    extra_s: float
    """Seconds its backward takes beyond what keeping everything takes. Never negative."""
    offload: bool = False
    """Whether what it keeps waits on the host."""
    released_bytes: int = 0
    """What of ``kept_bytes`` goes when forward and loss have ended, before backward begins."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A stack with every item that may be chosen; a plan is a sequence of items that covers it without gaps."""

    n_blocks: int
    items: tuple[tuple[Item, ...], ...]
    """By first block: the items that may start there. Every block has its plain item."""
    start_bytes: int
    """Live bytes when the first block begins."""
    head_peak_bytes: int
    """Highest live bytes in the forward of head and loss, above those after the last block's forward."""
    later_bytes: tuple[int, ...]
    """By block ``i`` from 0 to ``n_blocks``: live bytes when the backward of blocks up to ``i - 1`` begins, less live
    bytes when their forward had ended: gradients of head and later blocks, and the gradient that comes in."""
    fixed_peak_bytes: int
    plain_s: float
    """Seconds of a whole step that keeps everything."""
    head_backward_peak_bytes: int = 0
    """Highest live bytes in the backward of head and loss, above what is held of all items then."""

    def slowdown_ratio(self, seconds: float) -> float:
        """Give a step that takes ``seconds`` longer as a multiple of one that keeps everything."""
        return 1 + seconds / self.plain_s

    def peak_bytes(self, items: Sequence[Item]) -> int:
        """Give the peak of a plan. Raises ValueError where the items leave a gap or overlap."""
        at, held, released = 0, self.start_bytes, 0
        peak = self.fixed_peak_bytes
        for item in items:
            if item.start != at:
                raise ValueError(f"items cover block {item.start} after {at}")
            peak = max(
                peak,
                held + item.forward_peak_bytes,
                held - released + self.later_bytes[item.stop] + item.backward_peak_bytes,
            )
            held += item.kept_bytes
            released += item.released_bytes
            at = item.stop
        if at != self.n_blocks:
            raise ValueError(f"items end at block {at} of {self.n_blocks}")
        return max(peak, held + self.head_peak_bytes, held - released + self.head_backward_peak_bytes)


def extra_s(items: Sequence[Item]) -> float:
    """Add up what a plan's recomputation takes, seconds."""
    return sum(item.extra_s for item in items)
