"""Record fields from the caching allocator's statistics and history, as plain data. No torch here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckbench.devices._timeline import Allocation, figures, live_bytes_timeline, phase_marks
from ckbench.records import PHASES

Stats = Mapping[str, Any]
"""Flat statistics of the caching allocator, as torch.cuda.memory_stats gives them."""


def allocator_peaks(stats: Stats) -> dict[str, int | None]:
    """Give the record fields of the allocator's peaks, and its retries since the process began.

    cudaMallocAsync leaves some counters at 0; beside allocated bytes a 0 there means unknown.
    """
    keys = {
        "peak_allocated_bytes": "allocated_bytes.all.peak",
        "peak_reserved_bytes": "reserved_bytes.all.peak",
        "peak_active_bytes": "active_bytes.all.peak",
        "peak_requested_bytes": "requested_bytes.all.peak",
    }
    is_used = bool(stats.get(keys["peak_allocated_bytes"]))
    peaks = {field: stats.get(key) or (None if is_used else stats.get(key)) for field, key in keys.items()}
    return {**peaks, "allocator_retries": stats.get("num_alloc_retries")}


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The allocator at one event of a step."""

    event: str
    allocated_bytes: int
    requested_bytes: int
    """As asked for, before rounding up to blocks."""
    peak_bytes: int
    """Most allocated since the last reset."""
    n_actions: int
    """Allocations and frees since the process began: the position of this moment in the history."""


def moment(event: str, stats: Stats) -> Moment:
    """Take what a moment needs from the allocator's statistics."""
    return Moment(
        event=event,
        allocated_bytes=stats.get("allocated_bytes.all.current", 0),
        requested_bytes=stats.get("requested_bytes.all.current", 0),
        peak_bytes=stats.get("allocated_bytes.all.peak", 0),
        n_actions=stats.get("allocation.all.allocated", 0) + stats.get("allocation.all.freed", 0),
    )


def phase_figures(start: Moment, moments: Sequence[Moment]) -> dict[str, Any]:
    """Give the record fields of peaks by phase and of saved bytes.

    The peak was reset at every moment, so each one knows the peak of the stretch that it ends.
    """
    phase_at = dict(phase_marks([(i, m.event) for i, m in enumerate(moments)]))
    peaks: dict[str, int] = {}
    phase = ""
    for i, stretch in enumerate(moments):
        if phase:
            peaks[phase] = max(peaks.get(phase, 0), stretch.peak_bytes)
        phase = phase_at.get(i, phase)
    saved = [m.allocated_bytes - start.allocated_bytes for m in moments if m.event == "turn"]
    return {
        "saved_bytes": saved[0] if saved else None,
        "peak_allocated_bytes": max(peaks.values(), default=None),
        "peak_phase": max(peaks, key=peaks.__getitem__, default=None),
        **{f"peak_{name}_bytes": peaks.get(name) for name in PHASES},
    }


def trace_events(trace: Iterable[Mapping[str, Any]]) -> list[Allocation]:
    """Turn one device's history into allocations and frees; the n-th of them happens at time 2n + 1.

    Time is position, because the history's clock is not exact against Python's; even times are free for
    marks between two events. A free counts when it is requested: the allocator's own figure falls then.
    """
    signs = {"alloc": 1, "free_requested": -1}
    known = [entry for entry in trace if entry["action"] in signs]
    return [(2 * i + 1, entry["addr"], signs[entry["action"]] * entry["size"]) for i, entry in enumerate(known)]


def history_figures(
    events: Sequence[Allocation],
    start: Moment,
    moments: Sequence[Moment],
    end: Moment,
    *,
    static_bytes: int,
    gradients: dict[int, int],
    gradients_at_start: dict[int, int],
) -> dict[str, Any]:
    """Give the record fields that only a whole history tells, in bytes as asked for: what was live at the peak and
    was neither static nor gradient, and live bytes over the step. Unknown where the history has gaps."""
    if not events or len(events) != end.n_actions - start.n_actions:
        return {"activation_peak_bytes": None, "live_bytes_timeline": []}
    marks = [(2 * (m.n_actions - start.n_actions), m.event) for m in moments]
    live = start.requested_bytes
    fields = figures(
        events,
        marks,
        live_at_start_bytes=live,
        static_bytes=static_bytes,
        gradients=gradients,
        gradients_at_start=gradients_at_start,
    )
    return {
        "activation_peak_bytes": fields["activation_peak_bytes"],
        "live_bytes_timeline": live_bytes_timeline(events, marks, live_at_start_bytes=live),
    }
