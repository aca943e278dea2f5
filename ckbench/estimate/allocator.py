"""PyTorch's CUDA caching allocator as arithmetic: requested, allocated and reserved bytes of a timeline.

One stream, no out-of-memory retry. Sources: c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp of
PyTorch 2.13. A request is rounded up to 512 bytes. Up to 1 MiB it comes from the small pool, whose segments are 2 MiB;
above from the large pool: segments of 20 MiB for requests below 10 MiB, else the request rounded up to 2 MiB. The
smallest free block that is large enough is taken, the lowest address among equals. What is left of it becomes a free
block of its own if it is at least 512 bytes (small pool, or expandable segments) or more than 1 MiB (large pool);
otherwise it stays with the block and counts as allocated. Free neighbours of a segment merge. With expandable segments
each pool is one segment that grows at its end by pages of 2 MiB (small) or 20 MiB (large).
"""

import bisect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MIN_BLOCK = 512
SMALL_REQUEST = 2**20
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
MIN_LARGE_REQUEST = 10 * 2**20
LARGE_ROUNDING = 2 * 2**20
BETWEEN_SEGMENTS = 2**40
"""Distance of the addresses of two segments, so that none are neighbours."""


SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that the allocator reads, the newer name first; the first that is set counts."""


def has_expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether PyTorch's own settings ask for expandable segments.

    >>> has_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"})
    True
    """
    text = next((environment[name] for name in SETTINGS if name in environment), "")
    return "expandable_segments:true" in text.replace(" ", "").lower()


def rounded(n_bytes: int) -> int:
    """Round a request up to whole blocks of 512 bytes."""
    return max(MIN_BLOCK, -(-n_bytes // MIN_BLOCK) * MIN_BLOCK)


def segment_bytes(n_bytes: int) -> int:
    """Give the size of a new segment for a rounded request."""
    if n_bytes <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if n_bytes < MIN_LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-n_bytes // LARGE_ROUNDING) * LARGE_ROUNDING


@dataclass(eq=False, slots=True)
class _Block:
    address: int
    n_bytes: int
    is_small: bool
    is_free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


class CachingAllocator:
    """The allocator's state; ``peak_*`` are the largest values since ``reset_peaks``.

    ``expandable``: whether segments grow; left out, what the environment asks of PyTorch.
    """

    def __init__(self, *, expandable: bool | None = None) -> None:
        self.expandable = has_expandable_segments() if expandable is None else expandable
        self.requested = self.allocated = self.reserved = 0
        self.peak_requested = self.peak_allocated = self.peak_reserved = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        """Per pool (small or not): free blocks by size, then address."""
        self._last: dict[bool, _Block | None] = {True: None, False: None}
        """With expandable segments: the block at the end of each pool's one segment."""
        self._taken: dict[int, tuple[_Block, int]] = {}
        self._next_address = BETWEEN_SEGMENTS

    def reset_peaks(self) -> None:
        """Let peaks start from what is held now."""
        self.peak_requested, self.peak_allocated, self.peak_reserved = self.requested, self.allocated, self.reserved

    def allocate(self, number: int, n_bytes: int) -> None:
        """Serve one request under a number of its own; one of no bytes takes nothing."""
        if n_bytes == 0:
            return
        size = rounded(n_bytes)
        is_small = size <= SMALL_REQUEST
        pool = self._free[is_small]
        at = bisect.bisect_left(pool, (size, 0))
        if at < len(pool):
            block = pool.pop(at)[2]
        else:
            block = self._grown(size, is_small) if self.expandable else self._new_segment(size, is_small)
        self._split(block, size)
        block.is_free = False
        self._taken[number] = (block, n_bytes)
        self.requested += n_bytes
        self.allocated += block.n_bytes
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, number: int) -> None:
        """Give a request's block back; it merges with its free neighbours."""
        block, n_bytes = self._taken.pop(number)
        self.requested -= n_bytes
        self.allocated -= block.n_bytes
        block.is_free = True
        pool = self._free[block.is_small]
        if block.before is not None and block.before.is_free:
            _take_out(pool, block.before)
            if self._last[block.is_small] is block:
                self._last[block.is_small] = block.before
            block = _joined(block.before, block)
        if block.after is not None and block.after.is_free:
            _take_out(pool, block.after)
            if self._last[block.is_small] is block.after:
                self._last[block.is_small] = block
            block = _joined(block, block.after)
        bisect.insort(pool, (block.n_bytes, block.address, block))

    def replay(self, events: Iterable[tuple[int, int, int]]) -> None:
        """Serve a timeline's events."""
        for _, number, n_bytes in events:
            if n_bytes > 0:
                self.allocate(number, n_bytes)
            elif number in self._taken:
                self.free(number)

    def _new_segment(self, size: int, is_small: bool) -> _Block:
        n_bytes = segment_bytes(size)
        block = _Block(address=self._next_address, n_bytes=n_bytes, is_small=is_small)
        self._next_address += BETWEEN_SEGMENTS
        self.reserved += n_bytes
        return block

    def _grown(self, size: int, is_small: bool) -> _Block:
        """Map pages at the end of the pool's segment until its last block is large enough."""
        page = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        last = self._last[is_small]
        tail = last.n_bytes if last is not None and last.is_free else 0
        mapped = -(-(size - tail) // page) * page
        self.reserved += mapped
        if last is not None and last.is_free:
            _take_out(self._free[is_small], last)
            last.n_bytes += mapped
            return last
        address = self._next_address if last is None else last.address + last.n_bytes
        if last is None:
            self._next_address += BETWEEN_SEGMENTS
        block = _Block(address=address, n_bytes=mapped, is_small=is_small, before=last)
        if last is not None:
            last.after = block
        self._last[is_small] = block
        return block

    def _split(self, block: _Block, size: int) -> None:
        left = block.n_bytes - size
        fine = block.is_small or self.expandable
        if left < MIN_BLOCK if fine else left <= SMALL_REQUEST:
            return
        rest = _Block(block.address + size, left, block.is_small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        if self._last[block.is_small] is block:
            self._last[block.is_small] = rest
        block.after, block.n_bytes = rest, size
        bisect.insort(self._free[block.is_small], (rest.n_bytes, rest.address, rest))


def _take_out(pool: list[tuple[int, int, _Block]], block: _Block) -> None:
    del pool[bisect.bisect_left(pool, (block.n_bytes, block.address))]


def _joined(first: _Block, second: _Block) -> _Block:
    """Make one block of two neighbours."""
    first.n_bytes += second.n_bytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
