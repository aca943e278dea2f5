"""What a trial would take, as data; made below, by a replay without the device."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Estimate:
    """What a trial would take, in bytes; None with a ``reason`` where it cannot be told."""

    strategy: str
    peak_allocated_bytes: int | None = None
    """Peak of allocated bytes over a steady step: blocks of the allocator on CUDA, tensors on CPU."""
    peak_requested_bytes: int | None = None
    """The same before the allocator rounds."""
    peak_reserved_bytes: int | None = None
    """Peak of what the caching allocator holds (CUDA)."""
    first_step_peak_bytes: int | None = None
    static_bytes: int | None = None
    gradient_bytes: int | None = None
    saved_bytes: int | None = None
    peak_phase: str | None = None
    peaks: dict[str, int | None] = field(default_factory=dict)
    """Peak by phase."""
    n_parameters: int | None = None
    host_bytes: int | None = None
    """Most that the trial moves to host memory at one time, as a record's host_store_peak_bytes; None: nothing."""
    host_pinned_bytes: int | None = None
    """What pinning takes for it: every buffer rounded up to a power of two (CUDA)."""
    method: str = "replay"
    reason: str | None = None

    def needed_bytes(self) -> int | None:
        """Give what the device must have: the peak of the whole run, first step included."""
        known = [n for n in (self.peak_allocated_bytes, self.first_step_peak_bytes) if n is not None]
        return max(known) if known else None
