"""How long a step waits for the link to the host, where a span's kept tensors leave the device and come back.

A model of ``engine/offload.py``, not a measurement. A block's tensors go out as they are made, so its copies are done
no sooner than the block, nor than the link has carried them after those of the block before; the step waits for them
when the next block of the span ends, and behind the last one at once. Coming back, a block's tensors are asked for when
the backward of the block after it begins, those of the last one when its own does, and a backward ends no sooner than
they are there. The link carries one thing at a time and both directions equally fast.
"""

from collections.abc import Sequence


def exposed_s(
    moved_bytes: Sequence[int], forward_s: Sequence[float], backward_s: Sequence[float], link_bytes_per_s: float
) -> float:
    """Give the seconds that a span's forward and backward take beyond their own; one figure per block in each list.

    >>> exposed_s([10], [1.0], [2.0], 10.0), exposed_s([40], [1.0], [2.0], 10.0), exposed_s([40, 0], [1, 9], [2, 9], 10)
    (0.0, 5.0, 0.0)
    """
    carry_s = [n_bytes / link_bytes_per_s for n_bytes in moved_bytes]
    now = sent = before = 0.0
    for computed_s, carried_s in zip(forward_s, carry_s, strict=True):
        begun, now = now, now + computed_s
        before, sent = sent, max(now, max(begun, sent) + carried_s)
        now = max(now, before)
    waited_s = max(now, sent) - sum(forward_s)
    now = 0.0
    there = carry_s[-1]
    for computed_s, earlier_s in zip(reversed(backward_s), [*reversed(carry_s[:-1]), 0.0], strict=True):
        following = max(now, there) + earlier_s
        now, there = max(now + computed_s, there), following
    return waited_s + now - sum(backward_s)
